"""MCP servers over HTTP on this machine: a real one, made with the official package, and hostile ones."""

from __future__ import annotations

import gzip
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import uvicorn
from mcp.server import Server
from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool

from tests.engines.booking_server import make_server

PAGES: dict[str | None, tuple[list[str], str | None]] = {
    None: (["add", "subtract"], "more"),
    "more": (["multiply"], None),
}
TOKEN = "the-token-of-the-test"


@contextmanager
def serve_app(app: Any) -> Iterator[str]:
    """Run an application over HTTP during the block, and yield the URL of its MCP endpoint."""
    config = uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=1, lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/mcp"
    finally:
        server.should_exit = True
        thread.join(10)


class McpServer:
    """A real server that lists three tools on two pages; ``kind``: json, events, or locked, which wants the token."""

    def __init__(self, kind: str):
        self.methods: list[str] = []

        async def list_tools(context: Any, params: Any) -> ListToolsResult:
            self.methods.append("tools/list")
            names, cursor = PAGES[params.cursor if params is not None else None]
            schema = {"type": "object", "properties": {"a": {"type": "integer", "default": None}}}
            return ListToolsResult(tools=[Tool(name=name, input_schema=schema) for name in names], next_cursor=cursor)

        async def call_tool(context: Any, params: Any) -> Any:
            self.methods.append("tools/call")
            raise AssertionError("a tool was called")

        app = Server("test", on_list_tools=list_tools, on_call_tool=call_tool).streamable_http_app(
            json_response=kind == "json"
        )

        async def guarded(scope: Any, receive: Any, send: Any) -> None:
            headers = dict(scope.get("headers", ()))
            if (
                kind == "locked"
                and scope["type"] == "http"
                and headers.get(b"authorization") != f"Bearer {TOKEN}".encode()
            ):
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return
            await app(scope, receive, send)

        self.app = guarded
        self.url = ""


@contextmanager
def serve_mcp(kind: str) -> Iterator[McpServer]:
    """Run a real server during the block."""
    server = McpServer(kind)
    with serve_app(server.app) as server.url:
        yield server


@contextmanager
def serve_tools(tools: list[Tool], call: Callable[[str, dict[str, Any]], str]) -> Iterator[str]:
    """Run a real server of tools during the block, and yield its URL; ``call`` returns the text of a result."""

    async def list_tools(context: Any, params: Any) -> ListToolsResult:
        return ListToolsResult(tools=tools)

    async def call_tool(context: Any, params: Any) -> CallToolResult:
        try:
            text, is_error = call(params.name, params.arguments or {}), False
        except ValueError as error:
            text, is_error = str(error), True
        return CallToolResult(content=[TextContent(type="text", text=text)], is_error=is_error)

    app = Server("tools", on_list_tools=list_tools, on_call_tool=call_tool).streamable_http_app(json_response=True)
    with serve_app(app) as url:
        yield url


@contextmanager
def serve_bookings() -> Iterator[str]:
    """Run ``booking_server`` over HTTP during the block, whose state all of its sessions share, and yield its URL."""
    with serve_app(make_server().streamable_http_app(json_response=True)) as url:
        yield url


class RawHandler(BaseHTTPRequestHandler):
    """Greets as an MCP server does, and answers ``attacked`` requests by the server's attack."""

    protocol_version = "HTTP/1.1"
    server: RawServer

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((request["method"], dict(self.headers)))
        self.id = request.get("id")
        with suppress(ConnectionError):
            if request["method"] == self.server.attacked:
                self.server.attack(self)
            elif request["method"] == "initialize":
                about = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
                self.say(about | {"serverInfo": {"name": "raw", "version": "1"}})
            elif self.id is None:
                self.send(b"", status=202)
            else:
                error = {"code": -32601, "message": "no such method"}
                self.send(json.dumps({"jsonrpc": "2.0", "id": self.id, "error": error}).encode())

    def do_GET(self) -> None:
        self.send(b"", status=405)

    do_DELETE = do_GET

    def say(self, result: dict[str, Any]) -> None:
        self.send(self.encode(result))

    def encode(self, result: dict[str, Any]) -> bytes:
        return json.dumps({"jsonrpc": "2.0", "id": self.id, "result": result}).encode()

    def send(self, body: bytes, kind: str = "application/json", status: int = 200, **headers: str) -> None:
        self.start(kind, status, Content_Length=str(len(body)), **headers)
        self.wfile.write(body)

    def start(self, kind: str, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()

    def stream(self, pieces: Iterator[bytes], kind: str = "text/event-stream", pause_s: float = 0.0) -> None:
        """Send pieces until the client has had enough, or the server is stopped."""
        self.start(kind)
        for piece in pieces:
            if self.server.stopped.wait(pause_s) if pause_s else self.server.stopped.is_set():
                return
            self.wfile.write(piece)

    def log_message(self, *_: object) -> None:
        pass


Attack = Callable[[RawHandler], object]


def nest(depth: int) -> bytes:
    """Return JSON of objects in objects."""
    return b'{"a":' * depth + b"1" + b"}" * depth


def _tool(schema: bytes) -> Attack:
    listed = b'{"jsonrpc": "2.0", "id": %d, "result": {"tools": [{"name": "x", "inputSchema": %s}]}}'
    return lambda handler: handler.send(listed % (handler.id, schema))


def _flood(handler: RawHandler) -> None:
    note = json.dumps(
        {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x" * 900}}
    )
    handler.stream(itertools.repeat(f"data: {note}\n\n".encode()))


# What a hostile server answers, and a part of the sentence that says so.
ATTACKS: dict[str, tuple[str, Attack]] = {
    "an endless stream of comments": ("over 1,000,000 bytes", lambda h: h.stream(itertools.repeat(b": x\n" * 1000))),
    "an endless stream of messages": ("over 1,000,000 bytes", _flood),
    "an endless line": ("over 1,000,000 bytes", lambda h: h.stream(itertools.repeat(b"x" * 9999))),
    "a huge body": ("over 1,000,000 bytes", lambda h: h.send(b" " * 2_000_000)),
    "a slow drip of JSON": ("within 1 s", lambda h: h.stream(itertools.repeat(b" "), "application/json", 0.02)),
    "a slow drip of events": ("within 1 s", lambda h: h.stream(itertools.repeat(b":\n"), pause_s=0.02)),
    "silence": ("within 1 s", lambda h: h.server.stopped.wait(10)),
    "a compressed bomb": (
        "compressed",
        lambda h: h.send(gzip.compress(b" " * 9_000_000), Content_Encoding="gzip"),
    ),
    "deeply nested JSON": ("MCP server", lambda h: h.send(nest(200_000))),
    "a deeply nested schema": ("MCP server", _tool(nest(100_000))),
    "a web page": ("Unexpected content type: text/html", lambda h: h.send(b"<html>", "text/html")),
    "half a JSON": ("MCP server", lambda h: h.send(b'{"jsonrpc": "2.0", "id"')),
    "a list": ("MCP server", lambda h: h.send(b"[1, 2]")),
    "text as tools": ("MCP server", lambda h: h.say({"tools": "all"})),
    "endless pages": ("over 5 pages", lambda h: h.say({"tools": [], "nextCursor": "more"})),
    "the token in an error": ("HTTP 403", lambda h: h.send(TOKEN.encode(), status=403)),
}


class RawServer(ThreadingHTTPServer):
    """A server of attacks, with the methods and headers of the requests that it got."""

    daemon_threads = True

    def __init__(self, attack: Attack, attacked: str = "tools/list"):
        super().__init__(("127.0.0.1", 0), RawHandler)
        self.attack, self.attacked = attack, attacked
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.stopped = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/mcp"

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # the client has had enough
            super().handle_error(request, client_address)


@contextmanager
def serve_raw(attack: Attack, attacked: str = "tools/list") -> Iterator[RawServer]:
    """Run a hostile server during the block."""
    with RawServer(attack, attacked) as running:
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield running
        running.stopped.set()
        running.shutdown()
