"""Connections to MCP servers by the official client: one question, or a session that stays open.

A server behind a URL (streamable HTTP) is not trusted: its answers have a deadline and a size, and a token goes to the
origin that it was set for, encrypted or within this machine. A server that a command starts (stdio) is the user's own
program: it has the deadline, and gets this process's environment without fctune's own keys.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO, TypeVar
from urllib.parse import SplitResult, urlsplit

from fctune.base.errors import ConfigError, one_line
from fctune.base.files import run_within
from fctune.base.network import is_loopback
from fctune.config.loading import read_environment
from fctune.engines.http_client import LOOPBACK, cut_secret, remove_pieces

if TYPE_CHECKING:
    import httpx2
    from anyio import CancelScope
    from anyio.from_thread import BlockingPortal

T = TypeVar("T")

_TOKEN = "FCTUNE_MCP_TOKEN"
STDIO = "stdio:"
"""How an address starts that is the command of a server."""

_INVALID_PARAMS = -32602  # of JSON-RPC
_GRACE_S = 5.0  # for a server to end by itself, and for our own thread to answer


@dataclass(frozen=True, slots=True)
class McpLimits:
    """Limits of all answers of a server together: seconds until the last byte of the last one, bytes, and pages."""

    max_s: float = 30.0
    max_bytes: int = 16 * 1024**2
    max_pages: int = 100


class McpFailure(Exception):
    """A server hung, ended, exceeded a limit or answered garbage, and its session is over; the text says which."""


@dataclass(frozen=True, slots=True)
class McpResult:
    """Result of a call: its text, True if the tool reports an error, and its structured content as JSON values."""

    text: str
    is_error: bool
    structured: Any = None


def describe_address(address: str) -> str:
    """Return a server's address for messages: of a command, what stands before its first option or setting."""
    if address.startswith(("http://", "https://")):
        return address
    words = address.split()
    most = next((i for i, word in enumerate(words) if i and (word.startswith("-") or "=" in word)), len(words))
    return " ".join(words[:most]) + (" ..." if most < len(words) else "")


def choose_mcp_token(setting: str | None, url: str, urls: Sequence[str]) -> str | None:
    """Return the token for a server; None if none was set for it.

    Args:
        setting: Value of FCTUNE_MCP_TOKEN: one token, or ``https://HOST[:PORT]=TOKEN`` for each server, separated by
            spaces.
        url: The server.
        urls: All servers that will be asked; one token without an address is for one of them only.

    Raises:
        ConfigError: An address is missing or invalid.
    """
    entries = (setting or "").split()
    named = [entry for entry in entries if entry.startswith(("http://", "https://")) and "=" in entry]
    if len(named) < len(entries) and (len(entries) > 1 or len({_origin(one) for one in urls}) > 1):
        raise ConfigError(
            f"{_TOKEN}: does not say which server each token is for. Write https://HOST[:PORT]=TOKEN for each, "
            "separated by spaces."
        )
    if not named:
        return entries[0] if entries else None
    tokens = {_origin(address): token for address, _, token in (entry.partition("=") for entry in named)}
    return tokens.get(_origin(url)) or None


def ask(url: str, token: str | None, budget: Budget, action: Callable[[Any], Awaitable[T]]) -> tuple[T | None, str]:
    """Return what ``action`` returns with a connected client; without a result, None and the reason.

    Raises:
        ConfigError: The official client is not installed.
    """
    check_client(url)
    import anyio

    async def run() -> T | None:
        result: T | None = None
        with anyio.move_on_after(budget.limits.max_s) as scope:
            budget.scope = scope
            async with _open_client(url, token, budget, errors) as client:
                result = await action(client)
        if scope.cancelled_caught:
            budget.problem = budget.problem or f"no complete answer within {budget.limits.max_s:g} s"
        return result

    result: T | None = None
    failure: Exception | None = None
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        try:
            with _MUTED:
                result = anyio.run(run)
        except Exception as error:  # whatever a hostile answer raises in the client or the libraries below it
            failure = error
        if budget.problem is None and result is not None:
            return result, ""
        return None, _explain(failure, budget, errors, token)


def check_address(address: str, token: str | None) -> None:
    """Check a server's address and the token for it.

    Raises:
        ConfigError: It is neither a URL without a password nor a command, or the token would be sent unencrypted.
    """
    if address.startswith(STDIO):
        _split_command(address)
        return
    parts = _split_url(address)
    if parts.username is not None or parts.password is not None:
        shown = f"{parts.scheme}://...@{parts.hostname}{parts.path}"
        raise ConfigError(f"{shown}: holds a name or password. Remove it, and set {_TOKEN}.")
    if token and not (token.isascii() and token.isprintable()):
        raise ConfigError(f"{_TOKEN}: contains characters that a header cannot carry. Set it again.")
    if token and parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        raise ConfigError(f"{address}: {_TOKEN} is set for it, and is never sent over plain http. Use https.")


def check_client(address: str) -> None:
    """Check that the official client is installed.

    Raises:
        ConfigError: It is not.
    """
    try:
        import mcp  # noqa: F401 (only its absence matters here)
    except ImportError:
        raise ConfigError(
            f"{describe_address(address)}: tools of an MCP server need its client. pip install 'fctune[mcp]'."
        ) from None


def _explain(error: BaseException | None, budget: Budget, errors: TextIO, token: str | None) -> str:
    """Return why a server is of no use: the limit, the status or the error, and the last line that a command wrote."""
    reason = "" if error is None else _describe(error)
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4096))
    if said := "".join(errors.readlines()[-1:]).strip():
        reason = f"{reason or 'its session ended'}; it said: {one_line(said, 200)}"
    for secret in _list_secrets():
        reason = reason.replace(secret, "***")
    reason = budget.problem or (f"HTTP {budget.status}: {reason}" if budget.status else reason)
    return remove_pieces(reason, cut_secret(token)) if token else reason


class Budget:
    """Remaining limits of a server; ``problem`` names the one that it exceeded."""

    def __init__(self, limits: McpLimits):
        self.limits, self.left, self.status = limits, limits.max_bytes, 0
        self.problem: str | None = None
        self.scope: CancelScope | None = None

    def end(self, problem: str) -> None:
        """End everything: the client would take an error in one answer as a reason to ask again."""
        self.problem = self.problem or problem
        if self.scope is not None:
            self.scope.cancel()

    async def limit(self, response: httpx2.Response) -> None:
        """Count the bytes of a response as they arrive."""
        if response.status_code >= 400:
            self.status = response.status_code
        if response.headers.get("Content-Encoding", "identity") != "identity":
            self.end("its answer is compressed, which was not asked for")
        response.stream = _count_bytes(response.stream, self)


def _count_bytes(stream: Any, budget: Budget) -> httpx2.AsyncByteStream:
    import httpx2

    class Counted(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for piece in stream:
                budget.left -= len(piece)
                if budget.left < 0:
                    budget.end(f"over {budget.limits.max_bytes:,} bytes")
                    return
                yield piece

        async def aclose(self) -> None:
            await stream.aclose()

    return Counted()


@contextlib.asynccontextmanager
async def _open_client(address: str, token: str | None, budget: Budget, errors: TextIO) -> AsyncIterator[Any]:
    """Yield a connected client; ``errors`` gets the standard error of a server that a command starts."""
    import httpx2
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client

    if address.startswith(STDIO):
        command = _split_command(address)
        if shutil.which("setpriv"):  # a server that hangs would outlive this process if that is killed
            command = ["setpriv", "--pdeathsig", "KILL", "--", *command]
        environment = {name: value for name, value in read_environment().items() if not name.startswith("FCTUNE_")}
        server = StdioServerParameters(command=command[0], args=command[1:], env=environment)
        async with Client(stdio_client(server, errlog=errors), cache=None) as client:
            yield client
        return
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
    # The MCP client follows redirects within the origin only.
    async with httpx2.AsyncClient(
        headers=headers,
        timeout=budget.limits.max_s,
        event_hooks={"response": [budget.limit]},
        mounts=dict.fromkeys(LOOPBACK),
    ) as http:
        transport = streamable_http_client(address, http_client=http, max_sse_event_size=budget.limits.max_bytes)
        async with Client(transport, cache=None) as client:
            yield client


def _split_command(address: str) -> list[str]:
    """Return the words of ``stdio: COMMAND``."""
    example = f"{STDIO} python server.py"
    try:
        words = shlex.split(address.removeprefix(STDIO))
    except ValueError as error:
        raise ConfigError(
            f"{describe_address(address)}: not a command ({error}). Expected one such as '{example}'."
        ) from None
    if not words:
        raise ConfigError(f"{address}: no command. Expected one such as '{example}'.")
    if "=" in words[0]:
        raise ConfigError(
            f"{STDIO} {words[0].partition('=')[0]}=...: a setting, not a program. Export it before you run fctune; "
            "the server gets the same environment."
        )
    return words


def _list_secrets() -> list[str]:
    """Return the values of environment variables that are secrets by their names, the longest first."""
    kinds = ("KEY", "TOKEN", "SECRET", "PASSW", "CREDENTIAL")
    found = [value for name, value in read_environment().items() if any(kind in name.upper() for kind in kinds)]
    return sorted((value for value in found if len(value) > 5), key=len, reverse=True)


async def list_pages(client: Any, budget: Budget) -> list[str]:
    """Return the pages of ``tools/list`` as JSON text."""
    pages: list[str] = []
    cursor = None
    for _ in range(budget.limits.max_pages):
        page = await client.list_tools(cursor=cursor)
        pages.append(json.dumps(page.model_dump(by_alias=True, mode="json", exclude_unset=True)))
        cursor = page.next_cursor
        if not cursor:
            return pages
    budget.problem = f"over {budget.limits.max_pages} pages of tools"
    return pages


async def call_tool(client: Any, name: str, arguments: Mapping[str, Any]) -> McpResult:
    """Return the result of a call.

    Arguments that the server refuses are a result that is an error, as is one of images, audio or other data alone.
    """
    from mcp import MCPError

    try:
        result = await client.call_tool(name, dict(arguments))
    except MCPError as error:
        if error.code != _INVALID_PARAMS:
            raise
        return McpResult(one_line(error, 300), True)
    texts = [_read_text(part) for part in result.content]
    has_text, is_error = any(text is not None for text in texts), bool(result.is_error)
    if not has_text and result.structured_content is not None:
        return McpResult(json.dumps(result.structured_content, ensure_ascii=False), is_error, result.structured_content)
    shown = (_name_data(part) if text is None else text for part, text in zip(result.content, texts, strict=True))
    return McpResult("\n".join(shown), is_error or bool(texts and not has_text), result.structured_content)


def _read_text(part: Any) -> str | None:
    """Return the text of a part of a result, for a link its URI; None for an image, audio or other data."""
    if part.type == "resource_link":
        return str(part.uri)
    text = getattr(part.resource if part.type == "resource" else part, "text", None)
    return text if isinstance(text, str) else None


def _name_data(part: Any) -> str:
    """Return what stands for a part without text, which a model that reads text cannot use."""
    kind = (part.resource if part.type == "resource" else part).mime_type
    return f"[{part.type}{f' of type {kind}' if kind else ''}: not text, so it cannot be read]"


def _describe(error: BaseException) -> str:
    """Return the first cause of an error, on one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return one_line(error, 300) or type(error).__name__


class _Muting:
    """Context in which the client logs nothing, as it would a traceback for each bad answer; several may be open."""

    def __init__(self) -> None:
        self._logger, self._lock = logging.getLogger("mcp"), threading.Lock()
        self._num_open, self._level = 0, logging.NOTSET

    def __enter__(self) -> None:
        with self._lock:
            if self._num_open == 0:
                self._level, self._logger.disabled = self._logger.level, False
                self._logger.setLevel(logging.CRITICAL + 1)
            self._num_open += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_open -= 1
            if self._num_open == 0:
                self._logger.setLevel(self._level)


_MUTED = _Muting()


def _split_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"{url[:200]}: not a URL ({error}). Expected https://HOST[:PORT]/PATH.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url[:200]}: not a URL. Expected https://HOST[:PORT]/PATH.")
    return parts


def _origin(url: str) -> tuple[str, str, int]:
    parts = _split_url(url)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


@dataclass(slots=True)
class _Request:
    """Something to do with a session's client, and the future that gets what comes back."""

    action: Callable[[Any], Awaitable[Any]]
    result: Future[Any] = field(default_factory=Future)


class McpClients:
    """Sessions with MCP servers, which are kept open on a thread of their own.

    Raises (at construction):
        ConfigError: The official client is not installed.
    """

    def __init__(self, address: str):
        check_client(address)
        from anyio.from_thread import start_blocking_portal

        self._sessions: set[McpSession] = set()
        self._lock = threading.Lock()
        self._open = contextlib.ExitStack()
        self._open.enter_context(_MUTED)
        self._portal = self._open.enter_context(start_blocking_portal(name="mcp-sessions"))

    def open(self, address: str, token: str | None, limits: McpLimits, call_s: float) -> McpSession:
        """Return a session, which connects, or starts its server, in the background.

        Args:
            address: URL, or ``stdio: COMMAND``.
            token: Bearer token for the URL; None sends none.
            limits: Seconds to connect, and bytes of the answer to each request.
            call_s: Seconds of a request.
        """
        session = McpSession(self._portal, address, token, limits, call_s)
        with self._lock:
            self._sessions = {one for one in self._sessions if not one.is_over} | {session}
        return session

    def close(self) -> None:
        """End all sessions, and the servers that they started."""
        for session in self._sessions:
            session.close()
        until = time.monotonic() + _GRACE_S
        for session in self._sessions:
            session.wait(max(0.0, until - time.monotonic()))
        with contextlib.suppress(RuntimeError):  # closed already
            self._portal.call(self._portal.stop, True)
        run_within(3 * _GRACE_S, self._open.close)  # a server that was asked to end is killed after 5 s


class McpSession:
    """A session with one server; made by ``McpClients.open``. One request at a time.

    A request that fails ends the session, and kills a server that it started.
    """

    def __init__(self, portal: BlockingPortal, address: str, token: str | None, limits: McpLimits, call_s: float):
        import anyio

        self._portal, self._address, self._token, self._call_s = portal, address, token, call_s
        self._budget = Budget(limits)
        self._requests, self._waiting = anyio.create_memory_object_stream[_Request](math.inf)
        self._problem: str | None = None
        self._serving = portal.start_task_soon(self._serve)

    @property
    def is_over(self) -> bool:
        """True once the session has ended."""
        return self._serving.done()

    def list_tools(self) -> list[str]:
        """Return the pages of ``tools/list`` as JSON text.

        Raises:
            McpFailure: The session is over.
        """
        pages: list[str] = self._request(lambda client: list_pages(client, self._budget))
        if self._budget.problem is not None:
            raise McpFailure(self._budget.problem)
        return pages

    def call(self, name: str, arguments: Mapping[str, Any]) -> McpResult:
        """Return the result of a tool, within the seconds of a request.

        Raises:
            McpFailure: The session is over.
        """
        result: McpResult = self._request(lambda client: call_tool(client, name, arguments))
        return result

    def close(self) -> None:
        """End the session in the background."""
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self._portal.start_task_soon(self._finish)

    def wait(self, limit_s: float) -> None:
        """Wait until the session has ended, but not longer than ``limit_s``."""
        with contextlib.suppress(Exception):
            self._serving.result(limit_s)

    def _request(self, action: Callable[[Any], Awaitable[Any]]) -> Any:
        import anyio

        request, limits = _Request(action), self._budget.limits
        try:
            self._portal.call(self._requests.send_nowait, request)
            return request.result.result(limits.max_s + self._call_s + _GRACE_S)
        except TimeoutError:  # our own thread is stuck in an answer
            raise McpFailure(f"no answer within {self._call_s:g} s") from None
        except (RuntimeError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise McpFailure(self._problem or "its session is closed") from None

    async def _finish(self) -> None:
        import anyio

        self._requests.close()
        if self._budget.scope is not None:
            self._budget.scope.deadline = min(self._budget.scope.deadline, anyio.current_time() + _GRACE_S)

    async def _serve(self) -> None:
        """Connect, answer requests until there are no more or one fails, and fail those that are left."""
        import anyio

        budget, limits = self._budget, self._budget.limits
        failure: BaseException | None = None
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            try:
                with anyio.CancelScope(deadline=anyio.current_time() + limits.max_s) as scope:
                    budget.scope = scope
                    async with _open_client(self._address, self._token, budget, errors) as client:
                        scope.deadline = math.inf
                        async for request in self._waiting:
                            if not await self._answer(client, request, errors):
                                break
                if scope.cancelled_caught and budget.problem is None:
                    budget.problem = f"no connection within {limits.max_s:g} s"
            except Exception as error:  # whatever a hostile answer raises in the client or the libraries below it
                failure = error
            finally:
                if self._problem is None:
                    self._problem = _explain(failure, budget, errors, self._token) or "its session is closed"
                with contextlib.suppress(anyio.WouldBlock, anyio.EndOfStream):
                    while True:
                        self._waiting.receive_nowait().result.set_exception(McpFailure(self._problem))
                self._waiting.close()

    async def _answer(self, client: Any, request: _Request, errors: TextIO) -> bool:
        """Do what is requested; returns False if that failed, so that the session is over."""
        import anyio

        budget, failure = self._budget, None
        outer, budget.left = budget.scope, budget.limits.max_bytes
        try:
            with anyio.move_on_after(self._call_s) as scope:
                budget.scope = scope
                request.result.set_result(await request.action(client))
                budget.scope = outer
                if budget.problem is None:
                    return True
            if scope.cancelled_caught and budget.problem is None:
                budget.problem = f"no result within {self._call_s:g} s"
        except Exception as error:  # as above
            failure = error
        finally:
            budget.scope = outer
            if not request.result.done():
                self._problem = _explain(failure, budget, errors, self._token) or "its session was closed"
                request.result.set_exception(McpFailure(self._problem))
        return False
