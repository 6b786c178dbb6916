"""Calls as Python writes them: Llama 3.2 and 4, the prompt of the Berkeley leaderboard, ToolACE, LFM."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from typing import Any

from fctune.calls.formats.base import CallFormat, Page
from fctune.calls.formats.json_formats import dump_json, find_mark, read_objects
from fctune.data.conversation import Call, Tool
from fctune.errors import DataError
from fctune.parsing.json_reader import ParseError
from fctune.parsing.python_reader import PythonReader

_PYTHON_MARKS = ("<|python_tag|>", "<|python_start|>")
_PYTHON_END = "<|python_end|>"
_NAME = re.compile(r"[^\W\d][\w.\-/]*")
_LIST_START = re.compile(r"\[\s*[^\W\d][\w.\-/]*+\(")
_CALL_START = re.compile(r"(?<![\w.\-/])[^\W\d][\w.\-/]*+\((?=\s*(?:\)|\*\*|[^\W\d]\w*+\s*=))")


def render_python_call(call: Call) -> str:
    """``name(a=1, b='x')``; a key that is no identifier stands in ``**{...}``.

    Raises:
        DataError: A name that cannot stand before a bracket, or a value that no literal gives.
    """
    if not _NAME.fullmatch(call.name):
        raise DataError(f"{call.name!r}: no name that a pythonic format can write. Use letters, digits and . - _ /.")
    dump_json(call.arguments, call.name)
    plain = [f"{key}={value!r}" for key, value in call.arguments.items() if _is_keyword_name(key)]
    others = {key: value for key, value in call.arguments.items() if not _is_keyword_name(key)}
    return f"{call.name}({', '.join([*plain, *([f'**{others!r}'] if others else [])])})"


class Pythonic(CallFormat):
    """``[f(a='x', b=1), g()]`` and nothing else.

    https://github.com/meta-llama/llama-models/blob/main/models/llama3_2/text_prompt_format.md; Llama 4 puts
    ``<|python_start|>`` and ``<|python_end|>`` around it, and ``<|python_tag|>`` may stand before it.
    """

    name = "pythonic"

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """One list of all calls."""
        return f"[{', '.join(map(render_python_call, calls))}]" if calls else ""

    def _read(self, page: Page, start: int, tools: Sequence[Tool], lenient: bool) -> None:
        if lenient:
            read_python_calls(page, start)
            return
        reader = PythonReader(page.text[: page.end])
        opened = body = _skip_blank(page, start)
        mark = next((mark for mark in _PYTHON_MARKS if page.text.startswith(mark, opened)), "")
        body = _skip_blank(page, opened + len(mark))
        if not mark and not _LIST_START.match(page.text, body, page.end):
            return
        try:
            calls, end = reader.read_calls(body)
            end = _skip_blank(page, end)
            if page.text.startswith(_PYTHON_END, end):
                end = _skip_blank(page, end + len(_PYTHON_END))
            if end < page.end:
                raise ParseError("text behind the list of calls", end)
            page.put_calls([Call(*call) for call in calls], opened, end)
        except ParseError as error:
            page.put_malformed(opened, page.end, error.reason)


class Lfm(CallFormat):
    """``<|tool_call_start|>[f(a='x', b=1), g()]<|tool_call_end|>``; lists and objects inside may have JSON's words.

    The chat templates of LFM2 and LFM2.5.
    """

    name = "lfm"
    _open, _close = "<|tool_call_start|>", "<|tool_call_end|>"

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """One list of all calls between the marks."""
        return f"{self._open}[{', '.join(map(render_python_call, calls))}]{self._close}" if calls else ""

    def _read(self, page: Page, start: int, tools: Sequence[Tool], lenient: bool) -> None:
        reader = PythonReader(page.text[: page.end], has_json_constants=True, lenient=lenient)
        position = start
        while (opened := page.find(self._open, position)) >= 0:
            body = opened + len(self._open)
            following, closed = page.find(self._open, body), page.find(self._close, body)
            position = following if following >= 0 else page.end
            if 0 <= closed < position:
                position = closed + len(self._close)
            try:
                calls, end = reader.read_calls(reader.skip_space(body))
                end = reader.skip_space(end)
                if page.text.startswith(self._close, end):
                    position = end + len(self._close)
                elif lenient:
                    position = end
                else:
                    raise ParseError(f"not closed by {self._close}", end)
                page.put_calls([Call(*call) for call in calls], opened, position)
            except ParseError as error:
                page.put_malformed(opened, position, error.reason)
        if lenient and not page.calls and not page.malformed:
            read_python_calls(page, start)


def read_python_calls(page: Page, start: int) -> None:
    """Put every call that stands in ``text[start:]``, in a list or alone, on the page, as the leaderboard decodes.

    Where there is none, calls written as JSON are taken.
    """
    reader = PythonReader(page.text[: page.end], lenient=True)
    position = start
    mark = next((mark for mark in _PYTHON_MARKS if page.find(mark, start) >= 0), "")
    opened = find_mark(page, mark, start, _CALL_START, lambda place: reader.read_call(place)[1])
    if opened >= 0:
        position = opened + len(mark)
        page.skip(opened, position)
    while (found := _CALL_START.search(page.text, position, page.end)) is not None:
        try:
            call, position = reader.read_call(found.start())
            page.put_loose_call(Call(*call), found.start(), position)
        except ParseError as error:
            position = max(error.position, found.end())
            page.put_malformed(found.start(), position, error.reason)
    if not page.calls and not page.malformed:
        read_objects(page, start, "arguments", mark)
    elif (ended := page.find(_PYTHON_END, page.position)) >= 0:
        page.skip(ended, ended + len(_PYTHON_END))


def _skip_blank(page: Page, position: int) -> int:
    while position < page.end and page.text[position] in " \t\r\n":
        position += 1
    return position


def _is_keyword_name(key: Any) -> bool:
    return isinstance(key, str) and key.isidentifier() and not keyword.iskeyword(key)
