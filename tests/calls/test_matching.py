"""Typed equality of calls, and the best pairing compared with brute force."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from fctune.calls.matching import (
    MAX_ASSIGNED,
    align,
    count_equal_arguments,
    describe_differences,
    is_equal,
    is_exact_match,
)
from fctune.data.conversation import Call


def call(name: str = "f", /, **arguments: object) -> Call:
    return Call(name, arguments)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (5, 5.0, True),
        (5, "5", False),
        (1, True, False),
        (0, False, False),
        (0.0, False, False),
        (None, False, False),
        (None, "null", False),
        ("a", "A", False),
        ("a", " a", False),
        ([1, 2], [2, 1], False),
        ([1, 2], (1, 2), True),
        ([1], [True], False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1.0}, True),
        ({"a": 1}, {"a": 1, "b": None}, False),
        ({"a": [{"b": 1}]}, {"a": [{"b": True}]}, False),
        ([], {}, False),
        ("", None, False),
        (float("nan"), float("nan"), False),
        (10**30, 10**30, True),
        (2**53 + 1, float(2**53), False),
    ],
)
def test_values_are_equal_as_typed_json(left: object, right: object, expected: bool) -> None:
    assert is_equal(left, right) is expected
    assert is_equal(right, left) is expected
    assert is_exact_match([call(a=left)], [call(a=right)]) is expected


def test_number_types_can_be_distinguished() -> None:
    assert is_equal([5], [5.0])
    assert not is_equal([5], [5.0], is_same_number_type=True)


def test_calls_match_in_any_order_and_as_often_as_expected() -> None:
    one, two = call(a=1), call("g")
    assert is_exact_match([one, two], [two, one])
    assert is_exact_match([], [])
    assert not is_exact_match([one, one], [one, two])
    assert not is_exact_match([one], [one, one])
    assert not is_exact_match([one], [])
    assert is_exact_match([Call("f", {"a": 1}, "id1")], [Call("f", {"a": 1}, "id2")])


def test_ten_thousand_calls_are_matched_in_time() -> None:
    calls = [call(a=[index, {"b": str(index)}]) for index in range(10_000)]
    begun = time.process_time()
    assert is_exact_match(calls, calls[::-1])
    assert len(align(calls, calls[1:])) == len(calls) - 1
    assert len(align(calls, [call(a=-1)] * len(calls))) == len(calls)
    assert time.process_time() - begun < 5


def test_the_pairing_shares_as_many_arguments_as_any() -> None:
    rng = random.Random(11)
    for _ in range(600):
        make = lambda: call(**{key: rng.randint(0, 1) for key in "abc" if rng.random() < 0.7})  # noqa: E731
        expected = [make() for _ in range(rng.randint(0, 5))]
        actual = [make() for _ in range(rng.randint(0, 5))]
        pairs = align(expected, actual)
        assert len(pairs) == min(len(expected), len(actual))
        assert len({row for row, _ in pairs}) == len({column for _, column in pairs}) == len(pairs)
        shared = sum(count_equal_arguments(expected[row], actual[column]) for row, column in pairs)
        short, long = sorted((expected, actual), key=len)
        best = max(
            sum(count_equal_arguments(one, other) for one, other in zip(short, order, strict=True))
            for order in itertools.permutations(long, len(short))
        )
        assert shared == best, (expected, actual)


def test_calls_of_other_names_never_pair() -> None:
    assert align([call("f", a=1), call("g", a=1)], [call("h", a=1), call("g", a=2)]) == [(1, 1)]
    many = [call("f", a=index) for index in range(MAX_ASSIGNED + 1)]
    assert align(many, [call("f", a=-1)] * 3) == [(0, 0), (1, 1), (2, 2)]


def test_differences_name_the_argument() -> None:
    expected = [call("f", a=1, b="x"), call("g")]
    actual = [call("f", a=2, c=True), call("h")]
    assert describe_differences(expected, actual) == (
        "f.a: 2, expected 1",
        "f.b: missing, expected 'x'",
        "f.c: True, not expected",
        "g: not called",
        "h: not expected",
    )
    assert describe_differences(expected, expected[::-1]) == ()
