"""Tasks from recorded conversations: as long as the policy makes the row's calls, the tools answer as recorded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

from fctune.base.errors import DataError
from fctune.calls.judge import judge
from fctune.calls.matching import call_key
from fctune.data.conversation import Call, Conversation, Message
from fctune.data.sources.defects import Defect
from fctune.data.sources.reader import parse_source
from fctune.data.tool_schema import ToolSet
from fctune.tasks.episode import Episode
from fctune.tasks.rollouts import RolloutSettings, TaskSet
from fctune.tasks.task import DialogueState, Step, Task, TaskState

RECORDED_PARTS: dict[str, str] = {
    "solved": "1 if every turn makes the calls of the row",
    "progress": "share of the turns before the first that does not",
}
"""Parts of a reward with recorded results, each with its meaning."""


class RecordedTasks(TaskSet):
    """Recorded conversations, which continue as recorded as long as the policy makes the row's calls.

    Rows without tools, rows without calls that have results, and repeated rows are left out.

    Raises:
        ConfigError: A part of the reward does not exist.
        DataError: No row has recorded results.
    """

    parts = RECORDED_PARTS
    default_weights: ClassVar[Mapping[str, float]] = {"solved": 1.0}

    def __init__(self, conversations: Iterable[Conversation], settings: RolloutSettings):
        super().__init__(settings)
        found = (RecordedTask(one) for one in conversations if one.tools and _find_start(one) is not None)
        self._tasks = {task.id: task for task in found}
        if not self._tasks:
            raise DataError(
                "no row has tools and calls with recorded results. Pass rows that have both, or use single-turn cases."
            )

    @property
    def ids(self) -> Sequence[str]:
        """Ids of the tasks: digests of their rows."""
        return list(self._tasks)

    def digest(self) -> str:
        """Return a hex digest of the rows and settings."""
        settings = [self._limits.describe(), dict(sorted(self._weights.items()))]
        return hashlib.blake2b(json.dumps([settings, self.ids]).encode(), digest_size=16).hexdigest()

    def open(self, task_id: str) -> Task:
        """Return the task of a row."""
        return self._tasks[task_id]

    def score(self, episode: Episode) -> Mapping[str, float]:
        """Return the parts of the reward, from the share of right turns."""
        assert isinstance(episode.state, _RecordedState)
        share = episode.state.share_right
        return {"solved": float(share == 1.0), "progress": share}


def read_recorded(path: str) -> Iterator[Conversation]:
    """Yield the conversations of a source, as ``fctune.data.sources.read_source`` takes it.

    Raises:
        DataError: The source, or one of its rows, cannot be read.
    """
    for parsed in parse_source(path):
        if isinstance(parsed, Defect):
            raise DataError(f"{parsed}. Fix the row or remove it.")
        yield parsed.conversation


class RecordedTask(Task):
    """A recorded conversation with results."""

    category = "recorded"

    def __init__(self, row: Conversation):
        self.id, self.row = row.digest(), row

    @property
    def questions(self) -> Sequence[Message]:
        """All messages of the row."""
        return self.row.messages

    @property
    def solution(self) -> Sequence[Call]:
        """The row's calls, from the first turn that the policy generates."""
        return [call for message in self.row.messages[_find_start(self.row) :] for call in message.calls]

    def start(self) -> TaskState:
        """Return a state that follows the row."""
        return _RecordedState(self.row)


class _RecordedState(DialogueState):
    """A row, up to the first turn in which the policy deviates from it."""

    def __init__(self, row: Conversation):
        start = _find_start(row)
        assert start is not None
        super().__init__(replace(row, messages=row.messages[:start]))
        self._messages = row.messages
        self._position = start
        self._tools = ToolSet(row.tools)
        self._num_turns = sum(message.role == "assistant" for message in row.messages[start:])
        self._num_right = 0

    @property
    def share_right(self) -> float:
        """Share of the row's turns before the first that deviates."""
        return self._num_right / self._num_turns

    def respond(self, step: Step) -> Sequence[Message]:
        """Return the recorded results and the messages after them, if the calls are those of the row."""
        expected = self._messages[self._position]
        made = step.parsed._replace(calls=step.calls)
        if step.parsed.malformed or not judge(expected.calls, made, self._tools).outcome.is_correct:
            return ()
        self._num_right += 1
        following = []
        self._position += 1
        while self._position < len(self._messages) and self._messages[self._position].role != "assistant":
            following.append(self._messages[self._position])
            self._position += 1
        if self._position == len(self._messages):
            return ()
        return _to_made_calls(expected.calls, step.calls, following)


def _find_start(row: Conversation) -> int | None:
    """Return the index of the first turn that the policy generates; None if no call has a recorded result."""
    for index, message in enumerate(row.messages):
        if message.role == "assistant" and message.weight > 0:
            rest = row.messages[index:]
            has_results = any(one.calls and other.role == "tool" for one, other in pairwise(rest))
            return index if has_results and index > 0 else None
    return None


def _to_made_calls(expected: Sequence[Call], made: Sequence[Call], following: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages with results in the order of the calls that were made, and with their ids."""
    results = [message for message in following if message.role == "tool"]
    others = [message for message in following if message.role != "tool"]
    if len(results) != len(expected):
        return tuple(following)
    left = list(range(len(expected)))
    ordered = []
    for call in made:
        index = next((i for i in left if call_key(expected[i]) == call_key(call)), left[0])
        left.remove(index)
        ordered.append(replace(results[index], call_id=call.id, name=call.name))
    return (*ordered, *others)
