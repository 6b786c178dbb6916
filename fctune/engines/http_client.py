"""HTTP client for servers that may be slow, busy or broken: it retries where that may help, and gives up in time.

Waits between attempts grow exponentially with jitter (M. Brooker, Exponential Backoff And Jitter, AWS Architecture
Blog, 2015), and are never shorter than what the server requests in ``Retry-After`` (RFC 9110, section 10.2.3).
"""

from __future__ import annotations

import base64
import email.utils
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

T = TypeVar("T")

# Statuses under 500 that are worth another attempt: the server was slow, busy or not ready.
_TRANSIENT = {408, 409, 425, 429}
# Statuses that every other request would get as well; so is being redirected.
_FATAL = {401, 403, 404, 405}
_MAX_CONNECT_S = 10.0
# Patterns of httpx for addresses of this machine.
LOOPBACK = ("all://localhost", "all://127.0.0.1", "all://[::1]")
_MAX_REASON_LENGTH = 300
# Length of the shortest piece of an API key that is redacted; providers themselves show the last four characters.
_SECRET_PIECE_LENGTH = 6


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits on how long a request is tried.

    Attributes:
        max_attempts: Attempts, the first included.
        timeout_s: Seconds for one attempt, from its first to its last byte.
        first_wait_s: Seconds before the second attempt; they double from one attempt to the next.
        max_wait_s: Seconds that a wait does not exceed.
        max_retry_after_s: The longest wait accepted from a server; one that requests more is not tried again.
    """

    max_attempts: int = 5
    timeout_s: float = 120.0
    first_wait_s: float = 0.5
    max_wait_s: float = 30.0
    max_retry_after_s: float = 300.0


class UnusableAnswer(ValueError):
    """An answer that cannot be used, though the server sent it as a success; ``kind`` is counted in metrics."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


class RequestError(Exception):
    """A request without a usable answer.

    Attributes:
        status: Status that the server sent; None if it sent none.
        retry_after_s: Seconds that it asks to wait.
        kind: What is wrong with the answer of a success, otherwise None.
        is_timeout: The attempt reached its time limit.
    """

    def __init__(
        self,
        reason: str,
        status: int | None = None,
        retry_after_s: float | None = None,
        kind: str | None = None,
        is_timeout: bool = False,
    ):
        super().__init__(reason)
        self.is_timeout = is_timeout
        self.status = status
        self.retry_after_s = retry_after_s
        self.kind = kind

    @property
    def is_transient(self) -> bool:
        """True if another attempt may succeed."""
        return self.status is None or self.status == 200 or self.status >= 500 or self.status in _TRANSIENT

    @property
    def is_fatal(self) -> bool:
        """True if every other request will fail like this one."""
        return self.status is not None and (self.status in _FATAL or 300 <= self.status < 400)


class HttpClient:
    """JSON client of one server, for any number of threads.

    Redirects are never followed, because the API key belongs to the server that was named. Proxies that the environment
    names are used, but not for servers on this machine, which no proxy leads to.

    Args:
        base_url: Prefix of every path.
        api_key: Sent as a bearer token, and redacted wherever the server repeats it; None sends none.
        retry_policy: How long requests are tried.
        max_body_bytes: The largest answer that is read.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        retry_policy: RetryPolicy | None = None,
        max_body_bytes: int = 64 * 1024**2,
    ):
        self.retry_policy = retry_policy or RetryPolicy()
        self._secret_pieces = cut_secret(api_key) if api_key else frozenset()
        self._max_body_bytes = max_body_bytes
        self._stopped = threading.Event()
        self._random = random.Random()
        timeout_s = self.retry_policy.timeout_s
        self._client = httpx.Client(
            base_url=base_url,
            headers={"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            # Reads are limited one by one; ``_Body`` holds the deadline of the attempt.
            timeout=httpx.Timeout(timeout_s, connect=min(_MAX_CONNECT_S, timeout_s), pool=None),
            limits=httpx.Limits(max_connections=None),
            follow_redirects=False,
            mounts=dict.fromkeys(LOOPBACK),
        )

    def start(self) -> None:
        """Accept requests again after ``stop``."""
        self._stopped.clear()

    def stop(self) -> None:
        """Fail requests that wait for their next attempt at once, and start no further attempts."""
        self._stopped.set()

    def get(self, path: str) -> Any:
        """Return the JSON at ``path``, in one attempt.

        Raises:
            RequestError: No usable answer.
        """
        return self._attempt("GET", path, None, _Body.read_json)

    def post(
        self,
        path: str,
        body: dict[str, Any],
        read: Callable[[Any], T],
        on_failure: Callable[[RequestError], None] = lambda error: None,
        retries_timeouts: bool = True,
    ) -> T:
        """Return what ``read`` makes of the server's JSON answer, after as many attempts as may help.

        ``read`` raises ``UnusableAnswer`` for an answer that makes no sense, which counts as a failed attempt.
        ``on_failure`` gets the error of each failed attempt. Without ``retries_timeouts``, an attempt that reached its
        time limit is the last.

        Raises:
            RequestError: The last attempt's error, with the number of attempts.
        """

        def attempt() -> T:
            return self._attempt("POST", path, body, lambda answer: read(answer.read_json()))

        return self._retry(attempt, on_failure, retries_timeouts)

    def post_text(self, path: str, body: dict[str, Any]) -> str:
        """Return the text of the server's answer, otherwise as ``post``; for servers that answer without JSON."""
        read: Callable[[_Body], str] = lambda answer: b"".join(answer).decode("utf-8", "replace")  # noqa: E731
        return self._retry(lambda: self._attempt("POST", path, body, read))

    def post_stream(self, path: str, body: dict[str, Any], read: Callable[[Iterator[Any]], T]) -> T:
        """Return what ``read`` makes of the server-sent events of the answer; otherwise as ``post``.

        Each event is decoded from JSON; ``[DONE]`` is None and the last. ``read`` decides if a stream without it is
        complete.
        """
        return self._retry(lambda: self._attempt("POST", path, body, lambda answer: read(answer.iter_events())))

    def redact(self, text: str) -> str:
        """Return the text on one line, shortened and without any piece of the API key, as it is or encoded."""
        line = remove_pieces(" ".join(text.split())[: 4 * _MAX_REASON_LENGTH], self._secret_pieces)
        return line if len(line) <= _MAX_REASON_LENGTH else line[: _MAX_REASON_LENGTH - 3] + "..."

    def _retry(
        self,
        attempt: Callable[[], T],
        on_failure: Callable[[RequestError], None] = lambda error: None,
        retries_timeouts: bool = True,
    ) -> T:
        policy = self.retry_policy
        for number in range(1, policy.max_attempts + 1):
            try:
                return attempt()
            except RequestError as error:
                on_failure(error)
                requested_s = error.retry_after_s or 0.0
                is_last = number == policy.max_attempts or requested_s > policy.max_retry_after_s
                is_last |= error.is_timeout and not retries_timeouts
                longest_s = min(policy.max_wait_s, policy.first_wait_s * 2 ** (number - 1))
                wait_s = max(requested_s, longest_s * self._random.uniform(0.5, 1.0))
                if is_last or not error.is_transient or self._stopped.wait(wait_s):
                    count = f" ({number} attempts)" if number > 1 else ""
                    raise RequestError(
                        f"{error}{count}", error.status, error.retry_after_s, error.kind, error.is_timeout
                    ) from None
        raise AssertionError("the last attempt raises or returns")

    def _attempt(self, method: str, path: str, body: dict[str, Any] | None, read: Callable[[_Body], T]) -> T:
        timeout_s = self.retry_policy.timeout_s
        deadline = time.monotonic() + timeout_s
        try:
            # Not httpx's json=, which fails on NaN and on half a surrogate pair.
            content = None if body is None else json.dumps(body).encode()
            with self._client.stream(method, path, content=content) as response:
                answer = _Body(response, deadline, self._max_body_bytes)
                if response.status_code != 200:
                    raise self._to_error(response, answer)
                return read(answer)
        except httpx.ConnectTimeout:
            raise RequestError(f"no connection within {min(_MAX_CONNECT_S, timeout_s):g} s") from None
        except (httpx.TimeoutException, TimeoutError):
            raise RequestError(f"no answer within {timeout_s:g} s", is_timeout=True) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RequestError(self.redact(f"connection failed ({str(error) or type(error).__name__})")) from None
        except ValueError as error:
            kind = error.kind if isinstance(error, UnusableAnswer) else "malformed"
            raise RequestError(self.redact(f"unusable answer: {error}"), 200, kind=kind) from None

    def _to_error(self, response: httpx.Response, answer: _Body) -> RequestError:
        try:
            body = b"".join(answer).decode("utf-8", "replace")
        except (httpx.HTTPError, TimeoutError, ValueError):
            body = ""
        target = f" to {response.headers.get('Location', '?')}" if 300 <= response.status_code < 400 else ""
        reason = self.redact(f"HTTP {response.status_code}{target}: {_find_message(body) or response.reason_phrase}")
        return RequestError(reason, response.status_code, _parse_retry_after(response.headers.get("Retry-After")))


class _Body:
    """The body of a response, read as it arrives, up to a deadline and a size."""

    def __init__(self, response: httpx.Response, deadline: float, max_bytes: int):
        self._response = response
        self._deadline = deadline
        self._max_bytes = max_bytes

    def __iter__(self) -> Iterator[bytes]:
        """Yield the pieces of the body.

        Raises:
            TimeoutError: The deadline passed, however steadily the server sends.
            ValueError: The body is too large.
        """
        size = 0
        for piece in self._response.iter_bytes():
            size += len(piece)
            if size > self._max_bytes:
                raise ValueError(f"more than {self._max_bytes:,} bytes")
            yield piece
            if time.monotonic() > self._deadline:
                raise TimeoutError

    def read_json(self) -> Any:
        """Return the decoded body; raises ``ValueError`` if it is not JSON."""
        body = b"".join(self)
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON ({error}): {body[:80]!r}") from None

    def iter_events(self) -> Iterator[Any]:
        """Yield the decoded data of server-sent events, with None for ``[DONE]``.

        https://html.spec.whatwg.org/multipage/server-sent-events.html, of which model servers use one line an event.
        """
        for line in self._iter_lines():
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

    def _iter_lines(self) -> Iterator[bytes]:
        rest = b""
        for piece in self:
            *lines, rest = (rest + piece).split(b"\n")
            yield from lines
        yield rest


def cut_secret(secret: str) -> frozenset[str]:
    """Return all pieces of a secret and of its hexadecimal and base64 forms, of one length."""
    raw = secret.encode()
    forms = [secret, raw.hex(), raw.hex().upper()]
    for num_before in range(3):
        # Base64 depends on the number of bytes before the secret, as in "Bearer ": skip letters that encode those too.
        encoded = base64.b64encode(b"\0" * num_before + raw).decode()
        encoded = encoded[(num_before * 8 + 5) // 6 : (num_before + len(raw)) * 8 // 6]
        forms += [encoded, encoded.replace("+", "-").replace("/", "_")]
    length = min(_SECRET_PIECE_LENGTH, len(secret))
    return frozenset(form[at : at + length] for form in forms for at in range(len(form) - length + 1))


def remove_pieces(line: str, pieces: frozenset[str]) -> str:
    """Replace each stretch of a line that consists of pieces of a secret by ``***``."""
    length = len(next(iter(pieces), ""))
    kept: list[str] = []
    position = hidden_to = 0
    while position < len(line):
        if length and line[position : position + length] in pieces:
            if position >= hidden_to:
                kept.append("***")
            hidden_to = position + length
        elif position >= hidden_to:
            kept.append(line[position])
        position += 1
    return "".join(kept)


def _parse_retry_after(value: str | None) -> float | None:
    """Return the seconds that a ``Retry-After`` header requests, as a number or as a date."""
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


def _find_message(text: str) -> str:
    """Return the message in an error body: servers put it under ``error.message``, ``message`` or ``detail``."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return text
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message", error.get("detail", error))
    return error if isinstance(error, str) else json.dumps(error)
