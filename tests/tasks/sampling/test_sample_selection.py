"""Draft rows from failures, and what is never drafted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fctune.base.errors import ConfigError
from fctune.calls.formats.registry import FORMATS
from fctune.data.sources.defects import RowError
from fctune.data.sources.read_context import ReadContext
from fctune.data.sources.row_formats.registry import read_row
from fctune.engines.engine import Answer
from fctune.tasks.benchmarks import find_suite_files
from fctune.tasks.judge import judge_answer
from fctune.tasks.sampling.selection import propose, write_proposals
from fctune.tasks.suite import Suite
from fctune.tasks.suite_files import load_suite
from tests.conftest import ROOT
from tests.tasks.benchmarks.bfcl.bfcl_wheel import needs_wheel

SUITES = ROOT / "eval" / "suites"
WRONG = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def suite() -> Suite:
    return load_suite(SUITES / "smoke.yaml")


def judged(suite: Suite, *texts: str) -> list[dict[str, object]]:
    answers = [Answer(i, text) for i, text in enumerate(texts)]
    return [judge_answer(c, a, FORMATS["hermes"]).to_row() for c, a in zip(suite.cases, answers, strict=True)]


def test_failures_are_drafts_by_error_class_and_say_what_went_wrong(suite: Suite, tmp_path: Path) -> None:
    right = FORMATS["hermes"].render(suite.cases[2].expected)
    rows = judged(suite, WRONG, "<tool_call>{", right, WRONG)
    path = tmp_path / "drafts.jsonl"
    assert write_proposals(suite, rows, path) == 3
    drafts = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(draft["case"], draft["error_class"]) for draft in drafts] == [
        ("weather", "wrong_arguments"),
        ("thanks", "false_call"),
        ("meeting", "malformed"),
    ]
    assert all(draft["reviewed"] is False for draft in drafts)
    assert drafts[0]["got"]["differences"] == [
        "get_weather.city: 'Rome', expected 'Paris'",
        "get_weather.unit: missing, expected 'celsius'",
    ]


def test_drafts_that_were_reviewed_are_kept(suite: Suite, tmp_path: Path) -> None:
    rows, path = judged(suite, WRONG, WRONG, WRONG, WRONG), tmp_path / "drafts.jsonl"
    write_proposals(suite, rows, path)
    write_proposals(suite, rows, path)  # nothing would change
    path.write_text(reviewed := path.read_text().replace('"reviewed": false', '"reviewed": true'))
    with pytest.raises(ConfigError, match=r"drafts\.jsonl: holds something else, perhaps reviewed drafts"):
        write_proposals(suite, rows, path)
    assert path.read_text() == reviewed


def test_a_draft_is_a_row_that_teaches_the_expected_calls(suite: Suite) -> None:
    drafts = propose(suite, judged(suite, WRONG, WRONG, WRONG, WRONG))
    for draft in drafts:
        case = next(case for case in suite.cases if case.id == draft["case"])
        if not case.expected:
            # The words are a person's to write: as it stands no reader takes the row.
            with pytest.raises(RowError):
                read_row(draft, "openai", ReadContext(), "draft")
            continue
        with pytest.raises(RowError, match="a draft"):
            read_row(draft, "openai", ReadContext(), "draft")
        reviewed = {**draft, "reviewed": True}
        conversation = read_row(reviewed, "openai", ReadContext(), "draft").conversation
        assert conversation.messages[:-1] == case.prompt.messages
        assert [(c.name, c.arguments) for c in conversation.messages[-1].calls] == [
            (c.name, c.arguments) for c in case.expected
        ]
        assert conversation.tools == case.prompt.tools


@needs_wheel
def test_nothing_is_drafted_from_a_benchmark_by_its_name_or_by_its_ids() -> None:
    bfcl = load_suite(find_suite_files()["bfcl"], categories=["simple_python"])
    for suite in (bfcl, replace(bfcl, name="mine", benchmark=None)):
        with pytest.raises(ConfigError, match=r"belongs to a benchmark \(BFCL v4\), which must not be trained on"):
            propose(suite, [])


def test_a_suite_that_calls_itself_a_benchmark_is_one(tmp_path: Path, suite: Suite) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text((SUITES / "smoke.yaml").read_text() + "\nbenchmark: Our yearly test\n")
    with pytest.raises(ConfigError, match="Our yearly test"):
        propose(load_suite(path), [])
