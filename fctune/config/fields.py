"""Constraints and documentation of config fields, declared in the dataclass that holds them.

A constraint annotates the field's type (``rank: Annotated[int, Range(ge=1)] = 64``); the checks, the reference page and
the JSON Schema read it there. A field's documentation is the string literal below it.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Range:
    """Interval of a finite number: ``ge <= x``, ``gt < x``, ``x <= le``, ``x < lt``."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def contains(self, value: float) -> bool:
        """Return True for a finite number within the bounds; NaN is in no interval."""
        return (
            math.isfinite(value)
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def find_problems(self, key: str, value: float | list[float], null: str) -> list[str]:
        """Check a number, or each number of a list."""
        if isinstance(value, list):
            return [p for i, item in enumerate(value) for p in self.find_problems(f"{key}.{i}", item, null)]
        return [] if self.contains(value) else [f"{key}={value}: expected {self.describe()}{null}"]

    def describe(self) -> str:
        """Describe the interval for a sentence that starts with "expected"."""
        bounds = (
            (self.ge, "{:g} or more"),
            (self.gt, "more than {:g}"),
            (self.le, "at most {:g}"),
            (self.lt, "less than {:g}"),
        )
        return " and ".join(words.format(bound) for bound, words in bounds if bound is not None)

    def to_json_schema(self) -> dict[str, float]:
        """Return the bounds as JSON Schema keywords."""
        names = {"minimum": self.ge, "exclusiveMinimum": self.gt, "maximum": self.le, "exclusiveMaximum": self.lt}
        return {name: bound for name, bound in names.items() if bound is not None}


AT_LEAST_0 = Range(ge=0)
AT_LEAST_1 = Range(ge=1)
SHARE = Range(ge=0, le=1)


@dataclass(frozen=True, slots=True)
class Null:
    """Meaning of null in an optional field, such as "no limit"."""

    meaning: str


@dataclass(frozen=True, slots=True)
class NotEmpty:
    """Constraint of a list that needs at least one item; ``example`` is what to write."""

    example: str

    def find_problems(self, key: str, value: list[Any], null: str) -> list[str]:
        """Check that the list holds an item."""
        return [] if value else [f"{key}={value}: empty; write e.g. {self.example}{null}"]


def join_key(where: str, name: str) -> str:
    """Return the full key of a field in the section ``where``, which is empty at the top level."""
    return f"{where}.{name}" if where else name


def find_value_problems(key: str, value: Any, constraints: tuple[Any, ...]) -> list[str]:
    """Check one value of the right type against its field's constraints; one line per problem."""
    null = next((f", or null ({c.meaning})" for c in constraints if isinstance(c, Null)), "")
    return [p for c in constraints if not isinstance(c, Null) for p in c.find_problems(key, value, null)]


def read_field_docs(cls: type[Any]) -> dict[str, str]:
    """Return the documentation of each field of a dataclass, on one line each.

    Raises:
        LookupError: A field has no string literal below it.
    """
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    names = [n.target.id for n in definition.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    for node, following in zip(definition.body, definition.body[1:], strict=False):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[node.target.id] = " ".join(str(following.value.value).split())
    if missing := [name for name in names if name not in docs]:
        raise LookupError(f"{cls.__name__}: no documentation below {', '.join(missing)}")
    return docs
