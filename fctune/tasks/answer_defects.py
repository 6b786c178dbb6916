"""Defects of a model's answer that no expected call is needed for, each counted on its own."""

from __future__ import annotations

from collections.abc import Sequence

from fctune.data.conversation import Tool
from fctune.data.tool_schema import ToolSet
from fctune.tasks.task import Step

DEFECTS: dict[str, str] = {
    "abandoned": "ended by the model after its reasoning or inside a call, with nothing said",
    "malformed": "a call that cannot be read",
    "invented_tool": "a call of a tool that is not on offer",
    "invented_argument": "an argument that its tool does not declare",
}
"""The defects and their meanings; an answer may have several."""


def find_defects(steps: Sequence[Step], tools: Sequence[Tool]) -> list[str]:
    """Return the defects of answers in their strict reading, in the order of ``DEFECTS``.

    Args:
        steps: The answers.
        tools: All tools that were on offer; without any, nothing is known of invented ones.
    """
    known, found = ToolSet(tools), set[str]()
    for step in steps:
        reading = step.reading.strict
        if not reading.calls and not step.answer.is_cut and (step.is_open or not (reading.prose or reading.malformed)):
            found.add("abandoned")
        if reading.malformed:
            found.add("malformed")
        for call in reading.calls if known else ():
            if not known.has(call.name):
                found.add("invented_tool")
            elif known.has_unknown_argument(call):
                found.add("invented_argument")
    return [name for name in DEFECTS if name in found]
