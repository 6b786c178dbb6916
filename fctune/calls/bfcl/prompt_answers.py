"""Answers to the leaderboard's own prompt, decoded as ``default_decode_ast_prompting`` of bfcl-eval 2026.3.23 does.

The wheel parses an answer as Python and evaluates arithmetic in it; here a scanner reads it and nothing is evaluated.
The tests compare the two. Expressions that are neither literals, names nor calls are malformed here; the wheel takes
a few of them, such as a subscript, as text.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from typing import Any

from fctune.calls.formats.base import CallFormat, Parsed, ParseState
from fctune.calls.formats.pythonic import CALL_START, render_python_call
from fctune.data.conversation import Call, Tool
from fctune.parsing.json_reader import MAX_DIGITS, ParseError
from fctune.parsing.python_reader import NamedArguments, PythonReader

TUPLE_KEY = "tuple"
"""The one key of the object that stands for a tuple, which JSON does not have and the leaderboard tells from a list."""

_NAME = re.compile(r"[^\W\d]\w*+(?:\s*+\.\s*+[^\W\d]\w*+)*+")
_COMPARISON = re.compile(r"\s*+(?:[=!<>]=|[<>])\s*+")
_WORD = re.compile(r"[^\W\d]\w*+(?!\.)")
_CONSTANTS = {"True": True, "False": False, "None": None}
_SIGNED = re.compile(r"[+\-~]\s*+(\d[\d_]*+(?:\.\d*+)?(?:[eE][+-]?\d++)?|\.\d++(?:[eE][+-]?\d++)?)(?![\w.])", re.ASCII)
_KEYWORD_ARGUMENT = re.compile(r"([^\W\d]\w*+)\s*+=(?!=)")


class BfclAnswer(CallFormat):
    """``[f(a='x', b=1), g()]`` as the leaderboard reads it: backquotes around it and missing brackets are ignored."""

    name = "bfcl_prompt"

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """Return one list of all calls."""
        return f"[{', '.join(map(render_python_call, calls))}]"

    def _is_unambiguous(self, text: str, strict: Parsed) -> bool:
        """Return True: the leaderboard has one reading."""
        return True

    def _read(self, state: ParseState, tools: Sequence[Tool], lenient: bool) -> None:
        answer = state.text[: state.end].strip("`\n ")
        opening, closing = "" if answer.startswith("[") else "[", "" if answer.endswith("]") else "]"
        reader = _AnswerReader(opening + answer + closing)
        try:
            calls, end = reader.read_calls(0)
            if reader.skip_space(end) < len(reader.text):
                raise ParseError("text after the list of calls", end)
        except ParseError as error:
            # Without anything like a call it is an answer in prose.
            if CALL_START.search(state.text, 0, state.end):
                state.add_malformed(0, state.end, error.reason)
            return
        state.add_calls([Call(*call) for call in calls], 0, state.end)


class _AnswerReader(PythonReader):
    """Reader with the peculiarities of the wheel's decoder.

    Positional arguments are dropped, names stand for their own text, a tuple stays apart from a list, and the last of
    equal keywords counts. Any sign before a number makes it negative.
    """

    __slots__ = ()

    def __init__(self, text: str) -> None:
        super().__init__(text, lenient=True)

    def _find_name_end(self, position: int) -> int:
        name = _NAME.match(self.text, position)
        if name is None or any(keyword.iskeyword(part.strip()) for part in name.group().split(".")):
            raise ParseError("expected a function name", position)
        return name.end()

    def read_call(self, position: int, depth: int = 0) -> tuple[NamedArguments, int]:
        """Return the call that starts at ``position`` without its positional arguments, and the position after it."""
        end = self._find_name_end(position)
        name = "".join(self.text[position:end].split())
        position = self.skip_space(end)
        self._expect("(", position)
        arguments: dict[str, Any] = {}
        position = self.skip_space(position + 1)
        while not self.text.startswith(")", position):
            if self.text.startswith("**", position):
                arguments["**"], end = self.read_value(self.skip_space(position + 2), depth)  # no parameter's name
            elif (key := _KEYWORD_ARGUMENT.match(self.text, position)) is not None:
                if keyword.iskeyword(key[1]):
                    raise ParseError("a Python keyword as the name of an argument", position)
                arguments[key[1]], end = self.read_value(self.skip_space(key.end()), depth)
            elif arguments:
                raise ParseError("a positional argument after a named one", position)
            else:
                end = self._skip_positional(position, depth)
            position = self._after_item(end, ")")
        return (name, arguments), position + 1

    def _skip_positional(self, position: int, depth: int) -> int:
        """Return the position after a positional argument, which may be a comparison (``a==1``)."""
        _, end = self.read_value(position, depth)
        while (compared := _COMPARISON.match(self.text, end)) is not None:
            _, end = self.read_value(compared.end(), depth)
        return end

    def _read_operand(self, position: int, depth: int) -> tuple[Any, int]:
        if self.text.startswith("...", position):
            return "...", position + 3
        if (signed := _SIGNED.match(self.text, position)) is not None and len(signed[1]) <= MAX_DIGITS:
            value, _ = super()._read_operand(signed.start(1), depth)
            return -value, signed.end()
        return super()._read_operand(position, depth)

    def _to_tuple(self, items: list[Any]) -> Any:
        return {TUPLE_KEY: items}

    def _read_word(self, position: int, depth: int) -> tuple[Any, int]:
        word = _NAME.match(self.text, position)
        if word is not None and self.text.startswith("(", self.skip_space(word.end())):
            (name, arguments), end = self.read_call(position, depth + 1)
            return ({name: arguments} if arguments else self.text[position:end]), end
        plain = _WORD.match(self.text, position)
        if plain is None:
            raise ParseError("expected a value", position)
        if plain.group() in _CONSTANTS:
            return _CONSTANTS[plain.group()], plain.end()
        if keyword.iskeyword(plain.group()):
            raise ParseError("expected a value, got a Python keyword", position)
        return plain.group(), plain.end()


def join_tuples(value: Any, is_tuple: bool = False) -> Any:
    """Return a value with every tuple as a list: what it is in JSON.

    Args:
        value: A value of a ``BfclAnswer``.
        is_tuple: Convert only the value itself, as the leaderboard does for a parameter of the type "tuple".
    """
    if isinstance(value, dict) and value.keys() == {TUPLE_KEY} and isinstance(value[TUPLE_KEY], list):
        return value[TUPLE_KEY] if is_tuple else [join_tuples(item) for item in value[TUPLE_KEY]]
    if is_tuple:
        return value
    if isinstance(value, dict):
        return {key: join_tuples(item) for key, item in value.items()}
    return [join_tuples(item) for item in value] if isinstance(value, list) else value
