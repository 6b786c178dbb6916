"""Llama 3.2 and 4, the prompt of the Berkeley leaderboard, ToolACE: calls as a list in Python's syntax."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Sequence
from typing import Any

from fctune.base.errors import DataError
from fctune.base.json_reader import ParseError
from fctune.base.python_reader import PythonReader
from fctune.calls.formats.base import CallFormat, ParseState, TemplateSignature
from fctune.calls.formats.json_calls import dump_json, find_mark, read_objects
from fctune.calls.formats.response_fields import ResponseFields, Surroundings, python_call
from fctune.calls.formats.tagged_calls import skip_space
from fctune.data.conversation import Call, Tool

_MARKS = ("<|python_tag|>", "<|python_start|>")
_END = "<|python_end|>"
_NAME = re.compile(r"[^\W\d][\w.\-/]*")
_LIST_START = re.compile(r"\[\s*[^\W\d][\w.\-/]*+\(")
CALL_START = re.compile(r"(?<![\w.\-/])[^\W\d][\w.\-/]*+\((?=\s*(?:\)|\*\*|[^\W\d]\w*+\s*=))")


class Pythonic(CallFormat):
    """``[f(a='x', b=1), g()]`` and nothing else.

    https://github.com/meta-llama/llama-models/blob/main/models/llama3_2/text_prompt_format.md; Llama 4 puts
    ``<|python_start|>`` and ``<|python_end|>`` around it, and ``<|python_tag|>`` may come before it.
    """

    name = "pythonic"
    aliases = ("llama4", "bfcl", "toolace")
    # The prompt of Llama 3.2 and of the leaderboard; and Llama 4's mark, which its template for JSON calls has as well.
    template_signatures = (
        TemplateSignature(("[func_name1(",), priority=-4),
        TemplateSignature(("<|python_start|>",), priority=-6),
    )
    vllm_parser = "pythonic"
    sglang_parser = "pythonic"
    response_note = (
        "strings in single quotes with escapes, or within lists and objects; True, False and None within these; keys "
        "that are not identifiers"
    )

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """Return one list of all calls."""
        return f"[{', '.join(map(render_python_call, calls))}]" if calls else ""

    def describe_response(self, around: Surroundings) -> ResponseFields | None:
        """Return the field of the calls of a list, from parenthesis to parenthesis."""
        before, after = r"(?:<\|python_(?:tag|start)\|>\s*)?", r"(?:<\|python_end\|>\s*)?"
        name, closed = r"[^\W\d][\w.\-/]*\(", r"\)\s*\]\s*"
        marks = {
            "open_pattern": rf"(?:{around.start}\s*{before}\[|(?<=\)),)\s*(?P<name>[^\W\d][\w.\-/]*)\(",
            "close_pattern": rf"\)(?=\s*,\s*{name})|{closed}{after}(?={around.end})|{closed}{after}\Z",
        }
        return {"tool_calls": python_call(marks, is_json=True)}

    def _read(self, state: ParseState, tools: Sequence[Tool], lenient: bool) -> None:
        if lenient:
            read_python_calls(state)
            return
        reader = PythonReader(state.text[: state.end])
        opened = body = skip_space(state, 0)
        mark = next((mark for mark in _MARKS if state.text.startswith(mark, opened)), "")
        body = skip_space(state, opened + len(mark))
        if not mark and not _LIST_START.match(state.text, body, state.end):
            return
        try:
            calls, end = reader.read_calls(body)
            end = skip_space(state, end)
            if state.text.startswith(_END, end):
                end = skip_space(state, end + len(_END))
            if end < state.end:
                raise ParseError("text after the list of calls", end)
            state.add_calls([Call(*call) for call in calls], opened, end)
        except ParseError as error:
            state.add_malformed(opened, state.end, error.reason)


def render_python_call(call: Call, write: Callable[[Any], str] = repr) -> str:
    """Write ``name(a=1, b='x')``; keys that are not identifiers go into ``**{...}``.

    Raises:
        DataError: The name cannot precede a parenthesis, or no literal gives a value.
    """
    if not _NAME.fullmatch(call.name):
        raise DataError(
            f"{call.name[:80]!r}: not a name that a pythonic format can write. Use letters, digits and . - _ /."
        )
    dump_json(call.arguments, call.name)
    plain = [f"{key}={write(value)}" for key, value in call.arguments.items() if _is_keyword_name(key)]
    others = {key: value for key, value in call.arguments.items() if not _is_keyword_name(key)}
    return f"{call.name}({', '.join([*plain, *([f'**{write(others)}'] if others else [])])})"


def read_python_calls(state: ParseState) -> None:
    """Add every call in the text, in a list or alone, as the leaderboard decodes them.

    If there is none, add calls written as JSON.
    """
    reader = PythonReader(state.text[: state.end], lenient=True)
    position = 0
    mark = next((mark for mark in _MARKS if state.find(mark, 0) >= 0), "")
    opened = find_mark(state, mark, CALL_START, lambda at: reader.read_call(at)[1])
    if opened >= 0:
        position = opened + len(mark)
        state.skip(opened, position)
    while (found := CALL_START.search(state.text, position, state.end)) is not None:
        try:
            call, position = reader.read_call(found.start())
            state.add_list_item(Call(*call), found.start(), position)
        except ParseError as error:
            position = max(error.position, found.end())
            state.add_malformed(found.start(), position, error.reason)
    if not state.calls and not state.malformed:
        read_objects(state, "arguments", mark)
    elif (ended := state.find(_END, state.position)) >= 0:
        state.skip(ended, ended + len(_END))


def _is_keyword_name(key: Any) -> bool:
    return isinstance(key, str) and key.isidentifier() and not keyword.iskeyword(key)
