"""The answers of a policy to one agent: token by token, each once, and merged into the sequences that are trained.

An agent sends the whole conversation with every request. Where it begins with one that was answered before, the ids of
that answer are continued, as in any other episode; where the agent rewrote its history, the conversation is encoded
anew and becomes a sequence of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError, DataError
from fctune.calls.formats.base import CallFormat
from fctune.config.intervals import format_count
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Call, Conversation, Message, Tool, to_encodable
from fctune.data.sources.defects import RowError
from fctune.engines.engine import Answer, AnswerTokens, Prompt
from fctune.tasks.environments.agent.requests import ChatRequest, RefusedRequest, Reply, read_message
from fctune.tasks.episode import EpisodeTokens, make_seed, read_answer
from fctune.tasks.task import Step


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of a session.

    Attributes:
        max_new_tokens: Tokens of one answer.
        max_context: Tokens of a prompt and its answer together.
        max_answers: Answers of the session; None: any number.
        max_generated: Tokens of all answers together; None: any number.
    """

    max_new_tokens: int
    max_context: int
    max_answers: int | None = None
    max_generated: int | None = None


@dataclass(slots=True, eq=False)
class SessionAnswer:
    """An answer of the policy to a request of an agent.

    Attributes:
        number: Position among the answers of the session, from 1.
        key: Idempotency key of the request, or its digest.
        conversation: What was asked, with the policy's own messages as it wrote them.
        message: The answer.
        tokens: Token ids of prompt and answer, and the log-probabilities of the answer.
        version: Version of the policy.
        reply: What the client gets.
        is_cut: A limit other than the client's own ended it.
        is_ended: The answer has its stop token, so that its ids can be continued.
        continues: Number of the answer whose ids the prompt begins with; None: the conversation was encoded.
        step: The answer as it was read; None if it comes from a log.
        num_received: Times that it was sent and not lost on the way.
        was_lost: It was lost on the way at least once.
    """

    number: int
    key: str
    conversation: Conversation
    message: Message
    tokens: AnswerTokens
    version: int
    reply: Reply
    is_cut: bool = False
    is_ended: bool = True
    continues: int | None = None
    step: Step | None = None
    num_received: int = 0
    was_lost: bool = False


class AnswerLog:
    """Appends what happens in sessions to a JSON Lines file; a line is written at once, so that no kill loses it.

    ``event`` is ``answer`` (with token ids, log-probabilities and the messages since the answer that it continues),
    ``lost`` for one that its client did not receive, ``received`` for one that was sent again, or ``end``.

    Args:
        path: The file. A line that a kill has cut off is removed.
    """

    def __init__(self, path: Path):
        self._path, self._lock, self._file = path, threading.Lock(), -1

    def write(self, session: str, event: str, **values: Any) -> None:
        """Append an event of a session, with its values.

        Raises:
            ConfigError: It cannot be written; the file is as it was before.
        """
        line = json.dumps({"episode": session, "event": event, "time": round(time.time(), 3), **values}) + "\n"
        with self._lock:
            try:
                self._append(line.encode())
            except OSError as error:
                raise ConfigError(
                    f"{self._path}: an answer cannot be recorded ({error.strerror or error}). Give the file space, and "
                    "run the same command again."
                ) from None

    def _append(self, line: bytes) -> None:
        if self._file < 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                with self._path.open("r+b") as file:
                    file.truncate(file.read().rfind(b"\n") + 1)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        size, left = os.fstat(self._file).st_size, memoryview(line)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            os.ftruncate(self._file, size)  # a disk that is full may have taken a part of the line
            raise

    def read(self) -> dict[str, list[dict[str, Any]]]:
        """Return the events of each session in the file; none without a file.

        Raises:
            ConfigError: The file cannot be read.
            DataError: A line other than the last is not one of a log.
        """
        events: dict[str, list[dict[str, Any]]] = {}
        try:
            *lines, _ = self._path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return events
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be read ({error.strerror}). Pass another file.") from None
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                events.setdefault(row["episode"], []).append(row)
            except (ValueError, LookupError, TypeError) as error:
                raise DataError(f"{self._path}:{number}: not an event ({error}). Pass another file.") from None
        return events

    def close(self) -> None:
        """Close the file, which the next event opens again."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy that answers agents.

    Attributes:
        template: Its chat template.
        call_format: The format in which it writes calls.
        name: Name that agents ask for.
        ask: Function that returns the answer to a prompt of token ids, called on several threads; its second argument
            returns True once nobody waits for the answer.
        encoding: Held while the template renders.
    """

    template: ChatTemplate
    call_format: CallFormat | None
    name: str
    ask: Callable[[Prompt, Callable[[], bool]], Answer]
    encoding: threading.Lock = field(default_factory=threading.Lock)


class AgentSession:
    """One episode of an agent; thread-safe, since agents may ask several things at once.

    Args:
        id: Name of the session, unique in its log.
        policy: The policy.
        limits: Where the session ends.
        executor: Where answers are generated.
        log: Where they are recorded; None: nowhere.
        seed: Seed of all tokens.

    Attributes:
        is_cut: A limit ended the session.
        num_repeats: Requests that got an answer from before, as their client repeated them.
        num_failed: Requests that the policy could not answer.
        rejected: Kinds of unusable answers that a server sent.
        ignored: Fields of requests that had no effect, each with its number of requests.
    """

    def __init__(
        self,
        id: str,
        policy: Policy,
        limits: SessionLimits,
        executor: Executor,
        log: AnswerLog | None = None,
        seed: int = 0,
    ):
        self.id, self._policy, self._limits, self._executor, self._log = id, policy, limits, executor, log
        self._seed, self._lock, self._is_closed = seed, threading.Lock(), False
        self.is_cut, self.num_repeats, self.num_failed = False, 0, 0
        self.rejected: list[str] = []
        self.ignored: Counter[str] = Counter()
        self._answers: list[SessionAnswer] = []
        self._by_key: dict[str, SessionAnswer] = {}
        self._by_history: dict[_History, SessionAnswer] = {}
        self._in_flight: dict[str, Future[SessionAnswer]] = {}
        self._prompts: Counter[str] = Counter()  # requests of each prompt, whose seeds differ
        self._num_begun = self._num_calls = 0

    @property
    def answers(self) -> list[SessionAnswer]:
        """The answers so far that their client received, in the order in which they were generated."""
        with self._lock:
            return [answer for answer in self._answers if answer.num_received]

    def begin(self, request: ChatRequest, key: str | None = None, is_repeated: bool = False) -> Future[SessionAnswer]:
        """Begin to answer a request; one that is repeated gets the answer to the first.

        Args:
            request: The request. It repeats one that is in flight, or whose answer was lost on the way, if it is equal.
            key: Its idempotency key, which then decides alone.
            is_repeated: The client says that it repeats a request.

        Raises:
            RefusedRequest: The session has ended, or reached a limit.
        """
        known_as = key or request.digest
        with self._lock:
            if (running := self._in_flight.get(known_as)) is not None:
                self.num_repeats += 1
                return running
            if (known := self._by_key.get(known_as)) is not None and (key or is_repeated or not known.num_received):
                self.num_repeats += 1
                done = Future[SessionAnswer]()
                done.set_result(known)
                return done
            self._check_limits()
            self._num_begun += 1
            self.ignored.update(request.ignored)
            future = self._executor.submit(self._answer, request, known_as)
            self._in_flight[known_as] = future
            return future

    def note_received(self, answer: SessionAnswer) -> None:
        """Count an answer as received; call it before sending, since its client may end the episode at once."""
        with self._lock:
            answer.num_received += 1
            is_again = answer.was_lost and answer.num_received == 1
        if is_again:
            self._record("received", number=answer.number)

    def note_lost(self, answer: SessionAnswer, was_counted: bool = True) -> None:
        """Note that the connection broke; ``was_counted``: after ``note_received``."""
        with self._lock:
            answer.num_received -= was_counted
            is_lost = not answer.num_received
            answer.was_lost |= is_lost
        if is_lost:
            self._record("lost", number=answer.number)

    def close(self) -> None:
        """End the session: requests are refused from now on."""
        with self._lock:
            self._is_closed = True
            waiting = list(self._in_flight.values())
        for future in waiting:
            future.cancel()

    def record_end(self, **values: Any) -> None:
        """Record how the episode ended."""
        self._record("end", is_cut=self.is_cut, num_repeats=self.num_repeats, num_failed=self.num_failed, **values)

    def restore(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Continue a session from the events in its log; the last answer may not have reached its client.

        Raises:
            DataError: The events are not those of a session.
        """
        try:
            for row in events:
                if row["event"] == "answer":
                    self._add(answer := self._read(row))
                    self._prompts[_digest_ids(answer.tokens.prompt_ids)] += 1
                elif row["event"] in ("lost", "received"):
                    self._answers[row["number"] - 1].num_received = int(row["event"] == "received")
        except (LookupError, TypeError, ValueError, RowError) as error:
            raise DataError(f"episode {self.id}: not the events of a session ({error}). Pass another file.") from None
        if self._answers:
            self._answers[-1].num_received = 0
        self._num_begun = len(self._answers)

    def _require_open(self) -> None:
        if self._is_closed:
            raise RefusedRequest("the episode has ended", 403, "episode_over")

    def _check_limits(self) -> None:
        self._require_open()
        most, generated = self._limits.max_answers, self._count_generated()
        if most is not None and self._num_begun >= most:
            self.is_cut = True
            raise RefusedRequest(f"the episode has had its {format_count(most, 'answer')}", 403, "episode_limit")
        if self._limits.max_generated is not None and generated >= self._limits.max_generated:
            self.is_cut = True
            raise RefusedRequest(f"the episode has had its {generated:,} generated tokens", 403, "episode_limit")

    def _count_generated(self) -> int:
        return sum(len(answer.tokens.ids) for answer in self._answers)

    def _answer(self, request: ChatRequest, key: str) -> SessionAnswer:
        try:
            made, num_new = self._generate(request, key)
            with self._lock:
                self._require_open()  # what comes after the end is of no episode
                made.number = len(self._answers) + 1
                # Under the lock, so that the log has the answers in the order of their numbers; and first, so that no
                # repeated request gets an answer that is not in the log.
                self._write(made, num_new, request.ignored)
                self._add(made)
                self._in_flight.pop(key, None)
        except BaseException:
            with self._lock:
                self._in_flight.pop(key, None)
                self._num_begun -= 1
                self.num_failed += 1
            raise
        return made

    def _generate(self, request: ChatRequest, key: str) -> tuple[SessionAnswer, int]:
        """Return the answer to a request, and the number of messages after those of the answer that it continues."""
        template, limits = self._policy.template, self._limits
        with self._lock:
            self._require_open()
            generated = self._count_generated()
        conversation, ids, continued = self._encode(request.conversation)
        room = min(limits.max_new_tokens, limits.max_context - len(ids))
        if limits.max_generated is not None:
            room = min(room, limits.max_generated - generated)
        if room < 1:
            self.is_cut = True
            raise RefusedRequest(
                f"{len(ids):,} prompt tokens leave no room for an answer within the context of {limits.max_context:,}",
                code="context_length_exceeded",
            )
        prompt = Prompt(
            replace(conversation, source=self.id),  # so that an episode stays with one of several servers
            min(room, request.max_new_tokens or room),
            ids=ids,
            seed=self._make_seed(ids),
            is_continued=True,
        )
        answer = self._policy.ask(prompt, lambda: self._is_closed)
        with self._lock:
            self.rejected += answer.rejected
        if answer.error is not None:
            raise RefusedRequest(f"the policy's server gave no answer: {answer.error}", 502, "no_answer")
        is_cut = answer.is_cut and (request.max_new_tokens is None or room <= request.max_new_tokens)
        answer, is_stopped = cut_at_stop(template, answer, request.stops)
        assert answer.tokens is not None
        step = self._read_answer(answer, conversation.tools)
        message = step.to_message()
        reason = "length" if answer.is_cut else "tool_calls" if message.calls else "stop"
        reply = Reply(
            f"chatcmpl-{secrets.token_hex(12)}",
            self._policy.name,
            message,
            reason,
            len(ids),
            len(answer.tokens.ids),
        )
        made = SessionAnswer(
            0,
            key,
            conversation,
            message,
            answer.tokens,
            answer.version,
            reply,
            is_cut,
            is_ended=not answer.is_cut and not is_stopped,
            continues=None if continued is None else continued.number,
            step=step,
        )
        num_before = 0 if continued is None else len(continued.conversation.messages) + 1
        return made, len(conversation.messages) - num_before

    def _encode(self, conversation: Conversation) -> tuple[Conversation, tuple[int, ...], SessionAnswer | None]:
        """Return a conversation as the policy sees it, its token ids, and the answer that they continue, if any."""
        with self._lock:
            continued = self._find_continued(conversation)
        template = self._policy.template
        with self._policy.encoding:
            if continued is not None:
                before = continued.conversation.messages
                messages = (*before, continued.message, *conversation.messages[len(before) + 1 :])
                joined = replace(conversation, messages=messages)
                with suppress(DataError):  # the template renders what precedes differently now
                    ids = template.encode_continuation(joined, len(before))
                    return joined, (*continued.tokens.prompt_ids, *continued.tokens.ids, *ids), continued
            try:
                return conversation, tuple(template.encode_prompt(conversation)), None
            except DataError as error:
                raise RefusedRequest(f"the model's chat template refuses the conversation: {error}") from None

    def _find_continued(self, conversation: Conversation) -> SessionAnswer | None:
        """Return the answer that the longest beginning of a conversation ends with, followed by other messages."""
        head, messages = _name_head(conversation), tuple(map(_name_message, conversation.messages))
        for count in range(len(messages) - 1, 0, -1):
            if (found := self._by_history.get((head, messages[:count]))) is not None:
                return found
        return None

    def _make_seed(self, ids: Sequence[int]) -> int:
        """Return the seed of an answer, which depends on what is asked and not on what else is asked meanwhile."""
        digest = _digest_ids(ids)
        with self._lock:
            self._prompts[digest] += 1
            return make_seed(self._seed, digest, self._prompts[digest])

    def _read_answer(self, answer: Answer, tools: tuple[Tool, ...]) -> Step:
        """Return an answer as a step; only well-formed calls are calls, as in every rollout."""
        reading = read_answer(answer, self._policy.call_format, tools)
        step = Step(answer, reading, reading.strict)
        if not reading.strict.malformed:
            with self._lock:
                first = self._num_calls
                self._num_calls += len(reading.strict.calls)
            step.calls = tuple(make_call(call, first + i) for i, call in enumerate(reading.strict.calls, start=1))
        return step

    def _add(self, made: SessionAnswer) -> None:
        self._answers.append(made)
        self._by_key[made.key] = made
        if made.is_ended:
            asked = tuple(map(_name_message, (*made.conversation.messages, made.message)))
            self._by_history[_name_head(made.conversation), asked] = made

    def _write(self, made: SessionAnswer, num_new: int, ignored: Sequence[str]) -> None:
        messages, tokens = made.conversation.messages, made.tokens
        self._record(
            "answer",
            number=made.number,
            key=made.key,
            continues=made.continues,
            messages=[message.to_openai() for message in messages[len(messages) - num_new :]],
            tools=[tool.to_openai() for tool in made.conversation.tools],
            template_args=made.conversation.template_args,
            message=made.message.to_openai(),
            finish_reason=made.reply.finish_reason,
            is_cut=made.is_cut,
            is_ended=made.is_ended,
            version=made.version,
            ignored=list(ignored),
            prompt_ids=list(tokens.prompt_ids),
            ids=list(tokens.ids),
            logprobs=list(tokens.logprobs),
        )

    def _read(self, row: Mapping[str, Any]) -> SessionAnswer:
        """Return the answer of an event."""
        messages = tuple(read_message(message, "messages") for message in row["messages"])
        if row["continues"] is not None:
            before = self._answers[row["continues"] - 1]
            messages = (*before.conversation.messages, before.message, *messages)
        tools = tuple(Tool(tool["function"]) for tool in row["tools"])
        message = read_message(row["message"], "message")
        tokens = AnswerTokens(tuple(row["prompt_ids"]), tuple(row["ids"]), tuple(row["logprobs"]))
        self._num_calls += len(message.calls)
        reply = Reply(
            f"chatcmpl-{secrets.token_hex(12)}",
            self._policy.name,
            message,
            str(row["finish_reason"]),
            len(tokens.prompt_ids),
            len(tokens.ids),
        )
        return SessionAnswer(
            int(row["number"]),
            str(row["key"]),
            Conversation(messages, tools, self.id, dict(row["template_args"])),
            message,
            tokens,
            int(row["version"]),
            reply,
            bool(row["is_cut"]),
            is_ended=bool(row["is_ended"]),
            continues=row["continues"],
            num_received=1,
        )

    def _record(self, event: str, **values: Any) -> None:
        if self._log is not None:
            self._log.write(self.id, event, **values)


_History = tuple[str, tuple[Hashable, ...]]
"""Tools and messages of a conversation, equal for those that differ only in how a client writes them."""


def _digest_ids(ids: Sequence[int]) -> str:
    return hashlib.blake2b(repr(ids).encode(), digest_size=16).hexdigest()


def _name_head(conversation: Conversation) -> str:
    tools = [tool.function for tool in conversation.tools]
    return json.dumps([tools, conversation.template_args], sort_keys=True)


def _name_message(message: Message) -> Hashable:
    """Return what tells a message from others; clients drop reasoning, ids of calls and spaces around an answer."""
    if message.role == "assistant":
        calls = tuple((call.name, json.dumps(call.arguments, sort_keys=True)) for call in message.calls)
        return message.role, (message.content or "").strip(), calls
    return message.role, message.content, message.call_id


def make_call(call: Call, number: int) -> Call:
    """Return a call with an id: nine letters and digits, as Mistral's templates and tokenizers require."""
    return Call(to_encodable(call.name), to_encodable(call.arguments), f"call{number:05d}")


def cut_at_stop(template: ChatTemplate, answer: Answer, stops: Sequence[str]) -> tuple[Answer, bool]:
    """Return an answer without its tokens after the first of the texts at which it ends, and True if there is one."""
    if answer.tokens is None or not any(stop in answer.text for stop in stops):
        return answer, False

    def has_stop(count: int) -> bool:
        text = template.decode(ids[:count])
        return any(stop in text for stop in stops)

    ids, logprobs = answer.tokens.ids, answer.tokens.logprobs
    count = bisect_left(range(len(ids) + 1), True, key=has_stop)
    text = answer.text[: min(at for stop in stops if (at := answer.text.find(stop)) >= 0)]
    tokens = replace(answer.tokens, ids=ids[:count], logprobs=logprobs[:count])
    return replace(answer, text=text, tokens=tokens, is_cut=False, num_tokens=count), True


def merge_answers(answers: Iterable[SessionAnswer]) -> list[EpisodeTokens]:
    """Return the sequences to train: an answer whose prompt begins with a sequence continues it.

    Each generated token is trained in one sequence, and is context in every other that begins with it.
    """
    sequences: list[EpisodeTokens] = []
    for answer in answers:
        ids = answer.tokens.prompt_ids
        fitting = [one for one in sequences if ids[: len(one.prompt_ids) + len(one.ids)] == one.context]
        if fitting:
            longest = max(fitting, key=lambda one: len(one.ids) + len(one.prompt_ids))
            longest.add_context(ids[len(longest.context) :])
        else:
            longest = EpisodeTokens(ids)
            sequences.append(longest)
        longest.add_generated(answer.tokens)
    return sequences
