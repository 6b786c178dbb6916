"""Values of arguments, drawn from a tool's schema so that rows cover it: teachers write the same few again and again.

Drawn are enums, booleans, bounded numbers, dates, times, and codes that the schema gives an example of, with other
digits. What needs words or judgement, such as a name or a quantity without bounds, is left to the teacher.
"""

from __future__ import annotations

import datetime
import random
import re
from typing import Any

import jsonschema
from referencing import Registry
from referencing.exceptions import Unresolvable

from fctune.data.conversation import Tool

_NO_DOCUMENTS: Registry[Any] = Registry()  # the default registry would fetch what a $ref names over the network
_OPTIONAL_SHARE = 0.25
_FIRST_DAY = datetime.date(2026, 1, 1)
_NUM_DAYS = 1_000
_DATE = re.compile(r"\bYYYY-MM-DD\b|\bISO[- ]?8601 date\b", re.IGNORECASE)
_TIME = re.compile(r"\bHH:MM\b(?!:)", re.IGNORECASE)
_EXAMPLE = re.compile(r"(?i:such as|e\.g\.,?|for example,?|like) ['\"`]?([A-Z]{1,4}[-_/ ]?\d{1,8})\b")
_DIGIT = re.compile(r"\d")


def draw_arguments(tool: Tool, rng: random.Random) -> dict[str, Any]:
    """Return values for the required parameters that have one to draw, and for some of the optional ones."""
    properties, required = tool.parameters.get("properties"), tool.parameters.get("required")
    required = required if isinstance(required, list) else []
    drawn: dict[str, Any] = {}
    for name, schema in (properties if isinstance(properties, dict) else {}).items():
        is_wanted = name in required or rng.random() < _OPTIONAL_SHARE
        value = draw_value(schema, rng) if isinstance(schema, dict) else None
        if is_wanted and value is not None:
            drawn[name] = value
    return drawn


def draw_value(schema: dict[str, Any], rng: random.Random) -> Any:
    """Return a valid value of a schema; None if it has none that can be drawn, or this draw is not valid."""
    value = _draw(schema, rng)
    return value if value is not None and is_valid(value, schema) else None


def _draw(schema: dict[str, Any], rng: random.Random) -> Any:
    """Return a value of a schema's kind, valid or not; None if the kind has none to draw."""
    if isinstance(values := schema.get("enum"), list) and values:
        return rng.choice(values)
    kind, text = schema.get("type"), str(schema.get("description", ""))
    if kind == "boolean":
        return rng.random() < 0.5
    if kind in ("integer", "number"):
        low, high = schema.get("minimum"), schema.get("maximum")
        if not (isinstance(low, (int, float)) and isinstance(high, (int, float)) and low <= high):
            return None
        return rng.randint(int(low), int(high)) if kind == "integer" else round(rng.uniform(low, high), 1)
    if kind != "string":
        return None
    if schema.get("format") == "date" or _DATE.search(text):
        return str(_FIRST_DAY + datetime.timedelta(rng.randrange(_NUM_DAYS)))
    if _TIME.search(text):
        return f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
    examples = [one for one in schema.get("examples") or () if isinstance(one, str)]
    if (match := _EXAMPLE.search(text)) is not None:
        examples.append(match[1])
    code = next((one for one in examples if _DIGIT.search(one) and len(one) < 16), None)
    # The first digit of a number stays away from 0.
    return _DIGIT.sub(lambda match: str(rng.randrange(1, 10)), code) if code is not None else None


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Return True if a value matches a schema, which may itself be invalid: then it does not.

    Nor does a value that leads to a reference, which is to a definition outside this part of the tool's schema.
    """
    try:
        jsonschema.validate(value, schema, registry=_NO_DOCUMENTS)
    except (jsonschema.ValidationError, jsonschema.SchemaError, Unresolvable, RecursionError):
        return False
    return True
