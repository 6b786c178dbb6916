"""Calls written as ``[name(argument=value, ...), ...]``, read by a scanner that goes over the text once.

Python's own parser does not do: ToolACE's names hold spaces, commas, dots and parentheses, its argument names are
hyphenated or Python keywords, and its values are JSON's ``true`` as often as Python's ``True``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fctune.data.conversation import Call
from fctune.data.sources.defects import RowError
from fctune.parsing.strict_json import MAX_DEPTH

_KIND = "call_not_pythonic"
_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN_NAME = re.compile(r"[A-Za-z_][\w.\-/]*(?=\()")
_ARGUMENT = re.compile(r"([^\s=,()\[\]{}'\"]+)[ \t]*=(?!=)")
_STRING = re.compile(r"\"((?:[^\"\\]++|\\.)*+)\"|'((?:[^'\\]++|\\.)*+)'", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?(?=[\s,)\]}])")
_WORD = re.compile(r"(True|true|False|false|None|null)(?=[\s,)\]}])")
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|U(?:0010|000[0-9a-fA-F])[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"'}
_UNCLEAR = frozenset("0123456789avN/\nxuU")
"""What a backslash before it means one thing in Python and another, or nothing, in JSON."""


def is_pythonic(text: str, names: Sequence[str]) -> bool:
    """Whether the text starts as a list of calls does: a bracket, then a declared name or a plain one, then ``(``."""
    if not text.startswith("["):
        return False
    at = _skip(text, 1)
    return _match_name(text, at, names) is not None


def read_pythonic(text: str, names: Sequence[str], pointer: str) -> tuple[list[Call], int]:
    """The calls of the list that ``text`` starts with, and the index after it.

    Args:
        text: Starts with ``[``.
        names: The declared tools, of which the longest that fits is taken; an undeclared name must be a plain one.
        pointer: Where the text stands, for the error.

    Raises:
        RowError: ``call_not_pythonic`` for a value that is not quoted, a positional argument, or text cut off.
    """
    return _Scanner(text, names, pointer).read_calls()


class _Scanner:
    def __init__(self, text: str, names: Sequence[str], pointer: str) -> None:
        self.text = text
        self.names = names
        self.pointer = pointer
        self.at = 0

    def read_calls(self) -> tuple[list[Call], int]:
        self.expect("[")
        calls = [self.read_call()]
        while self.next_is(","):
            calls.append(self.read_call())
        self.expect("]")
        return calls, self.at

    def read_call(self) -> Call:
        self.at = _skip(self.text, self.at)
        name = _match_name(self.text, self.at, self.names)
        if name is None:
            raise self.error("expected a tool's name and '('")
        self.at += len(name)
        self.expect("(")
        arguments: dict[str, Any] = {}
        if self.next_is(")"):
            return Call(name, arguments)
        while True:
            match = _ARGUMENT.match(self.text, _skip(self.text, self.at))
            if match is None:
                raise self.error("expected an argument as name=value")
            if match.group(1) in arguments:
                raise RowError(self.pointer, "duplicate_key", f"{name} is given {match.group(1)!r} twice")
            self.at = match.end()
            arguments[match.group(1)] = self.read_value(MAX_DEPTH)
            if not self.next_is(","):
                self.expect(")")
                return Call(name, arguments)

    def read_value(self, depth: int) -> Any:
        if depth < 0:
            raise RowError(self.pointer, "too_deep", f"nested deeper than {MAX_DEPTH} levels")
        self.at = _skip(self.text, self.at)
        if self.text.startswith("[", self.at):
            return self.read_list(depth)
        if self.text.startswith("{", self.at):
            return self.read_object(depth)
        if match := _STRING.match(self.text, self.at):
            self.at = match.end()
            return self.unescape(match)
        if match := _WORD.match(self.text, self.at):
            self.at = match.end()
            return _WORDS[match.group()]
        if (match := _NUMBER.match(self.text, self.at)) and match.end() - self.at < 400:
            self.at = match.end()
            is_float = match.group(1) is not None or match.group(2) is not None
            return self.read_float(match.group()) if is_float else int(match.group())
        raise self.error("expected a quoted string, a number, true, false, null, a list or an object")

    def read_float(self, text: str) -> float:
        value = float(text)
        if value in (float("inf"), float("-inf")):
            raise RowError(self.pointer, "not_finite", f"the number {text[:40]} is too large for a float")
        return value

    def read_list(self, depth: int) -> list[Any]:
        self.expect("[")
        values: list[Any] = []
        while not self.next_is("]"):
            if values:
                self.expect(",")
            values.append(self.read_value(depth - 1))
        return values

    def read_object(self, depth: int) -> dict[str, Any]:
        self.expect("{")
        value: dict[str, Any] = {}
        while not self.next_is("}"):
            if value:
                self.expect(",")
            match = _STRING.match(self.text, _skip(self.text, self.at))
            if match is None:
                raise self.error("expected a quoted key")
            key = self.unescape(match)
            if key in value:
                raise RowError(self.pointer, "duplicate_key", f"the key {key!r} stands twice in one object")
            self.at = match.end()
            self.expect(":")
            value[key] = self.read_value(depth - 1)
        return value

    def unescape(self, match: re.Match[str]) -> str:
        text: str = match.group(1) if match.group(1) is not None else match.group(2)
        if "\\" not in text:
            return text
        plain = _ESCAPE.sub(self.read_escape, text)
        # \ud83d\ude00 is one character; half a pair stays half and is refused with the row.
        return plain.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")

    def read_escape(self, match: re.Match[str]) -> str:
        code: str = match.group(1)
        if len(code) > 1:
            return chr(int(code[1:], 16))
        if code in _UNCLEAR:
            raise RowError(self.pointer, _KIND, f"the escape {match.group()!r} has no one meaning")
        return _ESCAPES.get(code, match.group())

    def next_is(self, mark: str) -> bool:
        at = _skip(self.text, self.at)
        if self.text.startswith(mark, at):
            self.at = at + 1
            return True
        return False

    def expect(self, mark: str) -> None:
        if not self.next_is(mark):
            raise self.error(f"expected {mark!r}")

    def error(self, reason: str) -> RowError:
        at = _skip(self.text, self.at)
        got = repr(self.text[at : at + 30]) if at < len(self.text) else "the end"
        return RowError(self.pointer, _KIND, f"{reason} at character {at}, got {got}")


def _match_name(text: str, at: int, names: Sequence[str]) -> str | None:
    fitting = [name for name in names if text.startswith(name, at) and text.startswith("(", at + len(name))]
    if fitting:
        return max(fitting, key=len)
    match = _PLAIN_NAME.match(text, at)
    return match.group() if match else None


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
