"""Sessions of Claude Code: a file of events, whose messages are Anthropic's and form trees.

Every event names its parent, so a message that was edited begins a branch: each path from a root to a leaf is a row.
Subagents (``isSidechain``) and what follows a compaction have roots of their own. The files have no tools: pass those
that the agent had (``--tools``).
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from typing import Any

from fctune.base.errors import DataError
from fctune.data.sources.defects import RowError
from fctune.data.sources.row_builder import ParsedRow, RowBuilder
from fctune.data.sources.row_formats.anthropic import add_anthropic_message
from fctune.data.sources.row_formats.base import FileRow, LeftOut, LogRow, RowFormat
from fctune.data.sources.row_formats.exchange import SETTINGS

_SESSION = "claude_code_session"
_MESSAGES = ("user", "assistant")
# Types of events that no version sends to the model as a message; others without a message are left out, too.
_TYPES = (*_MESSAGES, "system", "summary", "file-history-snapshot", "queue-operation", "progress", "attachment")
_EVENT_TYPE = re.compile("[a-z]+(?:-[a-z]+)*")
_CALL_KEYS = frozenset(("messages", "input", "output", "inputs", "outputs", "request", "response", "traceId"))
# Keys of an event that describe it or repeat its message.
_DESCRIBING = frozenset(
    (
        *("uuid", "parentUuid", "logicalParentUuid", "sessionId", "agentId", "requestId", "timestamp", "version"),
        *("isSidechain", "isMeta", "isCompactSummary", "isVisibleInTranscriptOnly", "userType", "cwd", "gitBranch"),
        *("slug", "level", "toolUseID", "toolUseResult", "sourceToolUseID", "sourceToolAssistantUUID", "todos", "type"),
        *("thinkingMetadata", "permissionMode", "imagePasteIds", "entrypoint", "promptId", "origin", "mcpMeta"),
        *("promptSource", "sessionKind", "session_id", "interruptedMessageId", "planContent", "queuePriority"),
        *("toolDenialKind", "agentName", "teamName", "attributionAgent", "attributionSkill", "attributionPlugin"),
        *("attributionMcpServer", "attributionMcpTool", "effort", "compactMetadata"),
    )
)
_KEPT = ("uuid", "parentUuid", "sessionId", "type", "interruptedMessageId")
_MESSAGE_KEYS = ("role", "content", "id", "type", "model", "usage", "stop_reason", *SETTINGS)
_FINISHED = (None, "end_turn", "tool_use", "stop_sequence")
# Begins the text in the user's name after a turn that the user interrupted, whose own stop_reason is null.
_INTERRUPTION = "[Request interrupted by user"
_REFUSED_CALL = f"{_INTERRUPTION} for tool use"

_MEMORY_BYTES = 64 * 2**20  # of the events of a file; those of larger ones are on disk

Event = dict[str, Any]


def _is_session(row: dict[str, Any]) -> bool:
    if _SESSION in row:
        return True
    kind = row.get("type")
    if kind not in _TYPES:  # newer versions have more, but never what records of model calls have
        is_event = isinstance(kind, str) and _EVENT_TYPE.fullmatch(kind) is not None and "sessionId" in row
        return is_event and _CALL_KEYS.isdisjoint(row)
    is_message = isinstance(row.get("message"), dict) and "uuid" in row and "parentUuid" in row
    return is_message or "sessionId" in row or "leafUuid" in row or "snapshot" in row


def _expand(rows: Iterator[FileRow]) -> Iterator[LogRow]:
    """Yield each conversation of a file: the path to every leaf, with the line of its first event."""
    tree = _Tree()
    try:
        for line, row in rows:
            if isinstance(row, RowError) or _SESSION in row or not _is_session(row):
                yield line, row  # a row of another format is read as one
            elif isinstance(row.get("uuid"), str):
                # What describes an event, such as a copy of a result, is most of it.
                kept = {key: value for key, value in row.items() if key in _KEPT or key not in _DESCRIBING}
                tree.add(line, kept)
            else:
                yield line, LeftOut("session_event")
        for _ in range(tree.num_left_out):
            yield tree.lines[0], LeftOut("session_event")
        for path in tree.iter_paths():
            first, lost = tree.lines[path[0]], tree.find_lost(path[0])
            if lost is not None:
                reason = f"the event before this one ({lost}) is not in the file, so the conversation has no beginning"
                yield first, RowError("parentUuid", "history_missing", reason)
            else:
                yield first, {_SESSION: tree.find_session(path[-1]), "events": [tree.load(i) for i in path]}
    finally:
        tree.close()


class _Tree:
    """The events of a file by their parents; an event is known by its number in the file.

    Files may hold many sessions, so the events themselves are in a temporary file, and ids are kept as digests: a tenth
    of the bytes of a file stays in memory.
    """

    def __init__(self) -> None:
        self.lines = array("q")
        self.num_left_out = 0
        self._store = tempfile.SpooledTemporaryFile(max_size=_MEMORY_BYTES)  # noqa: SIM115
        self._ends = array("q", (0,))
        self._parents = array("q")  # digest of the parent's id; 0 for none
        self._sessions = array("q")
        self._is_message, self._is_repeated, self._is_answer = bytearray(), bytearray(), bytearray()
        # Two sessions may share events: one that resumes another repeats them.
        self._numbers: dict[int, int] = {}  # by the digest of session and id
        self._elsewhere: dict[int, int] = {}  # by the digest of the id alone
        # The events of one message are a chain: the last of it, and each one's predecessor or itself.
        self._messages = array("q")
        self._last_of: dict[int, int] = {}
        self._before = array("q")
        # The first result of each call of a session, and the one that follows it. Some servers' ids are not unique.
        self._results: dict[int, int] = {}
        self._called: dict[int, tuple[int, tuple[int, ...]]] = {}  # an event's own digest and its calls
        self._answered: dict[int, tuple[int, ...]] = {}

    def add(self, line: int, event: Event) -> None:
        """Add the next event of the file.

        Raises:
            DataError: The disk of temporary files is full.
        """
        number, session = len(self.lines), _digest(event.get("sessionId"))
        uuid, parent = _digest(event["uuid"]), event.get("parentUuid")
        self.lines.append(line)
        with self._full_disk_as_error():
            self._store.write(json.dumps(event, separators=(",", ":")).encode())
        self._ends.append(self._store.tell())
        self._sessions.append(session)
        self._parents.append(_digest(parent) if isinstance(parent, str) else 0)
        is_repeated = self._numbers.setdefault(uuid ^ session, number) != number
        self._elsewhere.setdefault(uuid, number)
        is_message = _is_message(event)
        is_answer = is_message and event["type"] == "assistant"
        self.num_left_out += not is_message
        self._is_message.append(is_message)
        self._is_repeated.append(is_repeated)
        self._is_answer.append(is_answer)
        message_id = _read_message_id(event) if is_answer else None
        message = 0 if message_id is None else _digest(message_id) ^ session or 1
        self._messages.append(message)
        self._before.append(number)
        results = tuple(map(_digest, _list_ids(event, "tool_result", "tool_use_id")))
        if results:
            self._answered[number] = results
        if calls := tuple(map(_digest, _list_ids(event, "tool_use", "id"))):
            self._called[number] = uuid, calls
        if is_message and not is_repeated:
            if message:
                self._before[number] = self._last_of.get(message, number)
                self._last_of[message] = number
            for call in results:
                self._results.setdefault(call ^ session, number)
                self._results.setdefault(call ^ session ^ self._parents[number], number)

    @contextmanager
    def _full_disk_as_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{tempfile.gettempdir()}: the events of a large file of sessions cannot be written there "
                f"({error.strerror}). Free some space, or name another directory in TMPDIR."
            ) from None

    def load(self, number: int) -> Event:
        """Read an event back from the temporary file, by its number."""
        self._store.seek(self._ends[number])
        event: Event = json.loads(self._store.read(self._ends[number + 1] - self._ends[number]))
        return event

    def close(self) -> None:
        """Delete the temporary file of events."""
        with suppress(OSError):  # of what a full disk has not taken
            self._store.close()

    def find_session(self, number: int) -> str:
        """Return the id of an event's session."""
        return str(self.load(number).get("sessionId") or "")

    def _find_parent(self, number: int) -> int | None:
        """Return the parent of an event, of its own session if it can be; None if the file lacks it."""
        parent = self._parents[number]
        found = self._numbers.get(parent ^ self._sessions[number])
        return self._elsewhere.get(parent) if found is None else found

    def find_lost(self, number: int) -> str | None:
        """Return the id of an ancestor that the file lacks, or None."""
        seen = set()
        while number not in seen:
            seen.add(number)
            if not self._parents[number]:
                return None
            found = self._find_parent(number)
            if found is None:
                return str(self.load(number)["parentUuid"])
            number = found
        return None

    def iter_paths(self) -> Iterator[array[int]]:
        """Yield the messages of each path to a leaf, in the order of the file; needs all events.

        Raises:
            DataError: The disk of temporary files is full.
        """
        with self._full_disk_as_error():
            self._store.flush()
        count = len(self.lines)
        is_inner, is_covered = bytearray(count), bytearray(count)
        for number in range(count):
            if self._parents[number] and (parent := self._find_parent(number)) is not None:
                is_inner[parent] = True
        paths: list[array[int]] = []
        leaves = (number for number in reversed(range(count)) if not is_inner[number])
        for leaf in chain(leaves, reversed(range(count))):  # events in a circle have no leaf
            if self._is_repeated[leaf] or is_covered[leaf]:
                continue
            events = self._collect(leaf)
            for number in events:
                is_covered[number] = True
            if messages := sorted(number for number in events if self._is_message[number]):
                paths.append(array("q", messages))
        beginnings = {path[0] for path in paths}
        containing: dict[int, list[int]] = {}  # of each beginning, the paths with it; few in a file of many sessions
        for index, path in enumerate(paths):
            for number in beginnings.intersection(path):
                containing.setdefault(number, []).append(index)
        distinct = []
        for index, path in enumerate(paths):
            own, others = set(path), [other for other in containing[path[0]] if other != index]
            if not any(own < set(paths[i]) or (path == paths[i] and i < index) for i in others):
                distinct.append(path)
        yield from sorted(distinct, key=lambda path: (path[0], path[-1]))

    def _collect(self, leaf: int) -> set[int]:
        """Return the ancestors of an event, with the other events of their messages and the results of their calls.

        A message is several events, one for each block, and parallel results have different parents.
        """
        path: set[int] = set()
        number: int | None = leaf
        while number is not None and number not in path:
            path.add(number)
            number = self._find_parent(number) if self._parents[number] else None
        for number in [number for number in path if self._is_answer[number]]:
            last = self._last_of.get(self._messages[number]) if self._messages[number] else None
            while last is not None:
                path.add(last)
                last = self._before[last] if self._before[last] != last else None
        called: dict[int, list[int]] = {}
        answered: dict[int, list[int]] = {}
        for number in sorted(path):
            for call in self._called.get(number, (0, ()))[1]:
                called.setdefault(call, []).append(number)
            for call in self._answered.get(number, ()):
                answered.setdefault(call, []).append(number)
        for call, numbers in called.items():
            for number, end in zip(numbers, [*numbers[1:], len(self.lines)], strict=True):
                if any(number < result < end for result in answered.get(call, ())):
                    continue
                key = call ^ self._sessions[number]
                result = self._results.get(key ^ self._called[number][0], self._results.get(key, number))
                if number < result < end:
                    path.add(result)
        return path


def _digest(value: Any) -> int:
    """Return 63 bits that stand for an id; 0 stands for none."""
    digest = hashlib.blake2b(str(value).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 or 1


def _is_message(event: Event) -> bool:
    """Return True for what the model was sent or wrote; the application's own errors are neither."""
    is_message = event.get("type") in _MESSAGES and isinstance(event.get("message"), dict)
    return is_message and not event.get("isApiErrorMessage") and event["message"].get("model") != "<synthetic>"


def _read_message_id(event: Event) -> str | None:
    """Return the id of an event's message, which its other events share; None if it has none."""
    message_id = event["message"].get("id")
    return message_id if isinstance(message_id, str) and message_id else None


def _list_ids(event: Event, kind: str, key: str) -> list[str]:
    message = event.get("message")
    content = message.get("content") if isinstance(message, dict) else None
    blocks = content if isinstance(content, list) else []
    found = [block.get(key) for block in blocks if isinstance(block, dict) and block.get("type") == kind]
    return [value for value in found if isinstance(value, str)]


def _find_interrupted(event: Event, messages: list[tuple[Event, str]], numbers: dict[str, int]) -> Event | None:
    """Return the assistant's message that a user's event says was interrupted, or None.

    Args:
        event: The event of the user.
        messages: The messages before it, with their locations.
        numbers: Index in ``messages`` by the id of a message.
    """
    name = event.get("interruptedMessageId")
    if isinstance(name, str) and name in numbers:
        return messages[numbers[name]][0]
    content = event["message"].get("content")
    blocks = content if isinstance(content, list) else [{"text": content}]
    texts = [block.get("text") for block in blocks if isinstance(block, dict)]
    text = next((text for text in texts if isinstance(text, str) and text.startswith(_INTERRUPTION)), "")
    if not text and name is None:
        return None
    # A turn with results was finished: it is the one after it, of which nothing was written, that was interrupted.
    candidates = [message for message, _ in (messages if text.startswith(_REFUSED_CALL) else messages[-1:])]
    return next((message for message in reversed(candidates) if message["role"] == "assistant"), None)


def _read(row: dict[str, Any], builder: RowBuilder) -> ParsedRow:
    messages: list[tuple[Event, str]] = []
    numbers: dict[str, int] = {}  # of messages of several events
    for i, event in enumerate(row["events"]):
        message, at = event["message"], f"events[{i}]"
        builder.note_unread(event, {*_DESCRIBING, "message"}, at)
        builder.note_unread(message, _MESSAGE_KEYS, f"{at}.message")
        if event["type"] == "user" and (interrupted := _find_interrupted(event, messages, numbers)) is not None:
            interrupted["stop_reason"] = "interrupted"
        message_id = _read_message_id(event) if event["type"] == "assistant" else None
        content = message.get("content")
        earlier = messages[numbers[message_id]][0] if message_id in numbers else {}
        if isinstance(content, list) and earlier.get("role") == message.get("role"):
            earlier["content"] = [*earlier["content"], *content]
            earlier["stop_reason"] = message.get("stop_reason") or earlier["stop_reason"]
            continue
        if message_id is not None and isinstance(content, list):
            numbers[message_id] = len(messages)
        kept = {"role": message.get("role"), "content": content, "stop_reason": message.get("stop_reason")}
        messages.append((kept, f"{at}.message"))
    for message, at in messages:
        stop_reason = message.pop("stop_reason")
        add_anthropic_message(message, at, builder)
        if stop_reason not in _FINISHED and builder.messages[-1].role == "assistant":
            builder.messages[-1] = replace(builder.messages[-1], weight=0.0)
            builder.notes["step_as_context"] += 1
    builder.join_turns()
    return builder.finish()


ROW_FORMAT = RowFormat(
    name="claude_code",
    keys="events with uuid, parentUuid, sessionId, message",
    matches=_is_session,
    read=_read,
    expand=_expand,
    columns=(_SESSION, "events"),
    is_log=True,
    priority=12,
)
