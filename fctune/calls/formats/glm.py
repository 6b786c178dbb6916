"""GLM 4.5 and later: calls as pairs of tags for keys and values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fctune.base.json_reader import ParseError
from fctune.calls.argument_types import argument_schemas
from fctune.calls.formats.base import ParseState, TemplateSignature
from fctune.calls.formats.json_calls import dump_json
from fctune.calls.formats.response_fields import ResponseFields, Surroundings, tagged_call
from fctune.calls.formats.tagged_calls import (
    CLOSE,
    NAME,
    OPEN,
    TaggedFormat,
    find_closing,
    find_name,
    read_value,
    require_writable,
    skip_space,
    write_value,
)
from fctune.data.conversation import Call, Tool

_KEY_OPEN, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_PLAIN = re.compile(r"<arg_key>([^<>\s]++)</arg_key>[ \t\r\n]*+<arg_value>([^<]*+)</arg_value>[ \t\r\n]*+")


class Glm(TaggedFormat):
    """``<tool_call>name`` with pairs of ``<arg_key>`` and ``<arg_value>``.

    The chat template of GLM-4.5.
    """

    name = "glm45"
    template_signatures = (TemplateSignature((OPEN, _KEY_OPEN)),)
    response_note = "values that contain the format's tags"
    vllm_parser = "glm45"
    sglang_parser = "glm45"

    def _render_call(self, call: Call, tools: Sequence[Tool]) -> str:
        require_writable(call)
        schemas = argument_schemas(tools, call.name)
        lines = [f"{OPEN}{call.name}"]
        for key, value in call.arguments.items():
            text = value if isinstance(value, str) else dump_json(value, call.name)
            text = write_value(value, text, schemas.get(key), bool(tools), (_VALUE_END,))
            lines.append(f"{_KEY_OPEN}{key}{_KEY_END}")
            lines.append(f"{_VALUE}{text}{_VALUE_END}")
        return "\n".join([*lines, CLOSE])

    def describe_response(self, around: Surroundings) -> ResponseFields | None:
        """Return the field of the blocks."""
        marks = {"open_pattern": rf"\s*{OPEN}(?P<name>[^<>\s]+)\s*", "close": CLOSE}
        tag = rf"{_KEY_OPEN}(?P<key>[^<>]+){_KEY_END}\s*{_VALUE}(?P<value>.*?){_VALUE_END}"
        return {"tool_calls": tagged_call(marks, tag)}

    def _read_call(self, state: ParseState, opened: int, tools: Sequence[Tool], lenient: bool) -> tuple[Call, int]:
        text = state.text
        position = opened + len(OPEN)
        tag = state.find("<", position)
        end = tag if tag >= 0 else state.end
        name = text[position:end].strip()
        if not NAME.fullmatch(name):
            raise ParseError(f"no name after {OPEN}", position)
        schemas = argument_schemas(tools, name)
        arguments: dict[str, Any] = {}
        position = end
        while text.startswith(_KEY_OPEN, position):
            start = position
            if plain := _PLAIN.match(text, position, state.end):
                (key, value), position = plain.groups(), plain.end()
            else:
                key, position = _read_key(state, position)
                end = find_closing(state, _VALUE_END, position)
                value, position = text[position:end], skip_space(state, end + len(_VALUE_END))
            if key in arguments and not lenient:
                raise ParseError(f"duplicate key {key[:40]!r}", start, "duplicate_key")
            arguments[key] = read_value(value, schemas.get(key))
        if text.startswith(CLOSE, position):
            return Call(name, arguments), position + len(CLOSE)
        if lenient and (position >= state.end or text.startswith(OPEN, position)):
            return Call(name, arguments), position
        raise ParseError(f"not closed by {CLOSE}", position)


def _read_key(state: ParseState, position: int) -> tuple[str, int]:
    """Return the key of the pair that begins at a position, and the position after the opening tag of its value."""
    key, end = find_name(state, position + len(_KEY_OPEN), _KEY_END)
    if not key:
        raise ParseError(f"the key before {_KEY_END} is empty or contains a tag", position)
    position = skip_space(state, end + len(_KEY_END))
    if not state.text.startswith(_VALUE, position):
        raise ParseError(f"no {_VALUE} after a key", position)
    return key, position + len(_VALUE)
