"""Tasks and servers are opened as a config names them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fctune.base.errors import ConfigError, DataError
from fctune.config.sections.rollouts import DialogueConfig
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversion import to_openai_row
from fctune.tasks.environments.tasks import EnvironmentTasks
from fctune.tasks.episode import EpisodeLimits
from fctune.tasks.recorded import RecordedTasks
from fctune.tasks.rollouts import RolloutSettings
from fctune.tasks.sampling.task_sets import open_dialogue_tasks
from tests.conftest import TINY_BASE
from tests.tasks.recorded_rows import make_row


@pytest.fixture(scope="module")
def settings() -> RolloutSettings:
    return RolloutSettings(ChatTemplate(TINY_BASE), EpisodeLimits(64, max_tokens=2048))


def test_environments_take_turns_and_held_out_tasks_are_others(settings: RolloutSettings) -> None:
    train = open_dialogue_tasks("environment:files,shop:3", DialogueConfig(), settings)
    test = open_dialogue_tasks("environment:files,shop:3", DialogueConfig(), settings, split="test")
    assert isinstance(train, EnvironmentTasks)
    assert isinstance(test, EnvironmentTasks)
    try:
        assert list(train.ids)[:3] == ["files/train/0", "shop/train/0", "files/train/1"]
        assert len(train.ids) == 6
        assert not set(train.ids) & set(test.ids)
    finally:
        train.close()
        test.close()


def test_unknown_environments_and_parts_are_named(settings: RolloutSettings) -> None:
    with pytest.raises(ConfigError, match="environment shp: no such environment; did you mean shop"):
        open_dialogue_tasks("environment:files,shp:3", DialogueConfig(), settings)
    weighted = replace(settings, weights={"arguments": 1.0})
    with pytest.raises(ConfigError, match=r"grpo.reward.arguments: no such part of this reward.* \(parts: solved"):
        open_dialogue_tasks("environment:files:3", DialogueConfig(), weighted)


def test_rows_with_recorded_results_are_read(settings: RolloutSettings, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(to_openai_row(make_row())) + "\n")
    tasks = open_dialogue_tasks(f"recorded:{path}", DialogueConfig(), settings)
    assert isinstance(tasks, RecordedTasks)
    assert len(tasks.ids) == 1
    path.write_text('{"messages": 3}\n')
    with pytest.raises(DataError, match=r"rows.jsonl:1: .* Fix the row or remove it\."):
        open_dialogue_tasks(f"recorded:{path}", DialogueConfig(), settings)
