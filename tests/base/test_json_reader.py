"""The JSON reader: equal to the standard library's, apart from what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fctune.base.json_reader import MAX_DEPTH, JsonReader, ParseError, decode_json, is_deeper_than, read_json

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
@given(value=values, indent=st.sampled_from([None, 2]), cut=st.integers(0, 200))
def test_both_readings_of_a_text_agree(value: Any, indent: int | None, cut: int) -> None:
    """The C scanner reads short texts, our own reader what follows 20,000 characters: no difference may show."""
    text = json.dumps(value, indent=indent)
    text = text[:cut] + text[cut + 1 :]
    padding = " " * 20_000
    try:
        quick: Any = read_json(text, 0)
    except ParseError as error:
        quick = error.reason
    try:
        value, end = read_json(padding + text, len(padding))
        slow: Any = (value, end - len(padding))
    except ParseError as error:
        slow = error.reason
    assert quick == slow


REFUSED = [
    ("", "unexpected end"),
    ('{"a": 1', "expected ',' or '}'"),
    ('{"a": 1, "a": 2}', "duplicate key 'a'"),
    ("{'a': 1}", "double quotes"),
    ("[1,]", "expected a JSON value"),
    ("NaN", "NaN is not JSON"),
    ("-Infinity", "-Infinity is not JSON"),
    ("1e999", "too large for a float"),
    ("9" * 5000, "more than 4300 digits"),
    ('"a\nb"', "control character"),
    ('"\\x"', "escape"),
    ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "deeper than 128 levels"),
    ("[" * 100_000, "deeper than 128 levels"),
]


@pytest.mark.parametrize(("text", "reason"), [*REFUSED, ("01", "extra text"), ('{"a": 1} x', "extra text")])
def test_what_is_not_json_is_refused_with_reason_and_position(text: str, reason: str) -> None:
    with pytest.raises(ParseError, match=reason) as error:
        decode_json(text)
    assert 0 <= error.value.position <= len(text)


@pytest.mark.parametrize(("text", "reason"), [case for case in REFUSED if "[[" not in case[0] or "]" not in case[0]])
def test_rows_are_read_as_strictly_as_calls(text: str, reason: str) -> None:
    with pytest.raises(ParseError, match=reason):
        JsonReader().read(text, 0)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("{", "syntax"), ('{"a": 1, "a": 1}', "duplicate_key"), ("[NaN]", "not_finite"), ("[1e999]", "not_finite")],
)
def test_errors_are_told_apart_by_their_kind(text: str, kind: str) -> None:
    with pytest.raises(ParseError) as error:
        decode_json(text)
    assert error.value.kind == kind


def test_the_lenient_reading_keeps_the_last_of_equal_keys() -> None:
    assert decode_json('{"a": 1, "a": 2}', lenient=True) == {"a": 2}
    assert read_json("\n" * 20_001 + '{"a": 1, "a": 2}', 20_001, lenient=True)[0] == {"a": 2}


def test_numbers_spelled_in_another_way_are_counted() -> None:
    reader = JsonReader()
    assert reader.read("[1e5, 1.50, 2.5, 100, -0.0]", 0)[0] == [1e5, 1.5, 2.5, 100, 0.0]
    assert reader.num_respelled == 2


@pytest.mark.parametrize("inside", ["", "1"])
def test_json_of_the_greatest_depth_is_read(inside: str) -> None:
    text = "[" * MAX_DEPTH + inside + "]" * MAX_DEPTH
    assert decode_json(text) == json.loads(text)
    padding = " " * 20_001
    assert read_json(padding + text, len(padding))[0] == json.loads(text)
    assert not is_deeper_than(json.loads(text), MAX_DEPTH)
    assert is_deeper_than([json.loads(text)], MAX_DEPTH)
    assert is_deeper_than({"a": json.loads(text)}, MAX_DEPTH)
