"""The readers of JSON and of Python literals: as the standard library reads, but for what is refused on purpose."""

from __future__ import annotations

import ast
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fctune.parsing.json_text import MAX_DEPTH, UnreadableError, decode_json, read_json
from fctune.parsing.python_text import PythonReader

values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(value=values, is_ascii=st.booleans(), indent=st.sampled_from([None, 2]))
def test_what_json_writes_is_read_back(value: Any, is_ascii: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    assert decode_json(f" {text}\n") == value
    assert read_json(f"x{text}x", 1) == (value, len(text) + 1)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(value=values)
def test_what_repr_writes_is_read_back(value: Any) -> None:
    text = repr(value)
    assert PythonReader(text).read_value(0) == (value, len(text))


def read_python(text: str) -> Any:
    value, end = PythonReader(text).read_value(0)
    assert end == len(text)
    return value


@pytest.mark.parametrize(
    "text",
    ["'a\\tb'", "'\\x41\\u0042\\U00000043\\N{LATIN SMALL LETTER D}\\101'", "r'a\\n'", "'''a'b\nc'''", '"""a"""',
     "'a' \"b\"", "'\\q'", "'a\\\nb'", "0x1F", "0b11", "0o17", "1_000", "1.", ".5", "1e3", "-5", "+5", "[1, 2,]", "[]",
     "{}", "{'a': 1,}",
     "[1, [2, (3)]]", "  [ 1 ]".strip(), "u'x'", "-0.0"],
)  # fmt: skip
def test_literals_are_read_as_python_reads_them(text: str) -> None:
    assert read_python(text) == ast.literal_eval(text)


@pytest.mark.parametrize("text", ["(1, 2)", "(1,)", "((1,))", "((1, 2),)", "()", "(1)", "((1))"])
def test_a_tuple_is_a_list(text: str) -> None:
    def to_lists(value: Any) -> Any:
        return [to_lists(item) for item in value] if isinstance(value, tuple) else value

    assert read_python(text) == to_lists(ast.literal_eval(text))


def test_arithmetic_folds_as_python_computes() -> None:
    rng = random.Random(4)
    numbers = ["2", "3", "(1 + 2)", "-4", "0.5", "(7 - 2) * 2", "1", "2 ** -1", "-2 ** 2", "2 ** 3 ** 2"]
    for _ in range(3000):
        text = rng.choice(numbers)
        for _ in range(rng.randint(1, 5)):
            text += f" {rng.choice(['+', '-', '*', '/', '//', '%'])} {rng.choice(numbers)}"
        try:
            # Digits, brackets and operators of this test's own making.
            expected = eval(text)
        except ArithmeticError:
            continue
        assert read_python(text) == expected, text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "ends before"),
        ('{"a": 1', "neither a comma"),
        ('{"a": 1, "a": 2}', "twice"),
        ("{'a': 1}", "double quotes"),
        ("[1,]", "no JSON value"),
        ("NaN", "no JSON value"),
        ("-Infinity", "no JSON value"),
        ("1e999", "no float holds"),
        ("9" * 5000, "digits"),
        ("01", "something follows"),
        ('"a\nb"', "control character"),
        ('"\\x"', "escape"),
        ("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2), "deep"),
        ("[" * 100_000, "deep"),
        ('{"a": 1} x', "something follows"),
    ],
)
def test_json_that_is_none_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(UnreadableError, match=reason) as error:
        decode_json(text)
    assert 0 <= error.value.position <= len(text)


def test_json_of_the_greatest_depth_is_read() -> None:
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert decode_json(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("f", "the name 'f'"),
        ("f()", "the name 'f'"),
        ("{1: 2}", "no string"),
        ("{'a': 1, 'a': 2}", "twice"),
        ("{*a}", "no value"),
        ("b'a'", "prefix b"),
        ("f'{a}'", "prefix f"),
        ("'a", "no value"),
        ("'\\N{nothing at all}'", "escape"),
        ("'\\xg'", "escape"),
        ("1e999", "no float holds"),
        ("10 ** 10000", "power too large"),
        ("9**9**9", "power too large"),
        ("1 / 0", "without a result"),
        ("(-8) ** 0.5", "without a result"),
        ("'a' * 3", "no number"),
        ("True + 1", "no number"),
        ("[" * 100_000, "deep"),
        ("-" * 100_000 + "1", "deep"),
        ("(" * 100_000, "deep"),
        ("010", "no number as Python"),
    ],
)
def test_python_that_is_no_literal_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(UnreadableError, match=reason) as error:
        read_python(text)
    assert 0 <= error.value.position <= len(text)


def test_calls_are_read_as_python_reads_them() -> None:
    reader = PythonReader("[ns.f(a=1, **{'b c': [2]}), g() , ]")
    calls, end = reader.read_calls(0)
    assert [(call.name, call.arguments) for call in calls] == [("ns.f", {"a": 1, "b c": [2]}), ("g", {})]
    assert end == len(reader.text)
