"""Engine for servers with OpenAI's chat completions API: vLLM, SGLang, llama.cpp, ``transformers serve``."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fctune.base.errors import ConfigError, DataError
from fctune.base.network import is_loopback
from fctune.config.server_address import parse_base_url
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Conversation, Message, Tool
from fctune.engines.choices import find_span, to_answer, with_choice
from fctune.engines.engine import Answer, ChoiceScore, Prompt, Sampling
from fctune.engines.http_client import HttpClient, RequestError, RetryPolicy
from fctune.engines.server_answers import (
    Timing,
    TokenLimits,
    count_vocabulary,
    read_chat_answer,
    read_chat_events,
    read_models,
    read_prompt_logprobs,
    read_text,
    read_token_ids,
    time_events,
)
from fctune.models.hub import digest_model

# Distance of the seeds of a prompt's samples: seeds that users choose are close to each other, and must not meet.
_SEED_STEP = 1_000_003
# Words, as servers have no code for it. vLLM: "maximum context length is", "maximum model length of";
# llama.cpp: "exceeds the available context size".
_CONTEXT = re.compile(r"context (?:length|size|window)|maximum model length|max_model_len", re.IGNORECASE)
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "description": "Name of a city, as in Köln"}}}
_PROBE = Conversation(
    (Message("user", 'What is the weather in "Köln", 12.50 °C?'),),
    (Tool({"name": "get_weather", "description": "Current weather", "parameters": _SCHEMA}),),
)


class ServerEngine:
    """Requests chat completions, several at a time.

    Args:
        url: Address of the server, with or without ``/v1``.
        model: Name under which the server serves the model; None takes the only one that the server lists.
        api_key: Sent as a bearer token and never written anywhere; None sends none.
        concurrency: Number of requests in flight.
        sampling: Choice of tokens; None is greedy.
        request: Further keys of the request's body, such as ``{"tool_choice": "none"}``; they override our own.
        retry_policy: How long a request is tried.
        template_args: Switches of the chat template, sent with each request; those of a prompt are merged over them.
        keeps_tokens: Answers have their ``tokens``, which vLLM sends on request; one without them is an error.
        is_streamed: Have answers sent in pieces, and put them together as clients do; not with ``keeps_tokens``.
        key_variable: Environment variable that the key is set with, for messages.
        model_option: Option that the model is named with, for messages.

    Attributes:
        vocab_size: Token ids of answers are below it; None if it is not known.

    Raises:
        ConfigError: The address or the key is invalid, there is no server, the server refuses the key, or it does not
            list exactly one model.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        api_key: str | None = None,
        concurrency: int = 16,
        sampling: Sampling | None = None,
        request: Mapping[str, Any] | None = None,
        retry_policy: RetryPolicy | None = None,
        template_args: Mapping[str, Any] | None = None,
        keeps_tokens: bool = False,
        is_streamed: bool = False,
        key_variable: str = "FCTUNE_API_KEY",
        model_option: str = "--served-model",
    ):
        assert not (keeps_tokens and is_streamed), "tokens are not read from streams"
        self.url = parse_base_url(url, "--model")
        if api_key and (not api_key.isascii() or not api_key.isprintable() or " " in api_key):
            # Not shown: part of it may be the key.
            raise ConfigError(
                f"{key_variable}: contains characters that a header cannot carry, such as spaces. Set it again."
            )
        self.concurrency = concurrency
        self.sampling = sampling or Sampling()
        self._request = dict(request or {})
        self._template_args = dict(template_args or {})
        self._keeps_tokens = keeps_tokens
        self._is_streamed = is_streamed
        self._client = HttpClient(self.url, api_key, retry_policy)
        # Consecutive requests without any answer after which the server is considered gone.
        self._give_up_after = max(8, 2 * concurrency)
        self._key_hint = "the server refuses the API key" if api_key else "the server requires an API key"
        self._key_variable, self._model_option = key_variable, model_option
        self._accepts_ignore_eos = True
        self.vocab_size: int | None = None
        self._root = self.url.removesuffix("/v1")
        self._server_name = "the server"
        self._outage = ""
        self.model = self._find_model(model)

    def describe(self) -> dict[str, Any]:
        """Return the address, the model's name and the settings of requests, without the API key.

        A server that tells the directory of its model, as vLLM does, is described by it, and by a digest of the weights
        if it runs on this machine.
        """
        sampling = self.sampling if self.sampling.temperature > 0 else Sampling()
        switches = {"template_args": self._template_args} if self._template_args else {}
        return {
            "model": self.url,
            "served_model": self.model,
            **self._weights,
            "request": self._request,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            **switches,
            **({"is_streamed": True} if self._is_streamed else {}),
        }

    def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        """Yield one answer per prompt in the order of completion; the server renders the conversations.

        Once the server has stopped answering altogether, no further requests are sent; their answers are errors.

        Raises:
            ConfigError: The server refuses every request: the key, the model's name or the path is wrong; or a prompt
                has choices, and the server sends no log-probabilities of a prompt.
        """
        if any(prompt.choices for prompt in prompts):
            self._require_prompt_logprobs()
        pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="endpoint")
        self._client.start()
        num_answered = num_failed_in_a_row = 0
        cancel_reason = self._outage = ""
        try:
            indices = {pool.submit(self._request_answer, index, prompt): index for index, prompt in enumerate(prompts)}
            for done in as_completed(indices):
                if done.cancelled():
                    yield Answer(indices[done], error=cancel_reason)
                    continue
                answer, is_server_gone = done.result()
                num_answered += answer.error is None
                # A server that refuses each of the very first requests will refuse the rest.
                num_failed_in_a_row = num_failed_in_a_row + 1 if is_server_gone or not num_answered else 0
                yield answer
                if num_failed_in_a_row >= self._give_up_after and not cancel_reason:
                    self._outage = f"{num_failed_in_a_row} requests in a row failed ({answer.error})"
                    cancel_reason = f"not sent: {self._outage}"
                    self._cancel(indices)
        finally:
            self._client.stop()
            pool.shutdown(wait=False, cancel_futures=True)

    def find_outage(self) -> str:
        """Return why answers are missing if the server failed as a whole, and not on single prompts; empty if not.

        That is so if the last ``answer`` gave up on it, or if it cannot be reached now.
        """
        if not self._outage:
            try:
                self._client.get("/models")
            except RequestError as error:
                return str(error) if error.status is None else ""
        return self._outage

    def request(
        self,
        prompt: Prompt,
        on_failure: Callable[[RequestError], None] = lambda error: None,
        retries_timeouts: bool = True,
    ) -> Answer:
        """Return the answer to one prompt; any number of threads may call it at once, until ``stop``.

        Args:
            prompt: The prompt.
            on_failure: Called with the error of each failed attempt, unless answers are streamed.
            retries_timeouts: Attempts that reach their time limit are repeated; those of streamed answers always are.

        Raises:
            RequestError: No usable answer after all attempts.
            ConfigError: The server refuses every request, as in ``answer``.
        """
        start = time.perf_counter()
        sent = self._body(prompt)
        most = sent["max_tokens"] if isinstance(sent["max_tokens"], int) else None  # --request may replace it
        limits = TokenLimits(most, self.vocab_size) if self._keeps_tokens else None
        try:
            if self._is_streamed:
                sent |= {"stream": True, "stream_options": {"include_usage": True}}
                answer = self._client.post_stream("/chat/completions", sent, read_chat_events)
            else:
                answer = self._client.post(
                    "/chat/completions",
                    sent,
                    lambda body: read_chat_answer(body, limits),
                    on_failure,
                    retries_timeouts,
                )
        except RequestError as error:
            if prompt.schema is not None and error.status in (400, 422):
                # A server without constrained decoding, or one that cannot compile this schema.
                return self.request(replace(prompt, schema=None), on_failure, retries_timeouts)
            if error.is_fatal:
                is_about_key = error.status in (401, 403)
                hint = f"{self._key_hint}; set {self._key_variable}" if is_about_key else f"see {self._model_option}"
                raise ConfigError(f"{self.url} with the model {self.model}: {error} ({hint}).") from None
            raise
        return replace(answer, seconds=round(time.perf_counter() - start, 4))

    def stop(self) -> None:
        """Start no further attempts of requests in flight, and fail those that wait for their next."""
        self._client.stop()

    def time_answer(self, prompt: Conversation, max_new_tokens: int) -> Timing:
        """Time one streamed answer, generated up to the limit of tokens if the server supports ``ignore_eos``.

        Raises:
            ConfigError: No answer.
        """
        body = self._body(Prompt(prompt, max_new_tokens))
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= {"ignore_eos": True} if self._accepts_ignore_eos else {}
        start = time.perf_counter()
        try:
            return self._client.post_stream("/chat/completions", body, lambda events: time_events(events, start))
        except RequestError as error:
            if error.status in (400, 422) and "ignore_eos" in body:
                self._accepts_ignore_eos = False
                return self.time_answer(prompt, max_new_tokens)
            raise ConfigError(f"{self.url}: {error}") from None

    def check_tokens(self, template: ChatTemplate) -> None:
        """Compare the token ids of a prompt with tools with the template's; asks the server for one token.

        From then on, answers with ids outside the vocabulary are refused. Needs ``keeps_tokens``.

        Args:
            template: The tokenizer and chat template that will be trained with.

        Raises:
            ConfigError: The server sends no ids, or other ones.
        """
        self.vocab_size = count_vocabulary(template)
        (answer,) = self.answer([Prompt(_PROBE, 1)])
        if answer.tokens is None:
            raise ConfigError(f"{self.url}: sends no token ids ({answer.error}). Serve the model with vLLM.")
        own, name = template.encode_prompt(_PROBE), f"{self.url}: {self.model}"
        require_equal_ids(name, template, "tokenizer or chat template", "prompt", own, answer.tokens.prompt_ids)

    @cached_property
    def _weights(self) -> dict[str, str]:
        """Where the server read its weights, with their digest if they are on this machine; hashed once."""
        root = next((row.get("root") for row in self._listed if row["id"] == self.model), None)
        if not isinstance(root, str) or not root:
            return {}
        described = {"served_from": root}
        if is_loopback(urlsplit(self.url).hostname or "") and Path(root).is_absolute():
            with suppress(OSError):  # of another user, or a path in a container
                if Path(root).is_dir():
                    described["served_digest"] = digest_model(Path(root))
        return described

    def _find_model(self, model: str | None) -> str:
        try:
            listed = self._client.get("/models")
        except RequestError as error:
            if error.status is None:
                raise ConfigError(f"{self.url}: {error}. Is the server up, and the address right?") from None
            if error.status in (401, 403):
                raise ConfigError(f"{self.url}: {self._key_hint} ({error}). Set {self._key_variable}.") from None
            listed = None
        rows = self._listed = read_models(listed)
        self._server_name = next((str(row["owned_by"]) for row in rows if row.get("owned_by")), "the server")
        if model is not None:
            return model
        names: list[str] = [row["id"] for row in rows]
        if len(names) == 1:
            return names[0]
        unlisted = "the server lists none (for transformers serve, it is the directory that it was started with)"
        listing = f"the server lists {', '.join(names[:10])}" if names else unlisted
        raise ConfigError(f"{self.url}: no model name given, and {listing}. Name it: {self._model_option} NAME.")

    def _request_answer(self, index: int, prompt: Prompt) -> tuple[Answer, bool]:
        """Return the answer to one prompt, and True if the server seems to be gone."""
        try:
            answer = self._choose(prompt) if prompt.choices else self.request(prompt)
            return replace(answer, index=index), False
        except RequestError as error:
            return Answer(index, error=f"{error}{_hint_at_context(error)}"), error.is_transient

    def _choose(self, prompt: Prompt) -> Answer:
        """Return the most likely choice of a prompt; see ``fctune.engines.choices``."""
        start_s = time.perf_counter()
        try:
            sequences = [self._tokenize(with_choice(prompt.conversation, choice)) for choice in prompt.choices]
            start, num_after = find_span(sequences)
            scores = []
            for ids in sequences:
                logprobs = self._score_ids(ids)[start : len(ids) - num_after]
                own = {"model": self.model, "tokens": ids[start : len(ids) - num_after]}
                text = self._client.post(f"{self._root}/detokenize", own, read_text)
                scores.append(ChoiceScore(sum(logprobs), len(logprobs), len(text)))
        except DataError as error:
            return Answer(0, error=str(error))
        return replace(to_answer(0, prompt.choices, scores), seconds=round(time.perf_counter() - start_s, 4))

    def _tokenize(self, conversation: Conversation) -> list[int]:
        body = self._body(Prompt(conversation, 1))
        kept = ("model", "messages", "tools", "chat_template_kwargs")
        sent = {key: body[key] for key in kept if key in body} | {"add_generation_prompt": False}
        return self._client.post(f"{self._root}/tokenize", sent, read_token_ids)

    def _score_ids(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token id; 0 for the first, which has none."""
        body = {"model": self.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        return self._client.post("/completions", body, lambda answer: read_prompt_logprobs(answer, ids))

    def _require_prompt_logprobs(self) -> None:
        """Score two tokens of a chat, which fails on a server without vLLM's API.

        Raises:
            ConfigError: The server sends no token ids of a conversation, or no log-probabilities of them.
        """
        try:
            self._score_ids(self._tokenize(_PROBE)[:2])
        except RequestError as error:
            raise ConfigError(
                f"{self.url}: {self._server_name} sends no log-probabilities of a prompt ({error}). Multiple-choice "
                "questions need prompt_logprobs of /v1/completions, and /tokenize: serve the model with vLLM, or "
                "evaluate its directory in process."
            ) from None

    def _cancel(self, futures: Iterable[Future[Any]]) -> None:
        self._client.stop()
        for future in futures:
            future.cancel()

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        assert prompt.ids is None, "a chat server renders its prompts"
        conversation = prompt.conversation
        body: dict[str, Any] = {
            "model": self.model,
            "messages": to_messages(conversation.messages),
            "max_tokens": prompt.max_new_tokens,
            "temperature": self.sampling.temperature,
            "seed": self.sampling.seed + _SEED_STEP * prompt.sample if prompt.seed is None else prompt.seed,
        }
        if self._keeps_tokens:
            body |= {"return_token_ids": True, "logprobs": True}
        if conversation.tools:
            body["tools"] = [tool.to_openai() for tool in conversation.tools]
        if switches := {**self._template_args, **conversation.template_args}:
            body["chat_template_kwargs"] = switches
        if prompt.schema is not None:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": prompt.schema},
            }
        return {**body, **self._request}


def require_equal_ids(
    name: str,
    template: ChatTemplate,
    what: str,
    probe: str,
    own: Sequence[int],
    sent: Sequence[int],
    remedy: str = "Serve the model that is trained.",
) -> None:
    """Check that a server, or another model, encodes a probe as the model that is trained does.

    Args:
        name: The server and its model, for the message.
        template: The model's tokenizer and chat template.
        what: Name of what would differ.
        probe: Name of what was encoded.
        own: Token ids by the template's tokenizer.
        sent: Token ids by the server.
        remedy: What to do if they differ.

    Raises:
        ConfigError: The ids differ.
    """
    if list(own) != list(sent):
        position = next(i for i, (a, b) in enumerate(zip_longest(own, sent)) if a != b)
        raise ConfigError(
            f"{name} has a different {what} from {template.model_dir}: the same {probe} has {len(sent):,} token ids "
            f"there and {len(own):,} here, which differ from number {position} on. {remedy}"
        )


def to_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form: arguments as a string of JSON, and an id for each call and its result."""
    sent: list[dict[str, Any]] = []
    pending: list[tuple[str, str]] = []  # id and name of calls without a result yet
    num_calls = 0
    for message in messages:
        row = message.to_openai()
        if message.reasoning is not None:
            row["reasoning"] = message.reasoning  # vLLM's name; SGLang and llama.cpp read reasoning_content
        if message.calls:
            for call, written in zip(message.calls, row["tool_calls"], strict=True):
                num_calls += 1
                written["id"] = call.id or f"call_{num_calls}"
                arguments = json.dumps(call.arguments, ensure_ascii=False)
                written["function"] = {**written["function"], "arguments": arguments}
                pending.append((written["id"], call.name))
        elif message.role == "tool":
            answered = next((call for call in pending if call[0] == message.call_id), None)
            answered = answered or next((call for call in pending if call[1] == message.name), None)
            answered = answered or (pending[0] if pending else None)
            if answered is not None:
                pending.remove(answered)
            row["tool_call_id"] = answered[0] if answered is not None else message.call_id or "call_0"
        sent.append(row)
    return sent


def _hint_at_context(error: RequestError) -> str:
    """Return the remedy for a server whose context is shorter than the prompt; empty for other errors."""
    if error.status not in (400, 413) or not _CONTEXT.search(str(error)):
        return ""
    return "; start the server with a longer context (vLLM: --max-model-len, llama.cpp: -c), or lower --max-new-tokens"
