"""Files of tasks for an agent: the command that runs it, its tasks, and what scores its episodes.

command: "python my_agent.py {question}" # gets OPENAI_BASE_URL and OPENAI_API_KEY; the task as JSON on its input
tasks: tasks.jsonl # an object a line; its texts and numbers may stand in the command
scorer: {command: "python score.py"} # the episode as JSON on its input; its last line is a score from 0 to 1
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fctune.base.errors import DataError
from fctune.config.fields import AT_LEAST_1, Range
from fctune.config.loading import read_dataclass
from fctune.config.parsing import suggest
from fctune.config.server_address import find_address_problem

_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
GIVEN = ("base_url", "model", "task_file", "episode_dir")
"""Names in a command that stand for an episode's own values; all others are fields of the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerConfig:
    """Scorer of episodes: a command or an endpoint, exactly one of the two.

    Attributes:
        command: Gets the episode as JSON on its input; the last line of its output is a score from 0 to 1, or an object
            with ``score``.
        endpoint: URL to which the episode is posted as JSON; it answers with a score, or an object with ``score``.
        timeout_s: Seconds that it may take.
    """

    command: str | None = None
    endpoint: str | None = None
    timeout_s: Annotated[float, Range(gt=0)] = 60.0

    def find_problems(self) -> list[str]:
        """Return what is wrong with it."""
        if (self.command is None) == (self.endpoint is None):
            return ["scorer: expected a command or an endpoint, one of them"]
        if self.command is not None:
            return find_command_problems(self.command, "scorer.command")
        assert self.endpoint is not None
        problem = find_address_problem(self.endpoint, "scorer.endpoint")
        return [] if problem is None else [problem]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFile:
    """A file of tasks for an agent.

    Attributes:
        command: Program and arguments that run one task; no shell reads them. ``{NAME}`` stands for a field of the
            task, or for one of ``GIVEN``.
        tasks: JSON Lines file of the tasks, each an object, with an ``id`` and a ``category`` if it has them.
        scorer: What scores an episode.
        model: Name of the model that the agent asks for.
        time_limit_s: Seconds that an episode may take; then the agent is killed.
        max_answers: Answers of the policy in an episode.
        max_generated: Tokens of all answers of an episode.
        concurrency: Agents that run at a time, in each process of the run.
        host: Address at which agents reach the proxy, which listens on it.
    """

    command: str
    tasks: str
    scorer: ScorerConfig
    model: str = "policy"
    time_limit_s: Annotated[float, Range(gt=0)] = 600.0
    max_answers: Annotated[int, AT_LEAST_1] = 64
    max_generated: Annotated[int, AT_LEAST_1] = 32_768
    concurrency: Annotated[int, AT_LEAST_1] = 8
    host: str = "127.0.0.1"

    def find_problems(self) -> list[str]:
        """Return what is wrong with the values."""
        problems = find_command_problems(self.command, "command") + self.scorer.find_problems()
        return problems if self.model.strip() else [*problems, "model: empty"]


def find_command_problems(command: str, key: str) -> list[str]:
    """Return why a command cannot be run."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        return [f"{key}={command}: {error}"]
    if not words:
        return [f"{key}: empty; write a program and its arguments"]
    if not _FIELD.search(words[0]) and shutil.which(words[0]) is None:
        return [f"{key}: there is no program {words[0]}; name one that is installed, or its path"]
    return []


def fill_command(command: str, values: Mapping[str, Any]) -> list[str]:
    """Return the words of a command with the values of ``{NAME}``; each stays within its word, whatever it holds."""

    def fill(found: re.Match[str]) -> str:
        value = values[found[1]]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return [_FIELD.sub(fill, word) for word in shlex.split(command)]


def read_agent_file(path: str | Path) -> tuple[AgentFile, dict[str, dict[str, Any]]]:
    """Return what a file says, and its tasks by their ids.

    Raises:
        ConfigError: It cannot be read, or values are missing or wrong, all of which are reported.
        DataError: The tasks cannot be read.
    """
    read = read_dataclass(AgentFile, path, AgentFile.find_problems)
    return read, _read_tasks(read)


def _read_tasks(file: AgentFile) -> dict[str, dict[str, Any]]:
    """Return the tasks by their ids, after checking that each has the fields of the command."""
    tasks: dict[str, dict[str, Any]] = {}
    needed = [name for word in shlex.split(file.command) for name in _FIELD.findall(word) if name not in GIVEN]
    try:
        # splitlines would also split at U+2028 in texts
        lines = Path(file.tasks).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{file.tasks}: cannot be read ({reason}). Name a JSON Lines file of tasks.") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{file.tasks}:{number}"
        try:
            task = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON ({error}). Write one object a line.") from None
        if not isinstance(task, dict):
            raise DataError(f"{where}: expected an object, got {type(task).__name__}. Write one object a line.")
        for name in needed:
            if name not in task:
                close = suggest(name, [*task, *GIVEN])
                raise DataError(f"{where}: the command has {{{name}}}, but the task has no such field{close}.")
        if taken := sorted({*GIVEN} & task.keys()):
            raise DataError(f"{where}: {taken[0]} stands for the episode's own value; name the field differently.")
        task_id = str(task.get("id", number))
        if task_id in tasks:
            raise DataError(f"{where}: the id {task_id!r} belongs to an earlier task; ids must be unique.")
        tasks[task_id] = task
    if not tasks:
        raise DataError(f"{file.tasks}: no tasks. Write one object a line.")
    return tasks
