"""Tasks with an MCP server: questions, the server's tools, and a reward for calls, facts and the final state."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from fctune.base.errors import ConfigError
from fctune.calls.matching import call_key, is_equal
from fctune.config.parsing import suggest
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.tool_schema import ToolSet
from fctune.engines.mcp_client import McpResult
from fctune.tasks.environments.base import Split
from fctune.tasks.environments.mcp.recording import EpisodeKey, RecordedEpisode, RecordingWriter
from fctune.tasks.environments.mcp.server import ReplayedRun, ReplayedServer, ServerRun, ToolServer
from fctune.tasks.environments.mcp.task_file import FinalCheck, McpTaskSpec, TaskFile
from fctune.tasks.environments.tasks import ENVIRONMENT_PARTS, has_fact
from fctune.tasks.episode import Episode
from fctune.tasks.rollouts import Request, RolloutSettings, TaskSet
from fctune.tasks.task import DialogueState, Step, Task, TaskError, TaskState, to_results


class McpTasks(TaskSet):
    """The tasks of a file on one side, with a live or a replayed server.

    Args:
        name: Name of the tasks, which their ids start with.
        file: The tasks.
        server: The server; it is closed with the tasks.
        split: Side of the tasks; those of ``test`` are never trained on.
        settings: How they are asked and rewarded.
        record: File to which episodes are appended; None: they are not recorded.

    Raises:
        ConfigError: A part of the reward does not exist, the file has no such tasks, or a tool that it names does not
            exist or has an unusable schema.
    """

    parts = ENVIRONMENT_PARTS
    default_weights: ClassVar[Mapping[str, float]] = {"solved": 0.8, "economy": 0.2}

    def __init__(
        self,
        name: str,
        file: TaskFile,
        server: ToolServer | ReplayedServer,
        split: Split,
        settings: RolloutSettings,
        record: Path | None = None,
    ):
        super().__init__(settings)
        self._file, self._server, self._name = file, server, name
        self._specs = {f"{name}/{split}/{task_id}": task for task_id, task in file.select(split).items()}
        if not self._specs:
            raise ConfigError(f"{name}: no task is in {split}. Give some split: {split}, or change test_share.")
        self.read_only = server.read_only | frozenset(file.read_only)
        self.tools = self._choose_tools()
        self.tool_set = ToolSet(self.tools)
        for tool in self.tools:
            if (problem := self.tool_set.find_schema_problem(tool.name)) is not None:
                raise ConfigError(f"{name}: {problem}. Leave it out by listing the others in tools.")
        self._checked: dict[str, str | None] = {}  # what is wrong with each task
        self._checking: dict[str, threading.Lock] = {}  # of each task, whose samples begin on several threads
        self._writer = None if record is None else RecordingWriter(record, server.tools, server.read_only)
        self.num_at_once, self.is_exclusive = file.num_at_once, file.is_exclusive and isinstance(server, ToolServer)

    @property
    def ids(self) -> Sequence[str]:
        """Ids of the tasks."""
        return list(self._specs)

    def digest(self) -> str:
        """Return a hex digest of the settings, the tools and the tasks."""
        tasks = [[task_id, repr(spec)] for task_id, spec in self._specs.items()]
        described = [self._limits.describe(), dict(sorted(self._weights.items())), sorted(self.read_only)]
        text = json.dumps([described, [tool.to_json() for tool in self.tools], tasks])
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def open(self, task_id: str) -> Task:
        """Return the task of an id."""
        return McpTask(self, self._specs[task_id], EpisodeKey(task_id, 0, None))

    def begin(self, request: Request) -> Episode:
        """Return the episode of a request, before its first answer."""
        key = EpisodeKey(request.case_id, request.sample, request.seed)
        return Episode(McpTask(self, self._specs[request.case_id], key), request.sample, request.seed)

    def score(self, episode: Episode) -> Mapping[str, float]:
        """Make the task's check, and return the parts of the reward."""
        assert isinstance(episode.state, _McpState)
        return episode.state.score(episode.final_text)

    def check(self) -> None:
        """Check that the calls of the first task solve it."""
        try:
            self.check_solution(next(iter(self._specs)))
        except TaskError as error:
            raise ConfigError(f"{error}.") from None

    def has_failed(self) -> bool:
        """Return True if 20 episodes in a row failed, of three tasks or of all: they share the server."""
        assert self.max_failing is not None
        return self._failing.total() >= self.max_failing and len(self._failing) >= min(3, len(self.ids))

    def start(self, key: EpisodeKey) -> ServerRun | ReplayedRun:
        """Begin an episode with the server."""
        return self._server.begin(key)

    def record(self, episode: RecordedEpisode) -> None:
        """Append an episode to the recording."""
        if self._writer is not None:
            self._writer.write(episode)

    def check_solution(self, task_id: str) -> None:
        """Check once that a task's own calls solve it, where the server is reset for each episode.

        Raises:
            TaskError: They do not, or the server failed.
        """
        server, file = self._server, self._file
        if not isinstance(server, ToolServer) or not (file.is_process or file.reset is not None):
            return
        with self._checking.setdefault(task_id, threading.Lock()):
            if task_id not in self._checked:
                self._checked[task_id] = self._find_defect(server, task_id)
        if (defect := self._checked[task_id]) is not None:
            raise TaskError(f"task {task_id}: {defect}")

    def close(self) -> None:
        """End the server's sessions and processes."""
        self._server.close()

    def _find_defect(self, server: ToolServer, task_id: str) -> str | None:
        spec = self._specs[task_id]
        calls, check = [call.to_call() for call in spec.calls], spec.check
        for call in calls:
            if problems := self.tool_set.find_errors(call):
                return f"calls has one that does not match its tool: {problems[0]}"
        if not calls and check is None:
            return None
        run = server.begin(EpisodeKey(task_id, 0, None))
        try:
            if check is not None and not spec.facts and is_met(check, run.check(check.to_call())):
                return "its check is met before any call, so that doing nothing solves it"
            for call in calls:
                result = run.call(call)
                if result is not None and result.is_error:
                    return f"its own call of {call.name} is refused: {result.text[:200]}"
            if check is not None and calls and not is_met(check, result := run.check(check.to_call())):
                got = "" if result is None else result.text[:200]
                return f"its check is not met after its own calls: {check.tool} returned {got}"
            return None
        finally:
            run.close()

    def _choose_tools(self) -> tuple[Tool, ...]:
        """Return the tools on offer, after checking every name in the file."""
        file, known = self._file, {tool.name: tool for tool in self._server.tools}
        hidden = {file.reset.tool} if file.reset is not None else set()
        offered = file.tools if file.tools is not None else [name for name in known if name not in hidden]
        called = {call.tool for spec in self._specs.values() for call in spec.calls}
        checks = {spec.check.tool for spec in self._specs.values() if spec.check is not None}
        for name in sorted({*offered, *hidden, *called, *checks, *file.read_only}):
            if name not in known:
                raise ConfigError(f"{self._name}: the server has no tool {name}{suggest(name, list(known))}.")
        if missing := called - set(offered):
            raise ConfigError(f"{self._name}: tasks call {', '.join(sorted(missing))}, which tools does not offer.")
        if changing := checks - self.read_only:
            raise ConfigError(
                f"{self._name}: a check calls {', '.join(sorted(changing))}, which the server does not declare "
                "read-only. If it changes nothing, list it in read_only."
            )
        if not offered:
            raise ConfigError(f"{self._name}: no tools are offered.")
        return tuple(known[name] for name in dict.fromkeys(offered))


class McpTask(Task):
    """One attempt at a task."""

    def __init__(self, tasks: McpTasks, spec: McpTaskSpec, key: EpisodeKey):
        self.id, self.category, self.sample = key.task, spec.category, key.sample
        self._tasks, self._spec, self._key = tasks, spec, key

    @property
    def questions(self) -> Sequence[Message]:
        """The question from the file of tasks, as the only message."""
        return (Message("user", self._spec.question),)

    @property
    def solution(self) -> Sequence[Call]:
        """The task's calls; none if only its check or facts decide."""
        return [call.to_call() for call in self._spec.calls]

    def start(self) -> TaskState:
        """Begin an episode with the server."""
        self._tasks.check_solution(self.id)
        return _McpState(self._tasks, self._spec, self._key)


class _McpState(DialogueState):
    """One episode of a task."""

    def __init__(self, tasks: McpTasks, spec: McpTaskSpec, key: EpisodeKey):
        system = (Message("system", spec.system),) if spec.system is not None else ()
        super().__init__(Conversation((*system, Message("user", spec.question)), tasks.tools, key.task))
        self._tasks, self._spec = tasks, spec
        self._made: list[tuple[Call, bool]] = []  # each call, and whether it was accepted
        self._recorded: RecordedEpisode | None = RecordedEpisode(key)
        self._run = tasks.start(key)

    def respond(self, step: Step) -> Sequence[Message]:
        """Make the answer's calls; an answer without calls ends the episode, as does a call that is not recorded."""
        results = []
        for call in step.calls:
            if problems := self._tasks.tool_set.find_errors(call):
                result = McpResult(json.dumps({"error": problems[0]}, ensure_ascii=False), True)
            else:
                answered = self._ask(self._run.call, call)
                if answered is None:
                    return ()
                result = answered
                self._recording.calls.append((call, result))
            self._made.append((call, not result.is_error))
            results.append(result.text or "null")
        step.results = tuple(results)
        return to_results(step.calls, results)

    def score(self, text: str) -> Mapping[str, float]:
        """Return the parts of the reward; ``text`` is the final answer."""
        check, is_check_met = self._spec.check, False
        if check is not None and any(is_accepted for _, is_accepted in self._made):
            self._recording.check = self._ask(self._run.check, check.to_call())
            is_check_met = is_met(check, self._recording.check)
        self._write()
        return score_calls(self._spec, self._made, self._tasks.read_only, is_check_met, text)

    def close(self) -> None:
        """Free the episode's session; an episode without an end is not recorded."""
        self._run.close()

    @property
    def _recording(self) -> RecordedEpisode:
        assert self._recorded is not None, "an episode that was scored goes on"
        return self._recorded

    def _ask(self, ask: Callable[[Call], McpResult | None], call: Call) -> McpResult | None:
        try:
            return ask(call)
        except TaskError as error:
            self._recording.error = str(error)
            self._write()
            raise

    def _write(self) -> None:
        """Record the episode, which is over."""
        self._tasks.record(self._recording)
        self._recorded = None


def is_met(check: FinalCheck, result: McpResult | None) -> bool:
    """Return True if a check's result is the expected one, as text or as JSON values."""
    if result is None or result.is_error:
        return False
    found: list[Any] = [result.text] if result.structured is None else [result.text, result.structured]
    with contextlib.suppress(ValueError, RecursionError):
        found.append(json.loads(result.text))
    if isinstance(result.structured, dict) and result.structured.keys() == {"result"}:
        found.append(result.structured["result"])  # how servers wrap what is not an object
    try:
        return any(is_equal(check.result, one) for one in found)
    except RecursionError:
        return False


def score_calls(
    spec: McpTaskSpec,
    made: Sequence[tuple[Call, bool]],
    read_only: frozenset[str],
    is_check_met: bool,
    text: str,
) -> dict[str, float]:
    """Return every part of the reward; all are 0 if no call was accepted.

    With a check, the server's state decides. Without one, the task's calls are required, and further accepted calls of
    tools that may change something are unwanted.

    Args:
        spec: The task.
        made: The calls in order, each with True if it was accepted.
        read_only: Tools that change nothing.
        is_check_met: The task's check has the expected result.
        text: The final answer.
    """
    accepted = [call for call, is_accepted in made if is_accepted]
    if not accepted:
        return dict.fromkeys(ENVIRONMENT_PARTS, 0.0)
    facts = [str(fact) for fact in spec.facts]
    done, due, num_unwanted = sum(has_fact(text, fact) for fact in facts), len(facts), 0
    if spec.check is not None:
        done, due = done + is_check_met, due + 1
    else:
        wanted = Counter(call_key(call.to_call()) for call in spec.calls)
        found = Counter(map(call_key, accepted))
        done, due = done + (wanted & found).total(), due + wanted.total()
        num_unwanted = sum(count for key, count in (found - wanted).items() if _find_name(key) not in read_only)
    is_solved = done == due and not num_unwanted
    least = len(spec.calls) or 1
    return {
        "solved": float(is_solved),
        "progress": max(0.0, (done - num_unwanted) / due),
        "economy": min(1.0, least / len(made)) if is_solved else 0.0,
        "validity": len(accepted) / len(made),
    }


def _find_name(key: Any) -> str:
    """Return the name of a call from its key."""
    name: str = key[0]
    return name
