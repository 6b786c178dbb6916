"""Calls as ``<invoke name="...">`` with one ``<parameter name="...">`` a value: what the dialects of it share."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fctune.base.errors import DataError
from fctune.base.json_reader import ParseError, read_json
from fctune.calls.argument_types import argument_schemas
from fctune.calls.formats.base import CallFormat, Malformed, Parsed, ParseState
from fctune.calls.formats.json_calls import dump_json, require_name
from fctune.calls.formats.response_fields import ResponseFields, Surroundings, tagged_call
from fctune.calls.formats.tagged_calls import find_closing, skip_space
from fctune.data.conversation import Call, Tool

_NAME = re.compile(r"[^\s\"'<>=\[\]{}]+")
_KEY = re.compile(r"[^\"<>\n\S]*+[^\"<>\s](?:[^\"<>\n]*[^\"<>\s])?")
_ATTRIBUTES = r'(?P<attributes>(?:\s++\w++="[^"<>\n]*+")*+)\s*+'


class Block(NamedTuple):
    """The tags of a dialect; ``invoke`` and ``parameter`` are opening tags up to the attributes."""

    opening: str
    closing: str
    invoke: str
    invoke_end: str
    parameter: str
    parameter_end: str


class InvokeFormat(CallFormat):
    """Base of the dialects: a block, in it an ``invoke`` a call, in that a ``parameter`` a value."""

    response_note = "values that contain the format's tags"
    _tags: Block
    # Other spellings of the opening tag of the block that models have written.
    _other_openings: tuple[str, ...] = ()

    def __init__(self) -> None:
        tags = self._tags
        self._invoke_tag = re.compile(
            rf'{re.escape(tags.invoke)}\s++name="(?P<name>[^"<>\n]++)"{_ATTRIBUTES}(?P<closed>/?+)>'
        )
        self._parameter_tag = re.compile(rf'{re.escape(tags.parameter)}\s++name="(?P<name>[^"<>\n]++)"{_ATTRIBUTES}>')
        # A value without anything that could be a tag, matched in one step.
        self._plain = re.compile(
            rf'{re.escape(tags.parameter)} name="(?P<name>[^"<>\n]++)"{_ATTRIBUTES}>'
            rf"(?P<value>[^<]*+){re.escape(tags.parameter_end)}"
        )

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """Return one block of all calls."""
        invokes = "\n".join(self._render_call(call, tools) for call in calls)
        return f"{self._tags.opening}\n{invokes}\n{self._tags.closing}" if calls else ""

    def describe_response(self, around: Surroundings) -> ResponseFields | None:
        """Return the field of the calls of a block; the schemas of tools type the values."""
        opening, closing, invoke, invoke_end, parameter, parameter_end = map(re.escape, self._tags)
        marks = {
            "open_pattern": rf'\s*(?:{opening}\s*)?{invoke}\s+name="(?P<name>[^"<>\n]+)"[^<>]*>',
            "close_pattern": rf"{invoke_end}(?:\s*{closing})?",
        }
        tag = rf'{parameter}\s+name="(?P<key>[^"<>\n]+)"[^<>]*>(?P<value>.*?){parameter_end}'
        return {"tool_calls": tagged_call(marks, tag)}

    def _render_call(self, call: Call, tools: Sequence[Tool]) -> str:
        dump_json(call.arguments, call.name)
        schemas = argument_schemas(tools, call.name)
        lines = [f'{self._tags.invoke} name="{require_name(call.name, _NAME)}">']
        for key, value in call.arguments.items():
            if not _KEY.fullmatch(key) or key != key.strip():
                raise DataError(f"{call.name}: the argument {key[:80]!r} cannot be written in a tag. Use letters.")
            attributes, text = self._write_value(value, schemas.get(key), bool(tools))
            lines.append(f'{self._tags.parameter} name="{key}"{attributes}>{text}{self._tags.parameter_end}')
        return "\n".join([*lines, *self._after_no_arguments(call), self._tags.invoke_end])

    def _after_no_arguments(self, call: Call) -> tuple[str, ...]:
        """Return what the dialect writes between the tags of a call without arguments."""
        return ()

    @abstractmethod
    def _write_value(self, value: Any, schema: Any, is_typed: bool) -> tuple[str, str]:
        """Return more attributes for the tag of a parameter, and the text of its value."""

    @abstractmethod
    def _read_value(self, text: str, attributes: str, schema: Any) -> Any:
        """Return the value that a text stands for."""

    def _has_mark(self, text: str) -> bool:
        """Return True if a text would end its own value, or turn everything before it into thinking."""
        return any(mark in text for mark in (*self._tags, "</think>", "<|"))

    def _is_unambiguous(self, text: str, strict: Parsed) -> bool:
        # In the lenient reading, a tag inside a value ends it.
        num_arguments = sum(len(call.arguments) for call in strict.calls)
        return (
            super()._is_unambiguous(text, strict)
            and text.count(self._tags.parameter) == num_arguments
            and text.count(self._tags.invoke_end) == len(strict.calls)
        )

    def _read(self, state: ParseState, tools: Sequence[Tool], lenient: bool) -> None:
        self._read_invokes(state, 0, tools, lenient)

    def _read_invokes(self, state: ParseState, start: int, tools: Sequence[Tool], lenient: bool) -> None:
        """Add all calls of ``text[start:state.end]``."""
        tags = self._tags
        position, outer, has_error = start, -1, False
        while (opened := state.find(tags.invoke, position)) >= 0:
            if (begun := self._find_opening(state, position, opened, lenient)) >= 0:
                outer = begun
            try:
                call, position = self._read_call(state, opened, tools, lenient)
                if outer < 0 and not lenient:
                    raise ParseError(f"not opened by {tags.opening}", opened)
                state.add_calls([call], opened, position)
            except ParseError as error:
                position, has_error = self._find_malformed_end(state, opened, error.position), True
                state.add_malformed(opened, position, error.reason)
            closing = skip_space(state, position)
            if state.text.startswith(tags.closing, closing):
                position, outer, has_error = closing + len(tags.closing), -1, False
                state.skip(closing, position)
        if (begun := state.find(tags.opening, position)) >= 0:
            state.add_malformed(begun, state.end, f"no call after {tags.opening}")
        elif outer >= 0 and not has_error and not lenient:
            # The span is that of the tag, because the calls after it are recorded already.
            state.malformed.append(Malformed(outer, outer + len(tags.opening), f"not closed by {tags.closing}"))

    def _find_opening(self, state: ParseState, position: int, opened: int, lenient: bool) -> int:
        """Skip the tag that opens a block before a call, and return its position; -1 if there is none."""
        for opening in (self._tags.opening, *(self._other_openings if lenient else ())):
            if 0 <= (begun := state.find(opening, position)) < opened:
                state.skip(begun, begun + len(opening))
                return begun
        return -1

    def _find_malformed_end(self, state: ParseState, opened: int, error_position: int) -> int:
        """Return the position after the tag that closes a call, or of one that opens the next or ends the block."""
        closed = state.find(self._tags.invoke_end, max(error_position, opened))
        others = (state.find(self._tags.invoke, opened + 1), state.find(self._tags.closing, opened + 1))
        ends = [closed + len(self._tags.invoke_end)] if closed >= 0 else []
        return min([*ends, *(position for position in others if position >= 0)], default=state.end)

    def _read_call(self, state: ParseState, opened: int, tools: Sequence[Tool], lenient: bool) -> tuple[Call, int]:
        text, tags = state.text, self._tags
        head = self._invoke_tag.match(text, opened, state.end)
        if head is None or not _NAME.fullmatch(head["name"]):
            raise ParseError(f'expected {tags.invoke} name="...">', opened)
        name, position = head["name"], head.end()
        if head["closed"]:
            if lenient:
                return Call(name, {}), position
            raise ParseError(f"not closed by {tags.invoke_end}", position)
        position = skip_space(state, position)
        if lenient and text.startswith("{", position):
            arguments, position = self._read_object(state, position)
        else:
            arguments, position = self._read_parameters(state, position, argument_schemas(tools, name), lenient)
        if text.startswith(tags.invoke_end, position):
            return Call(name, arguments), position + len(tags.invoke_end)
        if lenient and (position >= state.end or text.startswith(tags.closing, position)):
            return Call(name, arguments), position
        raise ParseError(f"not closed by {tags.invoke_end}", position)

    def _read_object(self, state: ParseState, position: int) -> tuple[dict[str, Any], int]:
        value, position = read_json(state.text, position, lenient=True)
        return value, skip_space(state, position)

    def _read_parameters(
        self, state: ParseState, position: int, schemas: Mapping[str, Any], lenient: bool
    ) -> tuple[dict[str, Any], int]:
        text, tags = state.text, self._tags
        arguments: dict[str, Any] = {}
        while text.startswith(tags.parameter, position):
            start = position
            if tag := self._plain.match(text, position, state.end):
                value, position = tag["value"], tag.end()
            else:
                tag = self._parameter_tag.match(text, position, state.end)
                if tag is None:
                    raise ParseError(f'expected {tags.parameter} name="...">', position)
                closed = find_closing(state, tags.parameter_end, tag.end())
                reopened = state.find(tags.invoke, tag.end())
                if 0 <= reopened < closed:
                    raise ParseError(f"not closed by {tags.parameter_end}", tag.end())
                value, position = text[tag.end() : closed], closed + len(tags.parameter_end)
            if tag["name"] in arguments and not lenient:
                raise ParseError(f"duplicate parameter {tag['name'][:40]!r}", start, "duplicate_key")
            arguments[tag["name"]] = self._read_value(value, tag["attributes"], schemas.get(tag["name"]))
            position = skip_space(state, position)
        return arguments, position
