"""Recordings of episodes with an MCP server, from which a run can be replayed without it.

JSON lines: the server's tools, then one object for each episode, with the calls that reached the server and their
results. Each process appends to a file of its own; a later object for the same episode replaces the earlier one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fctune.base.errors import DataError
from fctune.calls.matching import call_key
from fctune.data.conversation import Call, Tool
from fctune.engines.mcp_client import McpResult


class EpisodeKey(NamedTuple):
    """An episode of a run: its task, the number of the attempt, and the seed of its tokens."""

    task: str
    sample: int
    seed: int | None


@dataclass(slots=True)
class RecordedEpisode:
    """The calls of an episode with what the server answered.

    Attributes:
        key: The episode.
        calls: Calls that reached the server, each with its result.
        check: Result of the task's check; None if it was not made.
        error: Why the episode was dropped; None if it was not.
    """

    key: EpisodeKey
    calls: list[tuple[Call, McpResult]] = field(default_factory=list)
    check: McpResult | None = None
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as a line of a recording holds it."""
        calls = [{"tool": call.name, "arguments": call.arguments, **_to_json(result)} for call, result in self.calls]
        check = None if self.check is None else _to_json(self.check)
        return {**self.key._asdict(), "calls": calls, "check": check, "error": self.error}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> RecordedEpisode:
        """Return the episode from what ``to_json`` returned.

        Raises:
            LookupError, TypeError, ValueError: The row is something else.
        """
        calls = [(Call(str(one["tool"]), dict(one["arguments"])), _from_json(one)) for one in row["calls"]]
        check = None if row["check"] is None else _from_json(row["check"])
        return cls(EpisodeKey(row["task"], row["sample"], row["seed"]), calls, check, row["error"])


def _to_json(result: McpResult) -> dict[str, Any]:
    return {"text": result.text, "is_error": result.is_error, "structured": result.structured}


def _from_json(row: Mapping[str, Any]) -> McpResult:
    return McpResult(str(row["text"]), bool(row["is_error"]), row["structured"])


class RecordingWriter:
    """Appends episodes to a recording, which is made with the first of them.

    Args:
        path: The file. A line that a kill has cut off is removed.
        tools: The server's tools.
        read_only: Those that change nothing.
    """

    def __init__(self, path: Path, tools: Sequence[Tool], read_only: frozenset[str]):
        self._path, self._lock, self._has_begun = path, threading.Lock(), False
        self._head = {"tools": [tool.function for tool in tools], "read_only": sorted(read_only)}

    def write(self, episode: RecordedEpisode) -> None:
        """Append an episode to the file; the first one also writes the server's tools."""
        with self._lock:
            if not self._has_begun:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                if self._path.exists():
                    with self._path.open("r+b") as file:
                        file.truncate(file.read().rfind(b"\n") + 1)
            lines = [episode.to_json()] if self._has_begun else [self._head, episode.to_json()]
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
            self._has_begun = True


class Recording:
    """The episodes of a recording.

    Args:
        path: The file, or a folder of files that end in ``.jsonl``.

    Attributes:
        tools: The server's tools, as functions.
        read_only: Those that change nothing.

    Raises:
        DataError: It cannot be read, or its files are from different servers.
    """

    def __init__(self, path: Path):
        self._episodes: dict[EpisodeKey, RecordedEpisode] = {}
        self._results: dict[Hashable, McpResult] = {}
        self._checks: dict[Hashable, McpResult] = {}
        heads = []
        for where, row in _read_lines(path):
            try:
                if "tools" in row:
                    heads.append((list(row["tools"]), frozenset(map(str, row["read_only"]))))
                else:
                    self._add(RecordedEpisode.from_json(row))
            except (LookupError, TypeError, ValueError) as error:
                raise DataError(f"{where}: not an episode ({type(error).__name__}: {error}). Copy it again.") from None
        if not heads or not self._episodes:
            raise DataError(f"{path}: holds no recorded episodes. Pass the mcp_calls folder of a run.")
        self.tools, self.read_only = heads[0]
        if any(head != heads[0] for head in heads):
            raise DataError(f"{path}: recorded with different tools. Pass the recording of one run.")

    def find_episode(self, key: EpisodeKey) -> RecordedEpisode | None:
        """Return the episode of this task, number and seed, if it was recorded."""
        return self._episodes.get(key)

    def find_result(self, task: str, calls: Sequence[Call]) -> McpResult | None:
        """Return the result of the last of these calls in any episode of the task that made them in this order."""
        return self._results.get((task, tuple(map(call_key, calls))))

    def find_check(self, task: str, calls: Sequence[Call]) -> McpResult | None:
        """Return the result of the check after these calls in any episode of the task."""
        return self._checks.get((task, tuple(map(call_key, calls))))

    def _add(self, episode: RecordedEpisode) -> None:
        task = episode.key.task
        self._episodes[episode.key] = episode
        made: tuple[Hashable, ...] = ()
        for call, result in episode.calls:
            made = (*made, call_key(call))
            self._results.setdefault((task, made), result)
        if episode.check is not None:
            self._checks.setdefault((task, made), episode.check)


def _read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the position and the object of each line; the last of a file may be cut off by a kill."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    for file in files:
        try:
            *lines, _ = file.read_bytes().split(b"\n")
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror}). Pass the mcp_calls folder of a run.") from None
        for number, line in enumerate(lines, start=1):
            where = f"{file}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{where}: not JSON ({error}). Copy the file again.") from None
            if not isinstance(row, dict):
                raise DataError(f"{where}: expected an object. Copy the file again.")
            yield where, row
