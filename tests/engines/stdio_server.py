"""A real MCP server over stdio, made with the official package: python stdio_server.py [fail].

With ``fail`` it writes an environment variable to its standard error and ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from mcp.server import Server
from mcp.server.stdio import stdio_server
from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ListToolsResult,
    ResourceLink,
    TextContent,
    TextResourceContents,
    Tool,
    ToolAnnotations,
)

TEXT = TextContent(text="found one file")
FILE = EmbeddedResource(resource=TextResourceContents(uri="repo://readme", mime_type="text/plain", text="Code: 4711."))
BLOB = EmbeddedResource(resource=BlobResourceContents(uri="repo://manual", mime_type="application/pdf", blob="AAAA"))
LINK = ResourceLink(name="plan", uri="https://host/plan.txt")
IMAGE = ImageContent(data="AAAA", mime_type="image/png")
AUDIO = AudioContent(data="AAAA", mime_type="audio/wav")
RESULTS: dict[str, list[ContentBlock]] = {
    "a file": [FILE],
    "a file with a text": [TEXT, FILE],
    "a link": [LINK],
    "an image": [IMAGE],
    "audio": [AUDIO],
    "a blob": [BLOB],
    "an image with a text": [TEXT, IMAGE],
}
"""Results of tools that are not listed, by their names."""


async def list_tools(context: Any, params: Any) -> ListToolsResult:
    """List one tool that changes nothing."""
    schema = {
        "type": "object",
        "properties": {"bed": {"type": "integer", "description": "Bed, 1 to 12"}},
        "required": ["bed"],
    }
    tool = Tool(
        name="read_moisture",
        description="Read the moisture of a bed.",
        input_schema=schema,
        annotations=ToolAnnotations(read_only_hint=True),
    )
    return ListToolsResult(tools=[tool])


async def call_tool(context: Any, params: Any) -> CallToolResult:
    """Return the arguments, and what the environment tells; for a name in ``RESULTS``, that result."""
    if params.name in RESULTS:
        return CallToolResult(content=RESULTS[params.name])
    told = {name: os.environ.get(name) for name in ("GARDEN_TOKEN", "FCTUNE_API_KEY")}
    return CallToolResult(content=[TextContent(text=json.dumps({**params.arguments, **told}))])


async def main() -> None:
    """Serve until the input ends."""
    server = Server("garden", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


if __name__ == "__main__":
    if sys.argv[1:] == ["fail"]:
        sys.exit(f"cannot log in with {os.environ['GARDEN_TOKEN']}")
    asyncio.run(main())
