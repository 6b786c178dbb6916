"""Calls as ``[name(argument=value)]``, which Python's own parser cannot read where names are free text."""

from __future__ import annotations

import ast
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fctune.data.sources.defects import RowError
from fctune.data.sources.python_types import convert_type
from fctune.data.sources.pythonic import is_pythonic, read_pythonic

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
def test_what_was_written_is_read_whether_as_python_or_as_json(
    calls: list[tuple[str, dict[str, Any]]], write: Any
) -> None:
    body = ", ".join(
        f"{name}({', '.join(f'{key}={write(value)}' for key, value in args.items())})" for name, args in calls
    )
    names = [name for name, _ in calls]
    text = f"[{body}]"
    assert is_pythonic(text, names)
    read, end = read_pythonic(text, names, "")
    assert end == len(text)
    assert [(call.name, json.dumps(call.arguments)) for call in read] == [(n, json.dumps(a)) for n, a in calls]


@settings(max_examples=200, deadline=None)
@given(st.text("abc =,()[]{}'\"\\1.-", max_size=25))
def test_what_is_read_is_what_python_reads(value: str) -> None:
    text = f"[f(a={value})]"
    try:
        (call,), end = read_pythonic(text, ["f"], "")
    except RowError:
        return
    if end != len(text):
        return
    node = ast.parse(text, mode="eval").body
    assert isinstance(node, ast.List)
    (only,) = node.elts
    assert isinstance(only, ast.Call)
    assert call.arguments == {word.arg: ast.literal_eval(word.value) for word in only.keywords}


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
        "[f(a=open('x'))]",
        "[f(a={1: 2})]",
        "[f(a=1e999)]",
        "[]",
        "[f]",
    ],
)
def test_what_has_more_than_one_reading_is_refused(text: str) -> None:
    with pytest.raises(RowError):
        read_pythonic(text, ["f"], "")


@pytest.mark.parametrize("text", ["[1] see below", "[note] f(x)", "see [f(a=1)]", "[]", ""])
def test_prose_is_not_taken_for_calls(text: str) -> None:
    assert not is_pythonic(text, ["f"])


@pytest.mark.parametrize("piece", ["f(a=[", "f(a={'k': ", "f(a='x', ", "f(a=1), ", "\\"])
def test_reading_takes_time_in_proportion_to_the_text(piece: str) -> None:
    text = "[" + piece * (400_000 // len(piece))
    start = time.process_time()
    with pytest.raises(RowError):
        read_pythonic(text, ["f"], "")
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("text", "schema", "is_optional"),
    [
        ("str", {"type": "string"}, False),
        ("int, optional", {"type": "integer"}, True),
        ("Optional[bool]", {"type": "boolean"}, True),
        ("List[int]", {"type": "array", "items": {"type": "integer"}}, False),
        ("Set[str]", {"type": "array", "items": {"type": "string"}, "uniqueItems": True}, False),
        ("Tuple[int, str]", {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}, False),
        ("Tuple[int, ...]", {"type": "array", "items": {"type": "integer"}}, False),
        ("dict", {"type": "object"}, False),
        ("Any", {}, False),
    ],
)
def test_python_types_become_json_schema(text: str, schema: dict[str, Any], is_optional: bool) -> None:
    assert convert_type(text, "") == (schema, is_optional)


@pytest.mark.parametrize("text", ["Callable[[float], float]", "np.ndarray", "int or str", "List[", "int, positive", ""])
def test_a_type_that_json_schema_cannot_say_is_refused(text: str) -> None:
    with pytest.raises(RowError, match="no JSON Schema for the type"):
        convert_type(text, "")
