"""The MCP server of a task file: its tools, and a reset session for each episode."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from fctune.base.errors import ConfigError
from fctune.calls.matching import call_key
from fctune.config.loading import read_environment
from fctune.data.conversation import Call, Tool
from fctune.data.sources.tool_file import read_tool_texts
from fctune.engines.mcp_client import (
    McpClients,
    McpFailure,
    McpLimits,
    McpResult,
    McpSession,
    check_address,
    choose_mcp_token,
    describe_address,
)
from fctune.engines.mcp_tools import find_read_only
from fctune.tasks.environments.mcp.recording import EpisodeKey, Recording
from fctune.tasks.environments.mcp.task_file import TaskFile
from fctune.tasks.task import TaskError

T = TypeVar("T")

_START_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class EpisodeServerLimits:
    """Limits of an MCP server.

    Attributes:
        call_s: Seconds of one request, once the server has started.
        episode_s: Seconds of all requests of an episode together, with the start.
        result_bytes: Size of the text of a result.
    """

    call_s: float = 5.0
    episode_s: float = 120.0
    result_bytes: int = 256 * 1024


class ToolServer:
    """A server that runs, and sessions with it for episodes.

    Args:
        file: The task file, which names it.
        limits: Its limits.

    Attributes:
        tools: All tools that it lists.
        read_only: Those that it declares to change nothing.

    Raises:
        ConfigError: The server cannot be used.
    """

    def __init__(self, file: TaskFile, limits: EpisodeServerLimits):
        self.file, self.limits, self.name = file, limits, describe_address(file.server)
        setting, urls = read_environment().get("FCTUNE_MCP_TOKEN"), [file.server]
        self._token = None if file.is_process else choose_mcp_token(setting, file.server, urls)
        check_address(file.server, self._token)
        self._clients = McpClients(file.server)
        self._idle: list[McpSession] = []
        try:
            session = self._open()
            pages = session.list_tools()
            self.tools = tuple(read_tool_texts(pages, [self.name] * len(pages)))
            self.read_only = find_read_only(pages)
            self.give_back(session)
        except BaseException as error:
            self._clients.close()
            if isinstance(error, McpFailure):
                raise ConfigError(f"{self.name}: no usable MCP server ({error}).") from None
            raise

    def begin(self, key: EpisodeKey) -> ServerRun:
        """Begin an episode: its session connects, or its process starts, in the background."""
        with suppress(IndexError):  # another thread may have taken the last one
            while self._idle:
                session = self._idle.pop()
                if not session.is_over:
                    return ServerRun(self, session)
        return ServerRun(self, self._open())

    def give_back(self, session: McpSession) -> None:
        """Keep a session for another episode if a tool resets it, or else end it."""
        if self.file.reset is not None:
            self._idle.append(session)
        else:
            session.close()

    def close(self) -> None:
        """End all sessions, and the processes that were started."""
        self._clients.close()

    def _open(self) -> McpSession:
        limits = McpLimits(max_s=max(_START_LIMIT_S, self.limits.call_s))
        return self._clients.open(self.file.server, self._token, limits, self.limits.call_s)


class ServerRun:
    """One episode with a live server."""

    def __init__(self, server: ToolServer, session: McpSession):
        self._server, self._session = server, session
        self._is_ready, self._spent_s = False, 0.0
        self._problem: str | None = None

    def call(self, call: Call) -> McpResult | None:
        """Call a tool, whose arguments match its schema, and return its text.

        Raises:
            TaskError: The server failed; the text names it and the call.
        """
        result = self._ask(call)
        return McpResult(result.text, result.is_error)

    def check(self, call: Call) -> McpResult | None:
        """Make the call of a task's check; see ``call``. The result has its structured content."""
        return self._ask(call)

    def close(self) -> None:
        """End the episode's session, or free it for another episode."""
        if self._problem is None:
            self._server.give_back(self._session)
        else:
            self._session.close()

    def _ask(self, call: Call) -> McpResult:
        try:
            if not self._is_ready:
                self._prepare()
            result = self._time(lambda: self._session.call(call.name, call.arguments))
        except McpFailure as error:
            self._problem = f"MCP server {self._server.name}, call of {call.name}: {error}"
            raise TaskError(self._problem) from None
        texts = [result.text, json.dumps(result.structured, ensure_ascii=False)]
        num_bytes, most = max(len(one.encode("utf-8", "replace")) for one in texts), self._server.limits.result_bytes
        if num_bytes > most:
            return McpResult(f"the result has {num_bytes:,} bytes; at most {most:,} are allowed", True)
        return result

    def _prepare(self) -> None:
        """Check that the server still has the same tools, and reset it.

        Raises:
            McpFailure: It has others, or does not reset.
        """
        server, reset = self._server, self._server.file.reset
        pages = self._time(self._session.list_tools)
        try:
            now = read_tool_texts(pages, [server.name] * len(pages))
        except ValueError as error:
            raise McpFailure(f"its tools changed: {error}") from None
        if (changes := _describe_changes(server.tools, now)) is not None:
            raise McpFailure(f"its tools changed since the run began: {changes}")
        if reset is not None:
            result = self._time(lambda: self._session.call(reset.tool, reset.arguments))
            if result.is_error:
                raise McpFailure(f"{reset.tool} did not reset it: {result.text[:200]}")
        self._is_ready = True

    def _time(self, request: Callable[[], T]) -> T:
        """Return the result of a request, within the time that is left for the episode."""
        start = time.monotonic()
        try:
            return request()
        finally:
            self._spent_s += time.monotonic() - start
            if self._spent_s > self._server.limits.episode_s:
                raise McpFailure(f"its calls took over {self._server.limits.episode_s:g} s together")


class ReplayedServer:
    """A recording in place of a server."""

    def __init__(self, recording: Recording):
        self._recording = recording
        self.tools = tuple(map(Tool, recording.tools))
        self.read_only = recording.read_only

    def begin(self, key: EpisodeKey) -> ReplayedRun:
        """Return an episode whose calls are answered from the recording."""
        return ReplayedRun(self._recording, key)

    def close(self) -> None:
        """Do nothing: a recording holds no session."""


class ReplayedRun:
    """One episode with recorded results: its own as long as it makes the same calls, or those of another episode."""

    def __init__(self, recording: Recording, key: EpisodeKey):
        self._recording, self._key = recording, key
        self._same = recording.find_episode(key)
        self._made: list[Call] = []

    def call(self, call: Call) -> McpResult | None:
        """Return the recorded result; None if this call was never made here.

        Raises:
            TaskError: The recorded episode failed here.
        """
        number = len(self._made)
        self._made.append(call)
        if self._same is not None and number == len(self._same.calls) and self._same.error is not None:
            raise TaskError(self._same.error)
        if self._same is not None and number < len(self._same.calls):
            recorded, result = self._same.calls[number]
            if call_key(recorded) == call_key(call):
                return result
        self._same = None
        return self._recording.find_result(self._key.task, self._made)

    def check(self, call: Call) -> McpResult | None:
        """Return the recorded result of the check; None if it was never made after these calls.

        Raises:
            TaskError: The recorded episode failed here.
        """
        if self._same is not None and len(self._made) == len(self._same.calls):
            if self._same.error is not None:
                raise TaskError(self._same.error)
            return self._same.check
        return self._recording.find_check(self._key.task, self._made)

    def close(self) -> None:
        """Do nothing: a recording holds no session."""


def _describe_changes(before: Sequence[Tool], now: Sequence[Tool]) -> str | None:
    """Return the first tool that a server has added, removed or changed; None if it has the same ones."""
    old, new = _by_name(before), _by_name(now)
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            return f"{name} was {'added' if name not in old else 'removed' if name not in new else 'changed'}"
    return None


def _by_name(tools: Sequence[Tool]) -> Mapping[str, Any]:
    return {tool.name: tool.to_json() for tool in tools}
