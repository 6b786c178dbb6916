"""A server that scores token ids with a teacher: its most likely tokens at each position, with log-probabilities."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fctune.base.errors import ConfigError
from fctune.config.sections.distill import TeacherServerConfig
from fctune.config.server_address import parse_base_url
from fctune.data.chat_template import ChatTemplate
from fctune.engines.http_client import HttpClient, RequestError, RetryPolicy
from fctune.engines.policy_server import find_base, list_models, require_equal_tokenizer
from fctune.engines.server_answers import count_vocabulary, read_top_logprobs

_SECTION = "distill.teacher_server"
_KEY_VARIABLE = "FCTUNE_TEACHER_API_KEY"
_POLL_S = 2.0
OTHER_TOKENIZER = "Choose a teacher with the tokenizer of the model in training."
"""Remedy for a teacher whose token ids mean something else."""


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The most likely tokens at some positions: ids, int64 ``[t, k]``, and log-probabilities, float32 ``[t, k]``."""

    ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]


class TeacherServer:
    """Scores sequences of token ids through ``prompt_logprobs`` of ``/v1/completions``; thread-safe.

    Args:
        config: The server.
        template: Chat template and tokenizer of the model in training.
        min_positions: Longest sequence, in tokens.
        api_key: Sent as a bearer token and never written anywhere.
        log: Called with a line when the server is lost.

    Raises:
        ConfigError: No server answers, or it has another tokenizer, too short a context, or sends no or too few
            log-probabilities of a prompt, or impossible ones.
    """

    def __init__(
        self,
        config: TeacherServerConfig,
        template: ChatTemplate,
        min_positions: int,
        api_key: str | None = None,
        log: Callable[[str], None] = lambda line: None,
    ):
        self._config, self._log = config, log
        self._closed = threading.Event()
        self._lock = threading.Lock()  # of the flag
        self._is_lost = False  # and the log has said so
        self._vocab_size = count_vocabulary(template)
        if config.top_k >= self._vocab_size:
            raise ConfigError(
                f"{_SECTION}.top_k={config.top_k:,}: expected fewer than the {self._vocab_size:,} tokens of the model."
            )
        self.url = parse_base_url(config.url, f"{_SECTION}.url").removesuffix("/v1")
        self._client = HttpClient(self.url, api_key, RetryPolicy(max_attempts=3, timeout_s=600.0))
        models = list_models(self._client, self.url, "vllm serve TEACHER", _KEY_VARIABLE)
        # Scoring generates a token, which takes a position.
        self._model = find_base(models, self.url, config.served_model, min_positions + 1, f"{_SECTION}.served_model")
        require_equal_tokenizer(self._client, self.url, self._model, template, OTHER_TOKENIZER)
        try:
            self._request(template.tokenizer.encode("1 2", add_special_tokens=False)[:1] * 2, [1])
        except RequestError as error:
            raise ConfigError(
                f"{self.url}: {self._model} does not send the {config.top_k:,} most likely tokens of a prompt's "
                f"positions ({error}). Serve the teacher with vLLM and --max-logprobs {config.top_k}, or lower "
                f"{_SECTION}.top_k."
            ) from None

    def describe(self) -> str:
        """Return the name of the teacher on the server."""
        return self._model

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[TopLogprobs]:
        """Return the teacher's most likely tokens at the given positions of each sequence of token ids.

        Raises:
            ConfigError: The server sends unusable answers, or is lost and does not come back.
        """
        pool = ThreadPoolExecutor(min(self._config.concurrency, len(sequences) or 1), thread_name_prefix="teacher")
        try:
            return list(pool.map(lambda one: self._score_one(*one), sequences))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """End the requests and waits of other threads, which a process that ends would wait for."""
        self._closed.set()
        self._client.stop()

    def _score_one(self, ids: Sequence[int], positions: Sequence[int]) -> TopLogprobs:
        lost_s: float | None = None
        while True:
            try:
                scores = self._request(ids, positions)
                self._is_lost = False
                return scores
            except RequestError as error:
                if error.status == 200 or not error.is_transient:
                    raise ConfigError(f"{self.url}: {self._model} cannot score an answer ({error}).") from None
                now = time.monotonic()
                if lost_s is None:
                    lost_s = now
                    with self._lock:
                        is_known, self._is_lost = self._is_lost, True
                    if not is_known:
                        self._log(f"the teacher at {self.url} is unavailable ({error}); waiting for it")
                if now - lost_s > self._config.max_wait_s:
                    raise ConfigError(
                        f"{self.url}: unavailable for {now - lost_s:,.0f} s ({error}). Start the teacher's server, and "
                        "run the same command again to resume."
                    ) from None
                if self._closed.wait(_POLL_S):
                    raise ConfigError(f"{self.url}: unavailable ({error}), and the run has ended.") from None

    def _request(self, ids: Sequence[int], positions: Sequence[int]) -> TopLogprobs:
        top_k = self._config.top_k
        body: dict[str, Any] = {"model": self._model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0}
        body |= {"prompt_logprobs": top_k, "add_special_tokens": False}

        def read(answer: Any) -> TopLogprobs:
            tokens, logprobs = read_top_logprobs(answer, ids, positions, top_k, self._vocab_size)
            shape = len(positions), top_k
            return TopLogprobs(
                np.array(tokens, dtype=np.int64).reshape(shape), np.array(logprobs, dtype=np.float32).reshape(shape)
            )

        return self._client.post("/v1/completions", body, read)
