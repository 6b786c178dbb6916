"""The scanner of Python literals and calls: equal to Python's own reading, apart from what is refused."""

from __future__ import annotations

import ast
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fctune.base.json_reader import ParseError
from fctune.base.python_reader import PythonReader

values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


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
        ("f", "the name 'f'"),
        ("f()", "the name 'f'"),
        ("{1: 2}", "expected a string"),
        ("{'a': 1, 'a': 2}", "duplicate key"),
        ("{*a}", "expected a value"),
        ("b'a'", "prefix b"),
        ("f'{a}'", "prefix f"),
        ("'a", "expected a value"),
        ("'''a'", "expected a value"),
        ('"""a"', "expected a value"),
        ("'\\N{nothing at all}'", "escape"),
        ("'\\xg'", "escape"),
        ("1e999", "too large for a float"),
        ("10 ** 10000", "operands of .. too large"),
        ("9**9**9", "operands of .. too large"),
        ("1 / 0", "without a finite result"),
        ("(-8) ** 0.5", "without a finite result"),
        ("'a' * 3", "other than numbers"),
        ("True + 1", "other than numbers"),
        ("[" * 100_000, "deep"),
        ("-" * 100_000 + "1", "deep"),
        ("(" * 100_000, "deep"),
        ("010", "not a number in Python"),
        ("0x" + "f" * 4000, "more than 4300 digits"),
        ("1000 ** 1000 * 1000 ** 1000", "result of arithmetic too large"),
    ],
)
def test_what_is_no_literal_is_refused_with_reason_and_position(text: str, reason: str) -> None:
    with pytest.raises(ParseError, match=reason) as error:
        read_python(text)
    assert 0 <= error.value.position <= len(text)


def test_calls_are_read_as_python_reads_them() -> None:
    reader = PythonReader("[ns.f(a=1, **{'b c': [2]}), g() , ]")
    calls, end = reader.read_calls(0)
    assert calls == [("ns.f", {"a": 1, "b c": [2]}), ("g", {})]
    assert end == len(reader.text)


def test_a_repeated_argument_is_refused_strictly_and_the_last_one_kept_leniently() -> None:
    with pytest.raises(ParseError, match="duplicate argument 'a'"):
        PythonReader("f(a=1, a=2)").read_call(0)
    assert PythonReader("f(a=1, a=2)", lenient=True).read_call(0)[0] == ("f", {"a": 2})


def test_numbers_that_are_accepted_can_be_written_again() -> None:
    for text in ("9" * 4300, "0x" + "f" * 3500, "1000 ** 1000"):
        assert str(read_python(text))
