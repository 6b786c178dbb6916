"""Tasks in environments: a question, calls that change a state, and a reward for the final state and the calls."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fctune.base.errors import ConfigError
from fctune.data.conversation import Call, Conversation, Message
from fctune.tasks.environments.base import CheckedTask, Split
from fctune.tasks.environments.host import EnvironmentDefect, EnvironmentHost
from fctune.tasks.episode import Episode
from fctune.tasks.rollouts import RolloutSettings, TaskSet
from fctune.tasks.task import DialogueState, Step, Task, TaskError, TaskState, to_results

ENVIRONMENT_PARTS: dict[str, str] = {
    "solved": "1 if the final state is the goal and the answer has the facts that were asked for",
    "progress": "share of the required changes and facts that were achieved, minus unwanted changes",
    "economy": "calls of the task's own solution divided by the calls made, at most 1; 0 unless solved",
    "validity": "share of the calls that match a tool and that the environment accepts; 0 without calls",
}
"""Parts of a reward in environments, each with its meaning."""

# A minus follows neither a word nor a minus, as the hyphens of ranges and dates do; a colon after a digit is of a time.
_NUMBER = re.compile(r"(?:(?<![\w-])[-\u2212]|(?<![\w.-])(?<!\d:))\d[\d,]*(?:\.\d+)?(?![\w:-]*\d)")
_LEADING_ZERO = re.compile(r"\b0(?=\d:\d\d)")


class EnvironmentTasks(TaskSet):
    """The tasks of one or several environments, in alternation.

    Args:
        hosts: The environments.
        split: Side of the tasks; those of ``test`` are never trained on.
        num_tasks: Tasks of each environment.
        settings: How they are asked and rewarded.

    Raises:
        ConfigError: A part does not exist, or an environment cannot make its first task.
    """

    parts = ENVIRONMENT_PARTS
    # Needless and refused calls cost up to a fifth.
    default_weights: ClassVar[Mapping[str, float]] = {"solved": 0.8, "economy": 0.2}

    def __init__(
        self,
        hosts: Sequence[EnvironmentHost],
        split: Split,
        num_tasks: int,
        settings: RolloutSettings,
    ):
        super().__init__(settings)
        self._hosts = {host.name: host for host in hosts}
        self._split: Split = split
        pairs = [(host, seed) for seed in range(num_tasks) for host in hosts]
        self._tasks = {task.id: task for task in (EnvironmentTask(host, seed, split) for host, seed in pairs)}
        limits, weights = self._limits.describe(), dict(sorted(self._weights.items()))
        described = [sorted(self._hosts), split, num_tasks, limits, weights]
        tools = [[tool.to_json() for tool in host.tools] for host in hosts]
        try:
            first = [self._tasks[f"{host.name}/{split}/0"].make().describe() for host in hosts]
        except EnvironmentDefect as error:
            raise ConfigError(f"{error}.") from None
        text = json.dumps([described, tools, first])
        self._digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def ids(self) -> Sequence[str]:
        """Ids of the tasks."""
        return list(self._tasks)

    def digest(self) -> str:
        """Return a hex digest of the settings, the tools and the first task of each environment."""
        return self._digest

    def open(self, task_id: str) -> Task:
        """Return the task of an id."""
        return self._tasks[task_id]

    def score(self, episode: Episode) -> Mapping[str, float]:
        """Compare the state with the goal."""
        assert isinstance(episode.state, _EnvironmentState)
        return episode.state.score(episode.final_text)

    def close(self) -> None:
        """End the environments' processes."""
        for host in self._hosts.values():
            host.close()


class EnvironmentTask(Task):
    """A task of an environment, made when it is first needed."""

    def __init__(self, host: EnvironmentHost, seed: int, split: Split):
        self.id = f"{host.name}/{split}/{seed}"
        self.category = ""
        self._host, self._seed, self._split = host, seed, split
        self._made: CheckedTask | None = None

    @property
    def solution(self) -> Sequence[Call]:
        """Calls of the task's own solution; none before it is made."""
        return () if self._made is None else [Call(name, arguments) for name, arguments in self._made.spec.calls]

    def make(self) -> CheckedTask:
        """Return the checked task.

        Raises:
            EnvironmentDefect: The environment cannot make it.
        """
        if self._made is None:
            self._made = self._host.make_task(self._seed, self._split)
            self.category = f"{self._host.name}: {self._made.spec.category}"
        return self._made

    def start(self) -> TaskState:
        """Begin an episode in the environment."""
        try:
            return _EnvironmentState(self._host, self.make())
        except EnvironmentDefect as error:
            raise TaskError(str(error)) from None


class _EnvironmentState(DialogueState):
    """One episode of a task."""

    def __init__(self, host: EnvironmentHost, task: CheckedTask):
        spec = task.spec
        system = (Message("system", spec.system),) if spec.system is not None else ()
        super().__init__(Conversation((*system, Message("user", spec.question)), host.tools, task.id))
        self._task = task
        self._run = host.start(task)

    def respond(self, step: Step) -> Sequence[Message]:
        """Make the answer's calls; an answer without calls ends the episode."""
        try:
            results = [self._run.call(call).text for call in step.calls]
        except EnvironmentDefect as error:
            raise TaskError(str(error)) from None
        step.results = tuple(results)
        return to_results(step.calls, results)

    def score(self, text: str) -> Mapping[str, float]:
        """Return the parts of the reward; ``text`` is the final answer."""
        try:
            state = self._run.state()
        except EnvironmentDefect as error:
            raise TaskError(str(error)) from None
        return score_episode(self._task, state, [result.is_accepted for _, result in self._run.calls], text)

    def close(self) -> None:
        """Free the episode in the environment's process."""
        self._run.close()


def score_episode(task: CheckedTask, state: Any, is_accepted: Sequence[bool], text: str) -> dict[str, float]:
    """Return every part of ``ENVIRONMENT_PARTS``; all are 0 if nothing was done.

    Args:
        task: The task.
        state: The final state.
        is_accepted: For each call made, whether it was accepted.
        text: The final answer, after the last call.
    """
    facts = task.spec.facts
    num_told = sum(has_fact(text, fact) for fact in facts) if any(is_accepted) else 0
    start, goal = _flatten(task.start), _flatten(task.goal)
    distance, left = _distance(start, goal), _distance(_flatten(state), goal)
    solved = left == 0 and num_told == len(facts) and any(is_accepted)
    due = distance + len(facts)
    done = distance - left + num_told
    num_calls = len(is_accepted)
    return {
        "solved": float(solved),
        "progress": max(0.0, done / due) if due and any(is_accepted) else 0.0,
        "economy": min(1.0, len(task.spec.calls) / num_calls) if solved else 0.0,
        "validity": sum(is_accepted) / num_calls if num_calls else 0.0,
    }


def has_fact(text: str, fact: str) -> bool:
    """Return True if a text contains a fact: an equal number in any notation, or its words in any case."""
    if _NUMBER.fullmatch(fact):
        return any(_to_float(found) == _to_float(fact) for found in _NUMBER.findall(text))
    text, fact = (_LEADING_ZERO.sub("", one.lower()) for one in (text, fact))
    return re.search(rf"(?<!\w){re.escape(fact)}(?!\w)", text) is not None


def _to_float(number: str) -> float:
    return float(number.replace(",", "").replace("\u2212", "-"))


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of a JSON value by their path; empty containers count as leaves."""
    if isinstance(value, dict) and value:
        found: dict[str, Any] = {}
        for key, item in value.items():
            found |= _flatten(item, f"{path}/{key}")
        return found
    if isinstance(value, list) and value:
        # Each item counts as one leaf, regardless of its position.
        texts = Counter(json.dumps(item, sort_keys=True) for item in value)
        return {f"{path}/{text}#{number}": True for text, count in texts.items() for number in range(count)}
    return {path: value}


def _distance(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Return the number of leaves that differ."""
    return sum(path not in one or path not in other or one[path] != other[path] for path in one.keys() | other.keys())
