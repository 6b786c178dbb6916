"""An HTTP server with OpenAI's chat API, behind which the policy answers agents and every token is recorded.

An agent needs nothing but a base URL. ``http://HOST:PORT/episode/ID/v1`` names its episode, as do the header
``X-Episode`` and the API key. Further requests wait once ``concurrency`` are being answered.
"""

from __future__ import annotations

import errno
import json
import queue
import select
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from fctune.base.errors import ConfigError, DataError
from fctune.calls.formats.base import CallFormat
from fctune.data.chat_template import ChatTemplate
from fctune.engines.engine import Answer, Engine, Prompt
from fctune.tasks.environments.agent.requests import ChatRequest, RefusedRequest, read_chat_request
from fctune.tasks.environments.agent.sessions import AgentSession, AnswerLog, Policy, SessionAnswer, SessionLimits
from fctune.tasks.episode import make_seed

_MAX_BODY_BYTES = 64 * 1024**2
_KEEP_ALIVE_S = 10.0  # a stream without a byte for longer may be given up by what lies between
_IDLE_S = 120.0  # connections without a request are closed then
_LINGER_S = 0.02  # agents whose prompts arrive within this time are answered in one batch
_PREFIX = "/episode/"
_HEADER = "X-Episode"
_PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A prompt that waits for a batch; ``is_over`` returns True once nobody waits for its answer."""

    prompt: Prompt
    is_over: Callable[[], bool]
    answer: Future[Answer] = field(default_factory=Future)

    def refuse(self) -> None:
        self.answer.set_exception(RefusedRequest("the run or the episode has ended", 503, "run_over"))


class AgentProxy:
    """Answers agents with an engine that continues token ids, from ``open`` to ``close``.

    Args:
        engine: The policy. One that answers several callers at a time, as servers do, gets each prompt as it arrives;
            another gets batches, on the thread that calls ``answer_waiting``.
        template: Chat template and tokenizer of the policy.
        call_format: The format in which it writes calls.
        limits: Limits of each episode.
        name: Name of the model that agents ask for.
        log: Where answers are recorded; None: nowhere.
        host: Address to listen on.
        port: Port to listen on; 0: a free one.
        concurrency: Requests that are answered at a time.
        seed: Seed of episodes that no caller begins, as for ``is_open``.
        is_open: Every name of an episode is accepted; else only those of ``begin``.

    Attributes:
        failure: Error after which no request can be answered, such as that of a lost server or a full disk.

    Raises (at construction):
        ConfigError: The port is taken, the host is not this machine's, or the log cannot be read.
        DataError: The log is of another form.
    """

    def __init__(
        self,
        engine: Engine,
        template: ChatTemplate,
        call_format: CallFormat | None,
        limits: SessionLimits,
        *,
        name: str = "policy",
        log: AnswerLog | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        concurrency: int = 64,
        seed: int = 0,
        is_open: bool = False,
    ):
        self._engine, self._limits, self._log = engine, limits, log
        self._seed, self._is_open = seed, is_open
        self._policy = Policy(template, call_format, name, self._ask)
        self._is_concurrent = bool(getattr(engine, "is_concurrent", False))
        self._waiting: queue.Queue[_Waiting] = queue.Queue()
        self._is_closed = threading.Event()
        self.failure: Exception | None = None
        self._lock = threading.Lock()
        self._sessions: dict[str, AgentSession] = {}
        self._executor = ThreadPoolExecutor(concurrency, thread_name_prefix="proxy")
        self._recorded = log.read() if log is not None and is_open else {}
        handler = type("Handler", (_Handler,), {"proxy": self})
        shown = f"[{host}]" if ":" in host else host
        try:
            self._server = _Server((host, port), handler)
        except OSError as error:
            remedy = "Choose another port" if error.errno in _PORT_ERRORS else "Choose an address of this machine"
            raise ConfigError(f"{shown}:{port}: cannot listen there ({error.strerror}). {remedy}.") from None
        self.url = f"http://{shown}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="proxy-server", daemon=True).start()

    @property
    def model(self) -> str:
        """Name of the model that agents ask for."""
        return self._policy.name

    def begin(self, episode: str, seed: int) -> AgentSession:
        """Begin an episode, whose tokens the seed decides."""
        session = self._make_session(episode, seed)
        with self._lock:
            self._sessions[episode] = session
        return session

    def base_url(self, episode: str) -> str:
        """Return the base URL of an episode."""
        return f"{self.url}{_PREFIX}{quote(episode, safe='')}/v1"

    def forget(self, episode: str) -> None:
        """Free what an episode that has ended holds; its requests are refused."""
        with self._lock:
            self._sessions.pop(episode, None)

    def find(self, episode: str) -> AgentSession:
        """Return the session of an episode.

        Raises:
            RefusedRequest: There is none of this name.
        """
        with self._lock:
            session = self._sessions.get(episode)
            if session is None and self._is_open:
                session = self._make_session(episode, make_seed(self._seed, episode))
                session.restore(self._recorded.pop(episode, ()))
                self._sessions[episode] = session
        if session is None:
            raise RefusedRequest("no such episode, or it has ended", 404, "episode_not_found")
        return session

    def answer_waiting(self, timeout_s: float) -> None:
        """Answer the prompts that wait, in one batch; waits for the first of them up to ``timeout_s``."""
        batch: list[_Waiting] = []
        try:
            batch.append(self._waiting.get(timeout=timeout_s))
            while True:
                batch.append(self._waiting.get(timeout=_LINGER_S))
        except queue.Empty:
            pass
        for one in batch:
            if one.is_over():
                one.refuse()
        if not (batch := [one for one in batch if not one.answer.done()]):
            return
        try:
            for answer in self._engine.answer([one.prompt for one in batch]):
                batch[answer.index].answer.set_result(answer)
        except DataError as error:  # none can be answered
            for index, one in enumerate(batch):
                if not one.answer.done():
                    one.answer.set_result(Answer(index, error=str(error)))
        finally:
            for one in batch:
                if not one.answer.done():
                    one.refuse()

    def close(self) -> None:
        """Stop listening; requests that wait end with an error."""
        self._is_closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._refuse_waiting()
        if self._log is not None:
            self._log.close()

    def fail(self, error: ConfigError) -> RefusedRequest:
        """Keep an error after which no request is answered; returns what the client is told."""
        self.failure = self.failure or error
        return RefusedRequest(str(error), 503, "run_over")

    def _refuse_waiting(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._waiting.get_nowait().refuse()

    def _make_session(self, episode: str, seed: int) -> AgentSession:
        return AgentSession(episode, self._policy, self._limits, self._executor, self._log, seed)

    def _ask(self, prompt: Prompt, is_over: Callable[[], bool]) -> Answer:
        if self.failure is not None or self._is_closed.is_set():
            reason = "the run has ended" if self.failure is None else str(self.failure)
            raise RefusedRequest(reason, 503, "run_over")
        if not self._is_concurrent:
            waiting = _Waiting(prompt, is_over)
            self._waiting.put(waiting)
            if self._is_closed.is_set():
                self._refuse_waiting()
            return waiting.answer.result()
        try:
            (answer,) = self._engine.answer([prompt])
        except ConfigError as error:
            raise self.fail(error) from None
        return answer


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]):
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that has gone: the handler reports its own errors
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One connection of an agent."""

    proxy: AgentProxy
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Answer with the list of models."""
        self._respond(self._list_models)

    def do_POST(self) -> None:
        """Answer a request for an answer."""
        self._respond(self._chat)

    def log_message(self, *arguments: Any) -> None:
        """Log nothing: answers are in the record."""

    def _respond(self, respond: Callable[[str, str], None]) -> None:
        try:
            path = urlsplit(self.path).path
            episode = self.headers.get(_HEADER) or (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            if path.startswith(_PREFIX):
                name, _, rest = path.removeprefix(_PREFIX).partition("/")
                episode, path = unquote(name), f"/{rest}"
            respond(episode.strip() or "default", path.removeprefix("/v1").rstrip("/"))
        except RefusedRequest as error:
            self._send_json(error.status, error.to_json())
        except ConfigError as error:  # the log cannot be written
            refused = self.proxy.fail(error)
            self._send_json(refused.status, refused.to_json())
        except Exception as error:  # the client must hear of it; what is wrong is shown where the proxy runs
            traceback.print_exception(error)
            self.close_connection = True
            self._send_json(500, RefusedRequest(f"{type(error).__name__}: {error}", 500, "internal").to_json())

    def _list_models(self, episode: str, path: str) -> None:
        model = {"id": self.proxy.model, "object": "model", "created": 0, "owned_by": "fctune"}
        if path == "/models":
            self._send_json(200, {"object": "list", "data": [model]})
        elif unquote(path) == f"/models/{self.proxy.model}":
            self._send_json(200, model)
        else:
            raise _unknown_path(path)

    def _chat(self, episode: str, path: str) -> None:
        body = self._read_body()
        if path != "/chat/completions":
            raise _unknown_path(path)
        session, request = self.proxy.find(episode), read_chat_request(body, episode)
        if request.model not in (None, self.proxy.model):
            reason = f"the model {request.model} does not exist; this proxy serves {self.proxy.model}"
            raise RefusedRequest(reason, 404, "model_not_found")
        is_repeated = self.headers.get("x-stainless-retry-count", "0") != "0"
        future = session.begin(request, self.headers.get("Idempotency-Key"), is_repeated)
        if request.is_stream:
            self._stream(session, request, future)
        else:
            answer = _wait(future)
            assert answer is not None
            self._deliver(session, answer, lambda: self._send_json(200, answer.reply.to_json()))

    def _read_body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self.close_connection = True
            raise RefusedRequest("expected a Content-Length", 411)
        if int(length) > _MAX_BODY_BYTES:
            self.close_connection = True
            raise RefusedRequest(f"the body has more than {_MAX_BODY_BYTES:,} bytes", 413)
        try:
            sent = self.rfile.read(int(length))
        except OSError:
            self.close_connection = True
            raise RefusedRequest("the body did not arrive", 408) from None
        try:
            return json.loads(sent)
        except (ValueError, RecursionError) as error:
            raise RefusedRequest(f"the body is not JSON ({error})") from None

    def _stream(self, session: AgentSession, request: ChatRequest, future: Future[SessionAnswer]) -> None:
        """Send an answer as server-sent events, with comments while it is awaited."""
        has_begun, is_lost = False, False
        try:
            while (answer := _wait(future, _KEEP_ALIVE_S)) is None:
                is_lost = is_lost or not self._send_events([": the policy is answering"], is_first=not has_begun)
                has_begun = True
            events = [f"data: {json.dumps(chunk)}" for chunk in answer.reply.iter_chunks(request.has_usage)]
            if is_lost:
                session.note_lost(answer, was_counted=False)
            else:
                send = partial(self._send_events, [*events, "data: [DONE]"], is_first=not has_begun)
                self._deliver(session, answer, send)
        except (RefusedRequest, ConfigError) as error:
            if not has_begun:
                raise
            refused = error if isinstance(error, RefusedRequest) else self.proxy.fail(error)
            self._send_events([f"data: {json.dumps(refused.to_json())}"], is_first=False)

    def _deliver(self, session: AgentSession, answer: SessionAnswer, send: Callable[[], bool]) -> None:
        """Send an answer; note if it was lost on the way, so that its client may ask for it again."""
        if self._is_gone():
            self.close_connection = True
            session.note_lost(answer, was_counted=False)
            return
        session.note_received(answer)
        if not send():
            session.note_lost(answer)

    def _is_gone(self) -> bool:
        """Return True if the client has closed the connection."""
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _send_events(self, events: Iterable[str], is_first: bool) -> bool:
        """Send lines of a stream, which ends with the connection; return False if the client has gone."""
        self.close_connection = True
        if self._is_gone():
            return False
        try:
            if is_first:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Cache-Control", "no-cache")
                self.send_header("Connection", "close")
                self.end_headers()
            for event in events:
                self.wfile.write(f"{event}\n\n".encode())
        except OSError:
            return False
        return True

    def _send_json(self, status: int, content: Any) -> bool:
        """Send an answer; return False if the client has gone."""
        sent = json.dumps(content).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(sent)))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(sent)
        except OSError:
            self.close_connection = True
            return False
        return True


def _wait(future: Future[SessionAnswer], timeout_s: float | None = None) -> SessionAnswer | None:
    """Return the answer, or None after ``timeout_s``.

    Raises:
        RefusedRequest: There is none.
    """
    try:
        return future.result(timeout_s)
    except TimeoutError:
        return None
    except CancelledError:
        raise RefusedRequest("the episode has ended", 403, "episode_over") from None


def _unknown_path(path: str) -> RefusedRequest:
    return RefusedRequest(f"{path or '/'}: this proxy serves /v1/chat/completions and /v1/models", 404, "not_found")
