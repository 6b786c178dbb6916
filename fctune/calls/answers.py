"""Read the text of an answer: its reasoning apart, and the calls of the rest, strictly and leniently."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache

from fctune.calls.formats.base import CallFormat, Malformed, find_content_end
from fctune.calls.formats.registry import FORMATS
from fctune.calls.reasoning.base import Reasoning
from fctune.calls.tool_calls import Reading
from fctune.data.conversation import Call, Tool

LEFT_IN_TEXT = "the server left the call in the text"
"""Why a call in the text of a served answer is malformed, however well it is written."""

_MARK = re.compile(r"<[^<>\n]+>|\[[A-Z_]+\]|\w+\[")
_HTML = "<code>"  # also the mark of a format


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


def find_unread_call(text: str, tools: Sequence[Tool] = ()) -> tuple[Malformed, bool] | None:
    """Return the stretch of a served text that is a call, and True if the text ends inside it; None without one.

    A server whose parser cannot read a call sends it as text, in a format that its client does not know. Clients get no
    call then, however well it is written. It is known by a format's opening mark, or by a tool on offer if the format
    has no mark and the text begins with the call.

    Args:
        text: The text of an answer without calls and reasoning.
        tools: The tools on offer.
    """
    readings = [(call_format, read_text(text, call_format, tools)) for call_format in _iter_meant(text, tools)]
    found = [one for one in readings if one[1].strict.calls or one[1].strict.malformed]
    if not found:
        return None
    spans = [
        span
        for _, reading in found
        for span in (*reading.strict.spans, *((one.start, one.end) for one in reading.strict.malformed))
    ]
    unread = [one for one in found if one[1].strict.malformed]
    is_open = len(unread) == len(found) and all(
        ends_inside_call(text, call_format, reading, tools) for call_format, reading in unread
    )
    start, end = min(span[0] for span in spans), max(span[1] for span in spans)
    return Malformed(start, end, LEFT_IN_TEXT), is_open


def _iter_meant(text: str, tools: Sequence[Tool]) -> Iterator[CallFormat]:
    """Yield the formats in which a text may be meant to call."""
    names = "|".join(re.escape(tool.name) for tool in tools)
    call = rf"\s*(?:(?:\[\s*)?\{{[^{{}}]{{0,80}}?\"name\"\s*:\s*\"(?:{names})\"|\[\s*(?:{names})\()"
    is_bare = bool(names) and re.match(call, text) is not None
    for call_format, mark in _list_marks():
        if mark in text if mark is not None else is_bare:
            yield call_format


@cache
def _list_marks() -> list[tuple[CallFormat, str | None]]:
    """Return each format with the mark that opens its calls; None if it has none."""
    marks: list[tuple[CallFormat, str | None]] = []
    for call_format in FORMATS.values():
        found = _MARK.match(call_format.render([Call("f", {})], [Tool({"name": "f"})]))
        if found is None or found[0] != _HTML:
            marks.append((call_format, None if found is None else found[0]))
    return marks


def _get_end(stretch: Malformed) -> int:
    return stretch.end
