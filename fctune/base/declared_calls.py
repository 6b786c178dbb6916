"""Calls written as ``[name(argument=value, ...), ...]`` in data rows that declare their tools.

Such rows (ToolACE's, for one) are nearly Python: names of tools hold spaces, commas, dots and parentheses, names of
arguments are hyphenated or Python keywords, and values are JSON's ``true`` as often as Python's ``True``. A value that
Python and JSON read differently is an error, because a row is trained on and must not be guessed at.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from fctune.base.json_reader import MAX_DIGITS, ParseError
from fctune.base.python_reader import NamedArguments, PythonReader

_SPACE = re.compile(r"[ \t\r\n]*+")
_PLAIN_NAME = re.compile(r"[A-Za-z_][\w.\-/]*(?=\()")
_KEY = re.compile(r"([^\s=,()\[\]{}'\"]+)[ \t]*=(?!=)")
_STRING = re.compile(r"\"((?:[^\"\\]++|\\.)*+)\"|'((?:[^'\\]++|\\.)*+)'", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(\.[0-9]++)?([eE][+-]?[0-9]++)?(?=[\s,)\]}])")
_CONSTANT = re.compile(r"(?:True|true|False|false|None|null)(?=[\s,)\]}])")
_CONSTANTS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|U(?:0010|000[0-9a-fA-F])[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"'}
# A backslash before one of these means one thing in Python and another, or nothing, in JSON.
_AMBIGUOUS_ESCAPES = frozenset("0123456789avN/\nxuU")


class DeclaredCallReader(PythonReader):
    """Reader of calls to declared tools, whose values have the same meaning in Python and in JSON.

    Args:
        text: The text to read from.
        names: The declared tools, of which the longest that fits is taken; another name must be a plain identifier.
    """

    __slots__ = ("_names",)

    def __init__(self, text: str, names: Sequence[str]) -> None:
        super().__init__(text, has_json_constants=True)
        self._names = sorted(names, key=len, reverse=True)

    def is_call_list(self) -> bool:
        """Return True if the text opens like a list of calls: a bracket, a name, and a parenthesis."""
        if not self.text.startswith("["):
            return False
        try:
            self._find_name_end(self.skip_space(1))
        except ParseError:
            return False
        return True

    def skip_space(self, position: int) -> int:
        """Return the position of the next character that is not whitespace."""
        match = _SPACE.match(self.text, position)
        assert match is not None
        return match.end()

    def read_calls(self, position: int) -> tuple[list[NamedArguments], int]:
        """Return the calls of the list that opens at ``position``, and the position after it.

        Raises:
            ParseError: No list of calls, an empty one, or an ambiguous value.
        """
        calls, end = super().read_calls(position)
        if not calls:
            raise ParseError("expected a call", position)
        return calls, end

    def read_value(self, position: int, depth: int = 0, strength: int = 0) -> tuple[Any, int]:
        """Return the value that starts at ``position``, and the position after it.

        Raises:
            ParseError: No value, or an ambiguous one.
        """
        self._check_depth(position, depth)
        text = self.text
        if text.startswith("[", position):
            return self._read_items(position + 1, "]", depth)
        if text.startswith("{", position):
            return self._read_dict(position + 1, depth)
        if string := _STRING.match(text, position):
            return _unescape(string), string.end()
        if constant := _CONSTANT.match(text, position):
            return _CONSTANTS[constant.group()], constant.end()
        number = _NUMBER.match(text, position)
        if number is None or number.end() - position > MAX_DIGITS:
            expected = "expected a quoted string, a number, true, false, null, a list or an object"
            raise ParseError(expected, position)
        if number[1] is None and number[2] is None:
            return int(number.group()), number.end()
        value = float(number.group())
        if math.isinf(value):
            raise ParseError(f"the number {number.group()[:40]} is too large for a float", position, "not_finite")
        return value, number.end()

    def _find_name_end(self, position: int) -> int:
        for name in self._names:
            if self.text.startswith(name, position) and self.text.startswith("(", position + len(name)):
                return position + len(name)
        if plain := _PLAIN_NAME.match(self.text, position):
            return plain.end()
        raise ParseError("expected a tool's name and '('", position)

    def _read_argument(self, position: int, depth: int) -> tuple[dict[str, Any], int]:
        key = _KEY.match(self.text, position)
        if key is None:
            raise ParseError("expected an argument as name=value", position)
        value, end = self.read_value(self.skip_space(key.end()), depth)
        return {key[1]: value}, end

    def _after_item(self, position: int, closing: str) -> int:
        """Return the position of the next item, which must follow a comma, or of the closing bracket."""
        start = self.skip_space(position)
        end = super()._after_item(start, closing)
        if end != start and self.text.startswith(closing, end):
            raise ParseError(f"expected an item between ',' and {closing!r}", end)
        return end


def _unescape(string: re.Match[str]) -> str:
    text: str = string[1] if string[1] is not None else string[2]
    if "\\" not in text:
        return text

    def replace(escape: re.Match[str]) -> str:
        code: str = escape[1]
        if len(code) > 1:
            return chr(int(code[1:], 16))
        if code in _AMBIGUOUS_ESCAPES:
            raise ParseError(f"Python and JSON read the escape {escape.group()!r} differently", string.start())
        return _ESCAPES.get(code, escape.group())

    # \ud83d\ude00 is one character; half a surrogate pair stays half and is refused with the row.
    return _ESCAPE.sub(replace, text).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
