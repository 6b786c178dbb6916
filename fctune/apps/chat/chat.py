"""A conversation with a model that may call tools: what the user says, the calls it makes, and their results."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fctune.base.errors import DataError
from fctune.base.launcher_watch import user_environment
from fctune.base.processes import run_command
from fctune.calls.formats.base import CallFormat
from fctune.data.conversation import Conversation, Message, Tool, to_encodable
from fctune.engines.engine import Engine
from fctune.tasks.episode import Episode, EpisodeLimits, EpisodeRunner
from fctune.tasks.task import Step, Task, TaskState, to_results

_MAX_RESULT_BYTES = 64 * 1024
_MAX_ERROR_CHARS = 500


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
    is_dialogue = True

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
    given = json.dumps(arguments).encode()
    try:
        done = run_command(command, given, timeout_s, user_environment(), _MAX_RESULT_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a NUL character
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return json.dumps({"error": f"cannot be started: {reason}"})
    if done.code is None:
        return json.dumps({"error": f"no result within {timeout_s:g} s"})
    if done.code:
        stderr = done.errors.text.strip()[-_MAX_ERROR_CHARS:]
        return json.dumps({"error": f"exit code {done.code}", "stderr": stderr})
    cut = f"\n[cut: only the first {_MAX_RESULT_BYTES:,} of {done.output.num_bytes:,} bytes]"
    return done.output.text.strip() + (cut if done.output.num_bytes > _MAX_RESULT_BYTES else "")


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
