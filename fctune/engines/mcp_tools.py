"""The tools of an MCP server, listed and, where a user names them, called by the official client."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError, one_line
from fctune.data.conversation import Call, Tool
from fctune.data.sources.tool_file import read_tool_files, read_tool_texts
from fctune.engines.mcp_client import (
    STDIO,
    Budget,
    McpLimits,
    McpResult,
    ask,
    call_tool,
    check_address,
    choose_mcp_token,
    describe_address,
    list_pages,
)


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
        if name not in servers and not name.startswith(STDIO):
            _check_no_program(name)
            tools += read_tool_files([Path(name)])
            continue
        token = choose_mcp_token(token_setting, name, servers) if name in servers else None
        pages = fetch_mcp_tools(name, token)
        listed = read_tool_texts(pages, [describe_address(name)] * len(pages))
        read_only = find_read_only(pages)
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
        f"--tools {describe_address(name)}: {shown}, not a file of tools. To start it as an MCP server over stdio, "
        f"write --tools {shlex.quote(f'{STDIO} {describe_address(started)}')}."
    )


def find_read_only(pages: Sequence[str]) -> frozenset[str]:
    """Return the tools whose annotations say that they change nothing."""
    listed = [tool for page in pages for tool in json.loads(page)["tools"]]
    notes = {str(tool["name"]): tool.get("annotations") or {} for tool in listed}
    return frozenset(
        name for name, note in notes.items() if note.get("readOnlyHint") is True and not note.get("destructiveHint")
    )


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
    check_address(url, token)
    budget = Budget(limits or McpLimits())
    pages, reason = ask(url, token, budget, lambda client: list_pages(client, budget))
    if pages is not None:
        return pages
    if url.startswith(STDIO):
        raise ConfigError(
            f"{describe_address(url)}: no usable list of tools from the MCP server that this command starts ({reason})."
        )
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

    async def run(client: Any) -> McpResult:
        return await call_tool(client, call.name, call.arguments)

    result, reason = ask(tool.url, tool.token, Budget(McpLimits()), run)
    if result is None:
        raise ToolError(f"{describe_address(tool.url)}: {reason}")
    if result.is_error or not result.text:
        raise ToolError(f"{call.name}: {one_line(result.text, 200) or 'its result has no text'}")
    return result.text
