"""Engine for a vLLM server whose model is trained: token ids in and out, each update of the policy as a new adapter.

A version is copied to a directory that the server sees, flushed, renamed and loaded; only then do requests use it. Its
name was never used before, because a server keeps cached prefixes by name and path. An older version is unloaded once
no request uses it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError
from fctune.base.files import flush, staged_directory
from fctune.checkpoint.fault_hooks import fire
from fctune.config.server_address import parse_base_url
from fctune.data.chat_template import ChatTemplate
from fctune.engines.decoding import AnswerDecoder
from fctune.engines.engine import Answer, AnswerTokens, Prompt
from fctune.engines.http_client import HttpClient, RequestError, RetryPolicy
from fctune.engines.server import require_equal_ids
from fctune.engines.server_answers import TokenLimits, count_vocabulary, read_completion, read_models, read_token_ids

_PROBE = 'Where is "Köln", 12.50 °C?\n\t{"city": [1, true]} <|x|> 北京 🎉'
# Times that one request may fail, each after all of its attempts, on a server that is up.
_MAX_FAILURES = 3
_MAX_DIALOGUES = 10_000  # whose servers are remembered
# HTTP statuses of a server that is starting or ending, or of a proxy without one behind it.
_UNAVAILABLE = (502, 503, 504)
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_SLEEP_REMEDY = "start vLLM with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1 in its environment"
_REMEDY = (
    "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, as fctune serve "
    "--adapters does"
)


@dataclass(frozen=True, slots=True)
class ServerPatience:
    """Waiting times for a server that is unavailable.

    Attributes:
        poll_s: Seconds between two checks.
        max_wait_s: Seconds after which the run ends.
        retry: How long to retry one request before the server counts as unavailable.
    """

    poll_s: float = 5.0
    max_wait_s: float = 1800.0
    retry: RetryPolicy = field(default_factory=lambda: RetryPolicy(max_attempts=3, timeout_s=600.0))


class PolicyServer:
    """Continues token ids with a vLLM server or one with the same API; a ``PolicyEngine``, and thread-safe.

    ``is_concurrent`` says that ``answer`` may be called on several threads at a time.

    Args:
        url: Address of the server, with or without ``/v1``.
        publish_dir: Directory for adapters that trainer and server see under the same path.
        template: Chat template and tokenizer of the policy.
        temperature: Sampling temperature; nothing else changes the tokens' probabilities.
        served_model: Name of the base on the server; None takes the only one.
        run_id: Part of the names of this run's adapters; those left by a killed process of the run are unloaded and
            deleted.
        api_key: Sent as a bearer token and never written anywhere.
        concurrency: Requests in flight, of one call with several prompts.
        min_positions: Smallest context of the server, in tokens.
        patience: How long to wait for a lost server.
        is_resumed: Wait for the server if it is not there yet, since the run has found it before.
        log: Called with a line when the server is lost or back.
        url_option, model_option: Options or config keys of the address and the base's name, for messages.
        can_sleep: ``sleep`` and ``wake`` will be called; a server that a killed process left asleep is woken up.

    Raises:
        ConfigError: The address is invalid, no server answers, or it has several models, a different tokenizer, too
            short a context, or no sleep mode where one is needed.
    """

    is_concurrent = True

    def __init__(
        self,
        url: str,
        publish_dir: Path,
        template: ChatTemplate,
        *,
        temperature: float = 1.0,
        served_model: str | None = None,
        run_id: str = "run",
        api_key: str | None = None,
        concurrency: int = 64,
        min_positions: int = 0,
        patience: ServerPatience | None = None,
        is_resumed: bool = False,
        log: Callable[[str], None] = lambda line: None,
        url_option: str = "grpo.server.url",
        model_option: str = "grpo.server.served_model",
        can_sleep: bool = False,
    ):
        self.url = parse_base_url(url, url_option).removesuffix("/v1")
        self._can_sleep = can_sleep
        self._template = template
        self._decoder = AnswerDecoder(template)
        self._vocab_size = count_vocabulary(template)
        self._temperature = temperature
        self._concurrency = concurrency
        self._patience = patience or ServerPatience()
        self._log = log
        self._client = HttpClient(self.url, api_key, self._patience.retry)
        # Loading is not retried blindly: a second attempt would find the name taken.
        self._once = HttpClient(self.url, api_key, RetryPolicy(max_attempts=1, timeout_s=300.0))
        self._adapters = ServerAdapters(self._once, self.url, publish_dir, run_id)
        self._lock = threading.Lock()  # of the fields below
        self._recovery = threading.Lock()  # one thread looks for a lost server
        self._num_recoveries = self._num_answering = 0
        self.is_lost = False  # and waited for
        self._closed = threading.Event()
        self._current = PublishedAdapter("", 0)
        self._retired: list[PublishedAdapter] = []
        if is_resumed:
            self._wait_for_server()
        self._base = find_base(self._list_models(), self.url, served_model, min_positions, model_option)
        self._current = PublishedAdapter(self._base, 0)
        if can_sleep:
            self.wake()
        require_equal_tokenizer(self._client, self.url, self._base, template)
        self._adapters.remove_left(row["id"] for row in self._list_models())

    @property
    def version(self) -> int:
        """Version of the policy that answers new requests."""
        return self._current.version

    def describe(self) -> dict[str, Any]:
        """Return the address, the base's name and the temperature."""
        return {"engine": "server", "url": self.url, "served_model": self._base, "temperature": self._temperature}

    def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        """Yield the continuation of each prompt's ids in the order of completion, with the version that wrote it.

        While the server is unavailable, requests wait; they are sent again once it is back.

        Raises:
            ConfigError: The server refuses the key or the path, or does not come back.
        """
        with self._lock:
            self._num_answering += 1
            self._client.start()
            if self._closed.is_set():
                self._client.stop()
        if len(prompts) == 1:  # of a dialogue that has a thread of its own
            try:
                yield self._decode(self._answer_one(0, prompts[0]))
            finally:
                self._end_answering()
            return
        pool = ThreadPoolExecutor(min(self._concurrency, len(prompts) or 1), thread_name_prefix="rollout")
        try:
            futures = [pool.submit(self._answer_one, index, prompt) for index, prompt in enumerate(prompts)]
            for done in as_completed(futures):
                yield self._decode(done.result())
        finally:
            self._end_answering()
            pool.shutdown(wait=False, cancel_futures=True)

    def _end_answering(self) -> None:
        """Note that a caller has its answers; the last one ends the waits of further attempts."""
        with self._lock:
            self._num_answering -= 1
            if not self._num_answering:
                self._client.stop()

    def publish(self, policy: Path, version: int) -> None:
        """Load an adapter and use it for all new requests; requests in flight finish with their own version.

        Args:
            policy: Directory of a PEFT adapter, which may change or vanish afterwards.
            version: Number of updates behind it.

        Raises:
            ConfigError: The server does not accept adapters, this one's rank is over its limit, it does not see the
                directory, or it is gone for good.
        """
        published = self._adapters.copy(policy, version)
        fire("load", published.name)
        try:
            while (error := self._adapters.load(published)) is not None:
                self._recover(error, self._num_recoveries)
        except ConfigError:
            published.delete_files()
            raise
        with self._lock:
            is_over = self._closed.is_set()  # while the server loaded it, so that close() did not know of it
            if not is_over:
                previous, self._current = self._current, published
                if previous.path is not None:
                    self._retired.append(previous)
        if is_over:
            self._adapters.remove(published)
        self._unload_unused()

    def wake(self) -> None:
        """Wake the server up, with all of its memory; waits for one that is unavailable or cannot wake up.

        Raises:
            ConfigError: It has no sleep mode, refuses the key, or does not wake up in time.
        """
        num_recoveries = self._num_recoveries
        if (error := self._set_asleep(False)) is not None:
            self._recover(error, num_recoveries)

    def sleep(self) -> None:
        """Put the server to sleep: it gives up its GPU memory, and holds requests until it is woken up.

        Weights and adapters move to the host's memory; the caches of prompts are lost. No request may be in flight.

        Raises:
            ConfigError: It has no sleep mode, refuses the key, does not fall asleep, or is gone for good.
        """
        for _ in range(_MAX_FAILURES):
            num_recoveries = self._num_recoveries
            if (error := self._set_asleep(True)) is None:
                return
            self._recover(error, num_recoveries)
        raise ConfigError(f"{self.url}: does not fall asleep ({error}); {_SLEEP_REMEDY}.")

    def _set_asleep(self, is_asleep: bool) -> str | None:
        """Put the server to sleep or wake it up, unless that is done; returns the reason if it failed, else None."""
        path = "/sleep?level=1" if is_asleep else "/wake_up"
        try:
            self._once.post_text(path, {})
            found = self._once.get("/is_sleeping")
        except RequestError as error:
            if error.status in (401, 403):
                raise ConfigError(f"{self.url}{path}: {error}. Set FCTUNE_API_KEY.") from None
            if error.is_fatal:
                raise ConfigError(f"{self.url}{path}: {error}, so it cannot share a GPU; {_SLEEP_REMEDY}.") from None
            return f"{path}: {error}"
        if not isinstance(found, dict) or found.get("is_sleeping") is not is_asleep:
            return f"{path}: /is_sleeping then says {json.dumps(found)[:100]}"
        return None

    def close(self) -> None:
        """Unload this run's adapters and delete their directories; threads that still generate end with errors.

        A server that may be asleep is woken up before, and a warning is logged if it is not.
        """
        self._closed.set()  # the process ends only after its threads
        self._client.stop()
        if self._can_sleep:
            try:
                error = self._set_asleep(False)
            except ConfigError as failure:
                error = str(failure)
            if error is not None:
                self._log(f"the server at {self.url} was not woken up ({error}); POST {self.url}/wake_up does")
        with self._lock:
            published = [*self._retired, self._current]
            self._retired, self._current = [], PublishedAdapter(self._base, self._current.version)
        for one in published:
            self._adapters.remove(one)

    def _decode(self, answer: Answer) -> Answer:
        return self._decoder.decode(answer) if answer.error is None else answer

    def _answer_one(self, index: int, prompt: Prompt) -> Answer:
        assert prompt.ids is not None, "a policy continues token ids"
        ids, failures, limits = prompt.ids, 0, TokenLimits(prompt.max_new_tokens, self._vocab_size)
        rejected: list[str] = []

        def fail(version: int, reason: str) -> Answer:
            return Answer(index, version=version, error=reason, rejected=tuple(rejected))

        def read(body: Any) -> tuple[AnswerTokens, bool]:
            return read_completion(body, ids, limits)

        def note(error: RequestError) -> None:
            if error.kind is not None:
                rejected.append(error.kind)

        while True:
            num_recoveries = self._num_recoveries
            if self._closed.is_set():
                return fail(self.version, "the run has ended")
            with self._using_current() as published:
                body = self._body(published.name, list(ids), prompt.seed, prompt.max_new_tokens)
                try:
                    tokens, is_cut = self._client.post("/v1/completions", body, read, note)
                    version, kinds = published.version, tuple(rejected)
                    return Answer(index, is_cut=is_cut, tokens=tokens, version=version, rejected=kinds)
                except RequestError as error:
                    failure = error
            is_unknown = failure.status == 404 and published.path is not None
            if failure.status in (401, 403, 405) or (failure.status == 404 and not is_unknown):
                hint = ". Set FCTUNE_API_KEY." if failure.status in (401, 403) else ""
                raise ConfigError(f"{self.url} with the model {published.name}: {failure}{hint}")
            if failure.status is not None and not is_unknown and failure.status < 500:
                return fail(published.version, str(failure))
            is_up = self._is_healthy()
            failures += is_up
            if failures == _MAX_FAILURES:  # it runs, and fails with this request
                return fail(published.version, str(failure))
            if is_up and not is_unknown:
                continue
            self._recover(str(failure), num_recoveries)

    def _body(self, name: str, prompt: list[int], seed: int | None, max_new_tokens: int) -> dict[str, Any]:
        return {
            "model": name,
            "prompt": prompt,
            "max_tokens": max_new_tokens,
            "temperature": self._temperature,
            "seed": seed,
            "stop_token_ids": sorted(self._template.stop_ids),
            "logprobs": 0,
            "return_token_ids": True,
            "add_special_tokens": False,
            # These override the model's generation config, which would change the sampled distribution.
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }

    @contextmanager
    def _using_current(self) -> Iterator[PublishedAdapter]:
        """Hold the current version, so that it is not unloaded while a request uses it."""
        with self._lock:
            published = self._current
            published.num_requests += 1
        try:
            yield published
        finally:
            with self._lock:
                published.num_requests -= 1
            self._unload_unused()

    def _unload_unused(self) -> None:
        with self._lock:
            unused = [one for one in self._retired if not one.num_requests]
            self._retired = [one for one in self._retired if one.num_requests]
        for one in unused:
            self._adapters.remove(one)

    def _wait_for_server(self) -> None:
        try:
            self._once.get("/v1/models")
        except RequestError as error:
            if error.status is None or error.status in _UNAVAILABLE:
                self._recover(str(error), self._num_recoveries)

    def _recover(self, reason: str, num_recoveries: int) -> None:
        """Wait until the server is healthy, awake, and has the current version again.

        Args:
            reason: Why the server counts as unavailable.
            num_recoveries: Value of the counter when the failed request began: if another thread has found the server
                in the meantime, there is nothing to wait for.
        """
        with self._recovery:
            if self._num_recoveries != num_recoveries:
                return
            started, has_warned, self.is_lost = time.monotonic(), False, True
            while True:
                if self._is_healthy():
                    error = self._set_asleep(False) if self._can_sleep else None
                    if error is None and self._current.path is not None:
                        error = self._adapters.load(self._current)
                    if error is None:
                        break
                    reason = error
                waited = time.monotonic() - started
                if waited > self._patience.max_wait_s:
                    raise ConfigError(
                        f"{self.url}: unavailable for {waited:,.0f} s ({reason}). Start the server, and run the same "
                        "command again to resume."
                    )
                if not has_warned:
                    self._log(f"the server at {self.url} is unavailable ({reason}); waiting for it")
                    has_warned = True
                if self._closed.wait(self._patience.poll_s):
                    raise ConfigError(
                        f"{self.url}: unavailable ({reason}), and the run has ended, so it was not waited for."
                    )
            self._num_recoveries += 1
            self.is_lost = False
            if has_warned:
                waited = time.monotonic() - started
                self._log(f"the server at {self.url} is back after {waited:,.0f} s, with version {self.version}")

    def _is_healthy(self) -> bool:
        try:
            self._once.get("/v1/models")
        except RequestError:
            return False
        return True

    def _list_models(self) -> list[dict[str, Any]]:
        return list_models(self._once, self.url, "fctune serve BASE --adapters")


def list_models(
    client: HttpClient, url: str, command: str, key_variable: str = "FCTUNE_API_KEY"
) -> list[dict[str, Any]]:
    """Return the models that a server lists, a base and its adapters, each with a text as ``id``.

    Args:
        client: Client of the server.
        url: Its address, for messages.
        command: Command that starts such a server, for messages.
        key_variable: Environment variable of the API key, for messages.

    Raises:
        ConfigError: No server answers, or it refuses the key.
    """
    try:
        listed = client.get("/v1/models")
    except RequestError as error:
        if error.status in (401, 403):
            raise ConfigError(f"{url}: refuses the API key ({error}). Set {key_variable}.") from None
        raise ConfigError(
            f"{url}: no server answers there ({error}). Start one ({command}), or correct the address."
        ) from None
    return read_models(listed)


def find_base(
    models: Sequence[dict[str, Any]], url: str, served_model: str | None, min_positions: int, model_option: str
) -> str:
    """Return the name of the base among the models that a server lists.

    Args:
        models: Result of ``list_models``.
        url: Address of the server, for messages.
        served_model: Name of the base; None takes the only one.
        min_positions: Smallest context, in tokens.
        model_option: Option or config key that names the base, for messages.

    Raises:
        ConfigError: It is not among them, there are several without a name, or its context is too short.
    """
    if served_model is None:
        found = [row for row in models if row.get("parent") is None]
        if len(found) != 1:
            raise ConfigError(f"{url}: lists {_list(found)}; name the base with {model_option}.")
    else:
        found = [row for row in models if row["id"] == served_model]
        if not found:
            raise ConfigError(f"{url}: does not serve {served_model}; it lists {_list(models)}. Pass one of them.")
    positions = found[0].get("max_model_len")
    if isinstance(positions, int) and positions < min_positions:
        raise ConfigError(
            f"{url}: has a context of {positions:,} tokens, but {min_positions:,} are needed. Start vLLM with "
            f"--max-model-len {min_positions}."
        )
    return str(found[0]["id"])


def list_probes(template: ChatTemplate) -> list[str]:
    """Return texts by whose token ids tokenizers are compared: a varied one, and the special tokens."""
    special = "".join(sorted(template.tokenizer.get_added_vocab()))
    return [_PROBE, special] if special else [_PROBE]


def require_equal_tokenizer(
    client: HttpClient,
    url: str,
    model: str,
    template: ChatTemplate,
    remedy: str = "Serve the model that is trained.",
) -> None:
    """Check that a server encodes texts as the tokenizer of the model in training does, special tokens included.

    Raises:
        ConfigError: The token ids differ, or the server does not return any.
    """
    for probe in list_probes(template):
        body = {"model": model, "prompt": probe, "add_special_tokens": False}
        try:
            sent = client.post("/tokenize", body, read_token_ids)
        except RequestError as error:
            raise ConfigError(
                f"{url}: does not return token ids of a text ({error}). Serve the model with vLLM."
            ) from None
        own = template.tokenizer.encode(probe, add_special_tokens=False)
        require_equal_ids(f"{url}: {model}", template, "tokenizer", "text", own, sent, remedy)


class PolicyServers:
    """Several servers of one base, each with every version of the policy; a ``PolicyEngine``, and thread-safe.

    A dialogue begins with the server that has the fewest requests, among those that are not lost, and stays with it,
    since that server has read the dialogue so far. A lost server delays its own dialogues and the next version.

    Args:
        servers: The servers.
    """

    is_concurrent = True

    def __init__(self, servers: Sequence[PolicyServer]):
        self._servers = list(servers)
        self._num_requests = [0] * len(servers)
        self._lock = threading.Lock()  # of the numbers and the dialogues
        self._of_dialogue: OrderedDict[tuple[str, int], int] = OrderedDict()  # the newest last

    @property
    def version(self) -> int:
        """Oldest version that answers new requests."""
        return min(server.version for server in self._servers)

    def describe(self) -> dict[str, Any]:
        """Return the addresses, the base's name and the temperature."""
        described = [server.describe() for server in self._servers]
        return described[0] | {"url": ",".join(one["url"] for one in described)}

    def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        """Yield the answer to each prompt as ``PolicyServer.answer``, one after the other.

        Rollouts ask from many threads, with one prompt each.
        """
        for index, prompt in enumerate(prompts):
            server = self._choose((prompt.conversation.source, prompt.sample))
            try:
                (answer,) = self._servers[server].answer([prompt])
            finally:
                with self._lock:
                    self._num_requests[server] -= 1
            yield replace(answer, index=index)

    def publish(self, policy: Path, version: int) -> None:
        """Load an adapter into every server, at the same time; see ``PolicyServer.publish``."""
        self._on_each(lambda server: server.publish(policy, version))

    def wake(self) -> None:
        """Wake every server up; see ``PolicyServer.wake``."""
        self._on_each(PolicyServer.wake)

    def sleep(self) -> None:
        """Put every server to sleep; see ``PolicyServer.sleep``."""
        self._on_each(PolicyServer.sleep)

    def close(self) -> None:
        """Close every server's connection."""
        for server in self._servers:
            server.close()

    def _on_each(self, action: Callable[[PolicyServer], None]) -> None:
        """Run an action on every server, at the same time."""
        with ThreadPoolExecutor(len(self._servers), thread_name_prefix="servers") as threads:
            list(threads.map(action, self._servers))

    def _choose(self, dialogue: tuple[str, int]) -> int:
        """Return the index of the server to ask, and count the request."""
        with self._lock:
            server = self._of_dialogue.pop(dialogue, None)
            if server is None:
                order = range(len(self._servers))
                server = min(order, key=lambda one: (self._servers[one].is_lost, self._num_requests[one]))
            self._of_dialogue[dialogue] = server
            if len(self._of_dialogue) > _MAX_DIALOGUES:
                self._of_dialogue.popitem(last=False)
            self._num_requests[server] += 1
        return server


def _list(models: Sequence[dict[str, Any]]) -> str:
    return ", ".join(row["id"] for row in models[:10]) or "no model"


@dataclass(slots=True, eq=False)
class PublishedAdapter:
    """An adapter on the server; before anything was published, ``name`` is the base's."""

    name: str
    version: int
    path: Path | None = None
    num_requests: int = 0

    def delete_files(self) -> None:
        """Delete its directory, if it has one."""
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)


class ServerAdapters:
    """Copies, loads and unloads the adapters of a run.

    Args:
        client: Client of the server, which tries each request once: a second attempt would find the name taken.
        url: Its address, for messages.
        publish_dir: Directory that this process and the server see under the same path.
        run_id: Names this run's adapters.

    Attributes:
        directory: ``publish_dir``, absolute.
        prefix: Start of the name of each of the run's adapters.
    """

    def __init__(self, client: HttpClient, url: str, publish_dir: Path, run_id: str):
        self._client, self._url, self.directory = client, url, publish_dir.absolute()
        self.prefix = f"fctune-{hashlib.blake2b(run_id.encode(), digest_size=4).hexdigest()}-"

    def copy(self, policy: Path, version: int) -> PublishedAdapter:
        """Copy an adapter to a directory with a new name, atomically.

        Raises:
            ConfigError: The directory cannot be written.
        """
        path = self.directory / f"{self.prefix}v{version}-{secrets.token_hex(3)}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with staged_directory(path) as staging:
                for name in _ADAPTER_FILES:
                    shutil.copyfile(policy / name, staging / name)
                    flush(staging / name)
                flush(staging)
            flush(self.directory)
        except OSError as error:
            raise ConfigError(
                f"{self.directory}: the adapter of version {version} cannot be written ({error.strerror or error}). "
                "Pass a directory with free space that trainer and server share."
            ) from None
        return PublishedAdapter(path.name, version, path)

    def load(self, published: PublishedAdapter) -> str | None:
        """Load an adapter; returns the reason if the server is unavailable, else None.

        Raises:
            ConfigError: The server refuses it, or does not see its directory.
        """
        body = {"lora_name": published.name, "lora_path": str(published.path)}
        try:
            # The body is plain text, not JSON.
            self._client.post_text("/v1/load_lora_adapter", body)
        except RequestError as error:
            if error.status is None or error.status in _UNAVAILABLE:
                return str(error)
            if "already been loaded" in str(error):  # vLLM answers 400 to every refusal, without a code
                return None
            raise ConfigError(f"{self._url}: {self._describe_refusal(published, error)}") from None
        return None

    def remove(self, published: PublishedAdapter) -> None:
        """Unload an adapter and delete its directory; nothing for the base."""
        if published.path is not None:
            self._unload(published.name)
            published.delete_files()

    def remove_left(self, names: Iterable[str]) -> None:
        """Unload those of these names that a killed process of this run has left, and delete its directories."""
        for name in names:
            if name.startswith(self.prefix):
                self._unload(name)
        for left in self.directory.glob(f"*{self.prefix}*"):
            shutil.rmtree(left, ignore_errors=True)

    def _unload(self, name: str) -> None:
        with suppress(RequestError):  # a server that has died has unloaded it as well
            self._client.post_text("/v1/unload_lora_adapter", {"lora_name": name})

    def _describe_refusal(self, published: PublishedAdapter, error: RequestError) -> str:
        said, path = str(error), published.path  # the words of vLLM, which answers 400 to every refusal
        assert path is not None
        if "max_lora_rank" in said or ("greater than" in said and "rank" in said.lower()):
            rank = _read_rank(path)
            return (
                f"the adapter has rank {rank}, over the server's limit ({said}). Start vLLM with --max-lora-rank "
                f"{rank} or more, or lower adapter.rank."
            )
        if "No adapter found" in said or "No such file" in said or str(path) in said:
            return (
                f"the server does not see {path} ({said}). Choose a directory that trainer and server share under the "
                "same path."
            )
        if error.status in (404, 405) or ("lora" in said.lower() and "enabl" in said.lower()):
            return f"does not load adapters at run time ({said}); {_REMEDY}."
        return f"rejects the adapter {path} ({said}). Check that it serves the model that is trained."


def _read_rank(adapter_dir: Path) -> int | str:
    try:
        return int(json.loads((adapter_dir / "adapter_config.json").read_text(encoding="utf-8"))["r"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown"
