"""Strict typed match with answers that have alternatives: exact values, best pairing."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest

from fctune.calls.formats.base import Malformed, Parsed
from fctune.calls.judge import Outcome
from fctune.data.conversation import Call
from fctune.tasks.benchmarks.bfcl.answer_key import AnswerKey
from fctune.tasks.benchmarks.bfcl.cases import BfclCase, read_bfcl
from fctune.tasks.benchmarks.bfcl.checker import CallChecker
from fctune.tasks.benchmarks.bfcl.single_turn import SingleTurnJudge
from tests.calls.mutations import mutate
from tests.tasks.benchmarks.bfcl.bfcl_wheel import PYTHON_CATEGORIES, Case, data_dir, gold_calls, needs_wheel

FUNCTION = {"name": "f", "parameters": {"type": "dict", "properties": {}, "required": []}}


def case(*answers: Any, category: str = "parallel", functions: Any = (FUNCTION,)) -> BfclCase:
    return BfclCase(f"{category}_0", category, (), tuple(functions), answers)


def judge(answers: list[Any], *calls: Call, malformed: int = 0) -> Outcome:
    return AnswerKey(case(*answers)).judge(Parsed(calls, (Malformed(0, 1, "broken"),) * malformed))


@pytest.mark.parametrize(
    ("alternatives", "value", "is_taken"),
    [
        (["New York"], "New York", True),
        (["New York"], "new york", False),
        (["New York", "NYC"], "NYC", True),
        ([5], 5.0, True),
        ([5], "5", False),
        ([1], True, False),
        ([True], 1, False),
        ([None], None, True),
        ([[1, 2]], [1, 2], True),
        ([[1, 2]], [2, 1], False),
        ([["a"], ["b"]], ["b"], True),
        ([{"k": ["x", "y"]}], {"k": "y"}, True),
        ([{"k": ["x", "y"]}], {"k": "z"}, False),
        ([{"k": ["x", ""]}], {}, True),
        ([{"k": ["x"]}], {}, False),
        ([{"k": ["x"]}], {"k": "x", "l": 1}, False),
        ([{"k": [{"l": [1, 2]}]}], {"k": {"l": 2}}, True),
        ([{"k": [[1, 2]]}], {"k": [1, 2]}, True),
        ([[{"k": ["x"]}, {"k": ["y"]}]], [{"k": "x"}, {"k": "y"}], True),
        ([[{"k": ["x"]}, {"k": ["y"]}]], [{"k": "y"}, {"k": "x"}], False),
        ([[{"k": ["x"]}]], [{"k": "x"}, {"k": "x"}], False),
        ([{"k": "x"}], {"k": "x"}, True),
    ],
)
def test_a_value_must_equal_one_of_its_alternatives_exactly(alternatives: Any, value: Any, is_taken: bool) -> None:
    assert judge([{"f": {"a": alternatives}}], Call("f", {"a": value})).is_correct is is_taken


@pytest.mark.parametrize(
    ("schema", "alternatives", "value", "is_taken"),
    [
        ({"type": "string"}, ["x", ""], "", True),
        ({"type": "any"}, ["x", ""], "", True),
        ({"type": "integer"}, [5, ""], "", False),
        ({"type": "float"}, [None, ""], "", False),
        ({"type": "boolean"}, [True, ""], "", False),
        ({"type": "integer"}, ["x", ""], "", False),
        ({"type": "array", "items": {"type": "string"}}, [["x"], ""], "", False),
        ({"type": "array", "items": {"type": "string"}}, [["", "x"]], ["", "x"], True),
        ({"type": "dict"}, [{"k": [1]}, ""], "", False),
        ({"type": "dict", "properties": {"k": {"type": "integer"}}}, [{"k": [1, ""]}], {"k": ""}, False),
        ({"type": "dict", "properties": {"k": {"type": "integer"}}}, [{"k": [1, ""]}], {}, True),
        ({"type": "dict", "properties": {"k": {"type": "string"}}}, [{"k": ["x", ""]}], {"k": ""}, True),
        ({"type": "dict"}, [{"k": [1, ""]}], {"k": ""}, False),
        ({}, ["x", ""], "", True),
        ({}, [5, ""], "", False),
    ],
)
def test_an_empty_text_among_the_alternatives_is_a_value_only_where_text_is_due(
    schema: Any, alternatives: Any, value: Any, is_taken: bool
) -> None:
    function = {"name": "f", "parameters": {"type": "dict", "properties": {"a": schema}, "required": []}}
    key = AnswerKey(case({"f": {"a": alternatives}}, functions=[function]))
    assert key.judge(Parsed((Call("f", {"a": value}),))).is_correct is is_taken
    assert key.judge(Parsed((Call("f", {}),))).is_correct is ("" in alternatives)


@needs_wheel
def test_no_number_or_boolean_of_the_leaderboard_is_an_empty_text() -> None:
    counts: Counter[bool] = Counter()
    for category in PYTHON_CATEGORIES:
        for found in read_bfcl(data_dir(), category):
            judge = SingleTurnJudge(found)
            gold = gold_calls(Case(found.id, category, list(found.functions), list(found.answers)))
            for index, call in enumerate(gold):
                for parameter, alternatives in found.answers[index][call.name].items():
                    if "" not in alternatives:
                        continue
                    (function,) = (one for one in found.functions if one["name"] == call.name)
                    schema = function["parameters"]["properties"].get(parameter, {})
                    calls = [*gold[:index], Call(call.name, {**call.arguments, parameter: ""}), *gold[index + 1 :]]
                    outcome = judge.judge(Parsed(tuple(calls))).outcome
                    if schema.get("type") in ("integer", "float", "boolean", "array", "dict"):
                        assert not outcome.is_correct, (found.id, parameter)
                    counts[outcome.is_correct] += 1
    assert counts[False] > 1_000
    assert counts[True] > 1_000


def test_arguments_that_may_be_left_out_are_due_where_they_are_given() -> None:
    answers = [{"f": {"a": [1], "b": ["x", ""]}}]
    for arguments, counts in [
        ({"a": 1}, ("correct", 1, 1, 1)),
        ({"a": 1, "b": "x"}, ("correct", 2, 2, 2)),
        ({"a": 1, "b": "y"}, ("wrong_arguments", 2, 2, 1)),
        ({"b": "x"}, ("wrong_arguments", 2, 1, 1)),
        ({"a": 1, "c": 1}, ("wrong_arguments", 1, 2, 1)),
    ]:
        outcome = judge(answers, Call("f", arguments))
        found = outcome.num_arguments_expected, outcome.num_arguments_called, outcome.num_arguments_matched
        assert (outcome.verdict, *found) == counts


@pytest.mark.parametrize(
    ("answers", "calls", "verdict"),
    [
        ([{"f": {}}], [], "missed_call"),
        ([{"f": {}}], [Call("f", {}), Call("f", {})], "wrong_count"),
        ([{"f": {}}], [Call("g", {})], "wrong_name"),
        ([{"f": {}}, {"g": {}}], [Call("g", {}), Call("f", {})], "correct"),
        ([], [], "correct"),
        ([], [Call("f", {})], "false_call"),
    ],
)
def test_each_prediction_has_one_verdict(answers: list[Any], calls: list[Call], verdict: str) -> None:
    assert judge(answers, *calls).verdict == verdict
    assert judge(answers, *calls, malformed=1).verdict == "malformed"


def test_the_best_pairing_is_found_where_a_greedy_one_fails() -> None:
    answers = [{"f": {"a": ["x", "y"]}}, {"f": {"a": ["x"]}}]
    assert judge(answers, Call("f", {"a": "x"}), Call("f", {"a": "y"})).is_correct
    assert judge(answers, Call("f", {"a": "y"}), Call("f", {"a": "x"})).is_correct


def test_a_prediction_is_correct_if_any_pairing_fits_in_full() -> None:
    rng = random.Random(12)
    num_correct = 0
    for _ in range(3000):
        num_calls = rng.randint(1, 4)
        answers = [
            {"f": {key: rng.sample([0, 1, 2, ""], rng.randint(1, 3)) for key in "ab" if rng.random() < 0.8}}
            for _ in range(num_calls)
        ]
        calls = [Call("f", {key: rng.randint(0, 2) for key in "ab" if rng.random() < 0.7}) for _ in range(num_calls)]
        key = AnswerKey(case(*answers))
        singly = [[AnswerKey(case(answer)).judge(Parsed((call,))).is_correct for call in calls] for answer in answers]
        expected = any(
            all(singly[row][column] for row, column in enumerate(order))
            for order in itertools.permutations(range(num_calls))
        )
        assert key.judge(Parsed(tuple(calls))).is_correct is expected, (answers, calls)
        num_correct += expected
    assert num_correct > 200


def test_source_text_is_compared_by_what_it_stands_for() -> None:
    properties = {
        "a": {"type": "integer"},
        "b": {"type": "ArrayList", "items": {"type": "String"}},
        "c": {"type": "String"},
    }
    function = {"name": "f", "parameters": {"type": "dict", "properties": properties, "required": []}}
    answer = {"f": {"a": [5], "b": [["x"]], "c": ["it's"]}}
    key = AnswerKey(case(answer, category="simple_java", functions=[function]))
    call = Call("f", {"a": "5", "b": 'new ArrayList<>(Arrays.asList("x"))', "c": "it's"})
    assert key.judge(Parsed((call,))).is_correct
    assert not key.judge(Parsed((Call("f", {**call.arguments, "a": "5L"}),))).is_correct
    assert key.judge(Parsed((call,))).num_schema_valid is None


def test_any_call_will_do_in_relevance() -> None:
    key = AnswerKey(case(category="live_relevance"))
    assert key.judge(Parsed((Call("f", {}),))).verdict == "correct"
    assert key.judge(Parsed(())).verdict == "missed_call"
    assert key.judge(Parsed((Call("f", {}),), (Malformed(0, 1, "broken"),))).verdict == "malformed"
    assert key.num_expected == 1


@needs_wheel
def test_the_leaderboards_own_answers_match_but_two_that_give_parameters_no_value() -> None:
    wrong = set()
    for category in PYTHON_CATEGORIES:
        for found in read_bfcl(data_dir(), category):
            gold = gold_calls(Case(found.id, category, list(found.functions), list(found.answers)))
            if not AnswerKey(found).judge(Parsed(tuple(gold))).is_correct:
                wrong.add(found.id)
    assert wrong == {"live_simple_106-63-0", "live_simple_112-68-0"}


@needs_wheel
def test_what_the_benchmark_finds_exact_is_what_the_strict_match_finds() -> None:
    """Else a prediction would be judged by how it was found right."""
    rng = random.Random(21)
    num_exact = num_others = 0
    for category in PYTHON_CATEGORIES:
        for found in read_bfcl(data_dir(), category):
            case = Case(found.id, category, list(found.functions), list(found.answers))
            key, official = AnswerKey(found), CallChecker(category, found.functions, found.answers)
            for calls in (gold_calls(case), gold_calls(case, 1), *(mutate(case, rng) for _ in range(8))):
                if official.check(calls).is_exact:
                    num_exact += 1
                    assert key.judge(Parsed(tuple(calls)), is_exact=True) == key.judge(Parsed(tuple(calls))), found.id
                else:
                    num_others += 1
    assert min(num_exact, num_others) > 3000


@needs_wheel
def test_counts_are_those_of_a_plain_pairing() -> None:
    """Counts never exceed their totals, and equal them if the match is exact."""
    rng = random.Random(8)
    for found in read_bfcl(data_dir(), "parallel_multiple"):
        key = AnswerKey(found)
        for _ in range(5):
            calls = mutate(Case(found.id, found.category, list(found.functions), list(found.answers)), rng)
            outcome = key.judge(Parsed(tuple(calls)))
            assert outcome.num_names_matched <= min(outcome.num_called, outcome.num_expected)
            most = min(outcome.num_arguments_called, outcome.num_arguments_expected)
            assert outcome.num_arguments_matched <= most
            if outcome.is_correct:
                assert outcome.num_names_matched == outcome.num_called == outcome.num_expected
                assert outcome.num_arguments_matched == outcome.num_arguments_called == outcome.num_arguments_expected
