"""The tools of an MCP server, listed by the official client over streamable HTTP; none is ever called.

A server is not trusted: all of its answers together have one deadline and one size, and a token goes to the origin that
it was set for, encrypted or within this machine.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from fctune.base.errors import ConfigError
from fctune.engines.http_client import LOOPBACK, cut_secret, remove_pieces

if TYPE_CHECKING:
    import httpx2
    from anyio import CancelScope

_TOKEN = "FCTUNE_MCP_TOKEN"


@dataclass(frozen=True, slots=True)
class McpLimits:
    """Limits of all answers of a server together: seconds until the last byte of the last one, bytes, and pages."""

    max_s: float = 30.0
    max_bytes: int = 16 * 1024**2
    max_pages: int = 100


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


def fetch_mcp_tools(url: str, token: str | None = None, limits: McpLimits | None = None) -> list[str]:
    """Return the pages of a server's ``tools/list`` as JSON text, as ``fctune data convert --tools`` reads them.

    Args:
        url: The server's endpoint, such as ``http://127.0.0.1:8000/mcp``.
        token: Sent as a bearer token to the origin of ``url`` and nowhere else; None sends none.
        limits: None: 30 s, 16 MiB and 100 pages.

    Raises:
        ConfigError: There is no server, it is not one of MCP's, its answers exceed a limit, or the token would be sent
            unencrypted.
    """
    parts = _split(url)
    if parts.username is not None or parts.password is not None:
        shown = f"{parts.scheme}://...@{parts.hostname}{parts.path}"
        raise ConfigError(f"{shown}: holds a name or password. Remove it, and set {_TOKEN}.")
    if token and not (token.isascii() and token.isprintable()):
        raise ConfigError(f"{_TOKEN}: contains characters that a header cannot carry. Set it again.")
    if token and parts.scheme == "http" and not _is_loopback(parts.hostname or ""):
        raise ConfigError(f"{url}: {_TOKEN} is set for it, and is never sent over plain http. Use https.")
    try:
        import anyio
        import mcp  # noqa: F401 (its absence is reported here)
    except ImportError:
        raise ConfigError(f"{url}: tools of an MCP server need its client. pip install 'fctune[mcp]'.") from None
    limits = limits or McpLimits()
    budget = _Budget(limits)
    reason = ""
    pages: list[str] | None = None
    try:
        with _muted(logging.getLogger("mcp")):
            pages = anyio.run(_list_tools, url, token, budget)
    except Exception as error:  # whatever a hostile answer raises in the client or the libraries below it
        reason = _describe(error)
    if budget.problem is None and pages is not None:
        return pages
    reason = budget.problem or (f"HTTP {budget.status}: {reason}" if budget.status else reason)
    if token:
        reason = remove_pieces(reason, cut_secret(token))
    raise ConfigError(
        f"{url}: no usable list of tools from an MCP server ({reason}). Pass the address of its streamable HTTP "
        "endpoint, which often ends in /mcp."
    )


class _Budget:
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


def _count_bytes(stream: Any, budget: _Budget) -> httpx2.AsyncByteStream:
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


async def _list_tools(url: str, token: str | None, budget: _Budget) -> list[str]:
    import anyio
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    pages: list[str] = []
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
    with anyio.move_on_after(budget.limits.max_s) as scope:
        budget.scope = scope
        # The MCP client follows redirects within the origin only.
        async with httpx2.AsyncClient(
            headers=headers,
            timeout=budget.limits.max_s,
            event_hooks={"response": [budget.limit]},
            mounts=dict.fromkeys(LOOPBACK),
        ) as http:
            transport = streamable_http_client(url, http_client=http, max_sse_event_size=budget.limits.max_bytes)
            async with Client(transport, cache=None) as client:
                cursor = None
                for _ in range(budget.limits.max_pages):
                    page = await client.list_tools(cursor=cursor)
                    pages.append(json.dumps(page.model_dump(by_alias=True, mode="json", exclude_unset=True)))
                    cursor = page.next_cursor
                    if not cursor:
                        break
                else:
                    budget.problem = f"over {budget.limits.max_pages} pages of tools"
    if scope.cancelled_caught:
        budget.problem = budget.problem or f"no complete answer within {budget.limits.max_s:g} s"
    return pages


def _describe(error: BaseException) -> str:
    """Return the first cause of an error, on one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextlib.contextmanager
def _muted(logger: logging.Logger) -> Iterator[None]:
    """Log nothing during the block: the client logs a traceback for each bad answer."""
    before, logger.disabled = logger.level, False
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"{url[:200]}: not a URL ({error}). Expected https://HOST[:PORT]/PATH.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url[:200]}: not a URL. Expected https://HOST[:PORT]/PATH.")
    return parts


def _origin(url: str) -> tuple[str, str, int]:
    parts = _split(url)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
