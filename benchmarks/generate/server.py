"""An MCP server of a harbour office, whose tools no model was trained on; ``held_out.yaml`` has its tools and requests.

    python -m benchmarks.generate.server --port 8123

Its state is in memory and made of the arguments alone, so equal calls have equal results. Only the tools that look
something up are marked read-only.
"""

from __future__ import annotations

import argparse
import json
import zlib
from pathlib import Path
from typing import Any

import uvicorn
import yaml
from mcp.server import Server
from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool, ToolAnnotations

SUITE = Path(__file__).with_name("held_out.yaml")
READ_ONLY = frozenset({"find_berths", "get_booking", "get_tides", "get_sea_forecast", "list_lock_openings"})


def list_tools() -> list[Tool]:
    """Return the tools of the suite with MCP's annotations."""
    functions = yaml.safe_load(SUITE.read_text(encoding="utf-8"))["tools"]
    return [
        Tool(
            name=function["name"],
            description=function["description"],
            input_schema=function["parameters"],
            annotations=ToolAnnotations(read_only_hint=function["name"] in READ_ONLY),
        )
        for function in functions
    ]


def call_tool(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a call."""
    number = zlib.crc32(json.dumps([name, arguments], sort_keys=True).encode())
    hour, minute, pick = number % 6, number // 7 % 60, number // 421
    match name:
        case "find_berths":
            found = [f"{'ABCDE'[(pick + i) % 5]}{(pick // 5 + 7 * i) % 30 + 1}" for i in range(pick % 4)]
            return {"berths": [{"berth": berth, "price": 28 + (pick + 9 * i) % 30} for i, berth in enumerate(found)]}
        case "get_booking":
            first = f"2027-{5 + pick % 5:02d}-{1 + pick % 27:02d}"
            berth, boat = f"{'ABCDE'[pick % 5]}{pick % 30 + 1}", ("Ondine", "Moll", "Grebe", "Lune")[pick % 4]
            return {**arguments, "berth": berth, "boat": boat, "arrival": first, "nights": 1 + pick % 6}
        case "get_tides":
            return {
                "high": [f"{hour:02d}:{minute:02d}", f"{hour + 12:02d}:{minute:02d}"],
                "low": [f"{hour + 6:02d}:{minute:02d}", f"{hour + 18:02d}:{minute:02d}"],
                "range_m": round(0.6 + pick % 15 / 10, 1),
            }
        case "get_sea_forecast":
            return {"wind_ms": 2 + pick % 14, "waves_m": round(pick % 25 / 10, 1), "visibility_km": 3 + pick % 17}
        case "list_lock_openings":
            return {"openings": [f"{6 + hour + 3 * i:02d}:00" for i in range(3 + pick % 3)]}
        case "book_berth":
            return {"booking_id": f"HB-{1000 + pick % 9000}"}
        case _:
            return {"status": "done", "reference": f"R{pick % 100_000}"}


def make_app() -> Any:
    """Return the server's ASGI application, with its endpoint at ``/mcp``."""

    async def on_list(context: Any, params: Any) -> ListToolsResult:
        return ListToolsResult(tools=list_tools())

    async def on_call(context: Any, params: Any) -> CallToolResult:
        result = call_tool(params.name, params.arguments or {})
        return CallToolResult(content=[TextContent(type="text", text=json.dumps(result))], structured_content=result)

    return Server("harbour", on_list_tools=on_list, on_call_tool=on_call).streamable_http_app(json_response=True)


def main() -> None:
    """Serve the harbour office on the port of the command line until interrupted."""
    parser = argparse.ArgumentParser(description="An MCP server of a harbour office")
    parser.add_argument("--port", type=int, default=8123)
    uvicorn.run(make_app(), host="127.0.0.1", port=parser.parse_args().port, log_level="warning")


if __name__ == "__main__":
    main()
