"""The tools of an MCP server, listed over its streamable HTTP transport; none is ever called.

https://modelcontextprotocol.io/specification/2025-06-18/basic/transports.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx

from fctune.errors import ConfigError

_VERSION = "2025-06-18"
_MAX_PAGES = 100
_MAX_BYTES = 16 * 1024**2
_TIMEOUT_S = 30.0


def fetch_mcp_tools(url: str, token: str | None = None) -> list[str]:
    """Return the pages of a server's ``tools/list`` as JSON text, as ``fctune data convert --tools`` reads them.

    Args:
        url: The server's endpoint, such as ``http://127.0.0.1:8000/mcp``.
        token: Sent as a bearer token; None sends none.

    Raises:
        ConfigError: There is no server, or it is not one of MCP's.
    """
    try:
        return list(_iter_pages(url, token))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"{url}: no answer from an MCP server ({reason}). Check the address and its path.") from None
    except ValueError as error:
        raise ConfigError(
            f"{url}: not an MCP server's answer ({error}). Pass the address of its streamable HTTP endpoint, which "
            "often ends in /mcp."
        ) from None


def _iter_pages(url: str, token: str | None) -> Iterator[str]:
    headers = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": _VERSION}
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    with httpx.Client(headers=headers, timeout=_TIMEOUT_S, follow_redirects=False) as client:
        about = {"protocolVersion": _VERSION, "capabilities": {}, "clientInfo": {"name": "fctune", "version": "1"}}
        response, answer = _request(client, url, {"id": 0, "method": "initialize", "params": about})
        if session := response.headers.get("mcp-session-id"):
            client.headers["Mcp-Session-Id"] = session
        if isinstance(version := answer["result"].get("protocolVersion"), str):
            client.headers["MCP-Protocol-Version"] = version
        client.post(url, json={"jsonrpc": "2.0", "method": "notifications/initialized"})
        cursor: Any = None
        for number in range(1, _MAX_PAGES + 1):
            params = {} if cursor is None else {"cursor": cursor}
            _, answer = _request(client, url, {"id": number, "method": "tools/list", "params": params})
            yield json.dumps(answer)
            cursor = answer["result"].get("nextCursor")
            if not cursor:
                return
        raise ValueError(f"over {_MAX_PAGES} pages of tools")


def _request(client: httpx.Client, url: str, request: dict[str, Any]) -> tuple[httpx.Response, dict[str, Any]]:
    """Send one JSON-RPC request, and return the response and the answer in its body or among its events."""
    with client.stream("POST", url, json={"jsonrpc": "2.0", **request}) as response:
        response.raise_for_status()
        body = b""
        for piece in response.iter_bytes():
            body += piece
            if len(body) > _MAX_BYTES:
                raise ValueError(f"over {_MAX_BYTES:,} bytes")
            # A server may keep the stream open after its answer.
            if _is_stream(response) and (answer := _find_answer(body.decode(errors="replace"), request["id"])):
                return response, answer
    answer = json.loads(body.decode(errors="replace"))
    if isinstance(answer, dict) and "error" in answer:
        raise ValueError(f"{request['method']}: {json.dumps(answer['error'])[:200]}")
    if not isinstance(answer, dict) or not isinstance(answer.get("result"), dict):
        raise ValueError(f"{request['method']}: no result")
    return response, answer


def _is_stream(response: httpx.Response) -> bool:
    return str(response.headers.get("content-type", "")).startswith("text/event-stream")


def _find_answer(text: str, request_id: int) -> dict[str, Any] | None:
    """Return the answer to a request among complete server-sent events; None before it has come."""
    for event in text.replace("\r\n", "\n").split("\n\n")[:-1]:
        lines = [line.removeprefix("data:").strip() for line in event.split("\n") if line.startswith("data:")]
        if not lines:
            continue
        message = json.loads("\n".join(lines))
        if isinstance(message, dict) and message.get("id") == request_id:
            if "error" in message or not isinstance(message.get("result"), dict):
                raise ValueError(f"the server answers {json.dumps(message.get('error'))[:200]}")
            return message
    return None
