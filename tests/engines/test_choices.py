"""Multiple choice: log-likelihoods in process and through a server, against transformers' own forward pass."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from fctune.base.errors import ConfigError, DataError
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.engines.choices import find_span
from fctune.engines.engine import Answer, Prompt
from fctune.engines.http_client import RetryPolicy
from fctune.engines.local import LocalEngine
from fctune.engines.server import ServerEngine
from fctune.models.transformers.likelihood import score_continuations
from tests.conftest import TINY_BASE
from tests.engines.fault_server import Handler, serve
from tests.engines.vllm_stand_in import VllmStandIn
from tests.models.dense_samples import read_raw
from tests.models.hybrid_samples import make_config

TOOL = Tool({"name": "find", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}})
ASKED = Conversation((Message("system", "Be brief."), Message("user", "Weather in Köln?")), (TOOL,))
CHOICES = (
    Message("assistant", None, (Call("find", {"city": "Köln", "days": [1, None]}),)),
    Message("assistant", "For which day, please?"),
    Message("assistant", "I can't look that up. I'm sorry; ask someone else, as I have nothing that could help."),
    Message("assistant", "Sunny."),
)
PROMPTS = [
    Prompt(ASKED, 8, choices=CHOICES),
    Prompt(Conversation(ASKED.messages[1:]), 8, choices=CHOICES[1:]),
]


@pytest.fixture(scope="module")
def server() -> Iterator[VllmStandIn]:
    stand_in = VllmStandIn(TINY_BASE)
    yield stand_in
    stand_in.stop()


def compute(prompt: Prompt) -> list[tuple[float, int]]:
    """Return the log-likelihood and the characters of each choice, with transformers alone."""
    tokenizer, model = AutoTokenizer.from_pretrained(TINY_BASE), AutoModelForCausalLM.from_pretrained(TINY_BASE).eval()
    found = []
    for choice in prompt.choices:
        rows = [message.to_openai() for message in (*prompt.conversation.messages, choice)]
        options = {"tools": [tool.to_openai() for tool in prompt.conversation.tools] or None, "tokenize": False}
        before = tokenizer.apply_chat_template(rows[:-1], add_generation_prompt=True, **options)
        written = tokenizer.apply_chat_template(rows, **options).removeprefix(before).split(tokenizer.eos_token)[0]
        ids, num_before = (tokenizer(text, add_special_tokens=False).input_ids for text in (before + written, before))
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        total = sum(float(logprobs[at - 1, ids[at]]) for at in range(len(num_before), len(ids)))
        found.append((total, len(written)))
    return found


def choose(engine: LocalEngine | ServerEngine, prompts: list[Prompt]) -> list[Answer]:
    answers = sorted(engine.answer(prompts), key=lambda answer: answer.index)
    assert [answer.index for answer in answers] == list(range(len(prompts)))
    return answers


@pytest.mark.parametrize("kind", ["in process", "server"])
def test_scores_are_those_of_transformers_and_the_best_per_character_is_the_answer(
    kind: str, server: VllmStandIn
) -> None:
    engine = LocalEngine(TINY_BASE) if kind == "in process" else ServerEngine(server.url)
    for prompt, answer in zip(PROMPTS, choose(engine, PROMPTS), strict=True):
        expected = compute(prompt)
        assert [score.logprob for score in answer.choices] == pytest.approx([one[0] for one in expected], abs=2e-3)
        assert [score.num_characters for score in answer.choices] == [one[1] for one in expected]
        best = max(range(len(expected)), key=lambda position: expected[position][0] / expected[position][1])
        assert answer.text == (prompt.choices[best].content or "")
        assert [call["function"]["name"] for call in answer.tool_calls or ()] == [
            call.name for call in prompt.choices[best].calls
        ]


@pytest.mark.parametrize(
    ("kind", "is_continued"), [("gemma3_text", True), ("qwen2", True), ("lfm2", False), ("bamba", False)]
)
def test_continuations_are_scored_as_in_one_pass_for_every_kind_of_cache(
    kind: str, is_continued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIG_MAPPING[kind].from_dict(read_raw(kind)) if is_continued else make_config(kind)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids, continuations = [3, 9, 4, 1, 7, 8, 5, 11, 2, 6], [[5], [2, 3, 4, 9, 13, 1, 12], [9, 9]]
    widths: list[int] = []
    forward = model.forward

    def watch(input_ids: Any, **options: Any) -> Any:
        widths.append(input_ids.shape[1])
        return forward(input_ids=input_ids, **options)

    functools.update_wrapper(watch, forward)
    monkeypatch.setattr(model, "forward", watch)
    scored = score_continuations(model, ids, continuations)
    rest = [len(one) if is_continued else len(ids) + len(one) - 1 for one in continuations]
    assert widths == [len(ids) - 1, *rest]
    for continuation, found in zip(continuations, scored, strict=True):
        with torch.no_grad():
            logits = forward(input_ids=torch.tensor([ids + continuation])).logits[0]
        expected = logits[len(ids) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])[:, 0]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["in process", "server"])
def test_a_choice_beyond_the_models_context_is_an_error_of_its_prompt_alone(kind: str) -> None:
    long = Prompt(ASKED, 8, choices=(*CHOICES, Message("assistant", "too long " * 3000)))
    if kind == "in process":
        answers = choose(LocalEngine(TINY_BASE), [long, PROMPTS[1]])
        assert "tokens with its longest choice exceed the model's" in (answers[0].error or "")
    else:
        stand_in = VllmStandIn(TINY_BASE, max_model_len=300)
        try:
            answers = choose(ServerEngine(stand_in.url), [long, PROMPTS[1]])
        finally:
            stand_in.stop()
        assert "maximum context length is 300" in (answers[0].error or "")
    assert answers[1].error is None


def complete_without_logprobs(handler: Handler, number: int, body: dict[str, Any]) -> None:
    if "messages" in body:
        handler.send(200, json.dumps({"tokens": [1, 2, 3]}))
    else:
        handler.send(200, json.dumps({"choices": [{"text": "", "finish_reason": "length"}]}))


def refuse_paths(handler: Handler, number: int, body: dict[str, Any]) -> None:
    handler.send(404, json.dumps({"detail": "Not Found"}))


def tokenize_text_alone(handler: Handler, number: int, body: dict[str, Any]) -> None:
    handler.send(200, json.dumps({"tokens": []}))


@pytest.mark.parametrize("behave", [complete_without_logprobs, refuse_paths, tokenize_text_alone])
def test_a_server_without_log_probabilities_of_prompts_is_refused_by_name(behave: Any) -> None:
    listed = json.dumps({"data": [{"id": "base", "owned_by": "llamacpp"}]}).encode()
    policy = RetryPolicy(max_attempts=1, timeout_s=2)
    with serve(behave, models=listed) as log:
        engine = ServerEngine(log.url, retry_policy=policy)
        with pytest.raises(ConfigError, match="llamacpp sends no log-probabilities of a prompt") as error:
            list(engine.answer(PROMPTS))
    assert "serve the model with vLLM" in str(error.value)


@pytest.mark.parametrize(
    ("sequences", "reason"),
    [
        ([[1, 2, 3, 9], [1, 2, 4, 5, 9]], None),
        ([[1, 2, 9], [1, 2, 9]], "no tokens of its own"),
        ([[1, 2, 9], [1, 2, 3, 9]], "no tokens of its own"),
        ([[2, 3], [1, 3]], "without a common prompt"),
    ],
)
def test_tokens_that_no_choice_has_of_its_own_are_refused(sequences: list[list[int]], reason: str | None) -> None:
    if reason is None:
        assert find_span(sequences) == (2, 1)
    else:
        with pytest.raises(DataError, match=reason):
            find_span(sequences)
