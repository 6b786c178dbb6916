"""The interface of environments: tools with a state, and tasks whose solution changes or reads it.

An environment is a class whose constructor takes no arguments. Built-in ones are written like a user's own, and run in
the same way: in a separate process, with limits (``fctune.tasks.environments.host``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Split = Literal["train", "test"]


class ToolError(Exception):
    """A call that the environment refuses; its text is the result that the model sees."""


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A question, the state in which the user asks it, and calls that solve it.

    Attributes:
        question: What the user asks.
        state: The initial state, as JSON values.
        calls: Name and arguments of calls that solve the task, in order. The state after them is the goal.
        facts: Texts that the final answer must contain, such as a price that had to be looked up.
        category: Kind of the task, for reports.
        system: System message; None: there is none.
    """

    question: str
    state: dict[str, Any]
    calls: tuple[tuple[str, dict[str, Any]], ...]
    facts: tuple[str, ...] = ()
    category: str = "all"
    system: str | None = None


class Environment(ABC):
    """Tools with a state. Everything is deterministic: the same task and calls give the same results and state."""

    @abstractmethod
    def list_tools(self) -> list[dict[str, Any]]:
        """Return the tools in OpenAI's function format: ``name``, ``description``, ``parameters`` (JSON Schema)."""

    @abstractmethod
    def make_task(self, seed: int, split: Split) -> TaskSpec:
        """Return the task of a seed; tasks of ``test`` are never among those of ``train``."""

    @abstractmethod
    def reset(self, state: dict[str, Any]) -> None:
        """Set the state; must not modify the given object."""

    @abstractmethod
    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Make a call whose arguments match its tool's schema; returns the result as JSON values.

        Raises:
            ToolError: The call makes no sense in this state, which is left unchanged.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state as JSON values; equal states are equally good."""


@dataclass(frozen=True, slots=True)
class ToolMethod:
    """A tool of a ``ToolEnvironment``: its definition in OpenAI's format, and the method that runs it."""

    function: dict[str, Any]
    run: Callable[..., Any]


class ToolEnvironment(Environment):
    """An environment whose tools are methods with keyword arguments, registered with ``add_tool``."""

    def __init__(self) -> None:
        self._tools: dict[str, ToolMethod] = {}

    def add_tool(
        self, run: Callable[..., Any], description: str, /, *optional: str, **parameters: str | dict[str, Any]
    ) -> None:
        """Register a method as a tool under its own name.

        Args:
            run: The method; returns the result, or raises ``ToolError``.
            description: What the tool does.
            optional: Names of optional parameters.
            parameters: Description of each parameter, which is a string, or its JSON Schema.
        """
        properties = {
            name: {"type": "string", "description": given} if isinstance(given, str) else given
            for name, given in parameters.items()
        }
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        schema["required"] = [name for name in properties if name not in optional]
        name = run.__name__
        self._tools[name] = ToolMethod({"name": name, "description": description, "parameters": schema}, run)

    def list_tools(self) -> list[dict[str, Any]]:
        """Return the definitions of all methods registered with ``add_tool``."""
        return [tool.function for tool in self._tools.values()]

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Run the method registered under a name, and return its result."""
        if name not in self._tools:
            raise ToolError(f"no such tool: {name}")
        return self._tools[name].run(**arguments)


@dataclass(frozen=True, slots=True)
class CheckedTask:
    """A task whose own calls have been checked to solve it.

    Attributes:
        id: ``ENVIRONMENT/SPLIT/SEED``.
        spec: Question, initial state and calls that solve it.
        start: The state before any call, as the environment reports it.
        goal: The state after the calls that solve it.
    """

    id: str
    spec: TaskSpec
    start: dict[str, Any] = field(default_factory=dict)
    goal: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> str:
        """Return the text that digests of tasks contain; it stays, since checkpoints hold such digests."""
        return f"Task(id={self.id!r}, spec={self.spec!r}, start={self.start!r}, goal={self.goal!r})"
