"""Scoring a file of predictions: one row out for each row in, agreement with the leaderboard, denominators."""

from __future__ import annotations

import contextlib
import io
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fctune.base.errors import ConfigError, DataError
from fctune.calls.formats.base import Parsed
from fctune.calls.formats.registry import FORMATS
from fctune.calls.judge import Judgement
from fctune.calls.metrics import wilson_interval
from fctune.data.conversation import Call, Tool
from fctune.tasks.benchmarks.bfcl.cases import CATEGORIES, MULTI_TURN, BfclCase, category_of, read_bfcl
from fctune.tasks.benchmarks.bfcl.single_turn import to_tool
from fctune.tasks.benchmarks.bfcl.suite import BfclSuite
from fctune.tasks.evaluation.score_file import partial_path, score_file
from fctune.tasks.suite import Suite
from fctune.tasks.suite_files import read_cases
from fctune.tasks.task import Case as OwnCase
from tests.calls.mutations import mutate, mutate_source, odd_arguments
from tests.tasks.benchmarks.bfcl.bfcl_wheel import (
    PYTHON_CATEGORIES,
    SOURCE_CATEGORIES,
    Case,
    data_dir,
    gold_calls,
    load_cases,
    needs_wheel,
    official_checker,
    official_multi_turn_checker,
    official_served_checker,
)
from tests.tasks.benchmarks.bfcl.turn_mutations import gold_turns, mutate_turns

WriteRows = Callable[..., Path]


def to_json(calls: list[Call]) -> list[dict[str, Any]]:
    return [{"name": call.name, "arguments": call.arguments} for call in calls]


def score_bfcl(
    predictions: Path, *categories: str, default_format: str | None = None, dots_as_underscores: bool = False
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    out = predictions.with_name("out.jsonl")
    summary = score_file(BfclSuite(data_dir(), categories, dots_as_underscores), predictions, out, default_format)
    assert json.loads(out.with_suffix(".summary.json").read_text()) == summary
    return [json.loads(line) for line in out.read_text().splitlines()], summary


@needs_wheel
def test_each_row_gets_the_official_verdict(write_rows: WriteRows) -> None:
    rng = random.Random(21)
    check = official_checker()
    rows, official = [], []
    for category in (*PYTHON_CATEGORIES, *SOURCE_CATEGORIES):
        cases = load_cases(category)
        for case in (rng.choice(cases) for _ in range(300)):
            calls = mutate_source(case, rng) if category in SOURCE_CATEGORIES else mutate(case, rng)
            with contextlib.redirect_stdout(io.StringIO()):
                official.append(check(case, calls) is True)
            rows.append({"id": case.id, "calls": to_json(calls)})
    out, summary = score_bfcl(write_rows(rows))
    assert [row["id"] for row in out] == [row["id"] for row in rows]
    assert [row["valid"] for row in out] == official
    assert all(bool(row["reason"]) != row["valid"] for row in out)
    assert all(row["category"] == row["id"].rpartition("_")[0] for row in out)
    # The typed match refuses much that the leaderboard accepts; the reverse is rarer, such as a better pairing.
    pairs = Counter((row["valid"], row["verdict"] == "correct") for row in out)
    assert pairs[True, False] > pairs[False, True]
    for category, scores in summary["scores"].items():
        mine = [row for row in out if row["category"] == category]
        assert len(mine) == 300
        num_valid = sum(row["valid"] for row in mine)
        num_missing = sum(category_of(case_id) == category for case_id in summary["missing_ids"])
        accuracy = scores["rates"]["accuracy"]
        assert scores["n"] == 300 + num_missing
        assert (accuracy["successes"], accuracy["n"]) == (num_valid, scores["n"])
        assert (accuracy["low"], accuracy["high"]) == wilson_interval(num_valid, scores["n"])
        num_typed = sum(row["verdict"] == "correct" for row in mine)
        assert summary["typed"][category]["successes"] == scores["verdicts"]["correct"] == num_typed


@needs_wheel
def test_multi_turn_rows_get_the_official_verdict(write_rows: WriteRows) -> None:
    rng = random.Random(22)
    check = official_multi_turn_checker()
    rows, official = [], []
    for case in (case for category in MULTI_TURN for case in rng.choices(read_bfcl(data_dir(), category), k=40)):
        turns = mutate_turns(case, gold_turns(case), rng) if rng.random() < 0.7 else gold_turns(case)
        official.append(check(case, turns) is True)
        rows.append({"id": case.id, "turns": [[to_json(step) for step in turn] for turn in turns]})
    out, summary = score_bfcl(write_rows(rows))
    assert [row["valid"] for row in out] == official
    assert 0 < sum(official) < len(official)
    assert set(summary["scores"]) == set(MULTI_TURN)
    for category, scores in summary["scores"].items():
        # Cases without a prediction are in the denominator.
        num_missing = sum(case_id.startswith(category) for case_id in summary["missing_ids"])
        assert scores["n"] == 40 + num_missing >= 200
        assert scores["rates"]["accuracy"]["n"] == scores["n"], category


@needs_wheel
@pytest.mark.parametrize("name", ["hermes", "pythonic", "qwen3_coder"])
def test_gold_as_text_gets_the_verdict_of_gold_as_calls(name: str, write_rows: WriteRows) -> None:
    cases = [*load_cases("simple_python"), *load_cases("parallel_multiple"), *load_cases("simple_java")]
    calls = {case.id: _source(case.id, gold_calls(case)) for case in cases}
    texts = [{"id": case.id, "text": FORMATS[name].render(calls[case.id], _tools(case))} for case in cases]
    by_text, summary = score_bfcl(write_rows(texts), default_format=name)
    by_calls, _ = score_bfcl(write_rows([{"id": case.id, "calls": to_json(calls[case.id])} for case in cases]))
    assert [row["valid"] for row in by_text] == [row["valid"] for row in by_calls]
    assert [row["valid_lenient"] for row in by_text] == [row["valid"] for row in by_calls]
    assert all(row["calls"] == to_json(calls[row["id"]]) for row in by_text)
    assert summary["scores"]["simple_python"]["rates"]["accuracy"]["successes"] == 400


def _tools(case: Case) -> tuple[Tool, ...]:
    return tuple(to_tool(function, case.category) for function in case.functions)


def _source(case_id: str, calls: list[Call]) -> list[Call]:
    if not case_id.startswith("simple_java"):
        return calls
    return [Call(call.name, {key: str(value) for key, value in call.arguments.items()}) for call in calls]


@needs_wheel
def test_both_readings_are_reported(write_rows: WriteRows) -> None:
    case = load_cases("simple_python")[0]
    calls = gold_calls(case)
    text = "Let me see: " + FORMATS["pythonic"].render(calls)
    (row,), summary = score_bfcl(write_rows([{"id": case.id, "text": text, "format": "bfcl"}]))
    assert (row["valid"], row["reason"], row["verdict"]) == (False, "0 calls instead of 1", "missed_call")
    assert (row["valid_lenient"], row["reason_lenient"]) == (True, "")
    rates = [summary[reading]["simple_python"]["rates"]["accuracy"] for reading in ("scores", "lenient")]
    assert [(rate["successes"], rate["n"]) for rate in rates] == [(0, 400), (1, 400)]


def _repeat_key(arguments: dict[str, Any], value: Any, is_last: bool) -> str:
    """Write arguments as JSON that has its first key twice; the other value comes last or first."""
    key, kept = next(iter(arguments.items()), ("a", 1))
    rest = {name: held for name, held in arguments.items() if name != key}
    pairs = [(key, kept), *rest.items(), (key, value)] if is_last else [(key, value), *rest.items(), (key, kept)]
    return "{" + ", ".join(f"{json.dumps(name)}: {json.dumps(held)}" for name, held in pairs) + "}"


@pytest.mark.sample(2)
@needs_wheel
@pytest.mark.parametrize("shape", ["arguments as text", "arguments as objects", "hermes", "pythonic"])
def test_malformed_calls_get_the_official_verdict(shape: str, write_rows: WriteRows, tmp_path: Path) -> None:
    rng = random.Random(5)
    check = official_served_checker()
    lines, official = [], []
    for case in [*load_cases("live_multiple")[:150], *load_cases("parallel")[:50], *_abstaining_cases()]:
        gold = gold_calls(case) or [Call("f", {"a": 1})]
        is_last = rng.random() < 0.5
        sent = [{"name": gold[0].name, "arguments": _repeat_key(gold[0].arguments, "other", is_last)}]
        sent += [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in gold[1:]]
        if rng.random() < 0.3 and shape != "pythonic":
            sent[-1]["arguments"] = sent[-1]["arguments"][:-1]  # not closed
        official.append(check(case, sent))
        objects = [f'{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}' for call in sent]
        if shape == "hermes":
            text = "\n".join(f"<tool_call>\n{written}\n</tool_call>" for written in objects)
            lines.append(json.dumps({"id": case.id, "text": text, "format": shape}))
        elif shape == "pythonic":
            text = ", ".join(_to_source(call["name"], call["arguments"]) for call in sent)
            lines.append(json.dumps({"id": case.id, "text": f"[{text}]", "format": shape}))
        elif shape == "arguments as objects" and all(call["arguments"].endswith("}") for call in sent):
            lines.append(f'{{"id": "{case.id}", "calls": [{", ".join(objects)}]}}')
        else:
            lines.append(json.dumps({"id": case.id, "calls": sent}))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(lines) + "\n")
    out, _ = score_bfcl(rows)
    assert [row["valid"] for row in out] == official
    assert {row["verdict"] for row in out} == {"malformed"}
    for category in ("live_multiple", "parallel", *(["irrelevance"] if shape != "pythonic" else [])):
        assert {row["valid"] for row in out if row["category"] == category} == {True, False}, category


@pytest.mark.sample(1)
@needs_wheel
@pytest.mark.parametrize("shape", ["arguments as text", "arguments as objects", "hermes"])
def test_calls_that_only_json_loads_reads_get_the_official_verdict(shape: str, tmp_path: Path) -> None:
    rng = random.Random(shape)
    check = official_served_checker()
    relevance = (case for name in ("irrelevance", "live_irrelevance", "live_relevance") for case in _unanswered(name))
    lines, official = [], []
    for case in [*relevance, *load_cases("live_simple"), *load_cases("live_parallel")]:
        gold = gold_calls(case) or [Call("f", {"a": 1})] * rng.choice((1, 1, 2))
        sent = [
            {"name": rng.choice([call.name] * 8 + ["", None]), "arguments": odd_arguments(call.arguments, rng)}
            for call in gold
        ]
        objects = [f'{{"name": {json.dumps(call["name"])}, "arguments": {call["arguments"]}}}' for call in sent]
        if shape != "arguments as text":
            # The arguments as decoded from the text of the complete call, of which they are a part.
            sent = [_read_object(written) for written in objects]
        if shape == "hermes":
            if any("</tool_call>" in written for written in objects):
                continue
            text = "\n".join(f"<tool_call>\n{written}\n</tool_call>" for written in objects)
            lines.append(json.dumps({"id": case.id, "text": text, "format": shape}))
        elif shape == "arguments as objects":
            line = f'{{"id": "{case.id}", "calls": [{", ".join(objects)}]}}'
            try:
                json.loads(line)
            except (ValueError, RecursionError):
                continue  # an error of the file
            lines.append(line.replace("\n", " "))
        else:
            lines.append(json.dumps({"id": case.id, "calls": sent}))
        official.append(check(case, sent))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(lines) + "\n")
    out, _ = score_bfcl(rows)
    assert len(out) > 800
    for row, line, valid in zip(out, lines, official, strict=True):
        assert row["valid"] is valid, (line[:300], row)
    malformed = Counter(row["valid"] for row in out if row["verdict"] == "malformed" and "irr" in row["category"])
    assert min(malformed.values()) > 40


def _unanswered(category: str) -> list[Case]:
    return [Case(case.id, category, [], []) for case in read_bfcl(data_dir(), category)]


def _read_object(written: str) -> dict[str, Any]:
    try:
        call = json.loads(written)
    except (ValueError, RecursionError):
        return {"name": "f", "arguments": "not JSON"}
    if call.keys() != {"name", "arguments"} or isinstance(call["arguments"], str):
        return {"name": "f", "arguments": "not a call"}
    return {"name": call["name"], "arguments": json.dumps(call["arguments"])}


def _to_source(name: str, arguments: str) -> str:
    """Write a call in Python's syntax, with the duplicate keys of its JSON."""
    pairs = json.loads(arguments, object_pairs_hook=tuple)
    return f"{name}({', '.join(f'{key}={_to_dicts(value)!r}' for key, value in pairs)})"


def _to_dicts(value: Any) -> Any:
    if isinstance(value, tuple):
        return {key: _to_dicts(item) for key, item in value}
    return [_to_dicts(item) for item in value] if isinstance(value, list) else value


def _abstaining_cases() -> list[Case]:
    return [Case(case.id, case.category, [], []) for case in read_bfcl(data_dir(), "irrelevance")[:60]]


@needs_wheel
def test_duplicate_keys_of_a_step_keep_the_official_verdict(tmp_path: Path) -> None:
    case = next(
        case
        for case in read_bfcl(data_dir(), "multi_turn_base")
        if gold_turns(case)[0][0][0].arguments and official_multi_turn_checker()(case, gold_turns(case))
    )
    turns = [[to_json(step) for step in turn] for turn in gold_turns(case)]
    line = json.dumps({"id": case.id, "turns": turns})
    key = next(iter(turns[0][0][0]["arguments"]))
    repeated = line.replace('"arguments": {', f'"arguments": {{"{key}": "other", ', 1)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(line + "\n" + repeated + "\n")
    out, _ = score_bfcl(rows)
    assert [(row["valid"], row["verdict"]) for row in out] == [(True, "correct"), (True, "malformed")]


@needs_wheel
def test_a_malformed_call_is_an_abstention_to_the_leaderboard_only(write_rows: WriteRows) -> None:
    rows = [
        {"id": "irrelevance_0", "text": '<tool_call>{"name": "f"', "format": "hermes"},
        {"id": "irrelevance_1", "calls": ["f"]},
        {"id": "irrelevance_2", "text": "I cannot.", "format": "hermes"},
        {"id": "irrelevance_3", "calls": []},
        {"id": "irrelevance_4", "error": "timed out"},
        {"id": "irrelevance_5", "calls": [{"name": "f", "arguments": {}}]},
        {"id": "live_relevance_0-0-0", "calls": [{"name": "f", "arguments": {}}]},
        {"id": "live_relevance_1-1-0", "calls": []},
        {"id": "live_relevance_2-2-0", "text": '<tool_call>{"name": "f"', "format": "hermes"},
    ]
    out, summary = score_bfcl(write_rows(rows))
    assert [row["valid"] for row in out] == [True, True, True, True, False, False, True, False, False]
    assert [row["verdict"] for row in out] == [
        "malformed", "malformed", "correct", "correct", "no_answer", "false_call",
        "correct", "missed_call", "malformed",
    ]  # fmt: skip
    assert out[0]["reason"] == ""
    assert out[8]["reason"].startswith("malformed at 0-23: not closed")
    assert out[0]["malformed"] == [{"start": 0, "end": 23, "reason": "not closed by </tool_call>"}]
    assert out[4]["reason"] == "timed out"
    rates = summary["scores"]["irrelevance"]["rates"]
    assert {name: rates[name]["successes"] for name in ("abstention", "false_call", "well_formed")} == {
        "abstention": 2, "false_call": 1, "well_formed": 3,
    }  # fmt: skip
    assert rates["abstention"]["n"] == 240
    assert (rates["accuracy"]["successes"], summary["typed"]["irrelevance"]["successes"]) == (4, 2)
    assert set(summary["scores"]["live_relevance"]["rates"]) == {
        "accuracy", "well_formed", "missed_call", "schema_valid",
    }  # fmt: skip


@needs_wheel
def test_missing_unknown_and_repeated_ids_are_counted(write_rows: WriteRows) -> None:
    gold = {case.id: to_json(gold_calls(case)) for case in load_cases("live_parallel")}
    ids = [*list(gold)[:10], *list(gold)[:2], "live_parallel_999-0-0", "no_such_0", "memory_0-customer-0", "x", ""]
    out, summary = score_bfcl(write_rows([{"id": i, "calls": gold.get(i, [])} for i in ids]))
    assert [row["id"] for row in out] == ids
    assert [row["valid"] for row in out] == [True] * 12 + [False] * 5
    assert {(row["category"], row["reason"]) for row in out[12:]} == {(None, "no such case")}
    assert summary["missing_ids"] == list(gold)[10:]
    assert summary["unknown_ids"] == dict.fromkeys(ids[12:], 1)
    assert summary["num_repeated_ids"] == 2
    scores = summary["scores"]["live_parallel"]
    assert (scores["n"], scores["rates"]["accuracy"]["successes"]) == (18, 12)
    assert scores["verdicts"]["no_answer"] == 6
    assert list(summary["scores"]) == ["live_parallel"]


@needs_wheel
def test_a_named_category_is_scored_without_any_prediction(write_rows: WriteRows) -> None:
    case = load_cases("multiple")[0]
    rows = [{"id": case.id, "calls": to_json(gold_calls(case))}]
    _, summary = score_bfcl(write_rows(rows), "live_relevance", "multi_turn_base")
    assert {name: (scores["n"], scores["verdicts"]["no_answer"]) for name, scores in summary["scores"].items()} == {
        "live_relevance": (16, 16), "multi_turn_base": (200, 200), "multiple": (200, 199),
    }  # fmt: skip
    with pytest.raises(ConfigError, match="not a category"):
        score_bfcl(write_rows(rows), "memory")


@needs_wheel
def test_an_answer_of_the_wrong_shape_is_wrong(write_rows: WriteRows) -> None:
    case = load_cases("multiple")[0]
    rows = [{"id": case.id, "turns": [[[]]]}, {"id": "multi_turn_base_0", "calls": []}]
    out, _ = score_bfcl(write_rows(rows))
    assert [(row["valid"], row["reason"]) for row in out] == [
        (False, "a single-turn case needs calls or text"),
        (False, "a multi-turn case needs turns"),
    ]


@needs_wheel
def test_steps_of_a_turn_may_be_text(write_rows: WriteRows) -> None:
    case = read_bfcl(data_dir(), "multi_turn_base")[0]
    write = FORMATS["hermes"].render
    turns: list[list[str]] = [[write(step) for step in turn] + ["Done."] for turn in gold_turns(case)]
    broken = [[*turns[0][:-1], "<tool_call>{"], *turns[1:]]
    loose = [[turns[0][0].replace("arguments", "parameters"), *turns[0][1:]], *turns[1:]]
    rows = [{"id": case.id, "turns": given, "format": "hermes"} for given in (turns, broken, loose)]
    out, summary = score_bfcl(write_rows(rows))
    # A broken step after all calls of its turn ends the turn like any text.
    assert [row["valid"] for row in out] == [True, True, False]
    assert [row["valid_lenient"] for row in out] == [True, True, True]
    assert [row["verdict"] for row in out] == ["correct", "malformed", "malformed"]
    assert out[2]["reason"].startswith("turn 1: malformed")
    assert summary["lenient"]["multi_turn_base"]["rates"]["accuracy"]["successes"] == 3


@needs_wheel
def test_multi_turn_is_not_run_without_the_wheel(write_rows: WriteRows, without_wheel: None) -> None:
    (row,), summary = score_bfcl(write_rows([{"id": "multi_turn_base_0", "turns": []}]))
    assert (row["category"], row["valid"]) == ("multi_turn_base", None)
    assert row["reason"].startswith("multi-turn categories need the wheel bfcl-eval")
    assert summary["scores"] == {}
    assert summary["not_run"] == {"multi_turn_base": row["reason"]}


@needs_wheel
def test_dots_may_be_expected_as_underscores(write_rows: WriteRows) -> None:
    case = next(case for case in load_cases("parallel_multiple") if "." in case.functions[0]["name"])
    calls = [Call(call.name.replace(".", "_"), call.arguments) for call in gold_calls(case)]
    rows = write_rows([{"id": case.id, "calls": to_json(calls)}])
    (row,), _ = score_bfcl(rows)
    assert (row["valid"], row["verdict"]) == (False, "wrong_name")
    (row,), summary = score_bfcl(rows, dots_as_underscores=True)
    assert (row["valid"], row["verdict"]) == (True, "correct")
    assert summary["scores"]["parallel_multiple"]["rates"]["schema_valid"]["successes"] == len(calls)


@needs_wheel
@pytest.mark.slow
def test_30000_rows_of_a_file_are_judged_in_a_second_on_one_core(write_rows: WriteRows) -> None:
    rows = [{"id": case.id, "calls": to_json(gold_calls(case))} for category in PYTHON_CATEGORIES
            for case in load_cases(category)] * 10  # fmt: skip
    predictions = write_rows(rows)
    suite = BfclSuite(data_dir(), PYTHON_CATEGORIES)
    rates = []
    for _ in range(5):
        begun = time.process_time()
        score_file(suite, predictions, predictions.with_name("out.jsonl"))
        rates.append(len(rows) / (time.process_time() - begun))
    assert max(rates) >= 30_000


CASES: list[dict[str, Any]] = [
    {
        "id": f"c{number}",
        "kind": kind,
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
            "a": {"type": "integer"}}, "required": ["a"]}}}],
        "expected_calls": calls,
    }
    for number, (kind, calls) in enumerate([
        ("single", [{"name": "f", "arguments": {"a": 1}}]),
        ("single", [{"name": "f", "arguments": {"a": 2}}]),
        ("none", []),
    ])
]  # fmt: skip


def test_cases_of_your_own_are_scored_the_same_way(write_rows: WriteRows) -> None:
    cases = write_rows(CASES, "cases.jsonl")
    predictions = write_rows(
        [
            {"id": "c0", "calls": [{"name": "f", "arguments": {"a": 1}}]},
            {"id": "c0", "calls": [{"name": "f", "arguments": {"a": "1"}}]},
            {
                "id": "c0",
                "text": 'Sure <tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>',
                "format": "hermes",
            },
            {"id": "c2", "text": "No.", "format": "hermes"},
            {"id": "c2", "error": "refused"},
            {"id": "c9", "calls": []},
        ]
    )
    out = predictions.with_name("out.jsonl")
    summary = score_file(Suite("cases", tuple(read_cases(cases))), predictions, out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["id"], row["category"], row["valid"], row["reason"]) for row in rows] == [
        ("c0", "single", True, ""),
        ("c0", "single", False, "f.a: '1', expected 1"),
        ("c0", "single", False, "malformed at 5-65: unknown key 'parameters'"),
        ("c2", "none", True, ""),
        ("c2", "none", False, "refused"),
        ("c9", None, False, "no such case"),
    ]
    assert rows[2]["valid_lenient"] is True
    assert rows[1]["differences"] == ["f.a: '1', expected 1", "schema: a: '1' is not of type 'integer'"]
    assert (summary["missing_ids"], summary["unknown_ids"]) == (["c1"], {"c9": 1})
    single, none = summary["scores"]["single"], summary["scores"]["none"]
    lenient = summary["lenient"]["single"]["rates"]["accuracy"]
    assert (single["n"], single["rates"]["accuracy"]["successes"], lenient["successes"]) == (4, 1, 2)
    assert (none["n"], none["rates"]["accuracy"]["successes"]) == (2, 1)
    assert (summary["scores"]["all"]["n"], summary["scores"]["all"]["rates"]["accuracy"]["successes"]) == (6, 2)
    assert single["rates"]["schema_valid"] | {"low": 0, "high": 0, "rate": 0} == {
        "rate": 0, "successes": 1, "n": 2, "low": 0, "high": 0,
    }  # fmt: skip


def test_one_prediction_never_ends_the_scoring(write_rows: WriteRows, tmp_path: Path) -> None:
    """An integer beyond every float, and a checker that raises something unforeseen."""
    cases = read_cases(write_rows(CASES, "cases.jsonl"))
    raising = RaisingCase(cases[1].id, cases[1].category, cases[1].prompt, cases[1].expected)
    calls = [{"name": "f", "arguments": {"a": 1}}]
    text = f"[f(a=1{'0' * 310})]"
    rows = [
        {"id": "c0", "text": text, "format": "pythonic"},
        {"id": "c1", "calls": calls},
        {"id": "c0", "calls": calls},
    ]
    out = tmp_path / "out.jsonl"
    summary = score_file(Suite("cases", (cases[0], raising, cases[2])), write_rows(rows), out)
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["valid"], row["verdict"]) for row in written] == [
        (False, "wrong_arguments"), (False, "not_judged"), (True, "correct"),
    ]  # fmt: skip
    reason = "could not be judged: ZeroDivisionError: division by zero"
    assert written[1]["reason"] == reason
    assert summary["not_judged"] == {"c1": reason}
    assert summary["scores"]["single"]["verdicts"]["not_judged"] == 1
    assert summary["scores"]["single"]["n"] == 3


class RaisingCase(OwnCase):
    """A case whose checker fails."""

    def judge(self, parsed: Parsed, decoded: Parsed | None = None) -> Judgement:
        raise ZeroDivisionError("division by zero")


@needs_wheel
@pytest.mark.parametrize("value", [10**310, -(10**4000), 1e308])
def test_huge_numbers_get_the_official_verdict(value: float, write_rows: WriteRows) -> None:
    case = next(case for case in load_cases("multiple") if case.id == "multiple_106")
    calls = [Call(call.name, {**call.arguments, "charge": value}) for call in gold_calls(case)]
    texts = [{"id": case.id, "text": FORMATS[name].render(calls), "format": name} for name in ("pythonic", "hermes")]
    out, _ = score_bfcl(write_rows([*texts, {"id": case.id, "calls": to_json(calls)}]))
    assert official_checker()(case, calls) is not True
    assert [(row["valid"], row["verdict"]) for row in out] == [(False, "wrong_arguments")] * 3


def test_verdicts_reach_the_disk_before_the_scoring_ends(write_rows: WriteRows, tmp_path: Path) -> None:
    suite = Suite("cases", tuple(read_cases(write_rows(CASES, "cases.jsonl"))))
    out = tmp_path / "out.jsonl"
    with pytest.raises(DataError, match="1 invalid prediction"):
        score_file(suite, write_rows([{"id": "c0", "calls": []}, {"calls": []}, {"id": "c2", "calls": []}]), out)
    kept = [json.loads(line) for line in partial_path(out).read_text().splitlines()]
    assert [(row["id"], row["valid"]) for row in kept] == [("c0", False), ("c2", True)]


def test_the_output_file_is_complete_or_absent(write_rows: WriteRows, tmp_path: Path) -> None:
    suite = Suite("cases", tuple(read_cases(write_rows(CASES, "cases.jsonl"))))
    out = tmp_path / "out.jsonl"
    with pytest.raises(DataError, match="1 invalid prediction"):
        score_file(suite, write_rows([{"id": "c0", "calls": []}, {"calls": []}]), out)
    assert {path.name for path in tmp_path.iterdir()} == {"cases.jsonl", "rows.jsonl", "out.partial.jsonl"}
    predictions = write_rows([{"id": "c0", "calls": []}])
    with pytest.raises(ConfigError, match="Pass another file"):
        score_file(suite, predictions, predictions)
    with pytest.raises(ConfigError, match="cannot be written"):
        score_file(suite, predictions, "/proc/nowhere/out.jsonl")
    for other in (tmp_path, "/dev/null"):
        with pytest.raises(ConfigError, match="not a file"):
            score_file(suite, predictions, other)
    score_file(suite, predictions, out)
    score_file(suite, predictions, out)
    assert len(out.read_text().splitlines()) == 1
    assert not partial_path(out).exists()


def test_only_earlier_verdicts_are_replaced(write_rows: WriteRows, tmp_path: Path) -> None:
    cases = write_rows(CASES, "cases.jsonl")
    suite, before = Suite("cases", tuple(read_cases(cases))), cases.read_bytes()
    with pytest.raises(ConfigError, match=r"cases\.jsonl: holds something other than verdicts.*Pass another file"):
        score_file(suite, write_rows([{"id": "c0", "calls": []}]), cases)
    assert cases.read_bytes() == before


def test_names_that_end_in_a_version_have_summaries_of_their_own(write_rows: WriteRows, tmp_path: Path) -> None:
    suite = Suite("cases", tuple(read_cases(write_rows(CASES, "cases.jsonl"))))
    for version in ("3.1", "3.2"):
        score_file(suite, write_rows([{"id": "c0", "calls": []}], f"{version}.jsonl"), tmp_path / f"llama-{version}")
    for version in ("3.1", "3.2"):
        summary = json.loads((tmp_path / f"llama-{version}.summary.json").read_text())
        assert summary["predictions"].endswith(f"{version}.jsonl")


def test_half_a_surrogate_pair_stays_escaped(write_rows: WriteRows, tmp_path: Path) -> None:
    suite = Suite("cases", tuple(read_cases(write_rows(CASES, "cases.jsonl"))))
    rows = [{"id": "\ud800", "calls": []}, {"id": "c0", "calls": [{"name": "\udfff", "arguments": {"\ud83d": "é"}}]}]
    score_file(suite, write_rows(rows), tmp_path / "out.jsonl")
    out = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["id"] for row in out] == ["\ud800", "c0"]
    assert "\udfff" in "".join(out[1]["differences"])


def test_a_missing_data_directory_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="bfcl_eval/data"):
        BfclSuite(tmp_path / "none")


@needs_wheel
def test_every_category_of_the_leaderboard_can_be_scored(write_rows: WriteRows) -> None:
    first = {category: read_bfcl(data_dir(), category)[0] for category in CATEGORIES}
    rows = [_answer(case) for case in first.values()]
    out, summary = score_bfcl(write_rows(rows))
    assert set(summary["scores"]) == set(CATEGORIES)
    assert {row["category"] for row in out if not row["valid"]} <= {"simple_java", "simple_javascript"}


def _answer(case: BfclCase) -> dict[str, Any]:
    if case.category in MULTI_TURN:
        return {"id": case.id, "turns": [[to_json(step) for step in turn] for turn in gold_turns(case)]}
    if case.category == "live_relevance":
        return {"id": case.id, "calls": [{"name": "any", "arguments": {}}]}
    calls = (
        gold_calls(next(found for found in load_cases(case.category) if found.id == case.id)) if case.answers else []
    )
    return {"id": case.id, "calls": to_json(calls)}
