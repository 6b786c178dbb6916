"""The teacher and the judge: servers that are asked within a budget, and what came back instead of an answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fctune.apps.generate.prompts import as_json_question, read_json_answer
from fctune.base.errors import ConfigError
from fctune.calls.formats.base import CallFormat, Parsed
from fctune.calls.tool_calls import read_tool_calls
from fctune.data.conversation import Conversation, Message, Tool
from fctune.engines.engine import Answer, Prompt
from fctune.engines.http_client import RequestError
from fctune.engines.server import ServerEngine
from fctune.tasks.episode import read_answer

DROPPED = {
    "no_answer": "the server did not answer in time, or the connection failed",
    "rate_limited": "the server had too many requests, however often it was asked",
    "server_error": "the server refused the request or failed",
    "cut": "the answer reached the limit of tokens",
    "refused": "the teacher refused",
    "garbage": "the answer had another form than was asked for",
    "no_values": "no value is known for a required argument of the call that was to be drafted",
    "wrong_kind": "the request was of another kind than was asked for, or none of the kind can be drafted",
    "invalid_call": "a call does not match its tool's schema, or calls a tool that is not on offer",
    "held_out": "the request is one that is held out",
    "disagreement": "the answers differ from each other",
    "other_calls": "the answers agree, but not with the calls that were intended",
    "execution_failed": "a tool that was really called gave no result",
    "judged_bad": "the judge found it wrong",
    "judge_failed": "the judge gave no usable verdict",
    "invalid_row": "the row cannot be read back as it was written",
    "near_duplicate": "the request repeats an earlier one exactly or nearly",
    "budget": "the budget was used up in the middle of the row",
}
"""Reasons for which a row falls, with their meaning."""

SERVER_FAILURES = frozenset({"no_answer", "rate_limited", "server_error"})


class Dropped(Exception):
    """A row falls; ``kind`` is one of ``DROPPED``."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


class Stopped(Exception):
    """The run ends, so nothing more is asked."""


@dataclass(slots=True)
class Usage:
    """Requests that were answered or failed, the tokens of their prompts and answers, and their price."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0

    def add(self, other: Usage) -> None:
        """Add what others used; changes this one."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.cost += other.cost

    def subtract(self, other: Usage) -> Usage:
        """Return what was used beyond ``other``."""
        if self.requests <= other.requests:
            return Usage()
        return Usage(
            self.requests - other.requests,
            max(self.prompt_tokens - other.prompt_tokens, 0),
            max(self.completion_tokens - other.completion_tokens, 0),
            round(max(self.cost - other.cost, 0.0), 9),
        )


@dataclass(frozen=True, slots=True)
class Price:
    """Price of a million tokens of prompts and of answers, in any currency."""

    prompt: float = 0.0
    completion: float = 0.0


@dataclass(slots=True)
class Budget:
    """Limits of all requests of a run together, including those of earlier runs into the same file.

    Attributes:
        max_tokens: Tokens of prompts and answers.
        max_requests: Requests to teacher and judge; attempts of one request count once.
        max_cost: In the currency of the prices.
        used: What was used so far.
        on_use: Called with ``used`` before each request and after its answer.
        log: Called with a line for each attempt that failed, by any thread.
    """

    max_tokens: int | None = None
    max_requests: int | None = None
    max_cost: float | None = None
    used: Usage = field(default_factory=Usage)
    is_stopped: bool = False
    on_use: Callable[[Usage], None] = lambda used: None
    log: Callable[[str], None] = lambda line: None
    _waiting: dict[int, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def needs_tokens(self) -> bool:
        """True if tokens must be known."""
        return self.max_tokens is not None or self.max_cost is not None

    @property
    def spent(self) -> str | None:
        """The option whose limit is reached; None if none is."""
        used = self.used
        for option, limit, value in (
            ("--max-total-tokens", self.max_tokens, used.prompt_tokens + used.completion_tokens),
            ("--max-requests", self.max_requests, used.requests),
            ("--max-cost", self.max_cost, used.cost),
        ):
            if limit is not None and value >= limit:
                return option
        return None

    def begin(self) -> None:
        """Take the next request, or end the row.

        Raises:
            Dropped: The budget is used up.
            Stopped: The run ends.
        """
        with self._lock:
            if self.is_stopped:
                raise Stopped
            if (option := self.spent) is not None:
                raise Dropped("budget", f"{option} is reached")
            self.used.requests += 1
            self.on_use(self.used)

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Note that this thread waits for an answer during the block."""
        thread = threading.get_ident()
        with self._lock:
            self._waiting[thread] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                del self._waiting[thread]

    def describe_waiting(self) -> str:
        """Return how many requests wait for an answer, and for how long; empty if none does."""
        with self._lock:
            starts = list(self._waiting.values())
        if not starts:
            return ""
        seconds = f"{time.monotonic() - min(starts):.0f} s"
        return (
            f"1 request waits for {seconds}" if len(starts) == 1 else f"{len(starts)} requests wait for up to {seconds}"
        )

    def count(self, usage: Usage) -> None:
        """Add the tokens and the price of a request that ``begin`` has counted."""
        with self._lock:
            self.used.prompt_tokens += usage.prompt_tokens
            self.used.completion_tokens += usage.completion_tokens
            self.used.cost += usage.cost
            self.on_use(self.used)


class Asker:
    """Asks one server within the budget.

    Args:
        engine: The server.
        budget: Limits that are shared with other servers.
        price: Price of its tokens.
        max_new_tokens: Limit of an answer.
        call_format: Call format of its text; None: the server parses the calls.
        answers_as_json: Its calls are asked for as a JSON object in place of the server's calls.
    """

    def __init__(
        self,
        engine: ServerEngine,
        budget: Budget,
        price: Price,
        max_new_tokens: int = 1024,
        call_format: CallFormat | None = None,
        answers_as_json: bool = False,
    ):
        self.engine, self.budget, self.price = engine, budget, price
        self._max_new_tokens, self._format, self._answers_as_json = max_new_tokens, call_format, answers_as_json

    def ask(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any],
        seed: int,
        usage: Usage,
        max_new_tokens: int | None = None,
        retries_timeouts: bool = True,
    ) -> str:
        """Return the text of an answer without its reasoning; adds what it used to ``usage``.

        A server that can holds the answer to the JSON Schema.

        Args:
            messages: The prompt.
            schema: JSON Schema of the answer.
            seed: Seed of the answer.
            usage: Changed.
            max_new_tokens: Lower limit for this answer; None: that of all answers.
            retries_timeouts: Ask again after an attempt that reached its time limit.

        Raises:
            Dropped: There is no complete answer, or the budget is used up.
        """
        answer = self._request(Conversation(tuple(messages)), schema, seed, usage, max_new_tokens, retries_timeouts)
        return answer.reasoning.blank(answer.text) if answer.reasoning is not None else answer.text

    def answer(self, system: str, row: Conversation, seed: int, usage: Usage, words_only: bool = False) -> Parsed:
        """Return the calls and the prose of an answer to a row, read strictly; ``system`` is not a part of the row.

        With ``words_only``, a teacher that answers with JSON objects is held to words.

        Raises:
            Dropped: There is no complete answer, or the budget is used up.
            UnusableText: It is not the JSON object that was asked for.
        """
        if self._answers_as_json:
            messages, schema = as_json_question(system, row, words_only)
            return read_tool_calls(*read_json_answer(self.ask(messages, schema, seed, usage))).strict
        prompt = Conversation((Message("system", system), *row.messages), row.tools)
        answer = self._request(prompt, None, seed, usage)
        tools: tuple[Tool, ...] = row.tools
        parsed = read_answer(answer, self._format, tools).strict
        if parsed.malformed:
            # A server that does not parse a model's calls cannot be told apart from a model that garbles them.
            hint = "" if self._format else "; --answers json asks a weak teacher for JSON instead"
            raise Dropped("garbage", f"{parsed.malformed[0].reason}{hint}")
        return parsed

    def _request(
        self,
        prompt: Conversation,
        schema: Mapping[str, Any] | None,
        seed: int,
        usage: Usage,
        max_new_tokens: int | None = None,
        retries_timeouts: bool = True,
    ) -> Answer:
        limit = min(self._max_new_tokens, max_new_tokens or self._max_new_tokens)
        self.budget.begin()
        usage.requests += 1
        try:
            with self.budget.wait():
                answer = self.engine.request(
                    Prompt(prompt, limit, seed=seed, schema=schema), self._log_failure, retries_timeouts
                )
        except RequestError as error:
            if self.budget.is_stopped:
                raise Stopped from None
            raise Dropped(_name_failure(error), str(error)) from None
        self._count(answer, usage)
        if answer.is_refused:
            raise Dropped("refused", "the server says that the model refused, or that a filter kept the answer back")
        if answer.is_cut:
            raise Dropped("cut", f"over {limit:,} tokens; raise --max-new-tokens")
        return answer

    def _log_failure(self, error: RequestError) -> None:
        if error.is_transient and not self.budget.is_stopped:
            hint = "; raise --timeout, or lower --concurrency or --max-new-tokens" if error.is_timeout else ""
            self.budget.log(f"{self.engine.model}: an attempt failed: {error}{hint}")

    def _count(self, answer: Answer, usage: Usage) -> None:
        if self.budget.needs_tokens and (answer.num_tokens is None or answer.num_prompt_tokens is None):
            raise ConfigError(
                f"{self.engine.url}: does not report tokens, which --max-total-tokens and --max-cost need. "
                "Pass --max-requests instead."
            )
        prompt, completion = answer.num_prompt_tokens or 0, answer.num_tokens or 0
        cost = (prompt * self.price.prompt + completion * self.price.completion) / 1e6
        made = Usage(0, prompt, completion, cost)
        self.budget.count(made)
        usage.add(made)


def _name_failure(error: RequestError) -> str:
    if error.kind is not None:
        return "garbage"
    if error.status is None:
        return "no_answer"
    return "rate_limited" if error.status == 429 else "server_error"
