"""Read the text of an answer: its reasoning apart, and the calls of the rest, strictly and leniently."""

from __future__ import annotations

from collections.abc import Sequence

from fctune.calls.formats.base import CallFormat, Malformed, find_content_end
from fctune.calls.reasoning.base import Reasoning
from fctune.calls.tool_calls import Reading
from fctune.data.conversation import Tool


def read_text(
    text: str, call_format: CallFormat, tools: Sequence[Tool] = (), reasoning: Reasoning | None = None
) -> Reading:
    """Read the calls of a model's text in both readings; a call inside the reasoning is none.

    Args:
        text: One assistant turn, as generated.
        call_format: The format of its calls.
        tools: The tools on offer.
        reasoning: The reasoning in the text, which is neither calls nor prose.
    """
    return Reading(*call_format.parse_both(reasoning.blank(text) if reasoning else text, tools))


def ends_inside_call(
    text: str, call_format: CallFormat, reading: Reading, tools: Sequence[Tool] = (), reasoning: Reasoning | None = None
) -> bool:
    """Return True if a text ends inside a call: whatever followed would still belong to it."""
    content = text[: find_content_end(text)].rstrip()
    last = max(reading.strict.malformed, key=_get_end, default=None)
    if last is None or last.end < len(content):
        return False
    written = content[last.start :]
    num_open, num_closed = (sum(map(written.count, brackets)) for brackets in ("{[(", "}])"))
    if num_open == num_closed > 0:  # complete, if wrong; formats without a mark after a call cannot tell
        return False
    longer = f"{reasoning.blank(content) if reasoning else content} x"
    again = max(call_format.parse(longer, tools).malformed, key=_get_end, default=None)
    return again is not None and (again.start, again.end) == (last.start, len(longer))


def _get_end(stretch: Malformed) -> int:
    return stretch.end
