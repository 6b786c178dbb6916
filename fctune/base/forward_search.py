"""Substring search that stays linear over a text with many opening marks and no closing one."""

from __future__ import annotations


class ForwardSearch:
    """Search in ``text[:end]`` that remembers, for each needle, the last search and its result.

    A reader that looks for a closing mark after each of n opening ones would otherwise scan the rest of the text n
    times.
    """

    __slots__ = ("_found", "end", "text")

    def __init__(self, text: str, end: int | None = None) -> None:
        self.text = text
        self.end = len(text) if end is None else end
        self._found: dict[str, tuple[int, int]] = {}

    def find(self, needle: str, start: int) -> int:
        """Return the position of the first ``needle`` at or after ``start``, or -1."""
        if needle in self._found:
            searched_from, found = self._found[needle]
            if searched_from <= start and (found < 0 or start <= found):
                return found
        found = self.text.find(needle, start, self.end)
        self._found[needle] = (start, found)
        return found
