"""An MCP server of a greenhouse, made with the official package, over stdio: python mcp_learning_server.py."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from mcp.server import Server
from mcp.server.stdio import stdio_server
from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool, ToolAnnotations


def describe_tool(name: str, description: str, is_read_only: bool = False, **properties: str) -> Tool:
    """Return a tool whose properties, given by their types, are all required."""
    # Not the package's schemas of functions: the titles that they add are in no row that the tiny model has seen.
    schema: dict[str, Any] = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    schema["required"] = list(properties)
    hint = ToolAnnotations(read_only_hint=is_read_only)
    return Tool(name=name, description=description, input_schema=schema, annotations=hint)


TOOLS = [
    describe_tool("water", "Water a bed with liters of water.", bed="string", liters="integer"),
    describe_tool("plant", "Plant or sow a crop in a bed.", bed="string", crop="string"),
    describe_tool("report_beds", "Report what was done in each bed.", is_read_only=True),
    describe_tool("clear_beds", "Forget all that was done."),
]


class Greenhouse:
    """Beds, and what was done in each."""

    def __init__(self) -> None:
        self.beds: dict[str, dict[str, Any]] = {}

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool and return its result.

        Raises:
            ValueError: The tool refuses the arguments.
        """
        if name == "report_beds":
            return self.beds
        if name == "clear_beds":
            self.beds.clear()
            return "done"
        bed = self.beds.setdefault(arguments["bed"], {})
        if name == "water":
            bed["liters"] = bed.get("liters", 0) + arguments["liters"]
        elif "crop" in bed:
            raise ValueError(f"{arguments['bed']} has a crop already")
        else:
            bed["crop"] = arguments["crop"]
        return "done"


async def serve() -> None:
    """Serve a greenhouse in which nothing has been done, until the client leaves."""
    greenhouse = Greenhouse()

    async def list_tools(context: Any, params: Any) -> ListToolsResult:
        return ListToolsResult(tools=TOOLS)

    async def call_tool(context: Any, params: Any) -> CallToolResult:
        try:
            result, is_error = greenhouse.call(params.name, params.arguments or {}), False
        except ValueError as error:
            result, is_error = str(error), True
        text = result if isinstance(result, str) else json.dumps(result)
        return CallToolResult(content=[TextContent(type="text", text=text)], is_error=is_error)

    server = Server("greenhouse", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(serve())
