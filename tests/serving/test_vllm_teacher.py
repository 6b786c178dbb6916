"""Distillation from a teacher on a real vLLM: its scores are those of the teacher's own forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fctune.base.errors import ConfigError
from fctune.config.sections.distill import TeacherServerConfig
from fctune.data.chat_template import ChatTemplate
from fctune.engines.teacher_server import TeacherServer
from tests.conftest import TINY_BASE
from tests.engines.vllm_stand_in import VllmStandIn
from tests.ranks import find_port, run_ranks
from tests.recipes.recipe_runs import Kind, distill_arguments, run_in_turn, write_teacher
from tests.serving.servers import serve_vllm
from tests.tasks.environments.agent_files import read_lines

pytestmark = pytest.mark.serving

TOP_K = 12
TOLERANCE = 1e-4  # of a log-probability, in nats


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(TINY_BASE)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_teacher(tmp_path_factory.mktemp("teacher") / "model")


@pytest.fixture(scope="module")
def address(vllm_python: str, teacher: Path) -> Iterator[str]:
    # In float32: in bfloat16, vLLM 0.32's worker on CPUs dies of the first log-probabilities of this model's prompts.
    with serve_vllm(teacher, vllm_python, find_port(), "--max-logprobs", str(TOP_K)) as address:
        yield address


def connect(address: str, template: ChatTemplate, positions: int = 2047, **options: Any) -> TeacherServer:
    return TeacherServer(TeacherServerConfig(url=address, **{"top_k": TOP_K, **options}), template, positions)


def test_scores_are_the_teachers_own_log_probabilities(address: str, teacher: Path, template: ChatTemplate) -> None:
    """Short and full rows, of which many begin alike, at the same time: cached prefixes would have no scores."""
    text = template.tokenizer.encode("Where is Bergen? It is cold in Oslo today, and " * 40)
    draw = torch.Generator().manual_seed(1)
    ids = [text[:count] for count in (2, 17, 300)] * 3
    ids += [torch.randint(0, len(template.tokenizer), (count,), generator=draw).tolist() for count in (64, 700, 2047)]
    sequences = [(one, sorted({1, len(one) // 2, *range(2, len(one), 3), len(one) - 1})) for one in ids]
    found = connect(address, template).score(sequences)
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    largest = 0.0
    for (one, positions), scores in zip(sequences, found, strict=True):
        with torch.no_grad():
            own = model(torch.tensor([one])).logits[0, torch.tensor(positions) - 1].log_softmax(-1)
        assert scores.ids.shape == scores.logprobs.shape == (len(positions), TOP_K)
        sent = torch.from_numpy(scores.logprobs)
        assert (sent.diff(dim=1) <= 0).all(), "best first"
        # Token by token, and rank by rank: equally likely tokens may change places.
        for expected in (own.gather(1, torch.from_numpy(scores.ids)), own.topk(TOP_K).values):
            largest = max(largest, float((sent - expected).abs().max()))
    assert largest < TOLERANCE


def test_a_server_that_cannot_teach_is_refused(address: str, template: ChatTemplate) -> None:
    with pytest.raises(ConfigError, match=rf"{TOP_K + 1}.*--max-logprobs {TOP_K + 1}, or lower distill"):
        connect(address, template, top_k=TOP_K + 1)
    with pytest.raises(ConfigError, match="has a context of 2,048 tokens, but 2,049 are needed"):
        connect(address, template, 2048)


def test_a_run_learns_the_same_from_vllm_as_from_the_teachers_forward_pass(
    address: str, teacher: Path, tmp_path: Path
) -> None:
    forward_pass = VllmStandIn(teacher)
    try:
        plans: list[tuple[list[str], Kind]] = []
        for name, url in (("vllm", address), ("forward", forward_pass.url)):
            options = ("max_steps=2", "distill.teacher=null", f"distill.teacher_server={{url: {url}, top_k: 8}}")
            plans.append((distill_arguments(tmp_path / name, *options), "distill"))
        results = run_ranks(run_in_turn, 1, plans)[0]
    finally:
        forward_pass.stop()
    assert [one["code"] for one in results] == [0, 0], results
    metrics = [read_lines(tmp_path / name / "run" / "metrics.jsonl") for name in ("vllm", "forward")]
    assert [len(rows) for rows in metrics] == [2, 2]
    for one, other in zip(*metrics, strict=True):
        assert one["data_digest"] == other["data_digest"], "the same answers"
        assert one["loss"] > 0
        for name in ("loss", "grad_norm", "teacher_tail"):
            assert one[name] == pytest.approx(other[name], rel=1e-4), name
