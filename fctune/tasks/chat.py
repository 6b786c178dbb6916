"""A conversation with a model that may call tools: what the user says, the calls it makes, and their results."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fctune.base.errors import DataError
from fctune.base.launcher_watch import stop_with_parent, user_environment
from fctune.calls.formats.base import CallFormat
from fctune.data.conversation import Conversation, Message, Tool, to_encodable
from fctune.engines.engine import Engine
from fctune.tasks.episode import Episode, EpisodeLimits, EpisodeRunner
from fctune.tasks.task import Step, Task, TaskState, to_results

_MAX_RESULT_BYTES = 64 * 1024
_MAX_PIPE_BYTES = 1024 * 1024  # what a pipe may hold (/proc/sys/fs/pipe-max-size)
_MAX_ERROR_CHARS = 500
_POLL_S = 0.05


@dataclass(slots=True)
class Chat:
    """The conversation so far.

    Args:
        engine: The model or server.
        call_format: The call format of its text; None: the server parses the calls.
        tools: The tools on offer.
        system: The system message; None: none.
        max_new_tokens: Maximum length of an answer.
    """

    engine: Engine
    call_format: CallFormat | None
    tools: Sequence[Tool] = ()
    system: str | None = None
    max_new_tokens: int = 512
    messages: tuple[Message, ...] = ()

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = (Message("system", self.system),) if self.system is not None else ()

    def say(self, text: str, respond: Callable[[Step], Sequence[str]]) -> str | None:
        """Take a turn of the user, in which the model answers until it makes no more calls.

        The turn only becomes part of the conversation if it ends with an answer. Otherwise calls without results, or a
        message without an answer, would make templates that require roles to alternate refuse every later prompt.

        Args:
            text: The user's message.
            respond: Called with each answer; returns the results of its calls in their order, or raises
                ``EpisodeStopped`` to end the turn.

        Returns:
            Why the turn was ended without an answer; None if it was not.

        Raises:
            DataError: The model cannot answer.
            ConfigError: The server refuses every request.
        """
        messages = (*self.messages, Message("user", to_encodable(text)))
        turn = Episode(_ChatTurn(Conversation(messages, tuple(self.tools), "chat"), respond))
        (turn,) = EpisodeRunner(self.engine, self.call_format, EpisodeLimits(self.max_new_tokens)).run([turn])
        if turn.error is not None:
            raise DataError(f"no answer: {turn.error}")
        if turn.stopped is None:
            self.messages = turn.messages
        return turn.stopped

    def to_row(self) -> dict[str, Any]:
        """Return the conversation as a row of training data."""
        return Conversation(self.messages, tuple(self.tools)).to_openai()


class _ChatTurn(Task, TaskState):
    """A turn of the user, whose calls a person answers."""

    id = category = "chat"

    def __init__(self, prompt: Conversation, respond: Callable[[Step], Sequence[str]]):
        TaskState.__init__(self, prompt)
        self._respond = respond

    def start(self) -> TaskState:
        """Return the turn itself, which is asked once."""
        return self

    def respond(self, step: Step) -> Sequence[Message]:
        """Return the results of the answer's calls; without calls the turn is over."""
        return to_results(step.calls, self._respond(step))


def run_tool(command: Sequence[str], arguments: Mapping[str, Any], timeout_s: float) -> str:
    """Run the user's command for a tool, and return its output as the result; a failure as ``{"error": ...}``.

    The command gets the arguments as JSON on its input. It leads a process group, which is killed when the command has
    ended, when its time is over, and when the user presses Ctrl-C. So what it started in the background neither goes on
    nor keeps the result back.

    Args:
        command: Program and arguments; no shell reads them.
        arguments: Arguments of the call.
        timeout_s: Seconds that the command may take.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=user_environment(),
            start_new_session=True,
            preexec_fn=stop_with_parent(),
        )
    except (OSError, ValueError) as error:  # ValueError: a NUL character
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return json.dumps({"error": f"cannot be started: {reason}"})
    try:
        output, errors = _exchange(process, json.dumps(arguments).encode(), time.monotonic() + timeout_s)
        has_ended = _has_ended(process)
    finally:
        _kill_group(process)
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
    if not has_ended:
        return json.dumps({"error": f"no result within {timeout_s:g} s"})
    if process.returncode:
        stderr = errors.text.strip()[-_MAX_ERROR_CHARS:]
        return json.dumps({"error": f"exit code {process.returncode}", "stderr": stderr})
    cut = f"\n[cut: only the first {_MAX_RESULT_BYTES:,} of {output.num_bytes:,} bytes]"
    return output.text.strip() + (cut if output.num_bytes > _MAX_RESULT_BYTES else "")


@dataclass(slots=True)
class _Output:
    """Output of a command's pipe: its first or its last 64 KiB, and its total size."""

    keeps_end: bool
    kept: bytes = b""
    num_bytes: int = 0

    def add(self, piece: bytes) -> None:
        self.num_bytes += len(piece)
        if self.keeps_end:
            self.kept = (self.kept + piece)[-_MAX_RESULT_BYTES:]
        elif len(self.kept) < _MAX_RESULT_BYTES:
            self.kept = (self.kept + piece)[:_MAX_RESULT_BYTES]

    @property
    def text(self) -> str:
        return self.kept.decode("utf-8", "replace")


def _exchange(process: subprocess.Popen[bytes], request: bytes, deadline: float) -> tuple[_Output, _Output]:
    """Write a command's input and read its outputs until it ends, or until the deadline.

    Other processes may hold the pipes longer than the command, so that its own end counts, not that of the pipes.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    outputs = {process.stdout: _Output(keeps_end=False), process.stderr: _Output(keeps_end=True)}
    rest = memoryview(request)
    with selectors.DefaultSelector() as selector:
        for pipe in (process.stdin, *outputs):
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_WRITE if pipe is process.stdin else selectors.EVENT_READ)
        while not _has_ended(process) and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(min(left, _POLL_S)):
                if key.fileobj is process.stdin:
                    try:
                        rest = rest[os.write(key.fd, rest) :]
                    except BrokenPipeError:  # the command does not read its input
                        rest = rest[:0]
                    if not rest:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                elif piece := os.read(key.fd, _MAX_RESULT_BYTES):
                    outputs[key.fileobj].add(piece)  # type: ignore[index]
                else:
                    selector.unregister(key.fileobj)
    if _has_ended(process):
        _kill_group(process)  # nobody writes after this, except processes that have left the group
        for pipe, output in outputs.items():
            with suppress(BlockingIOError):
                for _ in range(_MAX_PIPE_BYTES // _MAX_RESULT_BYTES):
                    output.add(os.read(pipe.fileno(), _MAX_RESULT_BYTES))
    return outputs[process.stdout], outputs[process.stderr]


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return True once the process has ended; it is not reaped, so that its group's id is not used again."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def simulate_result(tool: Tool | None) -> str:
    """Return a result that fits the schema of results that the tool declares; ``{"status": "ok"}`` without one."""
    if tool is None:
        return json.dumps({"error": "there is no such tool"})
    for key in ("returns", "response", "outputSchema"):
        schema = tool.function.get(key)
        if isinstance(schema, dict) and ("type" in schema or "properties" in schema):
            return json.dumps(_sample(schema, 0), ensure_ascii=False)
    return json.dumps({"status": "ok"})


def _sample(schema: Any, depth: int) -> Any:
    """Return a value of a JSON Schema: its example, default or first choice, else an empty or small one."""
    if not isinstance(schema, dict) or depth > 8:
        return None
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("examples", "enum"):
        if isinstance(schema.get(key), list) and schema[key]:
            return schema[key][0]
    kind = schema.get("type", "object" if "properties" in schema else None)
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object":
        properties = schema.get("properties")
        return {name: _sample(one, depth + 1) for name, one in (properties or {}).items()}
    if kind == "array":
        return [_sample(schema.get("items", {}), depth + 1)]
    return {"string": "text", "integer": 1, "number": 1.0, "boolean": True}.get(str(kind))
