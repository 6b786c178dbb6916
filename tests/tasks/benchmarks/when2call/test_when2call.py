"""When2Call: its rows as cases, the published decision, its figures, and models compared case by case."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fctune.base.errors import ConfigError, DataError
from fctune.cli import main
from fctune.data.conversation import Call
from fctune.engines.engine import ChoiceScore
from fctune.tasks.benchmarks import find_benchmarks
from fctune.tasks.benchmarks.when2call.cases import CLASSES, When2CallCase, load_when2call, measure
from fctune.tasks.evaluation.paired import compare_rows
from fctune.tasks.evaluation.results import read_rows
from fctune.tasks.evaluation.summary import summarise_run
from fctune.tasks.judge import is_valid
from fctune.tasks.suite import Suite
from tests.conftest import REAL_DATA, TINY_BASE
from tests.tasks.benchmarks.when2call.when2call_rows import ROWS, make_row, write_rows


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return load(write_rows(tmp_path / "cases.jsonl"))


def load(path: Path | str) -> Suite:
    return load_when2call({"data": "unused"}, "when2call.yaml", (), str(path))


def pick(case: When2CallCase, label: str, likeliest: str | None = None) -> Sequence[ChoiceScore]:
    """Return scores of which one choice is the best per character, and one (the same by default) the likeliest."""
    chosen = {label: ChoiceScore(-20.0, 12, 40), likeliest or label: ChoiceScore(-10.0, 3, 8)}
    if likeliest in (None, label):
        chosen = {label: ChoiceScore(-5.0, 12, 40)}
    return [chosen.get(name, ChoiceScore(-30.0, 6, 15)) for name in case.labels]


def test_rows_become_cases_with_schemas_that_templates_expect(suite: Suite) -> None:
    assert [(case.id, case.category) for case in suite.cases] == [
        (f"when2call-{row['uuid']}", row["correct_answer"]) for row in ROWS
    ]
    case = suite.cases[0]
    assert isinstance(case, When2CallCase)
    assert case.expected == (Call("weather.get", {"city": "Köln", "days": [1, 2.5]}),)
    assert [choice.content for choice in case.choices] == [None, *[ROWS[0]["answers"][name] for name in CLASSES[1:]]]
    assert case.choices[0].calls == case.expected
    assert case.prompt.tools[0].parameters == {
        "type": "object",
        "required": ["city"],
        "properties": {
            "city": {"type": "string", "description": "Name of the city, such as 'Köln'."},
            "days": {"type": "array", "items": {"type": "number"}, "default": [1]},
            "type": {"type": "string", "description": "A property that has the name of a keyword.", "enum": ["int", 2]},
        },
    }
    assert suite.cases[2].expected == ()
    assert not suite.cases[4].prompt.tools
    assert all(find_benchmarks()["when2call"].owns(case.id) for case in suite.cases)


@pytest.mark.parametrize(
    ("number", "chosen", "verdict"),
    [
        (0, "tool_call", "correct"),
        (0, "cannot_answer", "missed_call"),
        (2, "request_for_info", "correct"),
        (2, "tool_call", "false_call"),
        (3, "request_for_info", "wrong_answer"),
        (5, "direct", "correct"),
    ],
)
def test_the_choice_with_the_best_likelihood_per_character_decides(
    suite: Suite, number: int, chosen: str, verdict: str
) -> None:
    case = suite.cases[number]
    assert isinstance(case, When2CallCase)
    other = next(name for name in CLASSES if name != chosen)
    for likeliest in (chosen, other):
        strict, lenient = case.judge_answer("", pick(case, chosen, likeliest))
        assert strict == lenient
        assert strict.outcome.verdict == verdict
        assert strict.benchmark is not None
        assert strict.is_valid == (verdict == "correct")
        assert strict.benchmark.to_plain() == {
            "valid": verdict == "correct",
            "reason": "" if verdict == "correct" else f"chose {chosen} instead of {case.category}",
            "expected": case.category,
            "chosen": chosen,
            "likeliest": likeliest,
            "has_tools": number != 4,
        }


def test_figures_count_calls_without_need_and_missing_calls_apart(suite: Suite) -> None:
    chosen = ["tool_call", "direct", "tool_call", "cannot_answer", "tool_call", None]
    verdicts = []
    for case, label in zip(suite.cases, chosen, strict=True):
        assert isinstance(case, When2CallCase)
        found = case.judge_failure("gone") if label is None else case.judge_answer("", pick(case, label, "direct"))[0]
        assert found.benchmark is not None
        verdicts.append(found.benchmark)
    figures = measure(verdicts, verdicts)
    counts = {name: (found["successes"], found["n"]) for name, found in figures["rates"].items()}
    assert counts == {
        "accuracy": (2, 6),
        "accuracy_not_normalised": (0, 6),
        "over_calling": (2, 4),
        "over_refusing": (1, 2),
        "hallucinated_tools": (1, 1),
    }
    # By class: tool_call 1 right, 1 missed, 2 false; cannot_answer 1 right, 1 missed; the others none right.
    assert figures["values"]["macro_f1"] == pytest.approx((2 / 5 + 0 + 2 / 3 + 0) / 4)
    assert figures["table"]["tool_call"] == dict.fromkeys(CLASSES, 0) | {"tool_call": 1, "direct": 1, "no_answer": 0}
    assert figures["table"]["direct"]["no_answer"] == 1
    assert list(figures["table"]) == list(CLASSES)


def broken(**changes: Any) -> dict[str, Any]:
    return make_row(9, "tool_call", "?") | changes


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (broken(correct_answer="tool"), "correct_answer 'tool' with answers direct, tool_call"),
        (make_row(9, "direct", "?", direct=" "), "answers.direct: empty"),
        (make_row(9, "direct", "?", tool_call="call it"), "answers.tool_call: not JSON"),
        (make_row(9, "direct", "?", tool_call='{"name": "f"}'), "answers.tool_call: not a call with a name"),
        (broken(tools=["[]"]), "tools: expected an object, got list"),
        (broken(tools=[{"description": "x"}]), "tools: a tool without a name"),
        (broken(answers=None), "answers: expected Mapping, got NoneType"),
        ({"messages": []}, "no uuid; it has messages"),
        ([1], "expected an object, got list"),
    ],
)
def test_a_file_of_another_shape_is_refused_with_its_line(row: Any, reason: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "cases.jsonl", (ROWS[0], row))
    with pytest.raises(DataError, match="1 row is not of When2Call") as error:
        load(path)
    assert f"{path}:2: {reason}" in str(error.value)


def test_missing_and_empty_files_and_unknown_categories_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "text.jsonl").write_text("no JSON\n")
    for name, reason in (
        ("none.jsonl", "hf:NAME"),
        ("empty.jsonl", "no rows"),
        ("text.jsonl", "text.jsonl:1: not JSON"),
    ):
        with pytest.raises(DataError, match=reason):
            load(tmp_path / name)
    path = write_rows(tmp_path / "cases.jsonl")
    with pytest.raises(ConfigError, match="tool: not a category"):
        load_when2call({"data": str(path)}, "w.yaml", ("tool",), None)
    with pytest.raises(ConfigError, match="data"):
        load_when2call({"dat": str(path)}, "w.yaml", (), None)


def test_a_model_is_evaluated_and_compared_case_by_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_rows(tmp_path / "cases.jsonl")
    results = []
    for name, options in (("before", []), ("after", ["--chat-template", "hermes"])):
        out = tmp_path / f"{name}.jsonl"
        words = ["eval", "--model", str(TINY_BASE), "--suite", "when2call", "--when2call-data", str(data)]
        assert main([*words, *options, "--out", str(out)]) == 0
        results.append((read_rows(out), json.loads(out.with_suffix(".summary.json").read_text())))
    printed = capsys.readouterr().out
    assert "over calling" in printed
    assert "request_for_info" in printed
    rows, summary = results[0]
    assert summary["release"] == "cases.jsonl"
    assert [len(row["choices"]) for row in rows] == [4] * len(ROWS)
    # Judged again from the rows alone.
    again = summarise_run(load(data), rows, {})
    assert again["figures"] == summary["figures"]
    assert again["scores"] == summary["scores"]
    assert "typed" not in again
    assert summary["figures"]["rates"]["accuracy"]["successes"] == sum(map(is_valid, rows))
    changed = compare_rows(rows, [*reversed(results[1][0])], has_total=False)
    assert [(one.category, one.n) for one in changed] == [
        (name, sum(row["correct_answer"] == name for row in ROWS)) for name in sorted(CLASSES)
    ]


@pytest.mark.thorough
def test_cases_come_from_a_data_set_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    rows = load(write_rows(folder / "test.jsonl")).cases
    assert load(f"hf:{folder}::test").cases == rows


@pytest.mark.real_data
def test_the_published_cases_are_read() -> None:
    suite = load(REAL_DATA / "when2call" / "cases.jsonl")
    counts = {name: sum(case.category == name for case in suite.cases) for name in CLASSES}
    assert counts == {"tool_call": 100, "request_for_info": 100, "cannot_answer": 100, "direct": 0}
