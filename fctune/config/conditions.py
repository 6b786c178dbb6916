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
_AND = re.compile(r"and\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of a named value with a number, a boolean or a text."""

    name: str
    operator: str
    value: bool | float | str

    def __str__(self) -> str:
        is_plain = not isinstance(self.value, str) or re.fullmatch(r"[\w.-]+", self.value)
        value = self.value if isinstance(self.value, str) and is_plain else json.dumps(self.value)
        return f"{self.name} {self.operator} {value}"

    def holds(self, found: Any) -> bool:
        """Return True if the comparison holds for a value, or for any value of a list (``!=``: for all of them).

        Texts that spell a number are compared as numbers; values of another type than the condition's are unequal.
        """
        if isinstance(found, list):
            return (all if self.operator == "!=" else any)(map(self.holds, found))
        if isinstance(found, str) and isinstance(self.value, bool | float):
            try:
                found = json.loads(found.lower())
            except ValueError:
                return self.operator == "!="
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        is_comparable = is_number if isinstance(self.value, float) else isinstance(found, type(self.value))
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
        if operator not in ("==", "!=") and not isinstance(condition.value, float):
            raise ValueError(f"{found.group().strip()}: {operator} needs a number")
        if name in COUNTS and not isinstance(condition.value, float):
            raise ValueError(f"{found.group().strip()}: {name} is a number")
        conditions.append(condition)
        at = found.end()
    return tuple(conditions)


def _read_value(text: str) -> bool | float | str:
    if text[0] in "\"'":
        return text[1:-1]
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return float(text)
    except ValueError:
        return text
