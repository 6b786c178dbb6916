"""Suites and cases in files: what is read, what is refused, and what a benchmark is asked."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fctune.base.errors import ConfigError, DataError
from fctune.calls.formats.base import Parsed
from fctune.calls.formats.registry import FORMATS, get_format
from fctune.data.conversation import Call
from fctune.engines.engine import Answer
from fctune.tasks.benchmarks import find_suite_files
from fctune.tasks.benchmarks.bfcl.cases import RELEVANCE, SINGLE_TURN, read_bfcl
from fctune.tasks.benchmarks.bfcl.single_turn import to_tool
from fctune.tasks.benchmarks.bfcl.suite import BfclSuite
from fctune.tasks.judge import judge_answer
from fctune.tasks.suite_files import benchmark_of, load_suite, read_cases, read_mark
from tests.conftest import ROOT
from tests.tasks.benchmarks.bfcl.bfcl_wheel import data_dir, needs_wheel
from tests.tasks.benchmarks.bfcl.official_loop import official_convert_to_tool

SUITES = ROOT / "eval" / "suites"


def test_the_smoke_suite_is_two_tools_and_four_prompts() -> None:
    suite = load_suite(SUITES / "smoke.yaml")
    assert len(suite.cases) == 4
    assert {tool.name for case in suite.cases for tool in case.prompt.tools} == {"get_weather", "schedule_meeting"}
    assert sorted(len(case.expected) for case in suite.cases) == [0, 1, 1, 2]
    assert benchmark_of(suite) is None


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_expected_calls_of_the_smoke_suite_are_right_in_every_format(name: str) -> None:
    suite, call_format = load_suite(SUITES / "smoke.yaml"), get_format(name)
    for case in suite.cases:
        text = call_format.render(case.expected, case.prompt.tools) if case.expected else "You are welcome."
        assert judge_answer(case, Answer(0, text), call_format).strict.is_valid


@pytest.mark.parametrize("read", [read_cases, read_mark, load_suite])
def test_cases_that_cannot_be_read_are_an_error_of_the_data(read: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.symlink_to("/proc/self/mem")  # a file whose reading fails, even for root
    with pytest.raises(DataError, match=r"cases\.jsonl: cannot be read \(Input/output error\)\. Check"):
        read(path)


def test_a_seed_makes_the_synthetic_suite_again() -> None:
    suite = load_suite(SUITES / "synthetic.yaml")
    assert len(suite.cases) == 300
    assert suite.digest() == load_suite(SUITES / "synthetic.yaml", seed=42).digest()
    assert suite.digest() != load_suite(SUITES / "synthetic.yaml", seed=43).digest()
    assert len(load_suite(SUITES / "synthetic.yaml", num_cases=10).cases) == 10


def test_a_digest_knows_the_question_and_the_answer(tmp_path: Path) -> None:
    spec = yaml.safe_load((SUITES / "smoke.yaml").read_text())
    digests = {load_suite(SUITES / "smoke.yaml").digest()}
    for path in (("messages", 0, "content"), ("expected_calls", 0, "arguments", "city")):
        changed: Any = copy.deepcopy(spec)
        place = changed["cases"][0]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] += "!"
        (tmp_path / "s.yaml").write_text(yaml.safe_dump(changed))
        digests.add(load_suite(tmp_path / "s.yaml").digest())
    assert len(digests) == 3


TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
QUESTION = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("- 1", "expected a mapping"),
        ("a: [", "not YAML"),
        ({"description": "x"}, "expected one of cases, synthetic and bfcl"),
        ({"description": "x", "synthetic": {"num_cases": 3}, "bfcl": {"categories": ["live"]}}, "expected one of"),
        ({"description": "x", "synthetik": {"num_cases": 3}}, "did you mean synthetic"),
        ({"cases": [{"messages": QUESTION, "expected_calls": []}]}, "description: missing"),
        ({"description": "x", "cases": [{"messages": QUESTION}]}, "no expected_calls, and the last message is not"),
        ({"description": "x", "cases": [{"expected_calls": []}]}, "expected an object with messages"),
        (
            {"description": "x", "cases": [{"id": 1, "messages": QUESTION, "expected_calls": []}] * 2},
            "2 cases have the id",
        ),
        (
            {"description": "x", "tools": [TOOL], "cases": [{"messages": QUESTION, "expected_calls": [{"name": "g"}]}]},
            "1 invalid case",
        ),
        (
            {
                "description": "x",
                "tools": [TOOL],
                "cases": [{"id": "q", "messages": QUESTION, "expected_calls": [{"name": "g", "arguments": {}}]}],
            },
            r"case q: expected_calls: expects a call of g, which is not on offer \(tools: f\)",
        ),
    ],
)
def test_an_invalid_suite_is_reported(spec: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "suite.yaml"
    path.write_text(spec if isinstance(spec, str) else yaml.safe_dump(spec))
    with pytest.raises((ConfigError, DataError), match=words):
        load_suite(path)


def test_cases_of_your_own_are_a_suite_and_unknown_tools_are_named(tmp_path: Path) -> None:
    row = {"messages": QUESTION, "tools": [{"type": "function", "function": TOOL}], "kind": "mine"}
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({**row, "expected_calls": [{"name": "f", "arguments": {"a": 1}}]}))
    assert load_suite(path).cases[0].category == "mine"
    with pytest.raises(ConfigError, match="it has mine"):
        load_suite(path, categories=["yours"])
    path.write_text(json.dumps({**row, "expected_calls": [{"name": "g", "arguments": {"a": 1}}]}))
    with pytest.raises(DataError, match="a call of g, which is not on offer"):
        load_suite(path)


def test_a_limit_is_of_each_category() -> None:
    suite = load_suite(SUITES / "synthetic.yaml").select(limit=2)
    assert set(Counter(case.category for case in suite.cases).values()) == {2}


@needs_wheel
def test_bfcl_asks_every_single_turn_case_and_says_what_it_leaves_out() -> None:
    suite = load_suite(find_suite_files()["bfcl"])
    counts = Counter(case.category for case in suite.cases)
    assert counts == Counter({name: len(read_bfcl(data_dir(), name)) for name in SINGLE_TURN})
    assert sum(counts.values()) == 3641
    assert {"multi_turn_base", "memory_kv", "web_search_base", "format_sensitivity"} <= suite.not_run.keys()
    assert benchmark_of(suite) == "BFCL v4"
    assert not load_suite(find_suite_files()["bfcl"], categories=["live"]).not_run


@needs_wheel
def test_bfcl_gold_is_right_but_for_the_seven_that_the_benchmark_refuses_itself() -> None:
    suite = load_suite(find_suite_files()["bfcl"])
    asked = [case for case in suite.cases if case.expected and not case.category.startswith("simple_java")]
    wrong = [case.id for case in asked if not case.judge(Parsed(case.expected)).is_valid]
    assert len(asked) == 2351
    assert len(wrong) == 7


@needs_wheel
def test_malformed_is_never_right_and_what_the_benchmark_says_is_kept() -> None:
    suite = load_suite(find_suite_files()["bfcl"], categories=list(RELEVANCE))
    for category, abstains in (("irrelevance", True), ("live_irrelevance", True), ("live_relevance", False)):
        case = next(case for case in suite.cases if case.category == category)
        answers = (Answer(0, "No."), Answer(0, "<tool_call>{"))
        rows = [judge_answer(case, answer, FORMATS["hermes"]).to_row() for answer in answers]
        assert rows[0]["verdict"] == ("correct" if abstains else "missed_call")
        assert rows[1]["verdict"] == "malformed"
        assert [row["bfcl"]["valid"] for row in rows] == [abstains, abstains]


@needs_wheel
@pytest.mark.parametrize("category", SINGLE_TURN)
def test_tools_are_shown_as_the_benchmark_shows_them(category: str) -> None:
    from bfcl_eval.utils import _func_doc_language_specific_pre_processing as add_hints

    convert = official_convert_to_tool()
    for case in read_bfcl(data_dir(), category):
        official = convert(add_hints(copy.deepcopy(list(case.functions)), category))
        ours = [to_tool(function, category).function for function in case.functions]
        for tool in ours:
            tool["name"] = tool["name"].replace(".", "_")
        assert ours == official, case.id


@needs_wheel
def test_names_without_dots_are_expected_where_they_are_offered() -> None:
    names = ["multiple", "simple_python"]
    opened, dotted = BfclSuite(data_dir(), names, has_plain_names=True), BfclSuite(data_dir(), names)
    assert any("." in tool.name for case in dotted.cases for tool in case.prompt.tools)
    for case in opened.cases:
        assert not any("." in tool.name for tool in case.prompt.tools)
        assert case.judge(Parsed(case.expected)).is_valid
    case = next(case for case in dotted.cases if "." in case.expected[0].name)
    plain = Call(case.expected[0].name.replace(".", "_"), case.expected[0].arguments)
    assert not case.judge(Parsed((plain,))).is_valid


@needs_wheel
def test_categories_of_the_benchmark_are_selected_and_keep_its_description() -> None:
    suite = BfclSuite(data_dir(), ["multiple", "simple_python"], mode="prompt")
    few = suite.select(["multiple"], 3)
    assert [case.id for case in few.cases] == ["multiple_0", "multiple_1", "multiple_2"]
    assert (few.benchmark, few.release, few.call_format) == (suite.benchmark, suite.release, suite.call_format)
    assert few.find("simple_python_0") is None


@pytest.mark.parametrize(
    ("names", "words"), [(["simple_pyton"], "did you mean simple_python"), (["liv"], "did you mean live")]
)
def test_an_unknown_category_is_reported(names: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        BfclSuite(tmp_path, names)


WriteRows = Callable[..., Path]
OWN_ROW: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Weather?"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
}
CALL = {"name": "f", "arguments": {"a": 1}}


def test_expected_calls_are_a_field_of_their_own_or_the_last_message(write_rows: WriteRows) -> None:
    answer = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]}
    first, second, third = read_cases(
        write_rows(
            [
                {**OWN_ROW, "expected_calls": [CALL], "id": "x", "kind": "single"},
                {**OWN_ROW, "messages": [*OWN_ROW["messages"], answer], "id": 7},
                {**OWN_ROW, "expected_calls": [], "id": None},
            ]
        )
    )
    assert first.expected == second.expected == (Call("f", {"a": 1}),)
    assert [case.prompt.messages for case in (first, second, third)] == [first.prompt.messages] * 3
    assert [(case.id, case.category) for case in (first, second, third)] == [
        ("x", "single"),
        ("7", "all"),
        ("3", "all"),
    ]
    assert third.expected == ()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (OWN_ROW, "no expected_calls"),
        ({**OWN_ROW, "expected_calls": {}}, "expected a list of calls, got dict"),
        ({**OWN_ROW, "expected_calls": [{"name": "g", "arguments": {}}]}, "which is not on offer (tools: f)"),
        ({"messages": OWN_ROW["messages"], "expected_calls": [CALL]}, "calls f, but the row has no tools"),
        ({**OWN_ROW, "expected_calls": [{"arguments": {}}]}, "function.name"),
        ({**OWN_ROW, "expected_calls": [{"name": "f"}]}, "arguments"),
        ({"expected_calls": []}, "expected an object with messages"),
        ([], "expected an object with messages"),
    ],
)
def test_an_invalid_case_is_reported_with_its_line(write_rows: WriteRows, row: Any, words: str) -> None:
    path = write_rows([{**OWN_ROW, "expected_calls": []}, row])
    with pytest.raises(DataError) as error:
        read_cases(path)
    assert f"{path}:2: " in str(error.value)
    assert words in str(error.value)


def test_ids_must_be_unique(write_rows: WriteRows) -> None:
    row = {**OWN_ROW, "expected_calls": [], "id": "x"}
    with pytest.raises(DataError, match="2 cases have the id 'x'"):
        read_cases(write_rows([row, row]))


def test_a_missing_an_empty_and_a_broken_file_are_reported(write_rows: WriteRows, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_cases(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="contains no cases"):
        read_cases(write_rows([]))
    (tmp_path / "broken.jsonl").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        read_cases(tmp_path / "broken.jsonl")
