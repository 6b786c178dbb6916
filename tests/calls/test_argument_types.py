"""The JSON types that an argument's schema allows."""

from __future__ import annotations

from typing import Any

import pytest

from fctune.calls.argument_types import argument_types


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": "dict"}, {"object"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"type": "string", "default": None}, {"string", "null"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"type": "string", "default": "null"}, {"string"}),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, {"integer", "string"}),
        ({"enum": ["a", 1]}, {"string", "integer"}),
        ({"const": "a"}, {"string"}),
    ],
)
def test_argument_types_follow_the_schema(schema: dict[str, Any], types: set[str]) -> None:
    assert argument_types(schema) == types


def test_an_unknown_type_allows_all_types() -> None:
    assert len(argument_types({"type": "geometry"})) == 7
    assert len(argument_types({})) == len(argument_types(None)) == 7
