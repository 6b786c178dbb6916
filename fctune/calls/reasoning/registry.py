"""Lookup of reasoning formats by chat template, or by the text where nothing else is known.

The formats are found in the modules of this package; nothing about any one of them is known here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from fctune.calls import reasoning
from fctune.calls.discovery import find_formats, match_signature, sort_signatures
from fctune.calls.reasoning.base import Reasoning, ReasoningFormat

REASONING_FORMATS: dict[str, ReasoningFormat] = find_formats(reasoning, ReasoningFormat)  # type: ignore[type-abstract]
_SIGNATURES = sort_signatures(REASONING_FORMATS)


def detect_reasoning(chat_template: str) -> ReasoningFormat | None:
    """Return the format in which a chat template writes reasoning; None if it writes none."""
    return match_signature(_SIGNATURES, chat_template)


def find_reasoning(text: str) -> Reasoning | None:
    """Find the reasoning at the start of a text whose model, and so its format, is unknown; None if there is none."""
    # Most texts have no mark, and searching them for every one takes longer than reading their calls.
    marks = [mark for word in _WORDS if word in text for mark in _MARKS_BY_WORD[word] if mark in text]
    if not marks:
        return None
    for found in dict.fromkeys([found for mark, found in _BY_MARK if mark in marks]):
        reasoning = found.split(text)
        if reasoning is not None and not text[: reasoning.spans[0][0]].strip():
            return reasoning
    return None


# One format for each opening mark; of several, one that reads a single block.
_DISTINCT = {
    found.opening or found.name: found
    for found in sorted(REASONING_FORMATS.values(), key=lambda found: not found.first_call)
}
_BY_MARK = [(mark, found) for found in _DISTINCT.values() for mark in found.marks]


def _find_words(marks: Iterable[str]) -> list[str]:
    """Return few words of which every mark contains one; searching a text for them takes less time than for marks."""
    words = sorted({max(re.findall("[A-Za-z]+", mark), key=len) for mark in marks}, key=len)
    return [word for i, word in enumerate(words) if not any(shorter in word for shorter in words[:i])]


_WORDS = _find_words(mark for mark, _ in _BY_MARK)
_MARKS_BY_WORD = {word: [mark for mark, _ in _BY_MARK if word in mark] for word in _WORDS}
