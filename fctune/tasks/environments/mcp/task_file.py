"""Files of tasks for an MCP server: the server, how it is reset, and questions with what solves them.

server: "stdio: python rooms.py" # or a URL, with its token in FCTUNE_MCP_TOKEN
tools: [list_rooms, book, list_bookings] # default: all
tasks:
- question: Book the cheapest room for Friday.
calls: [{tool: book, arguments: {room: blue, day: friday}}]
facts: [blue, 30]
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fctune.config.fields import AT_LEAST_1, SHARE
from fctune.config.intervals import is_in_share
from fctune.config.loading import read_dataclass
from fctune.data.conversation import Call
from fctune.engines.mcp_client import STDIO
from fctune.tasks.environments.base import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a server's tool."""

    tool: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def to_call(self) -> Call:
        """Return it as a call without an id."""
        return Call(self.tool, self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalCheck(ToolCall):
    """A call that changes nothing, and its result if the task is solved: text, or JSON values."""

    result: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class McpTaskSpec:
    """A question, and what solves it.

    Attributes:
        question: What the user asks.
        id: Name of the task; None: its number in the file, from 1.
        system: System message; None: there is none.
        category: Kind of the task, for reports.
        split: Side of the task; None: by its question, see ``TaskFile.test_share``.
        calls: Calls that solve the task, in any order. They are required, unless there is a check.
        facts: Texts and numbers that the final answer must contain.
        check: Decides at the end, in place of the calls, if the server's state is the goal.
    """

    question: str
    id: str | None = None
    system: str | None = None
    category: str = "all"
    split: Split | None = None
    calls: list[ToolCall] = field(default_factory=list)
    facts: list[Any] = field(default_factory=list)
    check: FinalCheck | None = None

    def find_problems(self, where: str) -> list[str]:
        """Return what is wrong with the task."""
        problems = [] if self.question.strip() else [f"{where}.question: empty"]
        if not (self.calls or self.facts or self.check):
            problems.append(f"{where}: asks for nothing; give calls, facts or a check")
        wrong = [one for one in self.facts if isinstance(one, bool) or not isinstance(one, str | int | float)]
        return problems + [f"{where}.facts: expected texts and numbers, got {one!r}" for one in wrong]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFile:
    """A file of tasks.

    Attributes:
        server: URL of an MCP server, or ``stdio: COMMAND``, which starts one.
        tasks: The tasks.
        tools: Tools that are offered; None: all but that of ``reset``.
        read_only: Tools that change nothing, besides those that the server declares so.
        reset: Call that restores the initial state before each episode; None: each has a server process of its own, or
            at a URL a session.
        concurrency: Episodes at a time; None: 32, or 1 at a URL with ``reset``, whose sessions may share one state.
        test_share: Share of the tasks that is held out, of those without a split. The question alone decides.
    """

    server: str
    tasks: list[McpTaskSpec]
    tools: list[str] | None = None
    read_only: list[str] = field(default_factory=list)
    reset: ToolCall | None = None
    concurrency: Annotated[int | None, AT_LEAST_1] = None
    test_share: Annotated[float, SHARE] = 0.2

    @property
    def is_process(self) -> bool:
        """True if a command starts the server."""
        return self.server.startswith(STDIO)

    @property
    def is_exclusive(self) -> bool:
        """True if episodes must not overlap."""
        return self.reset is not None and not self.is_process and self.concurrency in (None, 1)

    @property
    def num_at_once(self) -> int:
        """Number of episodes that run at a time."""
        return self.concurrency or (1 if self.is_exclusive else 32)

    def select(self, split: Split) -> dict[str, McpTaskSpec]:
        """Return the tasks of a side by their ids."""
        return {
            task.id or str(number): task
            for number, task in enumerate(self.tasks, start=1)
            if self._find_split(task) == split
        }

    def _find_split(self, task: McpTaskSpec) -> Split:
        return task.split or ("test" if is_in_share(task.question, self.test_share) else "train")

    def find_problems(self) -> list[str]:
        """Return what is wrong with the tasks."""
        problems = [line for number, task in enumerate(self.tasks) for line in task.find_problems(f"tasks.{number}")]
        ids = Counter(task.id or str(number) for number, task in enumerate(self.tasks, start=1))
        problems += [
            f"tasks: {count} have the id {one!r}; ids must be unique" for one, count in ids.items() if count > 1
        ]
        sides: dict[str, set[Split]] = {}
        for task in self.tasks:
            sides.setdefault(task.question, set()).add(self._find_split(task))
        both = [question for question, found in sides.items() if len(found) > 1]
        problems += [f"tasks: train and test both ask {question!r}" for question in both]
        if not self.server.startswith((STDIO, "http://", "https://")):
            problems.append(f"server={self.server}: expected a URL, or '{STDIO} COMMAND', which starts a server")
        if self.reset is not None and self.reset.tool in (self.tools or ()):
            problems.append(f"tools: {self.reset.tool} resets the server, so the model must not have it")
        return problems if self.tasks else ["tasks: empty"]


def read_task_file(path: str | Path) -> TaskFile:
    """Read a file of tasks.

    Raises:
        ConfigError: It cannot be read, or values are missing or wrong, all of which are reported.
    """
    return read_dataclass(TaskFile, path, TaskFile.find_problems)
