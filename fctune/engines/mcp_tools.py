"""The tools of an MCP server, listed and, where a user names them, called by the official client.

A server behind a URL (streamable HTTP) is not trusted: all of its answers together have one deadline and one size, and
a token goes to the origin that it was set for, encrypted or within this machine. A server that a command starts (stdio)
is the user's own program: it has the deadline, and gets this process's environment without fctune's own keys.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar
from urllib.parse import SplitResult, urlsplit

from fctune.base.errors import ConfigError, one_line
from fctune.base.network import is_loopback
from fctune.config.loading import read_environment
from fctune.data.conversation import Call, Tool
from fctune.data.sources.tool_file import read_tool_files, read_tool_texts
from fctune.engines.http_client import LOOPBACK, cut_secret, remove_pieces

if TYPE_CHECKING:
    import httpx2
    from anyio import CancelScope

T = TypeVar("T")

_TOKEN = "FCTUNE_MCP_TOKEN"
_STDIO = "stdio:"


@dataclass(frozen=True, slots=True)
class McpLimits:
    """Limits of all answers of a server together: seconds until the last byte of the last one, bytes, and pages."""

    max_s: float = 30.0
    max_bytes: int = 16 * 1024**2
    max_pages: int = 100


class ToolError(Exception):
    """A tool of an MCP server gave no result; the text says why."""


@dataclass(frozen=True, slots=True)
class McpTool:
    """Where a tool can be called: its server, the token for it, and True if the server declares it read-only.

    ``url`` is the server's URL, or ``stdio: COMMAND``, which starts it.
    """

    url: str
    token: str | None
    is_read_only: bool


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """Tools from files and MCP servers; ``remote`` has those of servers by name."""

    tools: tuple[Tool, ...]
    remote: Mapping[str, McpTool] = field(default_factory=dict)


def read_offered_tools(given: Sequence[str], token_setting: str | None) -> OfferedTools:
    """Return the tools of files and of MCP servers, in the order in which they are given.

    Args:
        given: Paths of files in any form that ``read_tool_files`` reads, URLs of MCP servers, and commands that start
            one (``stdio: COMMAND``).
        token_setting: Value of FCTUNE_MCP_TOKEN.

    Raises:
        ConfigError: A file or server cannot be read or has no tools, or two tools have one name.
    """
    tools: list[Tool] = []
    remote: dict[str, McpTool] = {}
    servers = [name for name in given if name.startswith(("http://", "https://"))]
    for name in given:
        if name not in servers and not name.startswith(_STDIO):
            _check_no_program(name)
            tools += read_tool_files([Path(name)])
            continue
        token = choose_mcp_token(token_setting, name, servers) if name in servers else None
        pages = fetch_mcp_tools(name, token)
        listed = read_tool_texts(pages, [_show(name)] * len(pages))
        read_only = _find_read_only(pages)
        remote |= {tool.name: McpTool(name, token, tool.name in read_only) for tool in listed}
        tools += listed
    names = [tool.name for tool in tools]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--tools: {', '.join(sorted(repeated))}: given twice; a model could not distinguish them.")
    return OfferedTools(tuple(tools), remote)


def _check_no_program(name: str) -> None:
    """Refuse a program or a command line in place of a file of tools.

    Raises:
        ConfigError: It is one; the message names the form that starts it.
    """
    path = Path(name)
    program = name.split()[0] if name.split() else ""
    if path.suffix == ".py" or (path.suffix == ".js" and path.exists()):
        started = f"{'python' if path.suffix == '.py' else 'node'} {shlex.quote(name)}"
    elif " " in name and not path.exists() and shutil.which(program):
        started = name
    else:
        return
    shown = "a program" if started != name else "a command"
    raise ConfigError(
        f"--tools {_show(name)}: {shown}, not a file of tools. To start it as an MCP server over stdio, write --tools "
        f"{shlex.quote(f'{_STDIO} {_show(started)}')}."
    )


def _show(address: str) -> str:
    """Return a server's address for messages: of a command, what stands before its first option or setting."""
    if address.startswith(("http://", "https://")):
        return address
    words = address.split()
    most = next((i for i, word in enumerate(words) if i and (word.startswith("-") or "=" in word)), len(words))
    return " ".join(words[:most]) + (" ..." if most < len(words) else "")


def _find_read_only(pages: Sequence[str]) -> frozenset[str]:
    """Return the tools whose annotations say that they change nothing."""
    listed = [tool for page in pages for tool in json.loads(page)["tools"]]
    notes = {str(tool["name"]): tool.get("annotations") or {} for tool in listed}
    return frozenset(
        name for name, note in notes.items() if note.get("readOnlyHint") is True and not note.get("destructiveHint")
    )


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
        url: The server's endpoint, such as ``http://127.0.0.1:8000/mcp``, or ``stdio: COMMAND``.
        token: Sent as a bearer token to the origin of ``url`` and nowhere else; None sends none.
        limits: None: 30 s, 16 MiB and 100 pages.

    Raises:
        ConfigError: There is no server, it is not one of MCP's, its answers exceed a limit, or the token would be sent
            unencrypted.
    """
    if url.startswith(_STDIO):
        budget = _Budget(limits or McpLimits())
        pages, reason = _ask(url, None, budget, lambda client: _list_pages(client, budget))
        if pages is not None:
            return pages
        raise ConfigError(
            f"{_show(url)}: no usable list of tools from the MCP server that this command starts ({reason})."
        )
    parts = _split(url)
    if parts.username is not None or parts.password is not None:
        shown = f"{parts.scheme}://...@{parts.hostname}{parts.path}"
        raise ConfigError(f"{shown}: holds a name or password. Remove it, and set {_TOKEN}.")
    if token and not (token.isascii() and token.isprintable()):
        raise ConfigError(f"{_TOKEN}: contains characters that a header cannot carry. Set it again.")
    if token and parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        raise ConfigError(f"{url}: {_TOKEN} is set for it, and is never sent over plain http. Use https.")
    budget = _Budget(limits or McpLimits())
    pages, reason = _ask(url, token, budget, lambda client: _list_pages(client, budget))
    if pages is not None:
        return pages
    raise ConfigError(
        f"{url}: no usable list of tools from an MCP server ({reason}). Pass the address of its streamable HTTP "
        "endpoint, which often ends in /mcp."
    )


def call_mcp_tool(tool: McpTool, call: Call) -> str:
    """Call a read-only tool, and return its result as text.

    Raises:
        ToolError: The server cannot be used, takes over 30 s or sends over 16 MiB, or reports an error.
    """
    assert tool.is_read_only, "only tools that change nothing are called"

    async def run(client: Any) -> str:
        result = await client.call_tool(call.name, call.arguments)
        texts = [part.text for part in result.content if getattr(part, "type", "") == "text"]
        text = "\n".join(texts)
        if not texts and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error or not text:
            raise ToolError(f"{call.name}: {one_line(text, 200) or 'its result has no text'}")
        return text

    text, reason = _ask(tool.url, tool.token, _Budget(McpLimits()), run)
    if text is None:
        raise ToolError(f"{_show(tool.url)}: {reason}")
    return text


def _ask(url: str, token: str | None, budget: _Budget, action: Callable[[Any], Awaitable[T]]) -> tuple[T | None, str]:
    """Return what ``action`` returns with a connected client; without a result, None and the reason.

    Raises:
        ConfigError: The official client is not installed.
    """
    try:
        import anyio
        import mcp  # noqa: F401 (its absence is reported here)
    except ImportError:
        raise ConfigError(f"{_show(url)}: tools of an MCP server need its client. pip install 'fctune[mcp]'.") from None
    result: T | None = None
    reason = ""
    command = _split_command(url) if url.startswith(_STDIO) else None
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        try:
            with _muted(logging.getLogger("mcp")):
                if command is None:
                    result = anyio.run(_connect, url, token, budget, action)
                else:
                    result = anyio.run(_start, command, errors, budget, action)
        except Exception as error:  # whatever a hostile answer raises in the client or the libraries below it
            reason = _describe(error)
        errors.seek(0)
        if said := "".join(errors.readlines()[-1:]).strip():
            reason = f"{reason}; it said: {one_line(said, 200)}"
    if command is not None:
        for secret in _list_secrets():
            reason = reason.replace(secret, "***")
    if budget.problem is None and result is not None:
        return result, ""
    reason = budget.problem or (f"HTTP {budget.status}: {reason}" if budget.status else reason)
    return None, remove_pieces(reason, cut_secret(token)) if token else reason


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


async def _connect(url: str, token: str | None, budget: _Budget, action: Callable[[Any], Awaitable[T]]) -> T | None:
    import anyio
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    result: T | None = None
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
                result = await action(client)
    if scope.cancelled_caught:
        budget.problem = budget.problem or f"no complete answer within {budget.limits.max_s:g} s"
    return result


async def _start(
    command: Sequence[str], errors: TextIO, budget: _Budget, action: Callable[[Any], Awaitable[T]]
) -> T | None:
    """Return what ``action`` returns with a client of the server that a command starts; it ends with the block."""
    import anyio
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    result: T | None = None
    environment = {name: value for name, value in read_environment().items() if not name.startswith("FCTUNE_")}
    server = StdioServerParameters(command=command[0], args=list(command[1:]), env=environment)
    with anyio.move_on_after(budget.limits.max_s) as scope:
        budget.scope = scope
        async with Client(stdio_client(server, errlog=errors), cache=None) as client:
            result = await action(client)
    if scope.cancelled_caught:
        budget.problem = budget.problem or f"no complete answer within {budget.limits.max_s:g} s"
    return result


def _split_command(address: str) -> list[str]:
    """Return the words of ``stdio: COMMAND``."""
    example = f"{_STDIO} python server.py"
    try:
        words = shlex.split(address.removeprefix(_STDIO))
    except ValueError as error:
        raise ConfigError(f"{_show(address)}: not a command ({error}). Expected one such as '{example}'.") from None
    if not words:
        raise ConfigError(f"{address}: no command. Expected one such as '{example}'.")
    if "=" in words[0]:
        raise ConfigError(
            f"{_STDIO} {words[0].partition('=')[0]}=...: a setting, not a program. Export it before you run fctune; "
            "the server gets the same environment."
        )
    return words


def _list_secrets() -> list[str]:
    """Return the values of environment variables that are secrets by their names, the longest first."""
    kinds = ("KEY", "TOKEN", "SECRET", "PASSW", "CREDENTIAL")
    found = [value for name, value in read_environment().items() if any(kind in name.upper() for kind in kinds)]
    return sorted((value for value in found if len(value) > 5), key=len, reverse=True)


async def _list_pages(client: Any, budget: _Budget) -> list[str]:
    """Return the pages of ``tools/list``."""
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


def _describe(error: BaseException) -> str:
    """Return the first cause of an error, on one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return one_line(error, 300) or type(error).__name__


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
