"""Tasks in environments: a question, calls that change a state, and a reward for the final state and the calls."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

from fctune.base.errors import ConfigError
from fctune.calls.formats.base import CallFormat, Parsed
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Conversation, Message
from fctune.tasks.environments.base import Split, Task
from fctune.tasks.environments.host import EnvironmentDefect, EnvironmentHost
from fctune.tasks.environments.scoring import ENVIRONMENT_PARTS, ENVIRONMENT_REWARD, score_episode
from fctune.tasks.sampling.dialogues import DialogueError, DialogueLimits, DialoguePlayer, to_results
from fctune.tasks.sampling.rewards import CONTROL, check_reward
from fctune.tasks.sampling.rollouts import Request, Rollout, RolloutEngine


class EnvironmentTasks:
    """The tasks of one or several environments, in alternation.

    Args:
        hosts: The environments.
        split: Side of the tasks; those of ``test`` are never trained on.
        num_tasks: Tasks of each environment.
        template: Chat template and tokenizer of the policy.
        call_format: Format in which it writes calls.
        limits: Where dialogues end.
        weights: Weight of each part of ``ENVIRONMENT_PARTS`` and of the control.
        where: Config key of the weights, for the message.

    Raises:
        ConfigError: A part does not exist, or an environment cannot make its first task.
    """

    def __init__(
        self,
        hosts: Sequence[EnvironmentHost],
        split: Split,
        num_tasks: int,
        template: ChatTemplate,
        call_format: CallFormat,
        limits: DialogueLimits,
        weights: Mapping[str, float] = ENVIRONMENT_REWARD,
        where: str = "reward",
    ):
        check_reward(weights, where, ENVIRONMENT_PARTS | CONTROL, "this reward")
        self._hosts = {host.name: host for host in hosts}
        self._split: Split = split
        self._ids = [f"{host.name}/{split}/{seed}" for seed in range(num_tasks) for host in hosts]
        self._player = DialoguePlayer(template, call_format, limits, weights)
        self._tasks: dict[str, Task] = {}
        self._settings = [sorted(self._hosts), split, num_tasks, repr(limits), dict(sorted(weights.items()))]
        for host in hosts:
            try:
                self._tasks[f"{host.name}/{split}/0"] = host.make_task(0, split)
            except EnvironmentDefect as error:
                raise ConfigError(f"{error}.") from None

    @property
    def ids(self) -> Sequence[str]:
        """Ids of the tasks."""
        return self._ids

    def digest(self) -> str:
        """Return a hex digest of the settings, the tools and the first task of each environment."""
        tools = [[tool.to_json() for tool in host.tools] for host in self._hosts.values()]
        first = [repr(self._tasks[f"{name}/{self._split}/0"]) for name in self._hosts]
        text = json.dumps([self._settings, tools, first])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def play(self, engine: RolloutEngine, requests: Sequence[Request]) -> Iterator[Rollout]:
        """Yield the rewarded rollout of each request."""
        return self._player.play(engine, requests, self._open)

    def close(self) -> None:
        """End the environments' processes."""
        for host in self._hosts.values():
            host.close()

    def _open(self, request: Request) -> _EnvironmentWorld:
        name, _, seed = request.case_id.rsplit("/", 2)
        host = self._hosts[name]
        try:
            task = self._tasks.get(request.case_id)
            if task is None:
                task = self._tasks[request.case_id] = host.make_task(int(seed), self._split)
            return _EnvironmentWorld(host, task)
        except EnvironmentDefect as error:
            raise DialogueError(str(error)) from None


class _EnvironmentWorld:
    """One episode of a task."""

    def __init__(self, host: EnvironmentHost, task: Task):
        spec = task.spec
        system = (Message("system", spec.system),) if spec.system is not None else ()
        self.prompt = Conversation((*system, Message("user", spec.question)), host.tools, task.id)
        self.category = f"{host.name}: {spec.category}"
        self._task = task
        self._episode = host.start(task)

    def respond(self, parsed: Parsed) -> Sequence[Message]:
        """Make the answer's calls; an answer without calls ends the dialogue."""
        try:
            results = [self._episode.call(call).text for call in parsed.calls]
        except EnvironmentDefect as error:
            raise DialogueError(str(error)) from None
        return to_results(parsed.calls, results)

    def score(self, text: str) -> Mapping[str, float]:
        """Compare the state with the goal."""
        try:
            state = self._episode.state()
        except EnvironmentDefect as error:
            raise DialogueError(str(error)) from None
        return score_episode(self._task, state, [result.is_accepted for _, result in self._episode.calls], text)

    def close(self) -> None:
        """Free the episode in the environment's process."""
        self._episode.close()
