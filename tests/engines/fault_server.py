"""A local HTTP server that fails on demand."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Log:
    """Bodies, headers and arrival times of completion requests, and the largest number of them at once."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    num_open: int = 0
    max_open: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


Behave = Callable[["Handler", int, dict[str, Any]], None]


class Handler(BaseHTTPRequestHandler):
    """Passes every completion request to ``behave``, numbered from 0."""

    protocol_version = "HTTP/1.1"
    log: Log
    behave: Behave
    models: bytes

    def do_GET(self) -> None:
        self.send(200, self.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        log = self.log
        with log.lock:
            number = len(log.bodies)
            log.bodies.append(body)
            log.headers.append(dict(self.headers))
            log.times.append(time.monotonic())
            log.num_open += 1
            log.max_open = max(log.max_open, log.num_open)
        try:
            type(self).behave(self, number, body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with log.lock:
                log.num_open -= 1

    def send(self, status: int, body: bytes | str, headers: dict[str, str] | None = None, length: int = 0) -> None:
        """Send an answer; ``length`` announces more bytes than are sent."""
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length or len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.close_connection = bool(length)

    def say(self, text: str | None, **message: Any) -> None:
        """Send a completion whose message is ``text``."""
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text, **message}}
        self.send(200, json.dumps({"object": "chat.completion", "choices": [choice]}))

    def stream(self, *data: str, pause_s: float = 0.0) -> None:
        """Send server-sent events, and nothing after them."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for piece in data:
            self.wfile.write(f"data: {piece}\n\n".encode())
            self.wfile.flush()
            time.sleep(pause_s)
        self.close_connection = True

    def log_message(self, *arguments: Any) -> None:
        """Log nothing."""


@contextmanager
def serve(behave: Behave, models: bytes | None = None) -> Iterator[Log]:
    """Run the server during the block; ``models`` is its answer to ``/v1/models``."""
    log = Log()
    listed = b'{"object": "list", "data": [{"id": "tiny"}]}' if models is None else models
    handler = type("Bound", (Handler,), {"log": log, "behave": staticmethod(behave), "models": listed})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    log.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield log
    finally:
        server.shutdown()
        server.server_close()


def say_user(handler: Handler, number: int, body: dict[str, Any]) -> None:
    """Answer with the user's own words."""
    handler.say(body["messages"][-1]["content"])
