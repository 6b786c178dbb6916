"""Single-turn verdicts agree with the wheel's own checker, run on the same predictions."""

from __future__ import annotations

import contextlib
import io
import random
import time
from collections.abc import Callable, Sequence

import pytest

from fctune.data.conversation import Call
from fctune.tasks.benchmarks.bfcl.checker import BfclVerdict, CallChecker
from fctune.tasks.benchmarks.bfcl.source_values import JAVA_TYPES, JAVASCRIPT_TYPES, read_java, read_javascript
from tests.calls.mutations import as_source, invented_case, mutate, mutate_source
from tests.tasks.benchmarks.bfcl.bfcl_wheel import (
    SOURCE_CATEGORIES,
    Case,
    gold_calls,
    load_cases,
    needs_wheel,
    official_checker,
    python_cases,
)

# The leaderboard's own answers that its own checker rejects.
BROKEN_GOLD = {
    "parallel_multiple_12",
    "parallel_multiple_26",
    "live_simple_106-63-0",
    "live_simple_112-68-0",
    "live_multiple_507-149-4",
    "live_multiple_862-181-3",
    "live_multiple_964-207-0",
}
FUNCTION = {
    "name": "f",
    "parameters": {"type": "dict", "properties": {"a": {"type": "string"}}, "required": ["a"]},
}


def verdict(case: Case, calls: Sequence[Call]) -> BfclVerdict:
    checker = CallChecker(case.category, case.functions, case.answers)
    found = checker.check(calls)
    assert checker.check(calls) == found, (case.id, calls)
    return found


def count_disagreements(predictions: Sequence[tuple[Case, list[Call]]]) -> tuple[int, int, list[str]]:
    """Count the predictions that the official checker accepts and raises on, and list those where ours disagrees."""
    check = official_checker()
    differing, num_valid, num_raised = [], 0, 0
    for case, calls in predictions:
        # The wheel prints what it cannot convert.
        with contextlib.redirect_stdout(io.StringIO()):
            official = check(case, calls)
        ours = verdict(case, calls)
        num_valid += official is True
        num_raised += official is None
        if ours.valid != (official is True):
            differing.append(f"{case.id}: {calls}: official {official}, ours {ours}")
    return num_valid, num_raised, differing


@needs_wheel
def test_gold_answers_get_the_official_verdict_and_the_same_seven_fail() -> None:
    cases = list(python_cases())
    assert len(cases) == 2351
    for rank in range(4):
        num_valid, num_raised, differing = count_disagreements([(case, gold_calls(case, rank)) for case in cases])
        assert (num_valid, num_raised, differing) == (2344, 0, [])
        assert {case.id for case in cases if not verdict(case, gold_calls(case, rank)).valid} == BROKEN_GOLD


@needs_wheel
@pytest.mark.parametrize("number", [10_000, pytest.param(55_000, marks=pytest.mark.thorough)])
def test_mutated_predictions_get_the_official_verdict(number: int) -> None:
    rng = random.Random(20260)
    cases = list(python_cases())
    # Every category equally often: some have 16 cases, one has 1,053.
    by_category = {category: [case for case in cases if case.category == category] for category in
                   dict.fromkeys(case.category for case in cases)}  # fmt: skip
    chosen = [rng.choice(by_category[rng.choice(list(by_category))]) for _ in range(number // 2)]
    chosen += [rng.choice(cases) for _ in range(number // 2)]
    num_valid, num_raised, differing = count_disagreements([(case, mutate(case, rng)) for case in chosen])
    assert differing == []
    # The mutations are only useful if both verdicts are common and raising is rare.
    assert 0.15 < num_valid / len(chosen) < 0.6
    assert num_raised < 0.01 * len(chosen)


@needs_wheel
@pytest.mark.parametrize("number", [6_000, pytest.param(30_000, marks=pytest.mark.thorough)])
def test_invented_schemas_and_answers_get_the_official_verdict(number: int) -> None:
    rng = random.Random(99)
    num_valid, num_raised, differing = count_disagreements([invented_case(rng) for _ in range(number)])
    assert differing == []
    assert num_valid > number // 15
    assert num_raised > number // 300


@needs_wheel
def test_java_and_javascript_predictions_get_the_official_verdict() -> None:
    rng = random.Random(7)
    cases = [case for category in SOURCE_CATEGORIES for case in load_cases(category)]
    predictions = [(case, mutate_source(case, rng)) for case in cases for _ in range(60)]
    num_valid, _, differing = count_disagreements(predictions)
    assert differing == []
    assert 0.1 < num_valid / len(predictions) < 0.7


@needs_wheel
def test_java_and_javascript_gold_as_source_text_gets_the_official_verdict() -> None:
    rng = random.Random(0)
    predictions = []
    for category in SOURCE_CATEGORIES:
        for case in load_cases(category):
            schemas = case.functions[0]["parameters"]["properties"]
            language = category.removeprefix("simple_")
            calls = [
                Call(
                    call.name,
                    {
                        key: as_source(value, language, rng, schemas.get(key, {}).get("type", ""))
                        for key, value in call.arguments.items()
                    },
                )
                for call in gold_calls(case)
            ]
            predictions.append((case, calls))
    num_valid, _, differing = count_disagreements(predictions)
    assert differing == []
    assert num_valid > 90


JAVA_PIECES = (
    "new ", " ", "\n", "ArrayList<", "Integer", ">", "(", "()", ")", "))", "Arrays.asList(", "{", "{{", "}", "}}",
    "add(", 'put("', '",', '"', "'", "1", "-2", "3.5", "f", "L", "true", "a", ",", ", ", "HashMap<", "int", "[]", "[",
    "]", "new ArrayList<>(Arrays.asList(", "new ArrayList<Integer>() {{ add(", "new int[]{", "e5", "1_0", "٣",
    'new HashMap<String, Object>() {{ put("k", 1); }}',
)  # fmt: skip
JAVASCRIPT_PIECES = (
    "new ", "Array(", "new Array(", "[", "]", "[[", "]]", "], [", "],[", "{", "}", '"', "'", ",", ", ", ":", ": ", "a",
    "b", "1", "2.5", "-3", "n", "true", "\n", " ", "key: ", '"k": ', '{"a": [1, 2], "b": 3}', "٣", "nan", "1_0",
)  # fmt: skip


@needs_wheel
@pytest.mark.parametrize("language", ["java", "javascript"])
def test_arbitrary_source_text_reads_the_same_as_in_the_wheel(language: str) -> None:
    official_checker()
    read: Callable[..., object]
    official: Callable[..., object]
    if language == "java":
        from bfcl_eval.eval_checker.ast_eval.type_convertor.java_type_converter import java_type_converter as official

        read, types, pieces = read_java, list(JAVA_TYPES), JAVA_PIECES
        collections = ["Array", "ArrayList", "HashMap"]
    else:
        from bfcl_eval.eval_checker.ast_eval.type_convertor.js_type_converter import js_type_converter as official

        read, types, pieces = read_javascript, list(JAVASCRIPT_TYPES), JAVASCRIPT_PIECES
        collections = ["array", "dict"]

    def outcome(function: Callable[..., object], *arguments: object) -> str:
        try:
            return repr(function(*arguments))
        except (ValueError, NotImplementedError):
            return "raised"

    rng = random.Random(3)
    for _ in range(20_000):
        text = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 14)))
        type_name = rng.choice(collections if rng.random() < 0.7 else types)
        item_name = rng.choice([None, *types])
        with contextlib.redirect_stdout(io.StringIO()):
            expected = outcome(official, text, type_name, item_name)
        assert outcome(read, text, type_name, item_name) == expected, (text, type_name, item_name)


@needs_wheel
def test_a_verdict_takes_less_than_a_tenth_of_a_millisecond() -> None:
    # ``benchmarks/scoring.py`` measures the rate, several times as high, without other tests running.
    predictions = [(case, gold_calls(case)) for case in python_cases()]
    rates = []
    for _ in range(5):
        begun = time.process_time()
        for case, calls in predictions:
            verdict(case, calls)
        rates.append(len(predictions) / (time.process_time() - begun))
    assert max(rates) >= 10_000


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        "[[" + "a],[" * 100_000,
        "[[" + "],[" * 100_000 + "\n",
        "[ [" + "],\n[" * 100_000,
        "new Array([" + "], [" * 100_000 + "x",
        "{" + "a:" * 200_000,
        "{" + "a:b," * 100_000 + "}",
        "{" + "," * 200_000 + "}",
        "new " * 100_000,
        "new HashMap<" * 50_000 + ">",
        "new HashMap<" * 50_000 + "\n> ()",
        "new HashMap<a>() {{ " + 'put("a",' * 50_000 + "}",
        "new ArrayList<>(Arrays.asList(" * 20_000,
        "new ArrayList<>(Arrays.asList(" * 20_000 + "\n))",
        "new ArrayList<>() {{" * 20_000,
        "new ArrayList<>() {{" + "add(" * 50_000 + "}}",
        "new int[]{" * 50_000 + "\n}",
        "9" * 200_000,
    ],
)
def test_hostile_source_text_is_read_in_time(text: str) -> None:
    begun = time.process_time()
    for read, types in ((read_java, JAVA_TYPES), (read_javascript, JAVASCRIPT_TYPES)):
        for type_name in types:
            with contextlib.suppress(NotImplementedError, ValueError):
                read(text, type_name, "String")
    assert time.process_time() - begun < 3


def test_a_call_is_due_in_relevance_and_none_in_irrelevance() -> None:
    call = Call("f", {})
    assert CallChecker("live_relevance", [], []).check([call]).valid
    assert not CallChecker("live_relevance", [], []).check([]).valid
    assert CallChecker("irrelevance", [], []).check([]).valid
    assert not CallChecker("live_irrelevance", [], []).check([call]).valid


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([], "0 calls instead of 1"),
        ([Call("g", {"a": "x"})], "calls g instead of f"),
        ([Call("f", {})], "required a is missing"),
        ([Call("f", {"a": "x", "b": 1})], "b is not expected"),
        ([Call("f", {"a": 1})], "a is 1, expected the type string"),
        ([Call("f", {"a": "y"})], "a is 'y', expected ['x']"),
    ],
)
def test_the_reason_names_what_is_wrong(calls: list[Call], reason: str) -> None:
    checker = CallChecker("simple_python", [FUNCTION], [{"f": {"a": ["x"]}}])
    assert checker.check(calls) == BfclVerdict(False, reason)
