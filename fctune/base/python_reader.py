"""Calls and literals in Python's syntax, read by a scanner: nothing is compiled, evaluated or looked up.

Python's own parser is unsuitable: on hostile text it recurses, takes more than linear time and warns, and it accepts
expressions that are not literals.
"""

from __future__ import annotations

import math
import operator
import re
import unicodedata
from collections.abc import Callable
from typing import Any

from fctune.base.json_reader import MAX_DEPTH, MAX_DIGITS, ParseError

NamedArguments = tuple[str, dict[str, Any]]
"""A call as it is read: the function's name and its arguments."""

_SPACE = re.compile(r"(?:[ \t\r\n]++|\\\n|#[^\n]*+)*+")
_FUNCTION = re.compile(r"[^\W\d][\w.\-/]*+")
_WORD = re.compile(r"[^\W\d]\w*+")
_NUMBER = re.compile(
    r"0[xXoObB][0-9a-fA-F_]++|(?:[0-9][0-9_]*+(?:\.[0-9_]*+)?|\.[0-9][0-9_]*+)(?:[eE][+-]?[0-9_]++)?", re.ASCII
)
_STRING = re.compile(
    r"(?P<prefix>[rRuUbBfF]{0,2})(?:"
    r"'''(?P<long1>[^'\\]*+(?:(?:\\.|'(?!''))[^'\\]*+)*+)'''|"
    r'"""(?P<long2>[^"\\]*+(?:(?:\\.|"(?!""))[^"\\]*+)*+)"""|'
    r"'(?!'')(?P<short1>[^'\\\n]*+(?:\\.[^'\\\n]*+)*+)'|"
    r'"(?!"")(?P<short2>[^"\\\n]*+(?:\\.[^"\\\n]*+)*+)")',
    re.DOTALL,
)
# Nine arguments of ten, matched in one step: a string without escapes, a number, or one of Python's constants.
_PLAIN_ARGUMENT = re.compile(
    r"([^\W\d]\w*+)=(?:'([^'\\\n]*+)'|(-?(?:0|[1-9][0-9]{0,15}))(\.[0-9]{1,15})?|(True|False|None))(?=[,)])"
)
_ESCAPE = re.compile(r"\\(\n|[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^{}]{1,80}\}|.)", re.DOTALL)
_ESCAPED = {
    "\n": "",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
}
_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}
_JSON_CONSTANTS = {"true": True, "false": False, "null": None}
_OPERATORS: dict[str, tuple[int, Callable[[Any, Any], Any]]] = {
    "+": (1, operator.add),
    "-": (1, operator.sub),
    "*": (2, operator.mul),
    "/": (2, operator.truediv),
    "//": (2, operator.floordiv),
    "%": (2, operator.mod),
    "**": (3, operator.pow),
}
_OPERATOR = re.compile(r"\*\*|//|[+\-*/%]")
_MAX_POWER = 1024
# Python cannot write out integers that are larger.
_INTEGER_LIMIT = 10**MAX_DIGITS


class PythonReader:
    """Reader of the calls and literals in one text.

    Args:
        text: The text to read from.
        has_json_constants: Accept ``true``, ``false`` and ``null`` as values.
        lenient: Take a name or a call in place of a value as its own text, accept JSON's constants, and keep the last
            of equal keywords or keys instead of refusing them.
    """

    __slots__ = ("has_json_constants", "lenient", "text")

    def __init__(self, text: str, has_json_constants: bool = False, lenient: bool = False) -> None:
        self.text = text
        self.has_json_constants = has_json_constants or lenient
        self.lenient = lenient

    def skip_space(self, position: int) -> int:
        """Return the position of the next character that is neither whitespace nor part of a comment."""
        match = _SPACE.match(self.text, position)
        assert match is not None
        return match.end()

    def read_calls(self, position: int) -> tuple[list[NamedArguments], int]:
        """Return the calls of the list ``[f(a=1), g()]`` that opens at ``position``, and the position after it.

        Raises:
            ParseError: There is anything else at ``position``.
        """
        self._expect("[", position)
        calls: list[NamedArguments] = []
        position = self.skip_space(position + 1)
        while not self.text.startswith("]", position):
            call, position = self.read_call(position)
            calls.append(call)
            position = self._after_item(position, "]")
        return calls, position + 1

    def read_call(self, position: int, depth: int = 0) -> tuple[NamedArguments, int]:
        """Return the call that starts at ``position``, and the position after it.

        Raises:
            ParseError: No call, a positional argument, a repeated keyword, or a value that is not a literal.
        """
        end = self._find_name_end(position)
        name = self.text[position:end]
        position = self.skip_space(end)
        self._expect("(", position)
        arguments: dict[str, Any] = {}
        position = self.skip_space(position + 1)
        while not self.text.startswith(")", position):
            if (plain := _PLAIN_ARGUMENT.match(self.text, position)) is not None and plain[1] not in arguments:
                arguments[plain[1]] = _plain_value(plain)
                position = self._after_item(plain.end(), ")")
                continue
            given, end = self._read_argument(position, depth)
            if not self.lenient and (repeated := arguments.keys() & given.keys()):
                raise ParseError(f"duplicate argument {min(repeated)[:40]!r}", position, "duplicate_key")
            arguments.update(given)
            position = self._after_item(end, ")")
        return (name, arguments), position + 1

    def read_value(self, position: int, depth: int = 0, strength: int = 0) -> tuple[Any, int]:
        """Return the literal that starts at ``position``, arithmetic over numbers folded, and the position after it.

        Args:
            position: Where the literal starts.
            depth: Number of lists, dicts and operators around it.
            strength: Binding strength of the operator to its left; weaker operators to its right are left unread.

        Raises:
            ParseError: No literal.
        """
        value, end = self._read_operand(position, depth)
        while True:
            operator_start = self.skip_space(end)
            found = _OPERATOR.match(self.text, operator_start)
            if found is None or _OPERATORS[found.group()][0] <= strength:
                return value, end
            own_strength, operate = _OPERATORS[found.group()]
            # Powers associate to the right, everything else to the left.
            right_strength = own_strength - 1 if found.group() == "**" else own_strength
            right, end = self.read_value(self.skip_space(found.end()), depth + 1, right_strength)
            value = _fold(operate, value, right, found.group(), operator_start)

    def _find_name_end(self, position: int) -> int:
        name = _FUNCTION.match(self.text, position)
        if name is None:
            raise ParseError("expected a function name", position)
        return name.end()

    def _read_argument(self, position: int, depth: int) -> tuple[dict[str, Any], int]:
        """Return what one argument gives, ``key=value`` or ``**{...}``, and the position after it."""
        if self.text.startswith("**", position):
            given, end = self.read_value(self.skip_space(position + 2), depth)
            if not isinstance(given, dict):
                raise ParseError("** before something other than a dict", position)
            return given, end
        key = _WORD.match(self.text, position)
        equals = self.skip_space(key.end()) if key else position
        if key is None or self.text[equals : equals + 1] != "=":
            raise ParseError("expected an argument as name=value", position)
        value, end = self.read_value(self.skip_space(equals + 1), depth)
        return {key.group(): value}, end

    def _read_operand(self, position: int, depth: int) -> tuple[Any, int]:
        self._check_depth(position, depth)
        text = self.text
        first = text[position : position + 1]
        if first == "[":
            return self._read_items(position + 1, "]", depth)
        if first == "{":
            return self._read_dict(position + 1, depth)
        if first == "(":
            items, end = self._read_items(position + 1, ")", depth)
            # Parentheses around one value without a comma only group it.
            is_grouping = len(items) == 1 and not text[position : end - 1].rstrip(" \t\r\n").endswith(",")
            # JSON has no tuples.
            return (items[0] if is_grouping else items), end
        if first in ("+", "-"):
            value, end = self.read_value(self.skip_space(position + 1), depth + 1, strength=2)
            return _fold(_OPERATORS[first][1], 0, value, first, position), end
        if string := _STRING.match(text, position):
            return self._read_strings(string)
        if number := _NUMBER.match(text, position):
            return _read_number(number.group(), position), number.end()
        return self._read_word(position, depth)

    def _check_depth(self, position: int, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise ParseError(f"nested deeper than {MAX_DEPTH} levels", position, "too_deep")

    def _read_items(self, position: int, closing: str, depth: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        position = self.skip_space(position)
        while not self.text.startswith(closing, position):
            item, end = self.read_value(position, depth + 1)
            items.append(item)
            position = self._after_item(end, closing)
        return items, position + 1

    def _read_dict(self, position: int, depth: int) -> tuple[dict[str, Any], int]:
        pairs: dict[str, Any] = {}
        position = self.skip_space(position)
        while not self.text.startswith("}", position):
            key, end = self.read_value(position, depth + 1)
            if not isinstance(key, str):
                raise ParseError("expected a string as the key", position)
            if key in pairs and not self.lenient:
                raise ParseError(f"duplicate key {key[:40]!r} in one dict", position, "duplicate_key")
            end = self.skip_space(end)
            self._expect(":", end)
            pairs[key], end = self.read_value(self.skip_space(end + 1), depth + 1)
            position = self._after_item(end, "}")
        return pairs, position + 1

    def _read_strings(self, string: re.Match[str]) -> tuple[str, int]:
        """Return a string, or adjacent strings joined as Python joins them, and the position after it."""
        parts = []
        following: re.Match[str] | None = string
        while following is not None:
            string = following
            parts.append(_unescape(string))
            following = _STRING.match(self.text, self.skip_space(string.end()))
        return "".join(parts), string.end()

    def _read_word(self, position: int, depth: int) -> tuple[Any, int]:
        word = _FUNCTION.match(self.text, position) if self.lenient else _WORD.match(self.text, position)
        if word is None:
            raise ParseError("expected a value", position)
        name = word.group()
        if name in _PYTHON_CONSTANTS:
            return _PYTHON_CONSTANTS[name], word.end()
        if name in _JSON_CONSTANTS and self.has_json_constants:
            return _JSON_CONSTANTS[name], word.end()
        if not self.lenient:
            raise ParseError(f"expected a value, got the name {name[:40]!r}", position)
        if self.text.startswith("(", word.end()):
            _, end = self.read_call(position, depth + 1)
            return self.text[position:end], end
        return name, word.end()

    def _after_item(self, position: int, closing: str) -> int:
        """Return the position of the next item, or of the closing bracket."""
        position = self.skip_space(position)
        if self.text.startswith(closing, position):
            return position
        self._expect(",", position)
        return self.skip_space(position + 1)

    def _expect(self, mark: str, position: int) -> None:
        if not self.text.startswith(mark, position):
            raise ParseError(f"expected {mark!r}", position)


def _plain_value(found: re.Match[str]) -> Any:
    _, text, integer, fraction, word = found.groups()
    if text is not None:
        return text
    if integer is None:
        return _PYTHON_CONSTANTS[word]
    return int(integer) if fraction is None else float(integer + fraction)


def _read_number(text: str, position: int) -> int | float:
    if len(text) > MAX_DIGITS:
        raise ParseError(f"number of more than {MAX_DIGITS} digits", position)
    try:
        value = float(text) if any(mark in text for mark in ".eE") and text[:2] not in ("0x", "0X") else int(text, 0)
    except ValueError:
        raise ParseError("not a number in Python's syntax", position) from None
    if isinstance(value, int) and abs(value) >= _INTEGER_LIMIT:
        raise ParseError(f"number of more than {MAX_DIGITS} digits", position)
    if isinstance(value, float) and math.isinf(value):
        raise ParseError(f"the number {text[:40]} is too large for a float", position, "not_finite")
    return value


def _fold(operate: Callable[[Any, Any], Any], left: Any, right: Any, mark: str, position: int) -> int | float:
    """Compute ``left operator right`` over two numbers; refuse what could grow without bound."""
    if any(isinstance(side, bool) or not isinstance(side, (int, float)) for side in (left, right)):
        raise ParseError(f"{mark} applied to something other than numbers", position)
    if mark == "**" and (abs(right) > _MAX_POWER or abs(left) > _MAX_POWER):
        raise ParseError("operands of ** too large", position)
    try:
        value = operate(left, right)
    except (ArithmeticError, ValueError):
        raise ParseError("arithmetic without a finite result", position) from None
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise ParseError("arithmetic without a finite result", position)
    if isinstance(value, int) and abs(value) >= _INTEGER_LIMIT:
        raise ParseError("result of arithmetic too large", position)
    assert isinstance(value, (int, float))
    return value


def _unescape(string: re.Match[str]) -> str:
    prefix = string["prefix"].lower()
    if "b" in prefix or "f" in prefix:
        raise ParseError(f"string with the unsupported prefix {prefix}", string.start())
    text: str = next(group for group in string.group("long1", "long2", "short1", "short2") if group is not None)
    if "\\" not in text or "r" in prefix:
        return text
    try:
        return _ESCAPE.sub(_escape, text)
    except (ValueError, KeyError):
        raise ParseError("invalid escape in a string", string.start()) from None


def _escape(match: re.Match[str]) -> str:
    code = match[1]
    if code in _ESCAPED:
        return _ESCAPED[code]
    if code[0] in "01234567":
        return chr(int(code, 8))
    if code[0] in "xuU" and len(code) > 1:
        return chr(int(code[1:], 16))
    if code[0] == "N" and len(code) > 1:
        return unicodedata.lookup(code[2:-1])
    if code[0] in "xuUN":
        raise ValueError(code)
    return match.group()
