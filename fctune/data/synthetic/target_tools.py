"""Tools that the synthetic rows call, read from ``target_tools.yaml``: schemas, phrasings and answers."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import yaml

from fctune.data.conversation import Tool

_JSON_TYPES = {"count": "integer", "whole": "integer", "amount": "number", "degrees": "number", "flag": "boolean"}


@dataclass(frozen=True, slots=True)
class Slot:
    """One argument of a target tool.

    ``kind`` names the values it takes (a key of ``values.TARGET_VALUES``, or flag, or enum); a flag has phrasings of
    both values instead, an enum its ``choices``.
    """

    kind: str = "enum"
    optional: bool = False
    is_list: bool = False
    choices: tuple[str, ...] = ()
    if_true: tuple[str, ...] = ()
    if_false: tuple[str, ...] = ()

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the argument."""
        if self.choices:
            return {"type": "string", "enum": list(self.choices)}
        one = {"type": _JSON_TYPES.get(self.kind, "string")}
        return {"type": "array", "items": one} if self.is_list else one


@dataclass(frozen=True, slots=True)
class TargetTool:
    """A tool with phrasings that ask for it, the kinds of its result's values and the answer to a result."""

    name: str
    description: str
    slots: dict[str, Slot]
    train: tuple[str, ...]
    held_out: tuple[str, ...]
    result: dict[str, str] = field(default_factory=dict)
    answer: str = ""
    is_called: bool = False

    def tool(self) -> Tool:
        """Return the tool as conversations declare it."""
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


@dataclass(frozen=True, slots=True)
class TargetTools:
    """All target tools in the order of the file, and what the base's curriculum must not contain."""

    all: tuple[TargetTool, ...]
    called: tuple[TargetTool, ...]
    names: frozenset[str]
    properties: frozenset[str]
    property_sets: frozenset[frozenset[str]]

    def find_called(self, name: str) -> TargetTool:
        """Return the tool of this name that rows call."""
        return next(tool for tool in self.called if tool.name == name)


@functools.cache
def load_target_tools() -> TargetTools:
    """Read the target tools once per process."""
    text = files(__package__).joinpath("target_tools.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    tools = tuple(_make_tool(name, **entry) for name, entry in yaml.load(text, loader).items())
    return TargetTools(
        tools,
        tuple(tool for tool in tools if tool.is_called),
        frozenset(tool.name for tool in tools),
        frozenset(name for tool in tools for name in tool.slots),
        frozenset(frozenset(tool.slots) for tool in tools),
    )


def _make_tool(
    name: str, arguments: dict[str, dict[str, Any]], train: list[str], held_out: list[str], **more: Any
) -> TargetTool:
    slots: dict[str, Slot] = {}
    for argument, entry in arguments.items():
        slot: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
        slots[argument] = Slot(**slot)
    return TargetTool(name, slots=slots, train=tuple(train), held_out=tuple(held_out), **more)
