"""Environments of a user: a counter that works, and what can be wrong with one."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from fctune.tasks.environments.base import Environment, Split, TaskSpec, ToolError

_STEP = {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]}


class Counter(Environment):
    """Counts to a number; ``fault`` is what a call with 13 does."""

    def __init__(self) -> None:
        self._value = 0

    def list_tools(self) -> list[dict[str, Any]]:
        return [{"name": "add", "description": "Add to the counter", "parameters": _STEP}]

    def make_task(self, seed: int, split: Split) -> TaskSpec:
        return TaskSpec(f"Count to {seed + 1}.", {"value": 0}, (("add", {"by": seed + 1}),))

    def reset(self, state: dict[str, Any]) -> None:
        self._value = state["value"]

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        if arguments["by"] == 13:
            return self.fault()
        if arguments["by"] < 0:
            raise ToolError("only upwards")
        self._value += arguments["by"]
        return {"value": self._value}

    def state(self) -> dict[str, Any]:
        return {"value": self._value}

    def fault(self) -> Any:
        return {}


class Raises(Counter):
    def fault(self) -> Any:
        raise KeyError("no such shelf")


class Hangs(Counter):
    def fault(self) -> Any:
        time.sleep(3600)


class Exits(Counter):
    def fault(self) -> Any:
        os._exit(7)


class SysExits(Counter):
    def fault(self) -> Any:
        sys.exit(3)


class ReturnsSet(Counter):
    def fault(self) -> Any:
        return {1, 2}


class ReturnsNan(Counter):
    def fault(self) -> Any:
        return float("nan")


class Floods(Counter):
    def fault(self) -> Any:
        return "x" * 10_000_000


class Eats(Counter):
    def fault(self) -> Any:
        return len(bytearray(8 * 1024**3))


class Writes(Counter):
    """Writes to the file descriptors that others use for their protocols; only stdout is caught."""

    def fault(self) -> Any:
        print("hello")
        os.write(1, b"\xff" * 100)
        return "printed"


class Crashes(Counter):
    def fault(self) -> Any:
        import ctypes

        return ctypes.string_at(0)


class Drifts(Counter):
    """Not deterministic: a result depends on the process."""

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        if arguments["by"] == 13:
            os._exit(7)
        return {"pid": os.getpid()}


class NoTools(Counter):
    def list_tools(self) -> Any:
        return "add"


class BadSchema(Counter):
    def list_tools(self) -> list[dict[str, Any]]:
        return [{"name": "add", "parameters": {"type": "object", "properties": {"by": {"minimum": "low"}}}}]


class Unsolvable(Counter):
    def make_task(self, seed: int, split: Split) -> TaskSpec:
        return TaskSpec("Count down.", {"value": 0}, (("add", {"by": -1}),))


class Pointless(Counter):
    def make_task(self, seed: int, split: Split) -> TaskSpec:
        return TaskSpec("Do nothing.", {"value": 0}, (("add", {"by": 0}),))


class NoTask(Counter):
    def make_task(self, seed: int, split: Split) -> Any:
        return "a task"


class NotAnEnvironment:
    """Lacks all methods."""
