"""Tasks that an agent program carries out with the policy behind a proxy; a command or an endpoint scores its episodes.

The agent's own loop, prompts and tools decide what the policy is asked. What it generated is trained token by token.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from fctune.base.errors import ConfigError
from fctune.base.processes import Finished, lead_group, run_command
from fctune.calls.formats.base import CallFormat
from fctune.engines.engine import Engine
from fctune.engines.http_client import HttpClient, RequestError, RetryPolicy, UnusableAnswer
from fctune.tasks.environments.agent.proxy import AgentProxy
from fctune.tasks.environments.agent.sessions import (
    AgentSession,
    AnswerLog,
    SessionAnswer,
    SessionLimits,
    merge_answers,
)
from fctune.tasks.environments.agent.task_file import AgentFile, ScorerConfig, fill_command
from fctune.tasks.environments.host import list_variables
from fctune.tasks.episode import Episode, EpisodeLimits, make_seed
from fctune.tasks.rollouts import Request, Rollout, RolloutSettings, T, TaskSet
from fctune.tasks.task import Task, TaskError, TaskState

AGENT_PARTS: dict[str, str] = {
    "score": "the scorer's score",
    "solved": "1 if the score is 1",
}
"""Parts of a reward of an agent's episodes, each with its meaning."""

_MAX_OUTPUT_BYTES = 64 * 1024
_MAX_SHOWN = 300
_POLL_S = 0.1


@dataclass(slots=True)
class AgentRun:
    """One run of the agent.

    Attributes:
        request: What was to be done.
        session: What the policy answered.
        finished: How the program ended; its code is None if its time was over.
        directory: Directory of the episode.
        answers: Answers of the policy that the agent received.
    """

    request: Request
    session: AgentSession
    finished: Finished
    directory: Path
    answers: list[SessionAnswer]


class AgentTask(Task):
    """A task of the agent; only the agent carries it out."""

    def __init__(self, task_id: str, fields: Mapping[str, Any]):
        self.id, self.fields = task_id, fields
        self.category = str(fields.get("category", "all"))
        self.session: AgentSession | None = None  # of the episode
        self.run: AgentRun | None = None

    def start(self) -> TaskState:
        """Raise, since nothing but the agent knows what to ask the policy.

        Raises:
            TaskError: Always.
        """
        raise TaskError("an agent carries this task out")


class AgentTasks(TaskSet):
    """The tasks of a file, which its agent carries out.

    Args:
        name: Name of the tasks, which their ids start with.
        file: The agent.
        tasks: Its tasks by their ids.
        settings: How they are asked and rewarded; of the limits, those of turns are the file's.
        record: File to which the policy's answers are appended; None: they are not recorded.
        log: Called with a line the first time that an agent fails, or asks for what it does not get.

    Raises:
        ConfigError: A part of the reward does not exist.
    """

    parts = AGENT_PARTS
    default_weights: ClassVar[Mapping[str, float]] = {"score": 1.0}

    def __init__(
        self,
        name: str,
        file: AgentFile,
        tasks: Mapping[str, Mapping[str, Any]],
        settings: RolloutSettings,
        record: Path | None = None,
        log: Callable[[str], None] = lambda line: None,
    ):
        super().__init__(settings)
        self._file, self._log, self._record = file, log, record
        self._specs = {f"{name}/{task_id}": task for task_id, task in tasks.items()}
        self._proxy: AgentProxy | None = None
        self._opening = threading.Lock()  # of the proxy, which dialogues on several threads share
        self._warned: set[str] = set()
        self._is_over = threading.Event()
        self._scorer = Scorer(file.scorer, self._is_over.is_set)
        self.num_at_once = file.concurrency

    @property
    def ids(self) -> Sequence[str]:
        """Ids of the tasks."""
        return list(self._specs)

    def digest(self) -> str:
        """Return a hex digest of the agent's command, its tasks, the limits and the scorer."""
        file = self._file
        limits = [self._limits.max_new_tokens, self._limits.max_tokens, file.max_answers, file.max_generated]
        described = [file.command, file.model, file.scorer.command, file.scorer.endpoint, file.time_limit_s, limits]
        text = json.dumps([described, dict(sorted(self._weights.items())), self._specs])
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def open(self, task_id: str) -> AgentTask:
        """Return the task of an id."""
        return AgentTask(task_id, self._specs[task_id])

    def play(self, engine: Engine, requests: Sequence[Request]) -> Iterator[Rollout]:
        """Run the agent on each request, and yield the rewarded rollouts in the order in which episodes end.

        Raises:
            ConfigError: Many tasks in a row failed, or the policy's server is lost.
        """
        with closing(self._run_each(engine, requests, self._make_rollout)) as rollouts:
            for rollout in rollouts:
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
        """Run the agent once on each of some tasks, within its file's limits; see ``TaskSet.ask_each``."""
        yield from self._run_each(engine, [Request(one, 0, make_seed(0, one)) for one in ids], end)

    def _run_each(
        self, engine: Engine, requests: Sequence[Request], end: Callable[[Episode], T]
    ) -> Generator[T, None, None]:
        """Yield what ``end`` returns for each episode, in the order in which they end."""
        proxy = self._open_proxy(engine)
        pool = ThreadPoolExecutor(self._file.concurrency, thread_name_prefix="agent")
        running: set[Future[T]] = {pool.submit(self._run_one, proxy, one, end) for one in requests}
        is_shared = getattr(engine, "is_concurrent", False)
        try:
            while running:
                if not is_shared:
                    proxy.answer_waiting(_POLL_S)
                done, running = wait(running, _POLL_S if is_shared else 0, FIRST_COMPLETED)
                if proxy.failure is not None:
                    raise proxy.failure
                for future in done:
                    yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            if running:
                self.close()

    def score(self, episode: Episode) -> Mapping[str, float]:
        """Return the score of an episode.

        Raises:
            TaskError: There is none, or not one from 0 to 1.
        """
        assert isinstance(episode.task, AgentTask)
        run = episode.task.run
        assert run is not None
        score = self._scorer.ask(self._describe(episode.task, run), run.directory)
        return {"score": score, "solved": float(score == 1)}

    def close(self) -> None:
        """Kill the agents that run, and stop the proxy."""
        with self._opening:
            self._is_over.set()
            proxy, self._proxy = self._proxy, None
        self._scorer.stop()
        if proxy is not None:
            proxy.close()

    def _open_proxy(self, engine: Engine) -> AgentProxy:
        with self._opening:
            if self._is_over.is_set():
                raise ConfigError("the run has ended, so no further agent is started.")
            if self._proxy is None:
                assert self._template is not None, "an agent's answers are kept as token ids"
                file, limits = self._file, self._limits
                self._proxy = AgentProxy(
                    engine,
                    self._template,
                    self._call_format,
                    SessionLimits(limits.max_new_tokens, limits.max_tokens, file.max_answers, file.max_generated),
                    name=file.model,
                    log=None if self._record is None else AnswerLog(self._record),
                    host=file.host,
                    concurrency=8 * file.concurrency,
                )
            return self._proxy

    def _run_one(self, proxy: AgentProxy, request: Request, end: Callable[[Episode], T]) -> T:
        task = self.open(request.case_id)
        episode = Episode(task, request.sample, request.seed)
        # Nobody can guess the name, so no other program answers for the agent.
        name = f"{request.case_id}/{request.sample}/{secrets.token_hex(8)}"
        with tempfile.TemporaryDirectory(prefix="fctune-episode-", ignore_cleanup_errors=True) as directory:
            session = task.session = proxy.begin(name, request.seed)
            try:
                finished = self._run_agent(task, proxy.base_url(name), name, proxy.model, Path(directory))
                session.close()
                task.run = AgentRun(request, session, finished, Path(directory), session.answers)
                self._note_end(episode, task.run)
            except TaskError as error:
                episode.fail(str(error), is_task_fault=True)
            finally:
                session.close()
                proxy.forget(name)
            return end(episode)

    def _make_rollout(self, episode: Episode) -> Rollout:
        """Return the rewarded rollout of an episode, and record how it ended."""
        task = episode.task
        assert isinstance(task, AgentTask)
        assert task.session is not None
        sequences = merge_answers(task.run.answers) if task.run is not None else []
        if sequences:
            episode.tokens = sequences[0]
        rollout = self._reward(episode)
        if rollout.error is None:
            rollout = replace(rollout, further=tuple(sequences[1:]))
        task.session.record_end(
            task=task.id,
            sample=episode.sample,
            seed=episode.seed,
            num_sequences=len(sequences),
            reward=rollout.reward,
            parts=dict(rollout.parts),
            error=rollout.error,
        )
        return rollout

    def _run_agent(self, task: AgentTask, url: str, key: str, model: str, directory: Path) -> Finished:
        given = json.dumps(task.fields, ensure_ascii=False)
        path = directory / "task.json"
        path.write_text(given, encoding="utf-8", errors="replace")
        values = {"base_url": url, "model": model, "task_file": str(path), "episode_dir": str(directory)}
        environment = list_variables() | {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,  # of older clients
            "OPENAI_API_KEY": key,
            "OPENAI_MODEL": model,
            "FCTUNE_TASK_FILE": str(path),
            "FCTUNE_EPISODE_DIR": str(directory),
            "NO_PROXY": self._file.host,
            "no_proxy": self._file.host,
        }
        try:
            return run_command(
                lead_group(fill_command(self._file.command, {**task.fields, **values})),
                given.encode("utf-8", "replace"),
                self._file.time_limit_s,
                environment,
                _MAX_OUTPUT_BYTES,
                keeps_end=True,
                is_stopped=self._is_over.is_set,
            )
        except (OSError, ValueError) as error:
            raise TaskError(f"the agent cannot be started: {error}") from None

    def _note_end(self, episode: Episode, run: AgentRun) -> None:
        """Set what an agent's run says about its episode."""
        code, errors, answers, session = run.finished.code, run.finished.errors, run.answers, run.session
        reason = "" if not errors.last_line else f": {errors.last_line[:_MAX_SHOWN]}"
        if code is None and self._is_over.is_set():
            raise TaskError("the run has ended")
        if code is None:
            session.is_cut = True
            self._warn("time", f"{episode.task.id}: the agent was killed after {self._file.time_limit_s:g} s")
        elif code:
            self._warn("code", f"{episode.task.id}: the agent ended with code {code}{reason}")
        for name in session.ignored:
            self._warn(name, f"{episode.task.id}: the agent sets {name}, which has no effect on the policy")
        episode.rejected = tuple(session.rejected)
        if not answers:
            ended = "was killed after its time limit" if code is None else f"ended with code {code}"
            failed = f" ({session.num_failed} of its requests failed)" if session.num_failed else ""
            raise TaskError(f"the agent got no answer from the model{failed}; it {ended}{reason}")
        last = answers[-1]
        episode.adopt(TaskState(last.conversation), [one.step for one in answers if one.step is not None])
        episode.messages = (*last.conversation.messages, last.message)
        episode.version = min(answer.version for answer in answers)
        episode.transcript = [_show(answer) for answer in answers]
        episode.is_cut = session.is_cut or answers[-1].is_cut

    def _warn(self, kind: str, line: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._log(f"{line} (further ones are not reported)")

    def _describe(self, task: AgentTask, run: AgentRun) -> dict[str, Any]:
        """Return an episode as a scorer gets it."""
        last = run.answers[-1]
        return {
            "id": task.id,
            "sample": run.request.sample,
            "task": dict(task.fields),
            "messages": [message.to_openai() for message in (*last.conversation.messages, last.message)],
            "answers": [answer.message.to_openai() for answer in run.answers],
            "is_cut": run.session.is_cut,
            "agent": {
                "code": run.finished.code,
                "output": run.finished.output.text,
                "errors": run.finished.errors.text,
                "directory": str(run.directory),
            },
        }


def _show(answer: SessionAnswer) -> str:
    calls = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in answer.message.calls]
    return "\n".join([answer.message.content or "", *calls]).strip()


class Scorer:
    """Asks what scores an agent's episodes; thread-safe.

    Args:
        config: The command or endpoint.
        is_stopped: Returns True once no score is wanted any more; the command is killed then.
    """

    def __init__(self, config: ScorerConfig, is_stopped: Callable[[], bool]):
        self._config, self._is_stopped = config, is_stopped
        self._client = HttpClient("", None, RetryPolicy(max_attempts=3, timeout_s=config.timeout_s))

    def stop(self) -> None:
        """Start no further attempt at an endpoint."""
        self._client.stop()

    def ask(self, episode: Mapping[str, Any], directory: Path) -> float:
        """Return the score of an episode, from 0 to 1.

        Args:
            episode: The episode, as JSON values.
            directory: Directory of the episode, which a command may look at.

        Raises:
            TaskError: The scorer fails, takes too long, or says anything but a score.
        """
        command, endpoint, timeout_s = self._config.command, self._config.endpoint, self._config.timeout_s
        if endpoint is not None:
            try:
                return self._client.post(endpoint, dict(episode), read_score)
            except RequestError as error:
                raise TaskError(f"the scorer at {endpoint}: {error}") from None
        assert command is not None
        values = {**episode["task"], "episode_dir": str(directory), "task_file": str(directory / "task.json")}
        environment = list_variables() | {"FCTUNE_EPISODE_DIR": str(directory)}
        given = json.dumps(episode, ensure_ascii=False).encode("utf-8", "replace")
        try:
            words = lead_group(fill_command(command, values))
            done = run_command(
                words,
                given,
                timeout_s,
                environment,
                _MAX_OUTPUT_BYTES,
                keeps_end=True,
                is_stopped=self._is_stopped,
            )
        except KeyError as error:
            raise TaskError(f"the scorer's command has {{{error.args[0]}}}, which the task lacks") from None
        except (OSError, ValueError) as error:
            raise TaskError(f"the scorer cannot be started: {error}") from None
        if done.code is None:
            raise TaskError(f"the scorer took longer than {timeout_s:g} s")
        if done.code:
            raise TaskError(f"the scorer ended with code {done.code}: {done.errors.last_line[:_MAX_SHOWN]}")
        try:
            return read_score(json.loads(done.output.last_line))
        except (ValueError, RecursionError):
            said = done.output.last_line[:_MAX_SHOWN] or "nothing"
            raise TaskError(f"the scorer said {said}; expected a number from 0 to 1, or an object with score") from None


def read_score(value: Any) -> float:
    """Return the score in what a scorer said: a number, or an object with ``score``.

    Raises:
        UnusableAnswer: It is not a number from 0 to 1.
    """
    score = value.get("score") if isinstance(value, dict) else value
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score) or not 0 <= score <= 1:
        raise UnusableAnswer("malformed", f"{str(value)[:_MAX_SHOWN]}; expected a number from 0 to 1")
    return float(score)
