"""Requests to a server that may be slow, busy or broken: asked again where that may help, and given up in time.

Waits grow exponentially and are jittered (M. Brooker, Exponential Backoff And Jitter, AWS Architecture Blog, 2015), and
are never shorter than what the server asks for in ``Retry-After`` (RFC 9110, section 10.2.3).
"""

from __future__ import annotations

import email.utils
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import requests
import urllib3.exceptions
from requests.auth import AuthBase

T = TypeVar("T")

# Worth another try beside 500 and above: the server was slow, busy or not ready.
_TRANSIENT = {408, 409, 425, 429}
# True of every request alike, as is being sent elsewhere.
_FATAL = {401, 403, 404, 405}
_MAX_BODY_BYTES = 64 * 1024**2
_MAX_SAID = 300


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a request is tried: ``timeout_s`` for one attempt from first to last byte, waits in between."""

    max_attempts: int = 5
    timeout_s: float = 120.0
    first_wait_s: float = 0.5
    max_wait_s: float = 30.0
    max_retry_after_s: float = 300.0


class RequestFailedError(Exception):
    """A request that got no use of an answer; ``status`` is the server's, None where it sent none."""

    def __init__(self, reason: str, status: int | None = None, retry_after_s: float | None = None):
        super().__init__(reason)
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def is_transient(self) -> bool:
        """Whether asking again may help."""
        return self.status is None or self.status == 200 or self.status >= 500 or self.status in _TRANSIENT

    @property
    def is_fatal(self) -> bool:
        """Whether every other request will fail like this one."""
        return self.status is not None and (self.status in _FATAL or 300 <= self.status < 400)


class HttpClient:
    """Talks JSON to one server, from any number of threads.

    Args:
        base_url: what every path is put behind.
        api_key: sent as a bearer token, and blacked out wherever the server repeats it; None: none.
        patience: how long to try.
    """

    def __init__(self, base_url: str, api_key: str | None = None, patience: Patience | None = None):
        self.base_url = base_url.rstrip("/")
        self.patience = patience or Patience()
        self._api_key = api_key
        self._threads = threading.local()
        self._stopped = threading.Event()
        self._random = random.Random()

    def start(self) -> None:
        """Take requests again after ``stop``."""
        self._stopped.clear()

    def stop(self) -> None:
        """Wait no longer: requests that wait for their next attempt fail at once."""
        self._stopped.set()

    def get(self, path: str) -> Any:
        """The JSON that the server has at ``path``; one attempt.

        Raises:
            RequestFailedError: it has none to give.
        """
        return self._attempt("GET", path, None, lambda response, deadline: _read_json(response, deadline))

    def post(self, path: str, body: dict[str, Any], read: Callable[[Any], T]) -> T:
        """What ``read`` makes of the server's JSON answer, asked again while that may help.

        ``read`` raises ``ValueError`` for an answer that makes no sense, which counts as a failed attempt.

        Raises:
            RequestFailedError: the last attempt's, its reason with the count of attempts.
        """
        return self._try_often(
            lambda: self._attempt("POST", path, body, lambda response, deadline: read(_read_json(response, deadline)))
        )

    def post_stream(self, path: str, body: dict[str, Any], read: Callable[[Iterator[Any]], T]) -> T:
        """What ``read`` makes of the server-sent events that answer; as ``post`` otherwise.

        Each event is decoded from JSON; ``[DONE]`` is None and the last. Whether a stream without it is whole is for
        ``read`` to say.
        """
        return self._try_often(
            lambda: self._attempt(
                "POST", path, body, lambda response, deadline: read(_iter_events(response, deadline)), is_stream=True
            )
        )

    def redact(self, text: str) -> str:
        """The text on one line, cut, without the key."""
        line = " ".join(text.split())
        line = line.replace(self._api_key, "***") if self._api_key else line
        return line if len(line) <= _MAX_SAID else line[: _MAX_SAID - 3] + "..."

    def _try_often(self, attempt: Callable[[], T]) -> T:
        for number in range(1, self.patience.max_attempts + 1):
            try:
                return attempt()
            except RequestFailedError as error:
                asked_s = error.retry_after_s or 0.0
                is_last = number == self.patience.max_attempts or asked_s > self.patience.max_retry_after_s
                if is_last or not error.is_transient or self._stopped.is_set():
                    count = f" ({number} attempts)" if number > 1 else ""
                    raise RequestFailedError(f"{error}{count}", error.status, error.retry_after_s) from None
                longest = min(self.patience.max_wait_s, self.patience.first_wait_s * 2 ** (number - 1))
                self._stopped.wait(max(asked_s, longest * self._random.uniform(0.5, 1.0)))
        raise AssertionError("the last attempt raises or returns")

    def _attempt(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        read: Callable[[requests.Response, float], T],
        is_stream: bool = False,
    ) -> T:
        timeout_s = self.patience.timeout_s
        deadline = time.monotonic() + timeout_s
        try:
            with self._session().request(
                method,
                self.base_url + path,
                data=None if body is None else json.dumps(body).encode(),
                headers={"Content-Type": "application/json", "Accept": "text/event-stream" if is_stream else "*/*"},
                auth=_Bearer(self._api_key),
                timeout=(min(10.0, timeout_s), timeout_s),
                stream=True,
                # A key belongs to the server that was named.
                allow_redirects=False,
            ) as response:
                if response.status_code != 200:
                    raise self._refusal(response, deadline)
                return read(response, deadline)
        except requests.ConnectTimeout:
            raise RequestFailedError(f"no connection within {min(10.0, timeout_s):g} s") from None
        except (requests.Timeout, urllib3.exceptions.TimeoutError, TimeoutError):
            raise RequestFailedError(f"no answer within {timeout_s:g} s") from None
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            raise RequestFailedError(self.redact(f"connection failed ({_innermost(error)})")) from None
        except ValueError as error:
            raise RequestFailedError(self.redact(f"answer makes no sense: {error}"), 200) from None

    def _refusal(self, response: requests.Response, deadline: float) -> RequestFailedError:
        try:
            said = _read_body(response, deadline).decode("utf-8", "replace")
        except (urllib3.exceptions.HTTPError, TimeoutError, ValueError):
            said = ""
        where = f" to {response.headers.get('Location', '?')}" if 300 <= response.status_code < 400 else ""
        reason = self.redact(f"HTTP {response.status_code}{where}: {_message_of(said) or response.reason}")
        return RequestFailedError(reason, response.status_code, _retry_after_s(response.headers.get("Retry-After")))

    def _session(self) -> requests.Session:
        # A session is not safe to share between threads.
        session: requests.Session | None = getattr(self._threads, "session", None)
        if session is None:
            session = self._threads.session = requests.Session()
        return session


class _Bearer(AuthBase):
    """The key of the server, or none: without this requests would take one from ~/.netrc."""

    def __init__(self, api_key: str | None):
        self._api_key = api_key

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._api_key:
            request.headers["Authorization"] = f"Bearer {self._api_key}"
        return request


def _iter_body(response: requests.Response, deadline: float) -> Iterator[bytes]:
    """The body as it arrives.

    One read of the socket at a time: requests' own ``iter_content`` waits until a block is full, however long a slow
    server takes to fill it, and the socket's timeout is for each read alone.
    """
    size = 0
    while piece := response.raw.read1(65_536, decode_content=True):
        size += len(piece)
        if size > _MAX_BODY_BYTES:
            raise ValueError(f"over {_MAX_BODY_BYTES // 1024**2} MiB")
        yield piece
        if time.monotonic() > deadline:
            raise TimeoutError


def _read_body(response: requests.Response, deadline: float) -> bytes:
    return b"".join(_iter_body(response, deadline))


def _iter_lines(response: requests.Response, deadline: float) -> Iterator[bytes]:
    rest = b""
    for piece in _iter_body(response, deadline):
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    yield rest


def _read_json(response: requests.Response, deadline: float) -> Any:
    body = _read_body(response, deadline)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}): {body[:80]!r}") from None


def _iter_events(response: requests.Response, deadline: float) -> Iterator[Any]:
    """The data of server-sent events, with None for ``[DONE]``.

    https://html.spec.whatwg.org/multipage/server-sent-events.html, of which model servers use one line an event.
    """
    for line in _iter_lines(response, deadline):
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            yield None
            return
        try:
            yield json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"an event is not JSON ({error}): {data[:80]!r}") from None


def _retry_after_s(value: str | None) -> float | None:
    """Seconds to wait by a ``Retry-After`` header: a count of them, or a date."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None


def _message_of(said: str) -> str:
    """What an error body says: servers put it under ``error.message``, ``message`` or ``detail``."""
    try:
        body = json.loads(said)
    except (ValueError, RecursionError):
        return said
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message", error.get("detail", error))
    return error if isinstance(error, str) else json.dumps(error)


def _innermost(error: BaseException) -> str:
    """The words at the bottom of a chain of wrapped errors."""
    inner = next((a for a in (*error.args, getattr(error, "reason", None)) if isinstance(a, BaseException)), None)
    return _innermost(inner) if inner is not None else str(error).rpartition(": ")[2][:160]
