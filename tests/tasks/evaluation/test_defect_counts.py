"""Counts of defects in the summary of an evaluation, and as the command and the page show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fctune.apps.report.eval_page import write_eval_html
from fctune.calls.formats.registry import FORMATS
from fctune.cli.tables import make_console, print_defects
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.engines.engine import Answer
from fctune.tasks.evaluation.summary import summarise_run
from fctune.tasks.judge import Row, judge_answer
from fctune.tasks.suite import Suite
from fctune.tasks.task import Case

TOOL = Tool({"name": "find", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}})
HERMES = FORMATS["hermes"]
ANSWERS = {
    "call": [
        Answer(0, HERMES.render([Call("find", {"city": "Oslo"})])),
        Answer(0, HERMES.render([Call("find", {"town": "Oslo"}), Call("look", {})])),
        Answer(0, '<tool_call>\n{"name": "find", "arguments": {"ci'),
        Answer(0, error="the server is gone"),
    ],
    "talk": [Answer(0, ""), Answer(0, "Hello.")],
}
EXPECTED = {
    "call": ({"abandoned": 1, "malformed": 1, "invented_tool": 1, "invented_argument": 1}, 3),
    "talk": ({"abandoned": 1, "malformed": 0, "invented_tool": 0, "invented_argument": 0}, 2),
    "all": ({"abandoned": 2, "malformed": 1, "invented_tool": 1, "invented_argument": 1}, 5),
}


@pytest.fixture
def suite() -> Suite:
    prompt = Conversation((Message("user", "Where is Oslo?"),), (TOOL,))
    return Suite(
        "mine",
        tuple(
            Case(f"{category}-{number}", category, prompt, (Call("find", {"city": "Oslo"}),))
            for category, answers in ANSWERS.items()
            for number in range(len(answers))
        ),
    )


@pytest.fixture
def rows(suite: Suite) -> list[Row]:
    answers = [answer for answers in ANSWERS.values() for answer in answers]
    return [judge_answer(case, one, HERMES).to_row() for case, one in zip(suite.cases, answers, strict=True)]


def count(defects: dict[str, Any]) -> dict[str, tuple[dict[str, int], int]]:
    return {
        category: ({name: rate["successes"] for name, rate in rates.items()}, rates["malformed"]["n"])
        for category, rates in defects.items()
    }


def test_each_defect_is_counted_by_category_over_the_answers_that_came(
    suite: Suite, rows: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = summarise_run(suite, rows, {})
    assert count(summary["defects"]) == EXPECTED
    print_defects(make_console(), summary["defects"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["call", "3", "1", "1", "1", "1"] in lines
    assert ["talk", "2", "1", "0", "0", "0"] in lines
    write_eval_html({"model": "m", "adapter": None, **summary}, rows, tmp_path / "page.html")
    assert "Invented argument" in (tmp_path / "page.html").read_text()


def test_a_benchmark_has_no_total_and_answers_without_defects_are_one_line(
    suite: Suite, rows: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    suite.benchmark = "B"
    assert count(summarise_run(suite, rows, {})["defects"]) == {
        name: found for name, found in EXPECTED.items() if name != "all"
    }
    clean = summarise_run(suite, [rows[0]], {})["defects"]
    print_defects(make_console(), clean)
    printed = capsys.readouterr().out
    assert printed == "answers with defects: none (abandoned, malformed, invented tool, invented argument)\n"
    # Rows of an earlier release say nothing about defects.
    assert summarise_run(suite, [{key: rows[0][key] for key in rows[0].keys() - {"defects"}}], {})["defects"] == {}
