"""Which settings may differ when a run resumes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fctune.base.errors import CheckpointError
from fctune.checkpoint.resume import Resume, RunFacts, check_same_run
from fctune.checkpoint.store import Checkpoint
from fctune.config.fields import iter_fields
from fctune.config.loading import load_config
from fctune.config.schema import RunConfig
from fctune.config.sections.distill import DistillConfig, TeacherServerConfig
from fctune.config.sections.rollouts import JudgeConfig, ServerConfig
from tests.conftest import ROOT

SERVED = ("grpo.engine=server", "grpo.server.url=http://10.0.0.1:8000")


def check(saved: tuple[str, ...], current: tuple[str, ...]) -> None:
    def read(overrides: tuple[str, ...]) -> dict[str, Any]:
        given = ("grpo.reward={strict: 1.0, brevity: 0.1}", *overrides)
        return load_config(ROOT / "configs" / "tiny_grpo.yaml", list(given)).to_dict()

    check_configs(read(saved), read(current))


def check_configs(saved: dict[str, Any], current: dict[str, Any]) -> None:
    state = {"config": saved, "base_fingerprint": "base", "trained_tokens": []}
    resume = Resume(Checkpoint(Path("checkpoint-2"), 2, "sharded"), state)
    check_same_run(resume, RunFacts(current, "base", 10, {}))


def test_a_run_resumes_with_another_value_of_the_annotated_keys_only() -> None:
    fields = dict(iter_fields(RunConfig))
    saved: dict[str, Any] = load_config(ROOT / "configs" / "tiny_grpo.yaml", SERVED).to_dict()
    # No config has both sections; a key of a section that is missing would be another section.
    distill = DistillConfig(teacher_server=TeacherServerConfig(url="http://h"), server=ServerConfig(url="http://h"))
    saved["distill"] = dataclasses.asdict(distill)
    saved["grpo"]["judge"] = dataclasses.asdict(JudgeConfig(url="http://h", rubric="Be brief."))
    for key in fields:
        *outer, name = key.split(".")
        sections = [".".join(outer[:end]) for end in range(1, len(outer) + 1)]
        current = copy.deepcopy(saved)
        values = current
        for section in outer:
            values[section] = values = values.get(section) or {}
        values[name] = "another value"
        may_change = any(fields[one].change for one in (*sections, key))
        with (
            contextlib.nullcontext()
            if may_change
            else pytest.raises(CheckpointError, match=f"  {outer[0] if outer else key}")
        ):
            check_configs(saved, current)


@pytest.mark.parametrize(
    "current",
    [
        ("grpo.engine=server", "grpo.server={url: http://10.0.0.2:8000, concurrency: 8, max_wait_s: 60}"),
        (*SERVED, "grpo.max_staleness=0"),
        (*SERVED, "grpo.cases=synthetic:train:9:1"),  # the source of rollouts compares their content
        ("grpo.engine=in_process", "grpo.generation_batch_size=8"),
    ],
    ids=["address", "staleness", "cases", "engine"],
)
def test_a_run_resumes_wherever_its_answers_come_from(current: tuple[str, ...]) -> None:
    check(SERVED, current)


@pytest.mark.parametrize(
    ("current", "words"),
    [
        ("grpo.group_size=4", "  grpo.group_size: was 8, is 4\n"),
        ("grpo.reward.strict=2.0", "  grpo.reward.strict: was 1.0, is 2.0\n"),
        ("grpo.clip_high=0.3", "  grpo.clip_high: was none, is 0.3\n"),
        ("optimizer.eps=1e-6", "  optimizer.eps: was none, is 1e-06\n"),
        ("~adapter.modules", "  adapter.modules: was"),
        ("model.router_aux_loss=0.1", "  model.router_aux_loss: was none, is 0.1\n"),
    ],
)
def test_a_setting_of_the_loss_is_named_alone(current: str, words: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        check(SERVED, (*SERVED, current))
    assert words in str(raised.value)
    assert len(str(raised.value).splitlines()) == 3, "the other settings are not repeated"


def test_a_part_that_is_gone_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"grpo\.reward\.format: was 0\.5, is none"):
        check((*SERVED, "grpo.reward.format=0.5"), SERVED)
