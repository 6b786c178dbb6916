"""Runs environments in separate processes, with limits on time, memory and results.

An environment that raises, hangs, exits or returns an invalid value ends its episode with an error that names it. The
process is restarted and the calls of the other episodes are replayed, so environments must be deterministic.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import select
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError
from fctune.base.processes import Child
from fctune.config.parsing import suggest
from fctune.data.conversation import Call, Tool
from fctune.data.tool_schema import ToolSet
from fctune.tasks.environments.base import CheckedTask, Split, TaskSpec

_HEADER = struct.Struct("<I")
_NUM_STDERR_SHOWN = 300


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the resources of an environment.

    Attributes:
        call_s: Seconds for one call, reset or task.
        memory_bytes: Memory of the process, as ``RLIMIT_DATA``.
        result_bytes: Size of one result or state as JSON.
    """

    call_s: float = 5.0
    memory_bytes: int = 2 * 1024**3
    result_bytes: int = 256 * 1024


# Variables that Python and common libraries need; none holds a key.
_PASSED = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV")
_FURTHER = "FCTUNE_ENVIRONMENT_VARIABLES"


def list_variables() -> dict[str, str]:
    """Return the environment variables of an environment's process: no keys or tokens, unless the user names them.

    ``FCTUNE_ENVIRONMENT_VARIABLES`` names further ones to pass on, separated by commas.
    """
    further = [name.strip() for name in os.environ.get(_FURTHER, "").split(",")]
    return {name: value for name, value in os.environ.items() if name in (*_PASSED, *further) or name[:3] == "LC_"}


class ProcessError(Exception):
    """The process ended, hung or exceeded its limits."""


class WorkerProcess:
    """A worker process, and the pipes to it.

    Args:
        reference: ``FILE.py:Class``, or ``module:Class`` of an installed package.
        limits: What it may use.
    """

    def __init__(self, reference: str, limits: Limits):
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by ``end``)
        allowed = {"memory_bytes": limits.memory_bytes, "result_bytes": limits.result_bytes}
        # One thread per process: memory limits count what idle threads of numerical libraries reserve.
        environment = list_variables() | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        # It ends when its input does, and may be started on a thread of rollouts, which ends earlier.
        self._child = Child(
            [sys.executable, "-P", "-m", "fctune.tasks.environments.worker", reference, json.dumps(allowed)],
            environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            ends_with_thread=False,
        )

    def exchange(self, request: dict[str, Any], limit_s: float, max_bytes: int) -> bytes:
        """Send a request and return the reply's bytes.

        Raises:
            ProcessError: No reply arrives in time, or it is too large.
        """
        assert self._child.stdin is not None
        deadline = time.monotonic() + limit_s
        content = json.dumps(request).encode()
        try:
            self._child.stdin.write(_HEADER.pack(len(content)) + content)
            self._child.stdin.flush()
        except OSError:
            raise ProcessError(self._describe_end()) from None
        (size,) = _HEADER.unpack(self._read(_HEADER.size, deadline, limit_s))
        if size > max_bytes + 1024:
            raise ProcessError(f"sent {size:,} bytes; at most {max_bytes:,} are allowed")
        return self._read(size, deadline, limit_s)

    def end(self) -> None:
        """Kill the process and those that it started."""
        self._child.end()
        self._stderr.close()

    def _read(self, size: int, deadline: float, limit_s: float) -> bytes:
        assert self._child.stdout is not None
        descriptor, content = self._child.stdout.fileno(), b""
        while len(content) < size:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise ProcessError(f"no result within {limit_s:g} s")
            piece = os.read(descriptor, size - len(content))
            if not piece:
                raise ProcessError(self._describe_end())
            content += piece
        return content

    def _describe_end(self) -> str:
        code = self._child.wait(5.0)
        if code is None:
            return "closed its pipes"
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - 4096))
        lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        said = f" ({lines[-1][:_NUM_STDERR_SHOWN]})" if lines else ""
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return f"its process {how}{said}"


_START_LIMIT_S = 60.0

BUILT_IN = {
    "files": "fctune.tasks.environments.files:Files",
    "calendar": "fctune.tasks.environments.calendar:Calendar",
    "shop": "fctune.tasks.environments.shop:Shop",
}
"""Our own environments by name."""

GROUP = "fctune.tasks.environments"
"""Entry points of this group are environments by name."""


class EnvironmentDefect(Exception):
    """A defect of an environment, which ends the episode; the text names the environment."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """Result of a call: JSON text for the model, and False if the call was refused."""

    text: str
    is_accepted: bool


class EnvironmentHost:
    """An environment class in a process of its own; thread-safe, with one request at a time.

    Args:
        name: ``files``, ``calendar`` or ``shop``, the name of an entry point in ``fctune.tasks.environments``, or
            ``FILE.py:Class`` or ``module:Class``.
        limits: Limits on its time, memory and results.

    Raises:
        ConfigError: The environment does not exist, or has no usable tools.
    """

    def __init__(self, name: str, limits: Limits | None = None):
        self.name = name
        self.limits = limits or Limits()
        self._reference = find_reference(name)
        self._process: WorkerProcess | None = None
        self._lock = threading.RLock()
        self._num_starts = 0
        self._next_episode = 0
        try:
            listed = self._start_process()
        except EnvironmentDefect as error:
            self.close()
            raise ConfigError(f"{error}. Pass an environment's name, or FILE.py:Class of a working one.") from None
        self.tools = self._read_tools(listed)
        self.tool_set = ToolSet(self.tools)

    def make_task(self, seed: int, split: Split) -> CheckedTask:
        """Return the task of a seed, after checking that its own calls solve it.

        Raises:
            EnvironmentDefect: The environment returns no task, or the task's own calls are refused or achieve nothing.
        """
        value = self._request("make_task", seed=seed, split=split)
        spec = self._read_task(value, f"the task of seed {seed} ({split})")
        episode = self.start(CheckedTask(f"{self.name}/{split}/{seed}", spec))
        try:
            before = episode.state()
            for name, arguments in spec.calls:
                result = episode.call(Call(name, arguments))
                if not result.is_accepted:
                    raise self._defect(f"the task of seed {seed} ({split}) has a call that is refused: {result.text}")
            goal = episode.state()
        finally:
            episode.close()
        if goal == before and not spec.facts:
            raise self._defect(f"the task of seed {seed} ({split}) changes nothing and asks for nothing")
        return CheckedTask(f"{self.name}/{split}/{seed}", spec, before, goal)

    def start(self, task: CheckedTask) -> EnvironmentEpisode:
        """Begin an episode in the initial state of a task.

        Raises:
            EnvironmentDefect: The environment fails.
        """
        with self._lock:
            self._next_episode += 1
            number = self._next_episode
        return EnvironmentEpisode(self, task, number)

    def close(self) -> None:
        """End the environment's process, and with it every episode."""
        with self._lock:
            if self._process is not None:
                self._process.end()
                self._process = None

    def _start_process(self) -> Any:
        """Start the process, and return the tools that the class lists."""
        self._num_starts += 1
        self._process = WorkerProcess(self._reference, self.limits)
        reply = self._exchange("open", {}, _START_LIMIT_S)
        if "value" not in reply:
            raise EnvironmentDefect(f"environment {self.name}: {reply.get('error') or reply.get('refused')}")
        return reply["value"]

    def _request(self, do: str, **values: Any) -> Any:
        """Return the value of a request that must not be refused.

        Raises:
            EnvironmentDefect: The environment failed; if its process ended, the next request starts a new one.
        """
        reply = self._request_reply(do, **values)
        if "value" not in reply:
            raise self._defect(f"{do}: {reply['refused']}")
        return reply["value"]

    def _request_reply(self, do: str, **values: Any) -> dict[str, Any]:
        with self._lock:
            if self._process is None:
                self._start_process()
            reply = self._exchange(do, values, self.limits.call_s)
            if "error" in reply:
                raise EnvironmentDefect(f"environment {self.name}, {_describe(do, values)}: {reply['error']}")
            return reply

    def _exchange(self, do: str, values: dict[str, Any], limit_s: float) -> dict[str, Any]:
        assert self._process is not None
        try:
            content = self._process.exchange({"do": do, "with": values}, limit_s, self.limits.result_bytes)
            reply = json.loads(content)
        except (ProcessError, ValueError) as error:
            self._process.end()
            self._process = None
            raise EnvironmentDefect(f"environment {self.name}, {_describe(do, values)}: {error}") from None
        if not isinstance(reply, dict) or not reply.keys() & {"value", "refused", "error"}:
            self.close()
            raise EnvironmentDefect(
                f"environment {self.name}, {_describe(do, values)}: its process sent an invalid reply"
            )
        return reply

    def _defect(self, what: str) -> EnvironmentDefect:
        return EnvironmentDefect(f"environment {self.name}: {what}")

    def _read_tools(self, listed: Any) -> tuple[Tool, ...]:
        if not isinstance(listed, list) or not listed:
            self.close()
            raise ConfigError(
                f"environment {self.name}: list_tools returned no list of tools. Return functions with name, "
                "description and parameters."
            )
        tools = []
        for function in listed:
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                self.close()
                raise ConfigError(
                    f"environment {self.name}: list_tools returned {json.dumps(function)[:100]}, not a function with "
                    "name, description and parameters."
                )
            tools.append(Tool(function))
        tool_set = ToolSet(tools)
        for tool in tools:
            if (problem := tool_set.find_schema_problem(tool.name)) is not None:
                self.close()
                raise ConfigError(f"environment {self.name}: {problem}.")
        return tuple(tools)

    def _read_task(self, value: Any, where: str) -> TaskSpec:
        try:
            calls = tuple((str(name), dict(arguments)) for name, arguments in value["calls"])
            spec = TaskSpec(
                value["question"], value["state"], calls, tuple(value["facts"]), value["category"], value["system"]
            )
        except (TypeError, KeyError, ValueError) as error:
            raise self._defect(f"{where} is not a TaskSpec ({type(error).__name__}: {error})") from None
        texts = [spec.question, spec.category, *spec.facts, *([] if spec.system is None else [spec.system])]
        if not all(isinstance(text, str) for text in texts) or not spec.question.strip():
            raise self._defect(
                f"{where} has an empty question, or a question, category, fact or system message that is not a string"
            )
        if not isinstance(spec.state, dict):
            raise self._defect(f"{where} has a state that is not a dictionary")
        return spec


class EnvironmentEpisode:
    """A task in progress: the calls made so far, which are replayed if the process is restarted."""

    def __init__(self, host: EnvironmentHost, task: CheckedTask, number: int):
        self.task = task
        self.calls: list[tuple[Call, CallResult]] = []
        self._host = host
        self._number = number
        self._start = -1
        self._begin()

    def call(self, call: Call) -> CallResult:
        """Make a call; one that does not match its tool's schema is refused here.

        Raises:
            EnvironmentDefect: The environment failed, or gave different results when its calls were replayed.
        """
        problems = self._host.tool_set.find_errors(call)
        if problems:
            result = CallResult(_to_text({"error": problems[0]}), False)
        else:
            with self._host._lock:
                self._ensure_alive()
                result = self._make(call)
        self.calls.append((call, result))
        return result

    def state(self) -> Any:
        """Return the environment's state in this episode, after the calls so far.

        Raises:
            EnvironmentDefect: The environment failed.
        """
        with self._host._lock:
            self._ensure_alive()
            return self._host._request("state", episode=self._number)

    def close(self) -> None:
        """Free the episode in the process."""
        with self._host._lock, suppress(EnvironmentDefect):
            if self._host._process is not None and self._start == self._host._num_starts:
                self._host._request("close", episode=self._number)

    def _begin(self) -> None:
        with self._host._lock:
            if self._host._process is None:
                self._host._start_process()
            self._host._request("reset", episode=self._number, state=self.task.spec.state)
            self._start = self._host._num_starts

    def _ensure_alive(self) -> None:
        """Replay all calls if the process was restarted because of another episode."""
        if self._host._process is not None and self._start == self._host._num_starts:
            return
        self._begin()
        for call, result in self.calls:
            if not self._host.tool_set.find_errors(call) and self._make(call) != result:
                raise self._host._defect(
                    f"is not deterministic: {call.name} gave a different result when it was called again"
                )

    def _make(self, call: Call) -> CallResult:
        reply = self._host._request_reply("call", episode=self._number, name=call.name, arguments=call.arguments)
        if "refused" in reply:
            return CallResult(_to_text({"error": reply["refused"]}), False)
        return CallResult(_to_text(reply["value"]), True)


def _describe(do: str, values: dict[str, Any]) -> str:
    if do == "call":
        return f"call of {values['name']}"
    return {"open": "starting"}.get(do, do)


def _to_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def list_environments() -> dict[str, str]:
    """Return the references of all environments by name, entry points included."""
    found = {point.name: point.value for point in importlib.metadata.entry_points(group=GROUP)}
    return {**found, **BUILT_IN}


def find_reference(name: str) -> str:
    """Return the reference of an environment, ``FILE.py:Class`` or ``module:Class`` of an installed package.

    Args:
        name: Its name, or its reference.

    Raises:
        ConfigError: There is no such environment.
    """
    where, colon, _ = name.rpartition(":")
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise ConfigError(f"environment {name}: {where} does not exist; relative paths start at {Path.cwd()}.")
        return name
    if colon:
        return name
    known = list_environments()
    if name not in known:
        close = suggest(name, list(known))
        raise ConfigError(
            f"environment {name}: no such environment{close} (known: {', '.join(sorted(known))}). Pass one of them, or "
            "FILE.py:Class."
        )
    return known[name]
