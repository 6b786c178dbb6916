"""Conditions on rows, such as ``score >= 0.8 and tool == search``, as a config and the command line give them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COUNTS = ("messages", "calls", "characters")
"""Names that are counted in the conversation; ``tool`` is the name of any tool that it calls, others are in the row."""

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    "!=": lambda a, b: a != b,
    "==": lambda a, b: a == b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
}
_CONDITION = re.compile(r"""\s*([\w.:/-]+)\s*(>=|<=|!=|==|>|<)\s*("[^"]*"|'[^']*'|[^\s"'=<>!]+)\s*""")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
_AND = re.compile(r"and\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of a named value with a number, a boolean or a text."""

    name: str
    operator: str
    value: bool | int | float | str

    def __str__(self) -> str:
        value = json.dumps(self.value)
        if isinstance(self.value, str):  # as it can be read again
            quote = "'" if '"' in self.value else '"'
            is_plain = re.fullmatch(r"[\w.-]+", self.value) and _read_value(self.value) == self.value
            value = self.value if is_plain else f"{quote}{self.value}{quote}"
        return f"{self.name} {self.operator} {value}"

    @property
    def is_number(self) -> bool:
        """True if values are compared with a number."""
        return isinstance(self.value, int | float) and not isinstance(self.value, bool)

    def holds(self, found: Any) -> bool:
        """Return True if the comparison holds for a value, or for any value of a list (``!=``: for all of them).

        Texts that spell a number are compared as numbers; values of another type than the condition's are unequal.
        """
        if isinstance(found, list):
            return (all if self.operator == "!=" else any)(map(self.holds, found))
        if isinstance(found, str) and not isinstance(self.value, str):
            found = _read_value(found)
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        is_comparable = is_number if self.is_number else isinstance(found, type(self.value))
        return _OPERATORS[self.operator](found, self.value) if is_comparable else self.operator == "!="


def parse_conditions(text: str) -> tuple[Condition, ...]:
    """Return the conditions of a text, which are joined by ``and``.

    Raises:
        ValueError: It is not of this form, in a sentence.
    """
    conditions: list[Condition] = []
    at = 0
    while at < len(text.rstrip()):
        if conditions:
            joined = _AND.match(text, at)
            if joined is None:
                raise ValueError(f"expected 'and' before {text[at:].strip()!r}")
            at = joined.end()
        found = _CONDITION.match(text, at)
        if found is None:
            raise ValueError(
                f"expected NAME OPERATOR VALUE, such as score >= 0.8, with one of {', '.join(_OPERATORS)}; got "
                f"{text[at:].strip()!r}"
            )
        name, operator, value = found.groups()
        condition = Condition(name, operator, _read_value(value))
        if operator not in ("==", "!=") and not condition.is_number:
            raise ValueError(f"{found.group().strip()}: {operator} needs a number")
        if name in COUNTS and not condition.is_number:
            raise ValueError(f"{found.group().strip()}: {name} is a number")
        conditions.append(condition)
        at = found.end()
    return tuple(conditions)


def _read_value(text: str) -> bool | int | float | str:
    if text[:1] in ("'", '"'):
        return text[1:-1]
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _NUMBER.fullmatch(text) is None:
        return text
    return int(text) if text.lstrip("+-").isdecimal() else float(text)
