"""A real MCP server with a state, made with the official package: python booking_server.py.

Over stdio; ``serve_bookings`` runs one over HTTP.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from mcp.server import MCPServer
from mcp_types import ToolAnnotations

ROOMS = {"blue": {"seats": 4, "price": 30}, "red": {"seats": 12, "price": 80}}
READ_ONLY = ToolAnnotations(read_only_hint=True)


def make_server() -> MCPServer:
    """Return a server without bookings."""
    server, bookings = MCPServer("rooms", log_level="CRITICAL"), dict[str, str]()

    @server.tool(annotations=READ_ONLY)
    def list_rooms() -> dict[str, Any]:
        """List the rooms with their seats and price."""
        return ROOMS

    @server.tool()
    def book(room: str, day: str) -> str:
        """Book a room for a day"""
        if room not in ROOMS or f"{room}/{day}" in bookings:
            raise ValueError(f"{room} is not free on {day}")
        bookings[f"{room}/{day}"] = "booked"
        return "booked"

    @server.tool(annotations=READ_ONLY)
    def list_bookings() -> dict[str, str]:
        """List all bookings."""
        return bookings

    @server.tool()
    def clear() -> str:
        """Cancel all bookings."""
        bookings.clear()
        return "cleared"

    return server


@contextmanager
def serve_bookings() -> Iterator[str]:
    """Run a server over HTTP during the block, whose state all of its sessions share, and yield its URL."""
    app = make_server().streamable_http_app(json_response=True)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/mcp"
    finally:
        server.should_exit = True
        thread.join(10)


if __name__ == "__main__":
    make_server().run()
