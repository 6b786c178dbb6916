"""Calls in tags whose values carry no type: Qwen3-Coder and its like, GLM 4.5. The tool's schema types them.

Text without quotes cannot say everything: that a value is the string ``"3"`` where the schema wants an integer, or
holds the closing tag. ``render`` writes such a value, and no other, as ``<json>"3"</json>``, which is a convention of
this project: no model is known to write it, no serving engine reads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fctune.calls.argument_types import argument_schemas, read_typed_text
from fctune.calls.formats.base import CallFormat, Page, Parsed
from fctune.calls.formats.json_formats import dump_json
from fctune.calls.matching import is_equal
from fctune.data.conversation import Call, Tool
from fctune.errors import DataError
from fctune.parsing.json_reader import ParseError, decode_json

_ESCAPED = re.compile(r"<json>(.*)</json>", re.DOTALL)
_BLANK = re.compile(r"[ \t\r\n]*+")
_NAME = re.compile(r"[^<>\s]+")
_KEY = re.compile(r"[^<>\n\S]*+[^<>\s][^<>\n]*+")


def write_text(value: Any, text: str, schema: Any, is_typed: bool, marks: tuple[str, ...]) -> str:
    """The text of an argument, escaped where it would not be read back as the same value.

    Args:
        value: The value.
        text: How the format writes it.
        schema: The argument's schema, None where the tool says nothing of it.
        is_typed: Whether tools are known; without them a text is escaped only where it holds a mark.
        marks: What ends a value, wherever it stands.
    """
    # An end of thinking on its own line would make thinking of all that stands before it.
    is_held = not any(mark in text for mark in (*marks, "<json>", "</think>"))
    if is_held and (not is_typed or is_equal(read_typed_text(text, schema), value, is_same_number_type=True)):
        return text
    escaped = dump_json(value, "an argument").replace("<", "\\u003c")
    return f"<json>{escaped}</json>"


def read_text(text: str, schema: Any) -> Any:
    """The value of an argument's text by its schema."""
    if "<json>" in text and (escaped := _ESCAPED.fullmatch(text.strip())):
        try:
            return decode_json(escaped[1])
        except ParseError:
            pass
    return read_typed_text(text, schema)


class _Tagged(CallFormat):
    """What both formats share: calls between ``<tool_call>`` and its end, read from tag to tag."""

    _open, _close = "<tool_call>", "</tool_call>"

    def _read(self, page: Page, start: int, tools: Sequence[Tool], lenient: bool) -> None:
        position = start
        while (opened := self._find_call(page, position, lenient)) >= 0:
            try:
                call, position = self._read_call(page, opened, tools, lenient)
                page.put_calls([call], opened, position)
            except ParseError as error:
                position = self._malformed_end(page, opened, error.position)
                page.put_malformed(opened, position, error.reason)

    def _find_call(self, page: Page, position: int, lenient: bool) -> int:
        return page.find(self._open, position)

    def _read_call(self, page: Page, opened: int, tools: Sequence[Tool], lenient: bool) -> tuple[Call, int]:
        raise NotImplementedError

    def _malformed_end(self, page: Page, opened: int, fault: int) -> int:
        """Behind the next closing tag, or before the next opening one, whichever comes first."""
        closed, reopened = page.find(self._close, fault), page.find(self._open, max(fault, opened + 1))
        if closed >= 0 and (reopened < 0 or closed < reopened):
            return closed + len(self._close)
        return reopened if reopened >= 0 else page.end

    def _until(self, page: Page, mark: str, start: int) -> int:
        found = page.find(mark, start)
        if found < 0:
            raise ParseError(f"not closed by {mark}", start)
        return found


class Qwen3Coder(_Tagged):
    """``<function=name>`` with one ``<parameter=key>`` a value, in ``<tool_call>``. Qwen3-Coder, Qwen3.5, Nemotron 3.

    The chat templates of those models; a value has a line break of its own before and behind it.
    """

    name = "qwen3_coder"
    _function, _function_end = "<function=", "</function>"
    _parameter, _parameter_end = "<parameter=", "</parameter>"
    # An argument that holds nothing that could be a tag, at one stroke.
    _plain = re.compile(r"<parameter=([^<>\s]++)>([^<]*+)</parameter>[ \t\r\n]*+")

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """The blocks, one under another."""
        return "\n".join(self._render_call(call, tools) for call in calls)

    def _render_call(self, call: Call, tools: Sequence[Tool]) -> str:
        _require_writable(call)
        schemas = argument_schemas(tools, call.name)
        lines = [self._open, f"{self._function}{call.name}>"]
        for key, value in call.arguments.items():
            text = dump_json(value, call.name) if isinstance(value, (dict, list)) else str(value)
            marks = (self._parameter_end, self._parameter, self._function_end)
            text = write_text(value, text, schemas.get(key), bool(tools), marks)
            lines.extend((f"{self._parameter}{key}>", text, self._parameter_end))
        return "\n".join([*lines, self._function_end, self._close])

    def _is_read_whole(self, text: str, strict: Parsed) -> bool:
        # A tag inside of a value ends it in the lenient reading.
        num_arguments = sum(len(call.arguments) for call in strict.calls)
        has_tags_only = text.count(self._parameter) == num_arguments
        return (
            super()._is_read_whole(text, strict)
            and has_tags_only
            and text.count(self._function_end) == len(strict.calls)
        )

    def _find_call(self, page: Page, position: int, lenient: bool) -> int:
        opened = page.find(self._open, position)
        bare = page.find(self._function, position) if lenient else -1
        return bare if bare >= 0 and (opened < 0 or bare < opened) else opened

    def _read_call(self, page: Page, opened: int, tools: Sequence[Tool], lenient: bool) -> tuple[Call, int]:
        text = page.text
        has_block = text.startswith(self._open, opened)
        position = _skip_blank(page, opened + len(self._open)) if has_block else opened
        name, position = self._read_tag(page, self._function, position)
        schemas = argument_schemas(tools, name)
        arguments: dict[str, Any] = {}
        position = _skip_blank(page, position)
        while text.startswith(self._parameter, position):
            place = position
            if plain := self._plain.match(text, position, page.end):
                (key, value), position = plain.groups(), plain.end()
            else:
                key, position = self._read_tag(page, self._parameter, position)
                value, position = self._read_value(page, position, lenient)
                position = _skip_blank(page, position)
            if key in arguments and not lenient:
                raise ParseError(f"the parameter {key[:40]!r} twice", place)
            arguments[key] = read_text(value.removeprefix("\n").removesuffix("\n"), schemas.get(key))
        for mark, is_due in ((self._function_end, True), (self._close, has_block)):
            if text.startswith(mark, position):
                position = _skip_blank(page, position + len(mark))
            elif is_due and not (lenient and (position >= page.end or text.startswith("<", position))):
                raise ParseError(f"no {mark} where one is due", position)
        return Call(name, arguments), position

    def _read_tag(self, page: Page, mark: str, position: int) -> tuple[str, int]:
        """The name in ``<function=name>`` or ``<parameter=name>``, and the position behind the tag."""
        if not page.text.startswith(mark, position):
            raise ParseError(f"no {mark}...> where one is due", position)
        end = self._until(page, ">", position + len(mark))
        name = page.text[position + len(mark) : end].strip()
        if not _KEY.fullmatch(name):
            raise ParseError(f"no name in {mark}...>", position)
        return name, end + 1

    def _read_value(self, page: Page, start: int, lenient: bool) -> tuple[str, int]:
        if not lenient:
            end = self._until(page, self._parameter_end, start)
            behind = end + len(self._parameter_end)
        else:
            ends = [page.find(mark, start) for mark in (self._parameter_end, self._parameter, self._function_end)]
            end = min((place for place in ends if place >= 0), default=page.end)
            behind = end + len(self._parameter_end) if end == ends[0] else end
        return page.text[start:end], behind


class Glm(_Tagged):
    """``<tool_call>name`` with pairs of ``<arg_key>`` and ``<arg_value>``. GLM 4.5 and later.

    The chat template of GLM-4.5.
    """

    name = "glm45"
    _key, _key_end, _value, _value_end = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
    _plain = re.compile(r"<arg_key>([^<>\s]++)</arg_key>[ \t\r\n]*+<arg_value>([^<]*+)</arg_value>[ \t\r\n]*+")

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """The blocks, one under another."""
        return "\n".join(self._render_call(call, tools) for call in calls)

    def _render_call(self, call: Call, tools: Sequence[Tool]) -> str:
        _require_writable(call)
        schemas = argument_schemas(tools, call.name)
        lines = [f"{self._open}{call.name}"]
        for key, value in call.arguments.items():
            text = value if isinstance(value, str) else dump_json(value, call.name)
            text = write_text(value, text, schemas.get(key), bool(tools), (self._value_end,))
            lines.append(f"{self._key}{key}{self._key_end}")
            lines.append(f"{self._value}{text}{self._value_end}")
        return "\n".join([*lines, self._close])

    def _read_call(self, page: Page, opened: int, tools: Sequence[Tool], lenient: bool) -> tuple[Call, int]:
        text = page.text
        position = opened + len(self._open)
        tag = page.find("<", position)
        end = tag if tag >= 0 else page.end
        name = text[position:end].strip()
        if not _NAME.fullmatch(name):
            raise ParseError("no name behind <tool_call>", position)
        schemas = argument_schemas(tools, name)
        arguments: dict[str, Any] = {}
        position = end
        while text.startswith(self._key, position):
            place = position
            if plain := self._plain.match(text, position, page.end):
                (key, value), position = plain.groups(), plain.end()
            else:
                key, position = self._read_key(page, position)
                end = self._until(page, self._value_end, position)
                value, position = text[position:end], _skip_blank(page, end + len(self._value_end))
            if key in arguments and not lenient:
                raise ParseError(f"the key {key[:40]!r} twice", place)
            arguments[key] = read_text(value, schemas.get(key))
        if text.startswith(self._close, position):
            return Call(name, arguments), position + len(self._close)
        if lenient and (position >= page.end or text.startswith(self._open, position)):
            return Call(name, arguments), position
        raise ParseError(f"not closed by {self._close}", position)

    def _read_key(self, page: Page, position: int) -> tuple[str, int]:
        """The key of the pair that begins there, and the position behind the tag of its value."""
        end = self._until(page, self._key_end, position)
        key = page.text[position + len(self._key) : end].strip()
        if not _KEY.fullmatch(key):
            raise ParseError(f"the key {key[:40]!r} is empty or holds a tag", position)
        position = _skip_blank(page, end + len(self._key_end))
        if not page.text.startswith(self._value, position):
            raise ParseError(f"no {self._value} behind a key", position)
        return key, position + len(self._value)


def _require_writable(call: Call) -> None:
    """Raise DataError unless tags can hold the names, and JSON the values."""
    dump_json(call.arguments, call.name)
    names: Mapping[str, re.Pattern[str]] = {call.name: _NAME} | dict.fromkeys(call.arguments, _KEY)
    for name, pattern in names.items():
        if not pattern.fullmatch(name) or name != name.strip():
            raise DataError(
                f"{call.name[:80]!r}: the name {name[:80]!r} cannot stand in a tag. Use letters and digits."
            )


def _skip_blank(page: Page, position: int) -> int:
    blank = _BLANK.match(page.text, position, page.end)
    return blank.end() if blank else position
