"""Tools are listed from an MCP server, page by page, whether it answers in JSON or in events."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fctune.data.sources.tool_file import read_tool_texts
from fctune.errors import ConfigError
from fctune.generation.mcp_tools import fetch_mcp_tools

PAGES = {None: (["add", "subtract"], "more"), "more": (["multiply"], None)}
TOKEN = "the-token-of-the-test"


class Handler(BaseHTTPRequestHandler):
    """A server of the streamable HTTP transport with a session; ``kind`` of the server chooses how it answers."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: Server = self.server  # type: ignore[assignment]
        server.methods.append(request["method"])
        if server.kind == "web page":
            self.reply(200, "text/html", b"<html>")
        elif server.kind == "locked" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.reply(401, "application/json", b"{}")
        elif request["method"] == "notifications/initialized":
            self.reply(202, "application/json", b"")
        elif request["method"] == "initialize":
            self.answer(request, {"protocolVersion": "2025-03-26", "capabilities": {}, "serverInfo": {}})
        elif self.headers.get("Mcp-Session-Id") != "s1" or self.headers["MCP-Protocol-Version"] != "2025-03-26":
            self.reply(400, "application/json", b"{}")
        elif server.kind == "broken":
            body = {"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32601, "message": "no tools here"}}
            self.reply(200, "application/json", json.dumps(body).encode())
        else:
            names, cursor = PAGES[request["params"].get("cursor")]
            tools = [{"name": name, "inputSchema": {"type": "object", "properties": {}}} for name in names]
            self.answer(request, {"tools": tools} | ({"nextCursor": cursor} if cursor else {}))

    def answer(self, request: dict[str, object], result: dict[str, object]) -> None:
        text = json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result})
        if self.server.kind == "events":  # type: ignore[attr-defined]
            note = json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}})
            self.reply(200, "text/event-stream", f"data: {note}\n\nevent: message\ndata: {text}\n\n".encode())
        else:
            self.reply(200, "application/json", text.encode())

    def reply(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Mcp-Session-Id", "s1")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """The server, with the methods that were called."""

    kind = "json"

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.methods: list[str] = []


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()


@pytest.mark.parametrize("kind", ["json", "events", "locked"])
def test_all_pages_are_listed_and_nothing_is_called(kind: str, server: Server) -> None:
    server.kind = kind
    pages = fetch_mcp_tools(f"http://127.0.0.1:{server.server_port}/mcp", TOKEN if kind == "locked" else None)
    tools = read_tool_texts(pages, ["mcp"] * len(pages))
    assert [tool.name for tool in tools] == ["add", "subtract", "multiply"]
    assert server.methods == ["initialize", "notifications/initialized", "tools/list", "tools/list"]


@pytest.mark.parametrize(
    ("kind", "message"),
    [("web page", "not an MCP server's answer"), ("broken", "no tools here"), ("locked", "401")],
)
def test_another_server_is_refused_with_its_reason(kind: str, message: str, server: Server) -> None:
    server.kind = kind
    with pytest.raises(ConfigError, match=message) as found:
        fetch_mcp_tools(f"http://127.0.0.1:{server.server_port}/mcp", "wrong-token")
    assert "wrong-token" not in str(found.value)
