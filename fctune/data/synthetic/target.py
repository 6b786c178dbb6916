"""What a target tool is: its schema, the ways to ask for it, what it says when called.

A phrasing is a sentence with ``{argument}`` places; ``[...]`` around a part makes it optional, and an optional argument
stands in such a part only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fctune.data.conversation import Tool

_JSON_TYPES = {"count": "integer", "whole": "integer", "amount": "number", "degrees": "number", "flag": "boolean"}


@dataclass(frozen=True, slots=True)
class Slot:
    """One argument of a target tool: where its values come from and, for closed sets, how each is said."""

    kind: str
    optional: bool = False
    is_list: bool = False
    choices: tuple[str, ...] = ()
    yes: tuple[str, ...] = ()
    no: tuple[str, ...] = ()

    def schema(self) -> dict[str, Any]:
        """JSON Schema of the argument."""
        if self.choices:
            return {"type": "string", "enum": list(self.choices)}
        one = {"type": _JSON_TYPES.get(self.kind, "string")}
        return {"type": "array", "items": one} if self.is_list else one


@dataclass(frozen=True, slots=True)
class Target:
    """A target tool with the ways to ask for it and what it says when called."""

    name: str
    description: str
    slots: dict[str, Slot]
    train: tuple[str, ...]
    held_out: tuple[str, ...]
    result: dict[str, str] = field(default_factory=dict)
    answer: str = ""

    def tool(self) -> Tool:
        """The tool as a conversation offers it."""
        return Tool(
            {
                "name": self.name,
                "description": self.description,
                "parameters": {
                    "type": "object",
                    "properties": {name: slot.schema() for name, slot in self.slots.items()},
                    "required": [name for name, slot in self.slots.items() if not slot.optional],
                },
            }
        )


def flag(yes: str, no: str, optional: bool = True) -> Slot:
    """A boolean argument; ``|`` parts the ways to say each value."""
    return Slot("flag", optional, yes=tuple(yes.split("|")), no=tuple(no.split("|")))


def enum(choices: str, optional: bool = False) -> Slot:
    """A string argument of a closed set."""
    return Slot("enum", optional, choices=tuple(choices.split()))
