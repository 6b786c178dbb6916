"""A teacher on a server: its scores equal a forward pass, and an unusable one is refused before training."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fctune.base.errors import ConfigError
from fctune.config.sections.distill import TeacherServerConfig
from fctune.data.chat_template import ChatTemplate
from fctune.engines import teacher_server
from fctune.engines.teacher_server import TeacherServer
from tests.conftest import TINY_BASE
from tests.engines.vllm_stand_in import VllmStandIn

SEQUENCE = [5, 9, 40, 7, 11, 60]


@pytest.fixture
def server() -> Iterator[VllmStandIn]:
    made = VllmStandIn(TINY_BASE)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(TINY_BASE)


def connect(url: str, template: ChatTemplate, **options: Any) -> TeacherServer:
    positions = options.pop("min_positions", 512)
    return TeacherServer(TeacherServerConfig(url=url, **options), template, positions)


def test_scores_are_the_teachers_most_likely_tokens(server: VllmStandIn, template: ChatTemplate) -> None:
    teacher = connect(server.url, template, top_k=5)
    found = teacher.score([(SEQUENCE, [2, 3, 5]), (SEQUENCE[:3], [1]), (SEQUENCE, [])])
    with torch.no_grad():
        expected = server.base(torch.tensor([SEQUENCE])).logits[0].log_softmax(-1).topk(5)
    assert [one.ids.shape for one in found] == [(3, 5), (1, 5), (0, 5)]
    rows = torch.tensor([1, 2, 4])
    assert found[0].ids.tolist() == expected.indices[rows].tolist()
    torch.testing.assert_close(torch.from_numpy(found[0].logprobs), expected.values[rows], rtol=0, atol=1e-5)
    assert teacher.describe() == "base"


def without_best(scores: list[Any]) -> list[Any]:
    return [None, *({k: v for k, v in entry.items() if v["rank"] > 1} for entry in scores[1:])]


def set_first(value: Any) -> Callable[[list[Any]], list[Any]]:
    def spoil(scores: list[Any]) -> list[Any]:
        entry = dict(scores[1])
        entry[next(iter(entry))] = {"logprob": value, "rank": 1}
        return [None, entry, *scores[2:]]

    return spoil


LIES: dict[str, tuple[Callable[[list[Any]], Any], str]] = {
    "none": (lambda scores: None, "no prompt_logprobs of 2 token ids"),
    "one position too few": (lambda scores: scores[1:], "no prompt_logprobs of 2 token ids"),
    "nothing at a position": (lambda scores: [None, None], "no log-probability of token"),
    "another token's": (lambda scores: [None, {"3": {"logprob": -1.0}}], "no log-probability of token"),
    "fewer than asked": (lambda scores: [None, dict(list(scores[1].items())[:3])], "3 log-probabilities of a position"),
    "NaN": (set_first(math.nan), "which is not finite"),
    "minus infinity": (set_first(-9999.0), "which is not finite"),
    "positive": (set_first(0.7), "expected 0 or less"),
    "text": (set_first("-1"), "expected a number"),
    "too much mass": (
        lambda scores: [None, {key: {"logprob": -0.01} for key in scores[1]}],
        "probabilities of a position sum to",
    ),
    "an unknown token": (lambda scores: [None, {**scores[1], "99999999": {"logprob": -1.0}}], "outside the vocabulary"),
    "text as a token": (lambda scores: [None, {**scores[1], "-5": {"logprob": -1.0}}], "outside the vocabulary"),
}


@pytest.mark.parametrize("lie", LIES)
def test_impossible_scores_are_refused_at_the_start_and_later(
    lie: str, server: VllmStandIn, template: ChatTemplate
) -> None:
    teacher = connect(server.url, template, top_k=8)
    teacher._client.retry_policy = replace(teacher._client.retry_policy, max_attempts=1)
    spoil, words = LIES[lie]
    server.spoil_scores = lambda scores: spoil(scores[:2])
    with pytest.raises(ConfigError, match="cannot score an answer") as raised:
        teacher.score([(SEQUENCE[:2], [1])])
    assert words in str(raised.value)
    if lie == "NaN":  # after three attempts
        with pytest.raises(ConfigError, match="does not send the 8 most likely tokens") as raised:
            connect(server.url, template, top_k=8)
        assert words in str(raised.value)


def test_a_server_that_cannot_teach_is_refused_before_training(
    server: VllmStandIn, template: ChatTemplate, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"greater than max allowed: 20.*--max-logprobs 30, or lower distill"):
        connect(server.url, template, top_k=30)
    with pytest.raises(ConfigError, match="has a context of 2,048 tokens, but 2,049 are needed"):
        connect(server.url, template, min_positions=2048)
    with pytest.raises(ConfigError, match="does not serve other; it lists base"):
        connect(server.url, template, served_model="other")
    with pytest.raises(ConfigError, match="expected fewer than the"):
        connect(server.url, template, top_k=10**7)
    # A special token that the teacher has not.
    student = tmp_path / "student"
    shutil.copytree(TINY_BASE, student)
    tokenizer = template.tokenizer.__class__.from_pretrained(student)
    tokenizer.add_tokens(["<new>"], special_tokens=True)
    tokenizer.save_pretrained(student)
    size = json.loads((student / "config.json").read_text())["vocab_size"]
    assert len(tokenizer) <= size + 1
    with pytest.raises(ConfigError, match="has a different tokenizer"):
        connect(server.url, ChatTemplate(student))
    server.stop()
    with pytest.raises(ConfigError, match="no server answers there"):
        connect(server.url, template)


def test_a_server_that_is_lost_is_waited_for(
    server: VllmStandIn, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_server, "_POLL_S", 0.05)
    said: list[str] = []
    config = TeacherServerConfig(url=server.url, top_k=4)
    teacher = TeacherServer(config, template, 512, log=said.append)
    teacher._client.retry_policy = replace(teacher._client.retry_policy, max_attempts=1)
    expected = teacher.score([(SEQUENCE, [1, 2])])[0]
    server.num_failing = 3
    found = teacher.score([(SEQUENCE, [1, 2])])[0]
    assert found.ids.tolist() == expected.ids.tolist()
    assert len(said) == 1
    teacher._config = replace(config, max_wait_s=0.1)
    server.num_failing = 1000
    with pytest.raises(ConfigError, match="Start the teacher's server, and run the same command again to resume"):
        teacher.score([(SEQUENCE, [1, 2])])
    teacher._config = config
    threading.Timer(0.2, teacher.close).start()
    with pytest.raises(ConfigError, match="and the run has ended"):  # a stop does not wait for it
        teacher.score([(SEQUENCE, [1, 2])])
