"""Calls as JSON without tags of their own, or behind one mark: Llama 3, xLAM, Granite 3, Mistral, Glaive."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from fctune.calls.formats.base import CallFormat, Page, to_call
from fctune.data.conversation import Call, Tool
from fctune.errors import DataError
from fctune.parsing.json_reader import ParseError, read_json, skip_space
from fctune.parsing.python_reader import PythonReader

_CALL_START = re.compile(r"""\{\s*["'](?:name|type|function|id|arguments|parameters)["']\s*:""")


def dump_json(value: Any, what: str) -> str:
    """JSON as chat templates write it: a space behind comma and colon, letters unescaped.

    Raises:
        DataError: A value that JSON does not have.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{what}: its arguments are no JSON ({error}). Expected finite numbers, text, lists, objects."
        ) from None


def require_name(name: str, pattern: re.Pattern[str]) -> str:
    """The name, if a format that writes it without quotes can.

    Raises:
        DataError: It would not be read back.
    """
    if not pattern.fullmatch(name):
        raise DataError(f"{name[:80]!r}: no name that this format can write. Use letters, digits and _ - .")
    return name


def call_object(call: Call, key: str = "arguments", has_id: bool = False) -> dict[str, Any]:
    """The object that most formats write for a call."""
    written: dict[str, Any] = {"name": call.name, key: call.arguments}
    if has_id and call.id is not None:
        written["id"] = call.id
    return written


def read_objects(page: Page, start: int, key: str, mark: str = "") -> None:
    """Put the objects that look like calls in ``text[start:]``, wherever they stand, on the page.

    This is the reading of serving engines, which take calls out of prose, lists and fences.

    Args:
        page: The page.
        start: Where to begin.
        key: Where the format keeps the arguments.
        mark: What the format puts before its calls; with it and no call behind it, the rest is malformed.
    """
    position = start
    opened = find_mark(page, mark, start, _CALL_START, lambda place: read_json(page.text, place, lenient=True)[1])
    if opened >= 0:
        position = opened + len(mark)
        page.skip(opened, position)
    while (found := _CALL_START.search(page.text, position, page.end)) is not None:
        call: Call | str
        try:
            value, position = read_json(page.text, found.start(), lenient=True)
            call = to_call(value, key, lenient=True)
        except ParseError as error:
            try:
                reader = PythonReader(page.text, has_json_constants=True)
                value, position = reader.read_value(found.start())
                call = to_call(value, key, lenient=True)
            except ParseError as second_error:
                # Both have read this far in vain; beginning again before would cost the square.
                call, position = error.reason, max(error.position, second_error.position, found.end())
        if isinstance(call, str):
            page.put_malformed(found.start(), position, call)
        else:
            page.put_loose_call(call, found.start(), position)
    page.require_call(mark, start)


def find_mark(page: Page, mark: str, start: int, call_start: re.Pattern[str], read: Callable[[int], int]) -> int:
    """Where the mark before the calls stands, or -1; one that a call holds in a string is none.

    Args:
        page: The page.
        mark: The mark; empty where the format has none.
        start: Where to begin.
        call_start: How a call begins.
        read: Reads the call at a position; returns the position behind it, or raises ``ParseError``.
    """
    opened = page.find(mark, start) if mark else -1
    position = start
    while position < opened and (found := call_start.search(page.text, position, opened)) is not None:
        try:
            position = read(found.start())
        except ParseError as error:
            position = max(error.position, found.end())
        else:
            if position > opened:
                return -1
    return opened


def read_list(page: Page, opened: int, start: int, key: str = "arguments") -> int:
    """Put the list of calls that stands at ``start`` on the page; the position behind it.

    One fault in one of them makes all of it malformed: which calls were meant cannot be said.

    Args:
        page: The page.
        opened: Where the mark before the list stands.
        start: Where the list is due.
        key: Where the format keeps the arguments.
    """
    start = skip_space(page.text, start)
    try:
        value, end = read_json(page.text, start)
    except ParseError as error:
        page.put_malformed(opened, page.end, error.reason)
        return page.end
    calls = [to_call(item, key) for item in value] if isinstance(value, list) else ["no list of calls"]
    faults = [call for call in calls if isinstance(call, str)]
    if faults:
        page.put_malformed(opened, end, faults[0])
    else:
        page.put_calls([call for call in calls if isinstance(call, Call)], opened, end)
    return end


class LlamaJson(CallFormat):
    """``{"name": ..., "parameters": {...}}`` and nothing else; several are joined by ``; ``. Llama 3.1 and later.

    https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md
    """

    name = "llama3_json"
    _mark = "<|python_tag|>"

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """The objects, joined by a semicolon where there are several (the official template writes one only)."""
        return "; ".join(dump_json(call_object(call, "parameters"), call.name) for call in calls)

    def _read(self, page: Page, start: int, tools: Sequence[Tool], lenient: bool) -> None:
        text = page.text
        if lenient:
            read_objects(page, start, "parameters", self._mark)
            return
        opened = position = skip_space(text, start)
        is_marked = text.startswith(self._mark, opened)
        if is_marked:
            position = skip_space(text, opened + len(self._mark))
        elif not _CALL_START.match(text, opened, page.end):
            return
        while True:
            try:
                value, end = read_json(text, position)
                call = to_call(value, "parameters")
            except ParseError as error:
                call, end = error.reason, page.end
            behind = skip_space(text, end)
            if behind < page.end and text[behind] != ";":
                call, end = call if isinstance(call, str) else "text behind the call", page.end
            if isinstance(call, str):
                page.put_malformed(opened, end, call)
            else:
                page.put_calls([call], opened, end)
            if behind >= page.end or end == page.end:
                return
            page.skip(end, behind + 1)
            opened = position = skip_space(text, behind + 1)


class Xlam(CallFormat):
    """``[{"name": ..., "arguments": {...}}, ...]`` and nothing else. xLAM 2 and its descendants.

    https://github.com/SalesforceAIResearch/xLAM
    """

    name = "xlam"

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """One list of all calls."""
        return dump_json([call_object(call) for call in calls], calls[0].name) if calls else ""

    def _read(self, page: Page, start: int, tools: Sequence[Tool], lenient: bool) -> None:
        if lenient:
            read_objects(page, start, "arguments")
            return
        start = skip_space(page.text, start)
        if not page.text.startswith("[", start):
            return
        first = skip_space(page.text, start + 1)
        if page.text.startswith("]", first) and skip_space(page.text, first + 1) >= page.end:
            page.skip(start, page.end)  # a list of no calls says that none is made
        if not _CALL_START.match(page.text, first, page.end):
            return
        end = read_list(page, start, start)
        if skip_space(page.text, end) < page.end and page.calls:
            page.calls.clear()
            page.spans.clear()
            page.put_malformed(start, page.end, "text behind the list of calls")


class MarkedList(CallFormat):
    """A mark and behind it a list of calls as JSON, to the end of the turn: Granite 3, Mistral v3 and v7."""

    def __init__(self, name: str, mark: str, has_id: bool) -> None:
        self.name = name
        self._mark = mark
        self._has_id = has_id

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """The mark and one list of all calls."""
        objects = [call_object(call, has_id=self._has_id) for call in calls]
        return self._mark + dump_json(objects, calls[0].name) if calls else ""

    def _read(self, page: Page, start: int, tools: Sequence[Tool], lenient: bool) -> None:
        if lenient:
            read_objects(page, start, "arguments", self._mark)
        elif (opened := page.find(self._mark, start)) >= 0:
            end = read_list(page, opened, opened + len(self._mark))
            if (again := page.find(self._mark, end)) >= 0:
                page.put_malformed(again, page.end, "a second list of calls")


class MistralNamed(CallFormat):
    """``[TOOL_CALLS]name[ARGS]{...}`` for each call, from v11 on; v11 puts ``[CALL_ID]id`` between.

    The tokenizers of https://github.com/mistralai/mistral-common.
    """

    _mark, _id, _arguments = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
    _name = re.compile(r"[^\s\[]([^\[]*[^\s\[])?")

    def __init__(self, name: str, has_id: bool) -> None:
        self.name = name
        self._has_id = has_id

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """The calls one behind another, each with its mark."""
        return "".join(self._render_call(call) for call in calls)

    def _render_call(self, call: Call) -> str:
        call_id = f"{self._id}{call.id}" if self._has_id and call.id is not None else ""
        name = require_name(call.name, self._name)
        return f"{self._mark}{name}{call_id}{self._arguments}{dump_json(call.arguments, call.name)}"

    def _read(self, page: Page, start: int, tools: Sequence[Tool], lenient: bool) -> None:
        position = start
        while (opened := page.find(self._mark, position)) >= 0:
            following = page.find(self._mark, opened + len(self._mark))
            call: Call | str
            try:
                call, end = self._read_call(page, opened + len(self._mark), lenient)
            except ParseError as error:
                call, end = error.reason, following if following >= 0 else page.end
            if isinstance(call, str):
                page.put_malformed(opened, end, call)
            else:
                page.put_calls([call], opened, end)
            position = end

    def _read_call(self, page: Page, start: int, lenient: bool) -> tuple[Call, int]:
        text = page.text
        marked = page.find(self._arguments, start)
        following = page.find(self._mark, start)
        if marked < 0 or 0 <= following < marked:
            raise ParseError("no [ARGS] behind the name", start)
        name, has_id, call_id = text[start:marked].partition(self._id)
        if not name.strip() or (name != name.strip() and not lenient):
            raise ParseError("no name behind [TOOL_CALLS]", start)
        arguments, end = read_json(text, skip_space(text, marked + len(self._arguments)), lenient)
        if not isinstance(arguments, dict):
            raise ParseError("the arguments are no object", marked)
        return Call(name.strip(), arguments, call_id.strip() if has_id else None), end


class Glaive(CallFormat):
    """``<functioncall> {"name": "...", "arguments": '{...}'}``: not JSON, for the quotes around the arguments.

    https://huggingface.co/datasets/glaiveai/glaive-function-calling-v2
    """

    name = "glaive"
    _mark = "<functioncall>"
    _head = re.compile(r'\s*\{\s*"name"\s*:\s*(?=")')
    _middle = re.compile(r"""\s*,\s*"arguments"\s*:\s*+('?)\s*+(?=\{)""")
    _tail = re.compile(r"\s*+('?)\s*+\}")

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """One line a call."""
        return "\n".join(
            f'{self._mark} {{"name": {dump_json(call.name, call.name)}, '
            f"\"arguments\": '{dump_json(call.arguments, call.name)}'}}"
            for call in calls
        )

    def _read(self, page: Page, start: int, tools: Sequence[Tool], lenient: bool) -> None:
        position = start
        while (opened := page.find(self._mark, position)) >= 0:
            body = opened + len(self._mark)
            following = page.find(self._mark, body)
            try:
                call, position = self._read_call(page.text, body, lenient)
                page.put_calls([call], opened, position)
            except ParseError as error:
                position = following if following >= 0 else page.end
                page.put_malformed(opened, position, error.reason)

    def _read_call(self, text: str, start: int, lenient: bool) -> tuple[Call, int]:
        if lenient:
            try:
                value, end = read_json(text, skip_space(text, start), lenient)
                call = to_call(value, "arguments", lenient)
                if isinstance(call, Call):
                    return call, end
            except ParseError:
                pass
        head = self._head.match(text, start)
        if head is None:
            raise ParseError('no {"name": behind the mark', start)
        name, end = read_json(text, head.end())
        middle = self._middle.match(text, end)
        if middle is None or not (middle[1] or lenient):
            raise ParseError("no arguments in single quotes behind the name", end)
        arguments, end = read_json(text, middle.end(), lenient)
        tail = self._tail.match(text, end)
        if tail is None or tail[1] != middle[1]:
            raise ParseError("not closed behind the arguments", end)
        if not name:
            raise ParseError("no name", start)
        return Call(name, arguments), tail.end()
