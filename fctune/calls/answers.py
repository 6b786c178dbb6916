"""Read the text of an answer: its reasoning apart, and the calls of the rest, strictly and leniently."""

from __future__ import annotations

from collections.abc import Sequence

from fctune.calls.formats.base import CallFormat
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
