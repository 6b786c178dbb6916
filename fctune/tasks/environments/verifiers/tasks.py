"""Tasks of a verifiers environment: its prompts, tools and user, and its own reward.

The package runs each rollout in a process of its own (``worker.py``), with the Python that has it; the policy answers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from fctune.base.errors import ConfigError
from fctune.base.processes import Child
from fctune.config.fields import AT_LEAST_1, SHARE, Range, SectionProblems
from fctune.config.intervals import is_in_share
from fctune.config.loading import read_dataclass
from fctune.config.sections.rollouts import DialogueConfig
from fctune.data.conversation import Conversation, Message
from fctune.data.sources.defects import RowError
from fctune.data.sources.read_context import ReadContext
from fctune.data.sources.row_formats.registry import read_row
from fctune.tasks.environments.base import Split
from fctune.tasks.environments.host import list_variables
from fctune.tasks.episode import Episode
from fctune.tasks.rollouts import Request, RolloutSettings, TaskSet
from fctune.tasks.task import DialogueState, Step, Task, TaskError, TaskState

VERIFIERS_PARTS: dict[str, str] = {
    "score": "the environment's reward: the weighted sum of its own parts",
    "solved": "1 if that is at least solved_at",
}
"""Parts of a reward in verifiers environments, each with its meaning."""

_WORKER = Path(__file__).with_name("worker.py")
_START_LIMIT_S = 300.0  # imports of the package and of the environment, and its data
_MAX_LINE_BYTES = 64 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersFile:
    """A file that names a verifiers environment.

    Attributes:
        env: Verifiers' own config of the environment, such as ``{taskset: {id: NAME}}``.
        python: Python that has verifiers and the environment; null: the one that runs fctune.
        num_tasks: Most tasks that are read.
        test_share: Share of the tasks that is held out; the prompt alone decides.
        solved_at: Reward from which a task counts as solved.
        concurrency: Episodes at a time.
    """

    env: dict[str, Any]
    python: str | None = None
    num_tasks: Annotated[int, AT_LEAST_1] = 1000
    test_share: Annotated[float, SHARE] = 0.2
    solved_at: Annotated[float, Range()] = 1.0
    concurrency: Annotated[int, AT_LEAST_1] = 16

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check that the environment's config names a taskset."""
        taskset = self.env.get("taskset")
        if not (isinstance(taskset, dict) and isinstance(taskset.get("id"), str)):
            problems.add(("env",), "env.taskset.id: missing; name an installed taskset, or a module next to this file")


def read_verifiers_file(path: str | Path) -> VerifiersFile:
    """Read a file that names an environment.

    Raises:
        ConfigError: It cannot be read, or values are missing or wrong, all of which are reported.
    """
    return read_dataclass(VerifiersFile, path)


class VerifiersHost:
    """The process of an environment; thread-safe.

    It is started anew if it has died, which ends the episodes in progress.

    Args:
        path: The file that names the environment; modules next to it can be imported.
        file: What it holds.
        config: Limits of dialogues.

    Attributes:
        prompts: The messages of each task's prompt, as OpenAI writes them.

    Raises:
        ConfigError: The environment cannot be loaded.
    """

    def __init__(self, path: Path, file: VerifiersFile, config: DialogueConfig):
        self.name, self.limits, self._file, self._folder = path.stem, config, file, str(path.parent.absolute())
        self._lock, self._next_episode, self._is_closed = threading.Lock(), 0, False
        self._process: _Process | None = None
        try:
            self.prompts = self._ensure_process().prompts
        except TaskError as error:
            self.close()
            raise ConfigError(
                f"{path}: {error}. python must name a Python that has verifiers (0.4) and the environment."
            ) from None

    def begin(self, task: int) -> VerifiersRun:
        """Begin an episode in the background.

        Raises:
            TaskError: The process died, and does not start again, or the environment is closed.
        """
        with self._lock:
            if self._is_closed:
                raise TaskError(f"environment {self.name}: the run has ended")
            process = self._ensure_process()
            self._next_episode += 1
            run = VerifiersRun(self, process, self._next_episode)
            process.replies[run.number] = run.replies
        if process.is_over:  # it may have told all who waited before
            run.replies.put({"error": "its process has ended"})
        process.send({"do": "start", "episode": run.number, "task": task})
        return run

    def close(self) -> None:
        """End the process, and with it every episode; none begins any more."""
        self._is_closed = True  # without the lock, which a start of the process holds
        if (process := self._process) is not None:
            process.end()

    def _ensure_process(self) -> _Process:
        if self._process is None or self._process.is_over:
            if self._process is not None:
                self._process.end()
            self._process = None
            file, limits = self._file, self.limits
            sent = {"env": file.env, "num_tasks": file.num_tasks, "concurrency": file.concurrency}
            arguments = json.dumps({**sent, "max_turns": limits.max_turns})
            variables = list_variables()
            paths = [self._folder, *filter(None, [variables.get("PYTHONPATH")])]
            variables["PYTHONPATH"] = os.pathsep.join(paths)
            self._process = _Process(self.name, file.python or sys.executable, arguments, variables)
            if self._is_closed:  # meanwhile
                self._process.end()
        return self._process


class _Process:
    """A worker's process: requests go to its stdin, and a thread passes its replies to their episodes."""

    def __init__(self, name: str, python: str, arguments: str, variables: Mapping[str, str]):
        self._name, self.is_over = name, False
        self.replies: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by ``end``)
        try:
            self._child = Child(
                [python, "-P", str(_WORKER), arguments],
                variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                ends_with_thread=False,
            )
        except OSError as error:
            self._stderr.close()
            raise TaskError(f"{python}: cannot be started ({error.strerror})") from None
        opened: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.replies[0] = opened
        threading.Thread(target=self._read, daemon=True, name="verifiers").start()
        try:
            reply = opened.get(timeout=_START_LIMIT_S)
        except queue.Empty:
            reply = {"error": f"not ready within {_START_LIMIT_S:g} s"}
        if not isinstance(tasks := reply.get("tasks"), list) or not tasks:
            self.end()
            raise TaskError(f"the environment does not start: {reply.get('error', 'it has no tasks')}")
        self.prompts: list[list[dict[str, Any]]] = [task["messages"] for task in tasks]

    def send(self, request: dict[str, Any]) -> None:
        """Send a request; one to a process that is over is dropped."""
        assert self._child.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()

    def end(self) -> None:
        """Kill the process and those that it started."""
        self.is_over = True
        self._child.end()
        self._stderr.close()

    def _read(self) -> None:
        assert self._child.stdout is not None
        reason = ""
        with contextlib.suppress(OSError, ValueError):
            while line := self._child.stdout.readline(_MAX_LINE_BYTES):
                try:
                    reply = json.loads(line)
                    waiting = self.replies.get(reply.get("episode", 0))
                except (ValueError, AttributeError, TypeError):
                    reason = f"its process sent {line[:80]!r}, which is no reply"
                    break
                if waiting is not None:
                    waiting.put(reply)
        self.is_over = True
        reason = reason or self._describe_end()
        for waiting in list(self.replies.values()):
            waiting.put({"error": reason})

    def _describe_end(self) -> str:
        code = self._child.wait(5.0)
        if code is None:
            return "its process closed its output"
        said = ""
        with contextlib.suppress(ValueError):  # closed by ``end``
            self._stderr.seek(0, os.SEEK_END)
            self._stderr.seek(max(0, self._stderr.tell() - 4096))
            lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
            said = f" ({lines[-1][:300]})" if lines else ""
        return f"its process {f'was killed by signal {-code}' if code < 0 else f'exited with code {code}'}{said}"


class VerifiersRun:
    """One episode in the environment's process."""

    def __init__(self, host: VerifiersHost, process: _Process, number: int):
        self.number, self.replies = number, queue.SimpleQueue[dict[str, Any]]()
        self._host, self._process, self._spent_s, self._is_over = host, process, 0.0, False

    def wait(self, limit_s: float) -> dict[str, Any]:
        """Return the next reply: a conversation that the policy is to answer, or the episode's reward.

        Raises:
            TaskError: The environment failed, or takes too long.
        """
        start = time.monotonic()
        left_s = min(limit_s, self._host.limits.episode_timeout_s - self._spent_s)
        try:
            reply = self.replies.get(timeout=max(0.0, left_s))
        except queue.Empty:
            raise self._fail(f"no reply within {left_s:.3g} s") from None
        finally:
            self._spent_s += time.monotonic() - start
        if "error" in reply:
            raise self._fail(str(reply["error"])[:400])
        self._is_over = "reward" in reply
        return reply

    def answer(self, message: dict[str, Any]) -> None:
        """Give the policy's answer."""
        self._process.send({"do": "answer", "episode": self.number, "message": message})

    def finish(self) -> None:
        """Ask for the reward of what there is."""
        self._process.send({"do": "finish", "episode": self.number})

    def close(self) -> None:
        """Forget the episode, and tell the environment's process unless it has ended it itself."""
        self._process.replies.pop(self.number, None)
        if not self._is_over:
            self._is_over = True
            self._process.send({"do": "close", "episode": self.number})

    def _fail(self, reason: str) -> TaskError:
        return TaskError(f"environment {self._host.name}: {' '.join(reason.split())}")


class VerifiersTasks(TaskSet):
    """The tasks of an environment on one side.

    Args:
        file: The file that names the environment.
        host: Its process; it is closed with the tasks.
        split: Side of the tasks; those of ``test`` are never trained on.
        settings: How they are asked and rewarded.

    Raises:
        ConfigError: A part of the reward does not exist, or no task is on this side.
    """

    parts = VERIFIERS_PARTS
    default_weights: ClassVar[Mapping[str, float]] = {"score": 1.0}

    def __init__(self, file: VerifiersFile, host: VerifiersHost, split: Split, settings: RolloutSettings):
        super().__init__(settings)
        self._file, self._host = file, host
        texts = [json.dumps(prompt, sort_keys=True) for prompt in host.prompts]
        self._numbers = {
            f"{host.name}/{split}/{number}": number
            for number, text in enumerate(texts)
            if is_in_share(text, file.test_share) == (split == "test")
        }
        if not self._numbers:
            raise ConfigError(f"{host.name}: no task is in {split}. Change test_share, or raise num_tasks.")
        self.num_at_once = file.concurrency
        described = [self._limits.describe(), dict(sorted(self._weights.items())), file.env, file.solved_at]
        text = json.dumps([described, [[name, texts[number]] for name, number in self._numbers.items()]])
        self._digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def ids(self) -> Sequence[str]:
        """Ids of the tasks."""
        return list(self._numbers)

    def digest(self) -> str:
        """Return a hex digest of the settings and of the tasks' prompts."""
        return self._digest

    def open(self, task_id: str) -> Task:
        """Return the task of an id."""
        return VerifiersTask(self._host, task_id, self._numbers[task_id])

    def begin(self, request: Request) -> Episode:
        """Return the episode of a request; the environment's process prepares it in the background."""
        task = VerifiersTask(self._host, request.case_id, self._numbers[request.case_id])
        with contextlib.suppress(TaskError):  # which the episode's start reports
            task.prepare()
        return Episode(task, request.sample, request.seed)

    def score(self, episode: Episode) -> Mapping[str, float]:
        """Return the environment's reward."""
        assert isinstance(episode.state, _VerifiersState)
        reward = episode.state.find_reward()
        return {"score": reward, "solved": float(reward >= self._file.solved_at)}

    def close(self) -> None:
        """End the environment's process."""
        self._host.close()


class VerifiersTask(Task):
    """One attempt at a task."""

    category = "all"

    def __init__(self, host: VerifiersHost, task_id: str, number: int):
        self.id, self._host, self._number = task_id, host, number
        self._run: VerifiersRun | None = None

    @property
    def questions(self) -> Sequence[Message]:
        """The user's messages of the prompt."""
        prompt = self._host.prompts[self._number]
        said = [message["content"] for message in prompt if message["role"] == "user"]
        return [Message("user", text) for text in said if isinstance(text, str)]

    def prepare(self) -> None:
        """Begin the episode, without waiting for its first turn."""
        self._run = self._host.begin(self._number)

    def start(self) -> TaskState:
        """Return the state before the first answer."""
        if self._run is None:
            self.prepare()
        run, self._run = self._run, None
        assert run is not None
        return _VerifiersState(run, self.id)


class _VerifiersState(DialogueState):
    """One episode of a task: the environment's turns, which must continue the conversation as it is."""

    def __init__(self, run: VerifiersRun, name: str):
        self._run, self._name = run, name
        self._reward: float | None = None
        try:
            turn = run.wait(_START_LIMIT_S)
            if "reward" in turn:
                raise TaskError(f"{name}: the environment ended before the first answer")
            self._sent: list[dict[str, Any]] = turn["messages"]
            self._tools = turn["tools"]
            super().__init__(self._read(turn))
        except TaskError:
            run.close()
            raise

    def respond(self, step: Step) -> Sequence[Message]:
        """Pass on an answer, and return the results and the user's messages that follow; none end the episode."""
        message: dict[str, Any] = {"content": step.content or (None if step.calls else "")}
        if step.calls:
            message["tool_calls"] = [_to_wire(call.to_openai()) for call in step.calls]
        self._run.answer(message)
        limit_s = self._run._host.limits.call_timeout_s * max(1, len(step.calls))
        turn = self._run.wait(limit_s if step.calls else math.inf)
        if "reward" in turn:
            self._take(turn)
            return ()
        num_known = len(self._sent) + 1
        if turn["messages"][: num_known - 1] != self._sent or turn["tools"] != self._tools:
            raise TaskError(f"{self._name}: the environment rewrote earlier messages or the tools, which are trained")
        following = self._read(turn).messages[num_known:]
        self._sent = turn["messages"]
        step.results = tuple(one.content or "" for one in following if one.role == "tool")
        return following

    def find_reward(self) -> float:
        """Return the reward; an episode that was cut off is scored as it is.

        Raises:
            TaskError: The environment fails to score it.
        """
        if self._reward is None:
            self._run.finish()
            while self._reward is None:
                self._take(self._run.wait(math.inf))
        return self._reward

    def close(self) -> None:
        """End the episode in the environment's process."""
        self._run.close()

    def _take(self, turn: dict[str, Any]) -> None:
        """Keep the reward of an episode that is over."""
        reward = turn.get("reward", 0.0 if "messages" in turn else None)
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise TaskError(f"{self._name}: the environment's reward is {reward!r}, not a finite number")
        if "reward" in turn:
            self._reward = float(reward)

    def _read(self, turn: dict[str, Any]) -> Conversation:
        """Return the conversation of a turn."""
        most = self._run._host.limits.max_result_bytes
        for message in turn["messages"]:
            if message["role"] == "tool" and len(str(message["content"]).encode("utf-8", "replace")) > most:
                raise TaskError(f"{self._name}: a result has over {most:,} bytes")
        answer = {"role": "assistant", "content": "-"}  # rows end with an answer
        try:
            row = {"messages": [*turn["messages"], answer], "tools": turn["tools"]}
            read = read_row(row, "openai", ReadContext(), self._name).conversation
        except RowError as error:
            raise TaskError(f"{self._name}: {error.pointer}: {error.reason}") from None
        return Conversation(read.messages[:-1], read.tools, self._name)


def _to_wire(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as text, as OpenAI's API has it."""
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
