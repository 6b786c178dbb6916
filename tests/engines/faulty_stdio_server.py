"""An MCP server over stdio without any package, which starts fast: python -S faulty_stdio_server.py [CHANGED].

It has a counter. Adding a number above 90 has a fault, and so has every start while a file CHANGED exists: another list
of tools.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

STEP = {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]}
NOTHING = {"type": "object", "properties": {}}
TOOLS = [
    {"name": "add", "description": "Add to the counter", "inputSchema": STEP},
    {"name": "read", "description": "Read it", "inputSchema": NOTHING, "annotations": {"readOnlyHint": True}},
]
HANG, EXIT, GARBAGE, WRONG_SHAPE, FLOOD, LONG, REFUSED, INTERNAL = range(91, 99)
"""Numbers whose adding has a fault."""


def reply(request: dict[str, Any], **content: Any) -> None:
    """Answer a request."""
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **content}), flush=True)


def have_fault(request: dict[str, Any], fault: int) -> None:
    """Hang, die, or answer what no client can read."""
    if fault == HANG:
        time.sleep(3600)
    if fault == EXIT:
        sys.exit("out of paper")
    if fault == GARBAGE:
        os.write(1, b"\xff\xfe this is not JSON\n" * 50)
    if fault == WRONG_SHAPE:
        reply(request, result={"content": "booked", "isError": 7})
    if fault == FLOOD:
        while True:
            os.write(1, b"x" * 65536)
    if fault == LONG:
        reply(request, result={"content": [{"type": "text", "text": "x" * 20_000}]})
    if fault in (REFUSED, INTERNAL):
        code = -32602 if fault == REFUSED else -32603
        reply(request, error={"code": code, "message": "no such number"})


def main() -> None:
    """Serve until the input ends."""
    counter, tools = 0, list(TOOLS)
    if len(sys.argv) > 1 and os.path.exists(sys.argv[1]):
        tools[0] = {**tools[0], "description": "Add twice"}
    for line in sys.stdin:
        request = json.loads(line)
        method, params = request["method"], request.get("params") or {}
        if method == "initialize":
            about = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
            reply(request, result=about | {"serverInfo": {"name": "counter", "version": "1"}})
        elif method == "tools/list":
            reply(request, result={"tools": tools})
        elif method == "tools/call":
            by = params["arguments"].get("by", 0)
            if by > 90:
                have_fault(request, by)
                continue
            counter += by
            reply(request, result={"content": [{"type": "text", "text": str(counter)}]})
        elif "id" in request:
            reply(request, error={"code": -32601, "message": "no such method"})


if __name__ == "__main__":
    main()
