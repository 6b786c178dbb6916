"""Rollouts: a policy's episodes, token by token, with their rewards.

A ``TaskSet`` plays requests with an engine that continues token ids; training learns from the resulting ``Rollout``.
Tokens are never decoded and encoded again on the way: the sampled tokens are trained.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from fctune.base.errors import ConfigError, DataError
from fctune.calls.formats.base import CallFormat
from fctune.calls.response_template import find_call_format
from fctune.checkpoint.fault_hooks import fire
from fctune.config.intervals import choose_noun, format_count
from fctune.data.chat_template import ChatTemplate
from fctune.engines.engine import Engine
from fctune.tasks.episode import Episode, EpisodeLimits, EpisodeRunner, EpisodeTokens
from fctune.tasks.judge import JudgedEpisode, judge_episode
from fctune.tasks.opinions import JUDGE_PART, Opinion, TextJudge, read_opinion
from fctune.tasks.rewards import BINARY, CONTROL, REWARD_PARTS, check_reward, score_answer, toss_coin, weigh_parts
from fctune.tasks.suite import Suite
from fctune.tasks.task import AnswerCase, Case, Task, TaskError

T = TypeVar("T")

# Failing tasks in a row after which the cause must be systematic, so that more tasks will not help. A single task,
# such as one whose prompt is too long, fails as many times as its group has answers.
_MAX_FAILING = 20
# Fields of a rollout that are lists in JSON.
_LISTS = ("prompt_ids", "ids", "logprobs", "rejected", "versions")


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one answer to a task: ``sample`` numbers the task's answers, ``seed`` determines its tokens."""

    case_id: str
    sample: int
    seed: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """One answer to a task, from the prompt to the end of its last turn.

    Attributes:
        case_id: Id of the task.
        sample: Number of the answer among those to the same task in a step.
        category: Category of the task.
        version: Oldest version of the policy that wrote a turn.
        prompt_ids: Token ids of the prompt.
        ids: Token ids after the prompt: the generated ones, including the stop token of each turn, and between turns
            those that the chat template adds, such as a tool's result.
        is_generated: True for each id that the policy generated; only these are trained.
        logprobs: Log-probability of each id under the policy that generated it, before the temperature is applied; 0
            for ids that were not generated.
        is_cut: True if the token limit ended the answer.
        reward: Weighted sum of the parts.
        parts: Parts of the reward, each from 0 to 1.
        text: The generated text, for display.
        error: Why there is no answer; ids are empty then.
        judging_s: Seconds that judging took; not compared.
        rejected: Kinds of unusable answers that a server sent to its requests (``server_answers``). After each the
            request was sent again, a bounded number of times; after the last, ``error`` is set.
        further: Further sequences of the episode, which do not continue the first: those of an agent that rewrites its
            history, or does several things at once.
        opinion: What a language model that judges said of the answer, if it was asked; not compared.
        versions: Version of the policy that wrote each turn, and gave the log-probabilities of its ids.
    """

    case_id: str
    sample: int
    category: str
    version: int
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    is_generated: tuple[bool, ...]
    logprobs: tuple[float, ...]
    is_cut: bool = False
    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    error: str | None = None
    judging_s: float = field(default=0.0, compare=False)
    rejected: tuple[str, ...] = ()
    further: tuple[EpisodeTokens, ...] = ()
    opinion: Opinion | None = field(default=None, compare=False)
    versions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.is_generated) == len(self.logprobs), "one flag and one logprob for each id"

    @property
    def num_generated(self) -> int:
        """Number of generated ids of all sequences, which are trained."""
        return sum(self.is_generated) + sum(sum(one.is_generated) for one in self.further)

    @property
    def sequences(self) -> list[Rollout]:
        """The rollout as one for each of its sequences."""
        rest = [
            dataclasses.replace(
                self,
                prompt_ids=one.prompt_ids,
                ids=tuple(one.ids),
                is_generated=tuple(one.is_generated),
                logprobs=tuple(one.logprobs),
                further=(),
            )
            for one in self.further
        ]
        return [dataclasses.replace(self, further=()), *rest] if rest else [self]

    def to_json(self) -> dict[str, Any]:
        """Return the rollout as plain values, which ``from_json`` reads back."""
        row = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        for name in _LISTS:
            row[name] = list(row[name])
        row["opinion"] = None if self.opinion is None else self.opinion.to_json()
        row |= {"is_generated": [int(one) for one in self.is_generated], "parts": dict(self.parts)}
        if self.further:
            return row | {"further": [one.to_json() for one in self.further]}
        del row["further"]
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Rollout:
        """Return the rollout from the plain values of ``to_json``; other keys are ignored."""
        later = ("rejected", "versions", "further", "opinion")  # which earlier checkpoints lack
        values = {one.name: row[one.name] for one in dataclasses.fields(cls) if one.name not in later}
        values |= {"rejected": row.get("rejected", ()), "versions": row.get("versions", ())}
        values["further"] = tuple(EpisodeTokens.from_json(one) for one in row.get("further", ()))
        values["opinion"] = read_opinion(row.get("opinion"))
        for name in _LISTS:
            values[name] = tuple(values[name])
        return cls(**values | {"is_generated": tuple(map(bool, values["is_generated"]))})


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """How tasks are asked and rewarded.

    Attributes:
        template: Chat template and tokenizer of the policy, which writes calls in the template's format. None: episodes
            are not kept as token ids, so the tasks can be evaluated and not played.
        limits: Where episodes end.
        weights: Weight of each part of the reward; None: the default of the tasks.
        section: Config section of the settings, for messages.
        judge: Language model that scores answers in words; it is closed with the tasks.
    """

    template: ChatTemplate | None
    limits: EpisodeLimits
    weights: Mapping[str, float] | None = None
    section: str = "grpo"
    judge: TextJudge | None = None


class TaskSet(ABC):
    """Tasks for a policy and the rewards of its episodes; subclasses open tasks and score how they end.

    Several threads play with one set while a server generates, so subclasses, their tasks and states are thread-safe;
    an episode stays on its thread.

    Raises:
        ConfigError: A part of the reward does not exist, or the template's call format is unknown.
    """

    parts: ClassVar[Mapping[str, str]]
    """Parts of the reward besides the control, each with its meaning."""
    default_weights: ClassVar[Mapping[str, float]]
    reward_name: ClassVar[str] = "this reward"
    max_failing: ClassVar[int | None] = _MAX_FAILING
    """Failing tasks in a row that end the run; None: failures are left to whoever asks."""
    num_at_once: int | None = None
    """Episodes that run at a time; None: all that are requested."""
    is_exclusive: bool = False
    """True if only one process of a run may play the tasks."""
    num_judged_at_once: int = 1
    """Episodes that are rewarded at a time, while further ones are played."""

    def __init__(self, settings: RolloutSettings, further_parts: Mapping[str, str] | None = None):
        weights = self.default_weights if settings.weights is None else settings.weights
        parts = {**self.parts, **(further_parts or {}), **CONTROL}
        check_reward(weights, f"{settings.section}.reward", parts, self.reward_name)
        self._template, self._limits, self._weights = settings.template, settings.limits, dict(weights)
        self._call_format = None if settings.template is None else find_call_format(settings.template)
        self._failing: Counter[str] = Counter()  # failures of each task since the last rollout
        self._counting = threading.Lock()  # of the failures

    @property
    @abstractmethod
    def ids(self) -> Sequence[str]:
        """Ids of the tasks, in an order that does not change."""

    @abstractmethod
    def digest(self) -> str:
        """Return a hex digest of everything that prompts and rewards depend on."""

    @abstractmethod
    def open(self, task_id: str) -> Task:
        """Return the task of an id."""

    @abstractmethod
    def score(self, episode: Episode) -> Mapping[str, float]:
        """Return the parts of the reward of an episode, each from 0 to 1.

        Raises:
            TaskError: The episode cannot be judged.
        """

    def begin(self, request: Request) -> Episode:
        """Return the episode of a request, before its first answer."""
        return Episode(self.open(request.case_id), request.sample, request.seed)

    def play(self, engine: Engine, requests: Sequence[Request]) -> Iterator[Rollout]:
        """Yield the rewarded rollout of each request, in the order in which episodes end.

        A task that fails, or a template that cannot continue, ends its episode with an error.

        Raises:
            ConfigError: Many tasks in a row failed.
        """
        assert self._template is not None, "tasks without a chat template are not played"
        runner = EpisodeRunner(engine, self._call_format, self._limits, template=self._template, acts_on="strict")
        for rollout in self._reward_each(runner.run(map(self.begin, requests), self.num_at_once, gives_up=False)):
            self.note_end(rollout.case_id, rollout.error)
            yield rollout

    def ask_each(
        self,
        engine: Engine,
        call_format: CallFormat | None,
        limits: EpisodeLimits,
        ids: Sequence[str],
        end: Callable[[Episode], T],
        *,
        num_at_once: int | None = None,
        is_first: bool = True,
    ) -> Iterator[T]:
        """Ask each of some tasks once, to measure a model; yield what ``end`` returns for each episode that is over.

        Args:
            engine: The model or server.
            call_format: The call format of its text; None: the server has parsed the calls.
            limits: Where episodes end.
            ids: Ids of the tasks.
            end: Called while the task still holds what its episode left.
            num_at_once: Most episodes that advance together; None: all.
            is_first: No prompt was answered before, so an engine that can answer none of them is an error.
        """
        runner = EpisodeRunner(engine, call_format, limits, acts_on="strict")
        yield from map(end, runner.run((Episode(self.open(one)) for one in ids), num_at_once, is_first))

    def check(self) -> None:  # noqa: B027 most tasks are checked as they are made
        """Check that the first task can be solved.

        Raises:
            ConfigError: It cannot.
        """

    def has_failed(self) -> bool:
        """Return True if so many tasks in a row failed that more will not help."""
        return self.max_failing is not None and len(self._failing) >= self.max_failing

    def note_end(self, task_id: str, error: str | None) -> None:
        """Count a task that failed, with its ``error``, or start anew after one that did not.

        Raises:
            ConfigError: Many tasks in a row failed.
        """
        with self._counting:
            if error is None:
                self._failing.clear()
            else:
                self._failing[task_id] += 1
            has_failed = self.has_failed()
        if has_failed:
            raise ConfigError(
                f"all dialogues of {len(self._failing)} tasks in a row failed, the last one, {task_id}, with: "
                f"{error.rstrip('.') if error else ''}. Fix the cause and run the same command again to resume."
            )

    def close(self) -> None:  # noqa: B027 most tasks hold nothing
        """Release what the tasks hold."""

    def _reward_each(self, episodes: Iterable[Episode]) -> Iterator[Rollout]:
        """Yield the rewarded rollout of each episode in their order."""
        if self.num_judged_at_once == 1:
            yield from map(self._reward, episodes)
            return
        pool, waiting = ThreadPoolExecutor(self.num_judged_at_once, "judge"), deque[Future[Rollout]]()
        try:
            for episode in episodes:
                waiting.append(pool.submit(self._reward, episode))
                while waiting and waiting[0].done():
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _reward(self, episode: Episode) -> Rollout:
        fire("judge", episode.task.id)
        start = time.perf_counter()
        parts: Mapping[str, float] = {}
        if episode.error is None:
            try:
                control = toss_coin(episode.task.id, "\n".join(episode.transcript))
                parts = {**self.score(episode), "random": control}
            except TaskError as error:
                episode.fail(str(error))
        tokens, reason = episode.tokens, episode.error
        if reason is not None or tokens is None:
            reason = " ".join((reason or "").split())[:400]
            tokens, parts = EpisodeTokens(()), {}
        return Rollout(
            episode.task.id,
            episode.sample,
            episode.task.category,
            episode.version,
            tokens.prompt_ids,
            tuple(tokens.ids),
            tuple(tokens.is_generated),
            tuple(tokens.logprobs),
            episode.is_cut and reason is None,
            weigh_parts(parts, self._weights) if parts else 0.0,
            parts,
            "\n".join(episode.transcript) if reason is None else "",
            reason,
            judging_s=time.perf_counter() - start,
            rejected=episode.rejected,
            opinion=episode.opinion,
            versions=tuple(step.answer.version for step in episode.steps) if reason is None else (),
        )


class CaseTasks(TaskSet):
    """The single-turn cases of a suite: one answer each, rewarded by the verdict on its calls.

    A judge scores the answers without an exact verdict: those in words, where no call is due.

    Raises:
        ConfigError: A part of the reward does not exist, or a prompt leaves no room for an answer.
        DataError: The suite has no single-turn case, or the chat template refuses one.
    """

    parts = REWARD_PARTS
    default_weights = BINARY
    reward_name = "a reward"
    max_failing = None

    def __init__(self, suite: Suite, settings: RolloutSettings):
        self._judge = settings.judge
        if self._judge is not None:
            self.num_judged_at_once = self._judge.concurrency
            settings = replace(settings, weights=settings.weights or dict.fromkeys(JUDGE_PART, 1.0))
        elif "judge" in (settings.weights or {}):
            raise ConfigError(
                f"{settings.section}.reward.judge: needs a server and a rubric; set {settings.section}.judge."
            )
        super().__init__(settings, None if self._judge is None else JUDGE_PART)
        template, where = settings.template, settings.section
        assert template is not None, "cases are encoded with a chat template"
        assert self._call_format is not None
        max_new_tokens, max_tokens = settings.limits.max_new_tokens, settings.limits.max_tokens
        if not suite.cases:
            raise DataError(
                f"{suite.name}: has no single-turn cases. Make some with fctune data cases ROWS --out FILE."
            )
        self._cases = {case.id: case for case in suite.cases}
        self._prompts = {case.id: tuple(template.encode_prompt(case.prompt)) for case in suite.cases}
        longest = max(self._prompts, key=lambda case_id: len(self._prompts[case_id]))
        if (num_tokens := len(self._prompts[longest])) + max_new_tokens > max_tokens:
            num_long = sum(len(ids) + max_new_tokens > max_tokens for ids in self._prompts.values())
            raise ConfigError(
                f"{where}.cases: {num_long:,} of {format_count(len(self._prompts), 'case')} "
                f"{choose_noun(num_long, 'leaves', 'leave')} no room for an answer, such as {longest} "
                f"with {num_tokens:,} tokens and {where}.max_new_tokens={max_new_tokens:,} in "
                f"data.seq_len={max_tokens:,}. Raise data.seq_len, lower {where}.max_new_tokens, or remove these cases."
            )
        described = [suite.digest(), self._call_format.name, max_new_tokens, sorted(self._weights.items())]
        described += [] if self._judge is None else self._judge.describe()
        self._digest = hashlib.blake2b(
            json.dumps([described, sorted(self._prompts.items())]).encode("utf-8", "surrogatepass"), digest_size=8
        ).hexdigest()

    @property
    def ids(self) -> Sequence[str]:
        """Ids of the cases."""
        return list(self._cases)

    @property
    def categories(self) -> Mapping[str, str]:
        """Category of each case, by its id."""
        return {case.id: case.category for case in self._cases.values()}

    def digest(self) -> str:
        """Return a hex digest of the cases, their prompts' tokens and the reward."""
        return self._digest

    def open(self, task_id: str) -> Task:
        """Return the case of an id."""
        return self._cases[task_id]

    def begin(self, request: Request) -> Episode:
        """Return the episode of a request, with the case's prompt as token ids."""
        episode = super().begin(request)
        episode.tokens = EpisodeTokens(self._prompts[request.case_id])
        return episode

    def score(self, episode: Episode) -> Mapping[str, float]:
        """Return the parts of the verdict, and the judge's score if there is a judge."""
        judged = judge_episode(episode)
        parts = score_answer(judged, self._limits.max_new_tokens)
        if self._judge is not None:
            parts["judge"] = self._ask_judge(self._judge, episode, judged)
        return parts

    def close(self) -> None:
        """Fail requests to the judge that wait for another attempt."""
        if self._judge is not None:
            self._judge.close()

    def _ask_judge(self, judge: TextJudge, episode: Episode, judged: JudgedEpisode) -> float:
        """Return the judge's score of an answer in words; of others the strict verdict, with which some are compared.

        Raises:
            TaskError: The judge gave no score.
        """
        case, is_right, text = judged.case, judged.strict.is_valid, judged.answer.text
        assert isinstance(case, Case)
        if not isinstance(case, AnswerCase) and not case.expected and is_right:
            words = episode.final_text.strip()
            if not words:
                return 0.0
            episode.opinion = opinion = judge.ask(case.prompt, words)
            if opinion.score is None:
                raise TaskError(opinion.error or "")
            return opinion.score
        if text.strip() and not judged.answer.is_cut and judge.is_compared(case.id, text):
            episode.opinion = judge.ask(case.prompt, text, is_right)
        return float(is_right)
