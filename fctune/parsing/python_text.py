"""Calls and literals as Python writes them, read without Python: nothing is compiled, evaluated or looked up.

Python's own parser is not used: on hostile text it recurses, takes more than linear time, warns, and accepts what is no
literal at all.
"""

from __future__ import annotations

import math
import operator
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fctune.data.conversation import Call
from fctune.parsing.json_text import MAX_DEPTH, MAX_DIGITS, UnreadableError

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
    r"'(?P<short1>[^'\\\n]*+(?:\\.[^'\\\n]*+)*+)'|"
    r'"(?P<short2>[^"\\\n]*+(?:\\.[^"\\\n]*+)*+)")',
    re.DOTALL,
)
# What nine arguments of ten are, in one step: a text without escapes, a number, one of Python's words.
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
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_JSON_WORDS = {"true": True, "false": False, "null": None}
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


@dataclass(frozen=True, slots=True)
class PythonReader:
    """Reads calls and literals from one text.

    Args:
        text: Where to read.
        has_json_words: Whether ``true``, ``false`` and ``null`` are values too.
        is_lenient: Whether a name or a call that stands for a value is taken as its own text, and the last of
            two equal keywords instead of none.
    """

    text: str
    has_json_words: bool = False
    is_lenient: bool = False

    def skip_space(self, position: int) -> int:
        """Position of the next character that is neither white space nor comment."""
        match = _SPACE.match(self.text, position)
        assert match is not None
        return match.end()

    def read_calls(self, position: int) -> tuple[list[Call], int]:
        """The calls of a list ``[f(a=1), g()]`` whose bracket stands at ``position``, and the position behind it.

        Raises:
            UnreadableError: Anything else stands there.
        """
        self._expect("[", position)
        calls: list[Call] = []
        position = self.skip_space(position + 1)
        while not self.text.startswith("]", position):
            call, position = self.read_call(position)
            calls.append(call)
            position = self._after_item(position, "]")
        return calls, position + 1

    def read_call(self, position: int, depth: int = 0) -> tuple[Call, int]:
        """The call that starts at ``position``, and the position behind it.

        Raises:
            UnreadableError: No call, a positional argument, or a value that is no literal.
        """
        name = _FUNCTION.match(self.text, position)
        if name is None:
            raise UnreadableError("no name of a function", position)
        position = self.skip_space(name.end())
        self._expect("(", position)
        arguments: dict[str, Any] = {}
        position = self.skip_space(position + 1)
        while not self.text.startswith(")", position):
            if (plain := _PLAIN_ARGUMENT.match(self.text, position)) is not None and plain[1] not in arguments:
                arguments[plain[1]] = _plain_value(plain)
                position = self._after_item(plain.end(), ")")
                continue
            if self.text.startswith("**", position):
                given, end = self.read_value(self.skip_space(position + 2), depth)
                if not isinstance(given, dict):
                    raise UnreadableError("** before something that is no dict", position)
            else:
                key = _WORD.match(self.text, position)
                equals = self.skip_space(key.end()) if key else position
                if key is None or self.text[equals : equals + 1] != "=":
                    raise UnreadableError("an argument without its name", position)
                value, end = self.read_value(self.skip_space(equals + 1), depth)
                given = {key.group(): value}
            if not self.is_lenient and (twice := arguments.keys() & given.keys()):
                raise UnreadableError(f"the argument {min(twice)[:40]!r} twice", position)
            arguments.update(given)
            position = self._after_item(end, ")")
        return Call(name.group(), arguments), position + 1

    def read_value(self, position: int, depth: int = 0, strength: int = 0) -> tuple[Any, int]:
        """The literal that starts at ``position``, arithmetic over numbers folded, and the position behind it.

        Raises:
            UnreadableError: No literal.
        """
        value, end = self._read_operand(position, depth)
        while True:
            place = self.skip_space(end)
            found = _OPERATOR.match(self.text, place)
            if found is None or _OPERATORS[found.group()][0] <= strength:
                return value, end
            own_strength, operate = _OPERATORS[found.group()]
            # A power binds from the right, everything else from the left.
            right_strength = own_strength - 1 if found.group() == "**" else own_strength
            right, end = self.read_value(self.skip_space(found.end()), depth + 1, right_strength)
            value = _fold(operate, value, right, found.group(), place)

    def _read_operand(self, position: int, depth: int) -> tuple[Any, int]:
        if depth > MAX_DEPTH:
            raise UnreadableError(f"nested more than {MAX_DEPTH} deep", position)
        text = self.text
        first = text[position : position + 1]
        if first == "[":
            return self._read_items(position + 1, "]", depth)
        if first == "{":
            return self._read_dict(position + 1, depth)
        if first == "(":
            items, end = self._read_items(position + 1, ")", depth)
            # Brackets around one value, without a comma, only group it.
            is_grouping = len(items) == 1 and not text[position : end - 1].rstrip(" \t\r\n").endswith(",")
            return (items[0] if is_grouping else items), end
        if first in ("+", "-"):
            value, end = self.read_value(self.skip_space(position + 1), depth + 1, strength=2)
            return _fold(_OPERATORS[first][1], 0, value, first, position), end
        if string := _STRING.match(text, position):
            return self._read_strings(string)
        if number := _NUMBER.match(text, position):
            return _number(number.group(), position), number.end()
        return self._read_word(position, depth)

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
                raise UnreadableError("a key that is no string", position)
            if key in pairs and not self.is_lenient:
                raise UnreadableError(f"the key {key[:40]!r} twice in one dict", position)
            end = self.skip_space(end)
            self._expect(":", end)
            pairs[key], end = self.read_value(self.skip_space(end + 1), depth + 1)
            position = self._after_item(end, "}")
        return pairs, position + 1

    def _read_strings(self, string: re.Match[str]) -> tuple[str, int]:
        """One string or several beside each other, which Python takes for one."""
        parts = []
        following: re.Match[str] | None = string
        while following is not None:
            string = following
            parts.append(_unescape(string))
            following = _STRING.match(self.text, self.skip_space(string.end()))
        return "".join(parts), string.end()

    def _read_word(self, position: int, depth: int) -> tuple[Any, int]:
        word = _FUNCTION.match(self.text, position) if self.is_lenient else _WORD.match(self.text, position)
        if word is None:
            raise UnreadableError("no value here", position)
        name = word.group()
        if name in _PYTHON_WORDS:
            return _PYTHON_WORDS[name], word.end()
        if name in _JSON_WORDS and (self.has_json_words or self.is_lenient):
            return _JSON_WORDS[name], word.end()
        if not self.is_lenient:
            raise UnreadableError(f"the name {name[:40]!r} where a value is due", position)
        if self.text.startswith("(", word.end()):
            _, end = self.read_call(position, depth + 1)
            return self.text[position:end], end
        return name, word.end()

    def _after_item(self, position: int, closing: str) -> int:
        """The position of the next item or of the closing bracket."""
        position = self.skip_space(position)
        if self.text.startswith(closing, position):
            return position
        self._expect(",", position)
        return self.skip_space(position + 1)

    def _expect(self, mark: str, position: int) -> None:
        if not self.text.startswith(mark, position):
            raise UnreadableError(f"no {mark!r} where one is due", position)


def _plain_value(found: re.Match[str]) -> Any:
    _, text, whole, fraction, word = found.groups()
    if text is not None:
        return text
    if whole is None:
        return _PYTHON_WORDS[word]
    return int(whole) if fraction is None else float(whole + fraction)


def _number(text: str, position: int) -> int | float:
    if len(text) > MAX_DIGITS:
        raise UnreadableError(f"a number of more than {MAX_DIGITS} digits", position)
    try:
        value = float(text) if any(mark in text for mark in ".eE") and text[:2] not in ("0x", "0X") else int(text, 0)
    except ValueError:
        raise UnreadableError("no number as Python writes it", position) from None
    if isinstance(value, float) and math.isinf(value):
        raise UnreadableError("a number that no float holds", position)
    return value


def _fold(operate: Callable[[Any, Any], Any], left: Any, right: Any, mark: str, position: int) -> int | float:
    """The result of arithmetic over two numbers, refused where it could grow without bound."""
    if any(isinstance(side, bool) or not isinstance(side, (int, float)) for side in (left, right)):
        raise UnreadableError(f"{mark} beside something that is no number", position)
    if mark == "**" and (abs(right) > _MAX_POWER or abs(left) > _MAX_POWER):
        raise UnreadableError("a power too large", position)
    try:
        value = operate(left, right)
    except (ArithmeticError, ValueError):
        raise UnreadableError("arithmetic without a result", position) from None
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise UnreadableError("arithmetic without a result", position)
    if isinstance(value, int) and value.bit_length() > 4 * MAX_DIGITS:
        raise UnreadableError("a number too large", position)
    assert isinstance(value, (int, float))
    return value


def _unescape(string: re.Match[str]) -> str:
    prefix = string["prefix"].lower()
    if "b" in prefix or "f" in prefix:
        raise UnreadableError(f"a string with the prefix {prefix}", string.start())
    text: str = next(group for group in string.group("long1", "long2", "short1", "short2") if group is not None)
    if "\\" not in text or "r" in prefix:
        return text
    try:
        return _ESCAPE.sub(_escape, text)
    except (ValueError, KeyError):
        raise UnreadableError("a string with an escape that Python does not have", string.start()) from None


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
