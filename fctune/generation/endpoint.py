"""Answers of a server that speaks OpenAI's chat completions: vLLM, SGLang, llama.cpp, ``transformers serve``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from fctune.data.conversation import Conversation, Message
from fctune.errors import ConfigError
from fctune.generation.engine import Answer, Sampling
from fctune.generation.http_client import HttpClient, Patience, RequestFailedError


@dataclass(frozen=True, slots=True)
class Timing:
    """One streamed answer: seconds to its first token and to its end, and how many tokens it has.

    Where the server does not count them, ``num_tokens`` is the count of its pieces, which servers send one a token.
    """

    first_s: float
    total_s: float
    num_tokens: int


class EndpointEngine:
    """Chat completions, several at a time.

    Args:
        url: the server's, with or without ``/v1``.
        model: the name it serves the model by; None: the one that it names, if it is one.
        api_key: sent as a bearer token and kept out of everything that is written; None: none.
        concurrency: requests in flight.
        sampling: how tokens are chosen.
        request: more of the request's body, such as ``{"tool_choice": "none"}``; wins over what stands there.
        patience: how long a request is tried.

    Raises:
        ConfigError: not an address, no server there, or one that refuses the key or does not say which model it has.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        api_key: str | None = None,
        concurrency: int = 16,
        sampling: Sampling | None = None,
        request: Mapping[str, Any] | None = None,
        patience: Patience | None = None,
    ):
        self.url = _base_url(url)
        self.concurrency = concurrency
        self.sampling = sampling or Sampling()
        self._request = dict(request or {})
        self._client = HttpClient(self.url, api_key, patience)
        # Cases in a row without any answer, after which the server counts as gone.
        self._give_up_after = max(8, 2 * concurrency)
        self._key_hint = "its key is refused" if api_key else "it wants a key"
        self._knows_ignore_eos = True
        self.model = self._find_model(model)

    def describe(self) -> dict[str, Any]:
        """Address and name of the model, and what is asked of it beside the prompt; never the key."""
        sampling = self.sampling if self.sampling.temperature > 0 else Sampling()
        return {
            "model": self.url,
            "served_model": self.model,
            "request": self._request,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
        }

    def answer(self, prompts: Sequence[Conversation], max_new_tokens: int) -> Iterator[Answer]:
        """An answer to each prompt as it comes.

        Where the server has stopped answering altogether the rest is not asked, each an error that says so.

        Raises:
            ConfigError: the server refuses every request: the key, the model's name or the path is wrong.
        """
        pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="endpoint")
        self._client.start()
        num_answered = num_lost_in_a_row = 0
        dropped = ""
        try:
            asked = {pool.submit(self._ask, i, prompt, max_new_tokens): i for i, prompt in enumerate(prompts)}
            for done in as_completed(asked):
                if done.cancelled():
                    yield Answer(asked[done], error=dropped)
                    continue
                answer, is_lost = done.result()
                num_answered += answer.error is None
                # A server that refuses the first of them all, each for itself, will refuse the rest.
                num_lost_in_a_row = num_lost_in_a_row + 1 if is_lost or not num_answered else 0
                yield answer
                if num_lost_in_a_row >= self._give_up_after and not dropped:
                    dropped = f"not asked: {num_lost_in_a_row} requests in a row got no answer ({answer.error})"
                    self._stop(asked)
        finally:
            self._client.stop()
            pool.shutdown(wait=False, cancel_futures=True)

    def time_answer(self, prompt: Conversation, max_new_tokens: int) -> Timing:
        """Times one answer of a stream, made as long as it may be where the server can be told to (vLLM, SGLang).

        Raises:
            ConfigError: no answer.
        """
        body = self._body(prompt, max_new_tokens)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= {"ignore_eos": True} if self._knows_ignore_eos else {}
        start = time.perf_counter()
        try:
            return self._client.post_stream("/chat/completions", body, lambda events: _time_events(events, start))
        except RequestFailedError as error:
            if error.status in (400, 422) and "ignore_eos" in body:
                self._knows_ignore_eos = False
                return self.time_answer(prompt, max_new_tokens)
            raise ConfigError(f"{self.url}: {error}") from None

    def _find_model(self, model: str | None) -> str:
        try:
            listed = self._client.get("/models")
        except RequestFailedError as error:
            if error.status is None:
                raise ConfigError(f"{self.url}: {error}. Is the server up, and the address right?") from None
            if error.status in (401, 403):
                raise ConfigError(f"{self.url}: {self._key_hint} ({error}). Set FCTUNE_API_KEY.") from None
            listed = None
        if model is not None:
            return model
        rows = listed.get("data") if isinstance(listed, dict) else None
        names = [str(row["id"]) for row in rows or [] if isinstance(row, dict) and "id" in row]
        if len(names) == 1:
            return names[0]
        unsaid = "it does not say which it has (of transformers serve, name the directory it was given)"
        known = f"it has {', '.join(names[:10])}" if names else unsaid
        raise ConfigError(f"{self.url}: which model? {known}. Name it: --served-model NAME.")

    def _ask(self, index: int, prompt: Conversation, max_new_tokens: int) -> tuple[Answer, bool]:
        """The answer to one prompt, and whether the server gave no sign of life."""
        start = time.perf_counter()
        try:
            answer = self._client.post(
                "/chat/completions", self._body(prompt, max_new_tokens), lambda body: _read_answer(body, index)
            )
        except RequestFailedError as error:
            if error.is_fatal:
                hint = f"{self._key_hint}; set FCTUNE_API_KEY" if error.status in (401, 403) else "see --served-model"
                raise ConfigError(f"{self.url} with the model {self.model}: {error} ({hint}).") from None
            return Answer(index, error=str(error)), error.is_transient
        return replace(answer, seconds=round(time.perf_counter() - start, 4)), False

    def _stop(self, asked: Iterable[Future[Any]]) -> None:
        self._client.stop()
        for future in asked:
            future.cancel()

    def _body(self, prompt: Conversation, max_new_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": to_messages(prompt.messages),
            "max_tokens": max_new_tokens,
            "temperature": self.sampling.temperature,
            "seed": self.sampling.seed,
        }
        if prompt.tools:
            body["tools"] = [tool.to_openai() for tool in prompt.tools]
        return {**body, **self._request}


def to_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the protocol has them: arguments as a string of JSON, an id for each call, named by its result."""
    sent: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []  # id and name of calls without a result yet
    num_calls = 0
    for message in messages:
        row = message.to_openai()
        if message.calls:
            for call, written in zip(message.calls, row["tool_calls"], strict=True):
                num_calls += 1
                written["id"] = call.id or f"call_{num_calls}"
                arguments = json.dumps(call.arguments, ensure_ascii=False)
                written["function"] = {**written["function"], "arguments": arguments}
                waiting.append((written["id"], call.name))
        elif message.role == "tool":
            own = next((w for w in waiting if w[0] == message.call_id), None)
            own = own or next((w for w in waiting if w[1] == message.name), waiting[0] if waiting else None)
            if own is not None:
                waiting.remove(own)
            row["tool_call_id"] = own[0] if own is not None else message.call_id or "call_0"
        sent.append(row)
    return sent


def _read_answer(body: Any, index: int) -> Answer:
    """The answer in a completion's body; a ``ValueError`` where it is none."""
    choices = body.get("choices") if isinstance(body, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise ValueError(f"no choices[0].message in {json.dumps(body)[:120]}")
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if not isinstance(content, str | None) or not isinstance(calls, list | None):
        raise ValueError(f"content or tool_calls of a wrong type in {json.dumps(message)[:120]}")
    is_cut = choice.get("finish_reason") == "length"
    return Answer(index, content or "", is_cut, tuple(c if isinstance(c, dict) else {} for c in calls or ()))


def _time_events(events: Iterator[Any], start: float) -> Timing:
    """The times of a stream; a ``ValueError`` where it broke off."""
    first_s, num_pieces, num_counted, is_whole = None, 0, None, False
    for event in events:
        if not isinstance(event, dict):
            is_whole |= event is None
            continue
        choices = event.get("choices") or [{}]
        # Not every server ends with [DONE].
        is_whole |= choices[0].get("finish_reason") is not None
        delta = choices[0].get("delta") or {}
        if delta.get("content") or delta.get("tool_calls") or delta.get("reasoning_content"):
            first_s = first_s or time.perf_counter() - start
            num_pieces += 1
        if isinstance(event.get("usage"), dict):
            num_counted = event["usage"].get("completion_tokens")
    if not is_whole:
        raise ValueError("the stream ended before its [DONE]")
    total_s = time.perf_counter() - start
    return Timing(first_s or total_s, total_s, num_pieces if num_counted is None else num_counted)


def _base_url(url: str) -> str:
    parts = urlsplit(url.rstrip("/"))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url}: not an address. Expected http://HOST:PORT or https://HOST/PATH.")
    if parts.username or parts.password:
        raise ConfigError(
            "--model: an address with a password in it would be written to the results; set FCTUNE_API_KEY."
        )
    path = parts.path.removesuffix("/chat/completions").removesuffix("/")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"
