"""The leaderboard's files, intact and broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fctune.base.errors import ConfigError, DataError
from fctune.tasks.benchmarks.bfcl.cases import CATEGORIES, MULTI_TURN, RELEVANCE, category_of, read_bfcl
from tests.tasks.benchmarks.bfcl.bfcl_wheel import data_dir, needs_wheel


@needs_wheel
def test_every_category_has_the_cases_that_the_leaderboard_counts() -> None:
    cases = {category: read_bfcl(data_dir(), category) for category in CATEGORIES}
    assert {category: len(found) for category, found in cases.items()} == {
        "simple_python": 400, "simple_java": 100, "simple_javascript": 50, "multiple": 200, "parallel": 200,
        "parallel_multiple": 200, "live_simple": 258, "live_multiple": 1053, "live_parallel": 16,
        "live_parallel_multiple": 24, "irrelevance": 240, "live_irrelevance": 884, "live_relevance": 16,
        **dict.fromkeys(MULTI_TURN, 200),
    }  # fmt: skip
    for category, found in cases.items():
        assert all(category_of(case.id) == category for case in found)
        assert all(bool(case.answers) == (category not in RELEVANCE) for case in found)
        assert all(bool(case.classes) == (category in MULTI_TURN) for case in found)
        assert all(len(case.turns) == (len(case.answers) if category in MULTI_TURN else 1) for case in found)


@needs_wheel
def test_on_offer_is_what_the_wheel_offers() -> None:
    from bfcl_eval.utils import load_dataset_entry

    offered = {entry["id"]: [f["name"] for f in entry["function"]] for entry in load_dataset_entry("multi_turn_base")}
    for case in read_bfcl(data_dir(), "multi_turn_base"):
        assert [tool.name for tool in case.tools] == offered[case.id]


def write(directory: Path, question: object, answer: object) -> Path:
    (directory / "possible_answer").mkdir()
    (directory / "BFCL_v4_multiple.json").write_text(json.dumps(question))
    (directory / "possible_answer" / "BFCL_v4_multiple.json").write_text(json.dumps(answer))
    return directory


def test_data_other_than_the_leaderboards_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a category of the leaderboard"):
        read_bfcl(tmp_path, "memory")
    with pytest.raises(DataError, match="site-packages/bfcl_eval/data"):
        read_bfcl(tmp_path, "multiple")
    question = {"id": "multiple_0", "question": [[]], "function": []}
    with pytest.raises(DataError, match="different ids"):
        read_bfcl(write(tmp_path, question, {"id": "multiple_1", "ground_truth": []}), "multiple")


@pytest.mark.parametrize("question", [{"id": "multiple_0"}, {"question": []}, [1], "x", None])
def test_rows_of_another_shape_are_reported(tmp_path: Path, question: object) -> None:
    with pytest.raises(DataError, match="bfcl_eval/data"):
        read_bfcl(write(tmp_path, question, {"id": "multiple_0", "ground_truth": []}), "multiple")


def test_lines_that_are_not_json_are_reported(tmp_path: Path) -> None:
    write(tmp_path, {}, {})
    (tmp_path / "BFCL_v4_multiple.json").write_text("{")
    with pytest.raises(DataError, match="not JSON Lines"):
        read_bfcl(tmp_path, "multiple")
