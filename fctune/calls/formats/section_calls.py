"""Calls between marks of their own, all of them in a section between two further marks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from fctune.base.json_reader import ParseError, skip_space
from fctune.calls.formats.base import CallFormat, Malformed, ParseState
from fctune.data.conversation import Call, Tool


class SectionFormat(CallFormat):
    """A section of calls; a subclass names the marks and reads a single call."""

    _opening: ClassVar[str]
    _closing: ClassVar[str]
    _call_opening: ClassVar[str]

    def _read(self, state: ParseState, tools: Sequence[Tool], lenient: bool) -> None:
        position, section = 0, -1
        is_open = was_open = False
        while (opened := state.find(self._call_opening, position)) >= 0:
            begun = state.find(self._opening, position)
            if 0 <= begun < opened:
                state.skip(begun, begun + len(self._opening))
                section, is_open, was_open = begun, True, True
            try:
                call, position = self._read_call(state, opened, was_open if lenient else is_open, lenient)
                state.add_calls([call], opened, position)
            except ParseError as error:
                position = self._find_malformed_end(state, opened, error.position)
                state.add_malformed(opened, position, error.reason)
            closing = skip_space(state.text, position)
            if state.text.startswith(self._closing, closing):
                position, is_open = closing + len(self._closing), False
                state.skip(closing, position)
        if (begun := state.find(self._opening, position)) >= 0:
            state.add_malformed(begun, state.end, "no call after the mark")
        if is_open and not lenient:
            # The span is that of the mark, because the calls after it are recorded already.
            reason = f"not closed by {self._closing}"
            state.malformed.append(Malformed(section, section + len(self._opening), reason))

    @abstractmethod
    def _read_call(self, state: ParseState, opened: int, is_inside: bool, lenient: bool) -> tuple[Call, int]:
        """Return the call whose opening mark is at ``opened``, and the position after its closing mark.

        Args:
            state: Progress of parsing.
            opened: Position of the call's opening mark.
            is_inside: The call is in an open section; in the lenient reading, a section was opened at any time.
            lenient: Read as servers do.

        Raises:
            ParseError: There is no such call.
        """

    @abstractmethod
    def _find_malformed_end(self, state: ParseState, opened: int, error_position: int) -> int:
        """Return the position after a call that cannot be read beyond ``error_position``."""
