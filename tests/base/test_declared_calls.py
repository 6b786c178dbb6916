"""Calls of declared tools as ``[name(argument=value)]``, which Python's parser cannot read: names are free text."""

from __future__ import annotations

import ast
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fctune.base.declared_calls import DeclaredCallReader
from fctune.base.json_reader import ParseError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=15)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)
WORDS = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
ARGUMENT_NAMES = WORDS | st.sampled_from(["from", "class", "max-rows", "$limit", "日付"])
TOOL_NAMES = WORDS | st.sampled_from(["Market Trends API", "Get (all, or one) v1.2", "a.b", "f(x)", "[x]"])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(TOOL_NAMES, st.dictionaries(ARGUMENT_NAMES, VALUES, max_size=3)), min_size=1, max_size=3),
    st.sampled_from([repr, json.dumps, lambda value: json.dumps(value, ensure_ascii=False)]),
)
def test_values_written_by_python_or_by_json_are_read_back(calls: list[tuple[str, dict[str, Any]]], write: Any) -> None:
    body = ", ".join(
        f"{name}({', '.join(f'{key}={write(value)}' for key, value in args.items())})" for name, args in calls
    )
    names = [name for name, _ in calls]
    text = f"[{body}]"
    assert DeclaredCallReader(text, names).is_call_list()
    read, end = DeclaredCallReader(text, names).read_calls(0)
    assert end == len(text)
    assert json.dumps(read) == json.dumps(calls)


@settings(max_examples=200, deadline=None)
@given(st.text("abc =,()[]{}'\"\\1.-", max_size=25))
def test_values_are_those_that_python_reads(value: str) -> None:
    text = f"[f(a={value})]"
    try:
        ((_, arguments),), end = DeclaredCallReader(text, ["f"]).read_calls(0)
    except ParseError:
        return
    if end != len(text):
        return
    node = ast.parse(text, mode="eval").body
    assert isinstance(node, ast.List)
    (only,) = node.elts
    assert isinstance(only, ast.Call)
    assert arguments == {word.arg: ast.literal_eval(word.value) for word in only.keywords}


@pytest.mark.parametrize(
    "text",
    [
        "[f(a=us)]",
        "[f('us')]",
        "[f(a=1 + 2)]",
        "[f(a=007)]",
        "[f(a=(1, 2))]",
        "[f(a=1",
        '[f(a="us)]',
        "[f(a=1) g(b=2)]",
        "[f(a=1, a=2)]",
        "[f(a=1,)]",
        "[f(a=[1,])]",
        "[f(a=1),]",
        "[f(a='x' 'y')]",
        "[f(a='\\0')]",
        "[f(a=r'x')]",
        "[f(**{'a': 1})]",
        "[f(a=open('x'))]",
        "[f(a={1: 2})]",
        "[f(a=1e999)]",
        "[]",
        "[f]",
    ],
)
def test_ambiguous_values_are_refused(text: str) -> None:
    with pytest.raises(ParseError):
        DeclaredCallReader(text, ["f"]).read_calls(0)


@pytest.mark.parametrize("text", ["[1] see below", "[note] f(x)", "see [f(a=1)]", "[]", ""])
def test_prose_is_not_taken_for_calls(text: str) -> None:
    assert not DeclaredCallReader(text, ["f"]).is_call_list()


@pytest.mark.parametrize("piece", ["f(a=[", "f(a={'k': ", "f(a='x', ", "f(a=1), ", "\\"])
def test_reading_takes_linear_time(piece: str) -> None:
    text = "[" + piece * (400_000 // len(piece))
    start = time.process_time()
    with pytest.raises(ParseError):
        DeclaredCallReader(text, ["f"]).read_calls(0)
    assert time.process_time() - start < 5
