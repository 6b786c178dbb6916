"""Values of arguments, drawn from a tool's schema so that rows cover it: teachers write the same few again and again.

Drawn are enums, booleans, numbers whose bounds the schema or its description gives, dates, times, and codes that the
schema gives an example of, with other digits. What needs words or judgement, such as a name or a quantity without
bounds, is left to the teacher; for drafts, quantities are drawn from those that people would say.
"""

from __future__ import annotations

import datetime
import math
import random
import re
from typing import Any

import jsonschema
from referencing import Registry
from referencing.exceptions import Unresolvable

from fctune.data.augment.spoken import list_properties, list_required, split_words
from fctune.data.conversation import Tool

_NO_DOCUMENTS: Registry[Any] = Registry()  # the default registry would fetch what a $ref names over the network
_OPTIONAL_SHARE = 0.25
_FIRST_DAY = datetime.date(2026, 1, 1)
_NUM_DAYS = 1_000
_SUCH_AS = r"(?i:such as|e\.g\.,?|for example,?|like) ['\"`]?"
_DATE = re.compile(rf"(?i:\bYYYY-MM-DD\b(?![T ]?HH)|\bISO[- ]?8601 date\b)|{_SUCH_AS}\d{{4}}-\d\d-\d\d\b(?![T ]\d)")
_TIME = re.compile(rf"(?i:(?<!DD[T ])\bHH:MM\b(?!:))|{_SUCH_AS}\d{{1,2}}:\d\d\b(?!:)")
_EXAMPLE = re.compile(_SUCH_AS + r"([A-Z]{1,4}[-_/ ]?\d{1,8})\b")
_NUMBER = r"-?\d+(?:\.\d+)?"
_RANGE = re.compile(
    rf"(?<![\w.,:/-])({_NUMBER})\s?(?:%\s?)?(?:to|and|through|-|–|\.\.\.?)\s?({_NUMBER})(?![\w:/-]|[.,]\d)"
)
_PERCENT = re.compile(r"\bper ?cent(?:age)?\b|%", re.IGNORECASE)
# Bounds of numbers that a name alone tells.
_NAMED = {
    "hour": (0, 23), "minute": (0, 59), "minutes": (1, 120), "second": (0, 59), "day": (1, 28), "month": (1, 12),
    "year": (2020, 2030), "latitude": (-60, 70), "longitude": (-180, 180), "lat": (-60, 70), "lon": (-180, 180),
    "hours": (1, 24), "days": (1, 30), "weeks": (1, 12), "months": (1, 24), "age": (1, 99), "rating": (1, 5),
}  # fmt: skip
_SAID = (10, 50, 500)  # people say small numbers more often than large ones
_MAX_SPAN = 10_000  # bounds that are wider are those of a computer's integers, and say nothing
_DIGIT = re.compile(r"\d")


def draw_arguments(tool: Tool, rng: random.Random) -> dict[str, Any]:
    """Return values for the required parameters that have one to draw, and for some of the optional ones."""
    required = list_required(tool)
    drawn: dict[str, Any] = {}
    for name, schema in describe_properties(tool).items():
        is_wanted = name in required or rng.random() < _OPTIONAL_SHARE
        value = draw_value(schema, rng, name)
        if is_wanted and value is not None:
            drawn[name] = value
    return drawn


def describe_properties(tool: Tool) -> dict[str, dict[str, Any]]:
    """Return the schemas of a tool's parameters: without null, and each with what is said of it.

    Servers that are made of Python functions describe parameters in the tool's own description, below "Args:".
    """
    text = str(tool.function.get("description") or "")
    found = {}
    for name, schema in list_properties(tool).items():
        described = str(schema.get("description") or "")
        schema = _without_null(schema)
        if not described:
            line = re.search(
                rf"^[ \t]*(?:[-*] |:param )?[`*]*{re.escape(name)}[`*]*(?: ?\([^)\n]*\))?:[ \t]*(.+)$", text, re.M
            )
            described = line[1] if line is not None else ""
        found[name] = {**schema, "description": described} if described else schema
    return found


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the only other alternative of a schema that allows null; the schema itself if there is none."""
    if isinstance(kinds := schema.get("type"), list):
        others = [kind for kind in kinds if kind != "null"]
        return {**schema, "type": others[0]} if len(others) == 1 else schema
    for key in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(key), list):
            others = [part for part in parts if isinstance(part, dict) and part.get("type") != "null"]
            if len(others) == 1 < len(parts):
                return {**{name: value for name, value in schema.items() if name != key}, **others[0]}
    return schema


def draw_value(schema: dict[str, Any], rng: random.Random, name: str = "", is_free: bool = False) -> Any:
    """Return a valid value of a schema; None if it has none that can be drawn, or this draw is not valid.

    Args:
        schema: Schema of a parameter, with its description.
        rng: Source of the draw.
        name: Name of the parameter.
        is_free: Draw numbers without bounds as well, of a size that people would say.
    """
    value = _draw(schema, rng, name, is_free)
    return value if value is not None and is_valid(value, schema) else None


def _draw(schema: dict[str, Any], rng: random.Random, name: str, is_free: bool) -> Any:
    """Return a value of a schema's kind, valid or not; None if the kind has none to draw."""
    if isinstance(values := schema.get("enum"), list) and values:
        return rng.choice(values)
    kind, text = schema.get("type"), str(schema.get("description", ""))
    if kind == "boolean":
        return rng.random() < 0.5
    if kind in ("integer", "number"):
        bounds = _find_bounds(schema, f"{' '.join(split_words(name))}: {text}")
        if bounds is None:
            return _draw_said(schema, name, rng) if is_free else None
        low, high = bounds
        if kind == "integer":
            return rng.randint(math.ceil(low), math.floor(high)) if math.ceil(low) <= high else None
        return round(rng.uniform(low, high), 1)
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


def _find_bounds(schema: dict[str, Any], described: str) -> tuple[float, float] | None:
    """Return the bounds that a number's schema declares, or within those the ones that its description gives."""
    low, high = schema.get("minimum"), schema.get("maximum")
    low, high = (limit if isinstance(limit, (int, float)) else None for limit in (low, high))
    if low is not None and high is not None and low <= high and high - low <= _MAX_SPAN:
        return low, high
    ranges = [(float(match[1]), float(match[2])) for match in _RANGE.finditer(described)]
    if not ranges and _PERCENT.search(described):
        ranges = [(0.0, 100.0)]
    for least, most in ranges:
        least = least if low is None else max(least, low)
        most = most if high is None else min(most, high)
        if least < most:
            return least, most
    return None


def _draw_said(schema: dict[str, Any], name: str, rng: random.Random) -> float:
    """Return a number of a size that people would say, within what bounds there are."""
    words = split_words(name)
    low, high = next((_NAMED[word] for word in reversed(words) if word in _NAMED), (1, rng.choice(_SAID)))
    least = [schema[key] for key in ("minimum", "exclusiveMinimum") if _is_number(schema.get(key))]
    most = [schema[key] for key in ("maximum", "exclusiveMaximum") if _is_number(schema.get(key))]
    if least and max(least) > low:
        low, high = math.floor(max(least)), max(high, math.floor(max(least)) + high)
    if most and min(most) < high:
        low, high = min(low, math.ceil(min(most)) - high), min(most)
        low = max(low, *least) if least else low
    if schema.get("type") == "integer" or rng.random() < 0.4:
        return rng.randint(math.ceil(low), max(math.ceil(low), math.floor(high)))
    return round(rng.uniform(low, high), rng.choice((1, 2)))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Return True if a value matches a schema, which may itself be invalid: then it does not.

    Nor does a value that leads to a reference, which is to a definition outside this part of the tool's schema.
    """
    try:
        jsonschema.validate(value, schema, registry=_NO_DOCUMENTS)
    except (jsonschema.ValidationError, jsonschema.SchemaError, Unresolvable, RecursionError):
        return False
    return True
