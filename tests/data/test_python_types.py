"""Python's type names as JSON Schema."""

from __future__ import annotations

from typing import Any

import pytest

from fctune.data.sources.defects import RowError
from fctune.data.sources.python_types import convert_type


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
def test_python_types_are_converted_to_json_schema(text: str, schema: dict[str, Any], is_optional: bool) -> None:
    assert convert_type(text, "") == (schema, is_optional)


@pytest.mark.parametrize("text", ["Callable[[float], float]", "np.ndarray", "int or str", "List[", "int, positive", ""])
def test_a_type_that_json_schema_cannot_express_is_rejected(text: str) -> None:
    with pytest.raises(RowError, match="no JSON Schema for the type"):
        convert_type(text, "")
