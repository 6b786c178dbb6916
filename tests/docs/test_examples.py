"""Examples on the pages work as they stand: the environment, the rows and the configs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from fctune.base.errors import ConfigError
from fctune.config import key_hints
from fctune.config.loading import load_config
from fctune.config.sections.rollouts import find_source_problems
from fctune.data.pairs import PairReader
from fctune.data.sources import read_source
from fctune.data.sources.defects import Defect
from fctune.data.sources.reader import UnreadRow
from fctune.tasks.environments.agent.task_file import read_agent_file
from fctune.tasks.environments.host import EnvironmentHost
from fctune.tasks.environments.mcp.task_file import read_task_file
from fctune.tasks.environments.verifiers.tasks import read_verifiers_file
from tests.conftest import ROOT
from tests.page_blocks import list_blocks

DOCS = sorted((ROOT / "docs").glob("*.md"))
# Problems that a part of a config may have: files that are not here, keys that the rest of it has.
_INCOMPLETE = ("no such file or directory", "missing; it has no default", "a run with grpo learns from its own answers")
KEYS = {key.partition(".")[0] for key in key_hints.list_keys()}


def test_the_environment_on_the_page_makes_tasks_that_its_own_calls_solve(tmp_path: Path) -> None:
    (code,) = list_blocks(ROOT / "docs" / "environments.md", "python")
    (tmp_path / "counter.py").write_text(code)
    host = EnvironmentHost(f"{tmp_path / 'counter.py'}:Counter")
    try:
        tasks = [host.make_task(seed, split) for seed in range(3) for split in ("train", "test")]
    finally:
        host.close()
    assert len({task.spec.question for task in tasks}) == 6


def test_the_file_of_tasks_on_the_page_is_read(tmp_path: Path) -> None:
    (text,) = (block for block in list_blocks(ROOT / "docs" / "environments.md", "yaml") if "tasks:" in block)
    (tmp_path / "rooms.yaml").write_text(text)
    file = read_task_file(tmp_path / "rooms.yaml")
    assert len(file.tasks) == 2
    assert len({**file.select("train"), **file.select("test")}) == 2


def test_the_file_of_an_agent_on_the_page_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = list_blocks(ROOT / "docs" / "reference" / "agents.md", "yaml")
    Path("agent.yaml").write_text(first)
    Path("tasks.jsonl").write_text('{"question": "Who?", "category": "orders"}\n')
    file, tasks = read_agent_file("agent.yaml")
    assert file.scorer.command == "python score.py"
    assert list(tasks) == ["1"]
    assert not find_source_problems(yaml.safe_load(second)["grpo"]["cases"], "")


def test_the_files_of_other_environments_and_of_a_judge_on_the_page_are_read(tmp_path: Path) -> None:
    *files, config = list_blocks(ROOT / "docs" / "reference" / "other-environments.md", "yaml")
    for text, taskset in zip(files, ("my-words", "nemo-gym"), strict=True):
        (tmp_path / "words.yaml").write_text(text)
        assert read_verifiers_file(tmp_path / "words.yaml").env["taskset"]["id"] == taskset
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"extends": "tiny_grpo", **yaml.safe_load(config)}))
    grpo = load_config(tmp_path / "run.yaml", []).grpo
    assert grpo is not None
    assert grpo.judge is not None
    assert grpo.reward == {"judge": 1.0}


@pytest.mark.parametrize("page", ["README.md", "docs/data.md"])
def test_the_row_on_the_page_is_read(page: str, tmp_path: Path) -> None:
    (text,) = list_blocks(ROOT / page, "json")
    (tmp_path / "rows.jsonl").write_text(json.dumps(json.loads(text)) + "\n")
    (row,) = read_source(str(tmp_path / "rows.jsonl"))
    assert not isinstance(row, Defect)
    assert row.messages[1].calls[0].name == "get_weather"


def test_the_pair_on_the_page_is_read() -> None:
    (text,) = list_blocks(ROOT / "docs" / "preference.md", "json")
    pair = PairReader().read(UnreadRow("pairs.jsonl", 1, json.loads(text)))
    assert not isinstance(pair, Defect)
    assert pair.chosen.messages[0].calls[0].name == "get_weather"


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_configs_on_the_page_have_known_keys_and_values(page: Path, tmp_path: Path) -> None:
    for number, text in enumerate(list_blocks(page, "yaml")):
        values = yaml.safe_load(text)
        if page.stem in ("contributing", "sweeps") or "extends" in values or "tasks" in values:
            continue
        assert set(values) <= KEYS, text
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml.safe_dump({"extends": "tiny_lora"} | values))
        try:
            load_config(file, [])
        except ConfigError as error:
            problems = str(error).splitlines()[1:]
            assert not [line for line in problems if not any(part in line for part in _INCOMPLETE)], text
