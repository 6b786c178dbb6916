"""Qwen3-Coder, Qwen3.5 to 3.8, Nemotron 3: calls as tags of functions and parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from fctune.base.json_reader import ParseError
from fctune.calls.argument_types import argument_schemas
from fctune.calls.formats.base import Parsed, ParseState, TemplateSignature
from fctune.calls.formats.json_calls import dump_json
from fctune.calls.formats.response_fields import ResponseFields, Surroundings, tagged_call
from fctune.calls.formats.tagged_calls import (
    NAME,
    TaggedFormat,
    find_closing,
    find_name,
    read_value,
    require_writable,
    skip_space,
    write_value,
)
from fctune.data.conversation import Call, Tool

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
# An argument without anything that could be a tag, matched in one step.
_PLAIN = re.compile(r"<parameter=([^<>\s]++)>([^<]*+)</parameter>[ \t\r\n]*+")


class Qwen3Coder(TaggedFormat):
    """``<function=name>`` with one ``<parameter=key>`` a value, in ``<tool_call>``.

    The chat templates of those models; a line break before and after a value is not part of it. Templates up to
    Qwen3.5's write ``True`` and ``None``, those from Qwen3.6's on ``true`` and ``null``, as here: servers keep the word
    ``None`` as text.
    """

    name = "qwen3_coder"
    aliases: ClassVar[tuple[str, ...]] = ("qwen3.5", "qwen3.6", "qwen3.8", "nemotron3")
    template_signatures = (TemplateSignature((_FUNCTION, _PARAMETER)),)
    response_note = "values that contain the format's tags"
    vllm_parser: ClassVar[str | None] = "qwen3_coder"
    sglang_parser: ClassVar[str | None] = "qwen3_coder"

    def _render_call(self, call: Call, tools: Sequence[Tool]) -> str:
        require_writable(call)
        schemas = argument_schemas(tools, call.name)
        lines = [self._open, f"{_FUNCTION}{call.name}>"]
        for key, value in call.arguments.items():
            text = value if isinstance(value, str) else dump_json(value, call.name)
            marks = (_PARAMETER_END, _PARAMETER, _FUNCTION_END)
            text = write_value(value, text, schemas.get(key), bool(tools), marks)
            lines.extend((f"{_PARAMETER}{key}>", text, _PARAMETER_END))
        return "\n".join([*lines, _FUNCTION_END, self._close])

    def describe_response(self, around: Surroundings) -> ResponseFields | None:
        """Return the field of the blocks."""
        marks = {
            "open_pattern": rf"\s*{self._open}\s*{_FUNCTION}(?P<name>[^<>\s]+)>",
            "close_pattern": rf"{_FUNCTION_END}\s*{self._close}",
        }
        tag = rf"{_PARAMETER}(?P<key>[^<>\n]+)>\n?(?P<value>.*?)\n?{_PARAMETER_END}"
        return {"tool_calls": tagged_call(marks, tag)}

    def _is_unambiguous(self, text: str, strict: Parsed) -> bool:
        # In the lenient reading, a tag inside a value ends it.
        num_arguments = sum(len(call.arguments) for call in strict.calls)
        return (
            super()._is_unambiguous(text, strict)
            and text.count(_PARAMETER) == num_arguments
            and text.count(_FUNCTION_END) == len(strict.calls)
        )

    def _find_call(self, state: ParseState, position: int, lenient: bool) -> int:
        opened = state.find(self._open, position)
        bare = state.find(_FUNCTION, position) if lenient else -1
        return bare if bare >= 0 and (opened < 0 or bare < opened) else opened

    def _read_call(self, state: ParseState, opened: int, tools: Sequence[Tool], lenient: bool) -> tuple[Call, int]:
        text = state.text
        has_block = text.startswith(self._open, opened)
        position = skip_space(state, opened + len(self._open)) if has_block else opened
        name, position = _read_tag(state, _FUNCTION, position)
        if not NAME.fullmatch(name):
            raise ParseError(f"no name in {_FUNCTION}...>", position)
        schemas = argument_schemas(tools, name)
        arguments: dict[str, Any] = {}
        position = skip_space(state, position)
        while text.startswith(_PARAMETER, position):
            start = position
            if plain := _PLAIN.match(text, position, state.end):
                (key, value), position = plain.groups(), plain.end()
            else:
                key, position = _read_tag(state, _PARAMETER, position)
                value, position = _read_text(state, position, lenient)
                position = skip_space(state, position)
            if key in arguments and not lenient:
                raise ParseError(f"duplicate parameter {key[:40]!r}", start, "duplicate_key")
            arguments[key] = read_value(value.removeprefix("\n").removesuffix("\n"), schemas.get(key))
        for mark, is_required in ((_FUNCTION_END, True), (self._close, has_block)):
            if text.startswith(mark, position):
                position = skip_space(state, position + len(mark))
            elif is_required and not (lenient and (position >= state.end or text.startswith("<", position))):
                raise ParseError(f"expected {mark}", position)
        return Call(name, arguments), position


class SeedOss(Qwen3Coder):
    """The same in ``<seed:tool_call>``.

    The chat template of Seed-OSS-36B-Instruct.
    """

    name = "seed_oss"
    aliases = ("seed-oss",)
    template_signatures = (TemplateSignature(("<seed:tool_call>",), priority=1),)
    vllm_parser = "seed_oss"
    sglang_parser = None
    _open, _close = "<seed:tool_call>", "</seed:tool_call>"


def _read_tag(state: ParseState, mark: str, position: int) -> tuple[str, int]:
    """Return the name in ``<function=name>`` or ``<parameter=name>``, and the position after the tag."""
    if not state.text.startswith(mark, position):
        raise ParseError(f"expected {mark}...>", position)
    name, end = find_name(state, position + len(mark), ">")
    if not name:
        raise ParseError(f"no name in {mark}...>", position)
    return name, end + 1


def _read_text(state: ParseState, start: int, lenient: bool) -> tuple[str, int]:
    """Return the text of a value, and the position after its closing tag."""
    if not lenient:
        end = find_closing(state, _PARAMETER_END, start)
        return state.text[start:end], end + len(_PARAMETER_END)
    ends = [state.find(mark, start) for mark in (_PARAMETER_END, _PARAMETER, _FUNCTION_END)]
    end = min((position for position in ends if position >= 0), default=state.end)
    return state.text[start:end], end + len(_PARAMETER_END) if end == ends[0] else end
