"""OLMo 3, and the code of SmolLM3: calls in Python's syntax between tags, each on its line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from fctune.base.json_reader import ParseError
from fctune.base.python_reader import PythonReader
from fctune.calls.formats.base import CallFormat, ParseState, TemplateSignature
from fctune.calls.formats.json_calls import dump_json
from fctune.calls.formats.lfm import Lfm
from fctune.calls.formats.pythonic import CALL_START, read_python_calls, render_python_call
from fctune.calls.formats.response_fields import ResponseFields, Surroundings, python_call
from fctune.calls.formats.tagged_calls import skip_space
from fctune.data.conversation import Call, Tool

_LINE_END = re.compile(r"[ \t\r]*+(?:\n|\Z)")


class Olmo3(CallFormat):
    """``<function_calls>f(a="x", b=true)``, a call a line, ``</function_calls>``; values are JSON's.

    The chat template of Olmo-3-7B-Instruct.
    """

    name = "olmo3"
    template_signatures = (TemplateSignature(("<function_calls>", "</function_calls>")),)
    vllm_parser: ClassVar[str | None] = "olmo3"
    response_note: ClassVar[str] = "keys that are not identifiers"
    _opening, _closing = "<function_calls>", "</function_calls>"
    _edge = ""
    _is_json: ClassVar[bool] = True

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """Return one block with a line a call."""
        lines = "\n".join(map(self._render_call, calls))
        return f"{self._opening}{self._edge}{lines}{self._edge}{self._closing}" if calls else ""

    def describe_response(self, around: Surroundings) -> ResponseFields | None:
        """Return the field of the calls of a block, from parenthesis to parenthesis."""
        marks = {
            "open_pattern": rf"(?:\s*{self._opening}|(?<=\))\n)\s*(?P<name>[^\W\d][\w.\-/]*)\(",
            "close_pattern": rf"\)(?=[ \t\r]*\n\s*[^\W\d][\w.\-/]*\()|\)\s*{self._closing}",
        }
        return {"tool_calls": python_call(marks, is_json=self._is_json)}

    def _render_call(self, call: Call) -> str:
        return render_python_call(call, lambda value: dump_json(value, call.name))

    def _read(self, state: ParseState, tools: Sequence[Tool], lenient: bool) -> None:
        reader = PythonReader(state.text[: state.end], has_json_constants=True, lenient=lenient)
        position = 0
        while (opened := state.find(self._opening, position)) >= 0:
            body = opened + len(self._opening)
            try:
                calls, position = self._read_lines(state, reader, body, lenient)
                state.add_calls(calls, opened, position)
            except ParseError as error:
                position = self._read_other(state, reader, opened, error, tools, lenient)
        if lenient and not state.calls and not state.malformed:
            read_python_calls(state)

    def _read_lines(
        self, state: ParseState, reader: PythonReader, position: int, lenient: bool
    ) -> tuple[list[Call], int]:
        """Return the calls from a position up to the closing tag, and the position after it."""
        calls: list[Call] = []
        position = skip_space(state, position)
        while not state.text.startswith(self._closing, position):
            if lenient and calls and position >= state.end:
                return calls, position
            call, end = reader.read_call(position)
            calls.append(Call(*call))
            position = skip_space(state, end)
            if not (_LINE_END.match(state.text, end, state.end) or state.text.startswith(self._closing, position)):
                raise ParseError("text after a call on its line", end)
        if not calls:
            raise ParseError(f"no call after {self._opening}", position)
        return calls, position + len(self._closing)

    def _read_other(
        self,
        state: ParseState,
        reader: PythonReader,
        opened: int,
        error: ParseError,
        tools: Sequence[Tool],
        lenient: bool,
    ) -> int:
        """Add a block that does not hold calls alone, and return the position after it."""
        end = state.choose_restart(self._find_block_end(state, opened + len(self._opening)), error.position)
        state.add_malformed(opened, end, error.reason)
        return end

    def _find_block_end(self, state: ParseState, body: int) -> int:
        """Return the position after the closing tag, or of the next opening one, whichever comes first."""
        closed, reopened = state.find(self._closing, body), state.find(self._opening, body)
        if closed >= 0 and (reopened < 0 or closed < reopened):
            return closed + len(self._closing)
        return reopened if reopened >= 0 else state.end


class SmolLM3Code(Olmo3):
    """``<code>``, lines of ``f(a='x', b=True)``, ``</code>``.

    The prompt of SmolLM3's template for tools in Python, and of smolagents. No server reads it. Strictly read, the code
    is calls and nothing else. Leniently read, the calls of tools on offer are found in other code, which is prose then;
    nothing is evaluated.
    """

    name = "smollm3_code"
    aliases = ("smolagents",)
    template_signatures = (TemplateSignature(("<code>", "</code>"), priority=-7),)
    vllm_parser = None
    response_note = Lfm.response_note
    _opening, _closing = "<code>", "</code>"
    _edge = "\n"
    _is_json = False

    def _render_call(self, call: Call) -> str:
        return render_python_call(call)

    def _read_other(
        self,
        state: ParseState,
        reader: PythonReader,
        opened: int,
        error: ParseError,
        tools: Sequence[Tool],
        lenient: bool,
    ) -> int:
        names = {tool.name for tool in tools}
        position = opened + len(self._opening)
        num_found = 0
        while lenient:
            # The next opening tag ends a block too, as many of them may precede one closing tag.
            ends = [at for mark in (self._closing, self._opening) if (at := state.find(mark, position)) >= 0]
            limit = min(ends, default=state.end)
            found = CALL_START.search(state.text, position, limit)
            if found is None:
                break
            position = found.end()
            if found.group()[:-1] not in names:
                continue
            if not num_found:
                state.skip(opened, opened + len(self._opening))
            num_found += 1
            try:
                call, position = reader.read_call(found.start())
                state.add_calls([Call(*call)], found.start(), position)
            except ParseError as call_error:
                position = max(call_error.position, position)
                state.add_malformed(found.start(), position, call_error.reason)
        if not num_found:
            return super()._read_other(state, reader, opened, error, tools, lenient)
        if state.text.startswith(self._closing, limit):
            state.skip(limit, limit + len(self._closing))
            return limit + len(self._closing)
        return limit
