"""A real MCP server with a state, made with the official package, over stdio: python booking_server.py."""

from __future__ import annotations

from typing import Any

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


if __name__ == "__main__":
    make_server().run()
