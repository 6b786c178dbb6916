"""Gemma 4 and FunctionGemma: calls as objects with bare keys, and strings between marks of their own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fctune.base.errors import DataError
from fctune.base.json_reader import MAX_DEPTH, ParseError, decode_json
from fctune.calls.formats.base import CallFormat, ParseState, TemplateSignature
from fctune.calls.formats.json_calls import dump_json, require_name
from fctune.calls.formats.response_fields import ResponseFields, Surroundings, named_call
from fctune.data.conversation import Call, Tool

_NAME = re.compile(r"[^\s{}()<>]+")
# Keys are written without marks; others are put between those of strings, as the templates write them in schemas.
_BARE_KEY = re.compile(r"[^\s{}\[\],:<>](?:[^\n{}\[\],:<>]*[^\s{}\[\],:<>])?")
_HEAD = re.compile(r"call:([^\s{}()<>]++)\{")
_ANY_HEAD = re.compile(r"\s*+(?:call)?+\s*+:\s*+([^\s{}()<>]++)\s*+[{(]")
_BARE = re.compile(r"[^,{}\[\]]*+")
_SPACE = re.compile(r"[ \t\r\n]*+")
_SEPARATORS = re.compile(r"[ \t\r\n,]*+")


class _GemmaFormat(CallFormat):
    """Base of both: ``call:name{key:value,...}`` between marks; keys sorted alphabetically, as in the templates.

    Values are strings between a pair of marks, ``{...}``, ``[...]``, numbers, ``true``, ``false`` and ``null``.
    The mark cannot be escaped, so a string that contains it is refused.
    """

    response_note = "keys of other characters than letters, digits and _"
    _open: str
    _close: str
    _quote: str

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """Return the calls, one directly after another."""
        return "".join(map(self._render_call, calls))

    def describe_response(self, around: Surroundings) -> ResponseFields | None:
        """Return the field of the calls, whose objects are JSON but for bare keys and the marks around strings."""
        marks = {
            "open_pattern": rf"\s*{re.escape(self._open)}call:(?P<name>[^\s{{}}()<>]+)(?=\{{)",
            "close": self._close,
        }
        quotes = [[self._quote, self._quote]]
        return {"tool_calls": named_call(marks, unquoted_keys=True, string_delims=quotes)}

    def _render_call(self, call: Call) -> str:
        dump_json(call.arguments, call.name)
        arguments = self._write_value(call.arguments, call.name)
        return f"{self._open}call:{require_name(call.name, _NAME)}{arguments}{self._close}"

    def _write_value(self, value: Any, name: str) -> str:
        if isinstance(value, str):
            return self._write_string(value, name)
        if isinstance(value, dict):
            keys = sorted(value, key=lambda key: str(key).lower())
            pairs = (f"{self._write_key(str(key), name)}:{self._write_value(value[key], name)}" for key in keys)
            return f"{{{','.join(pairs)}}}"
        if isinstance(value, (list, tuple)):
            return f"[{','.join(self._write_value(item, name) for item in value)}]"
        return dump_json(value, name)

    def _write_key(self, key: str, name: str) -> str:
        return key if _BARE_KEY.fullmatch(key) else self._write_string(key, name)

    def _write_string(self, text: str, name: str) -> str:
        if self._quote in text:
            raise DataError(f"{name}: an argument contains {self._quote}, which ends strings in this format.")
        return f"{self._quote}{text}{self._quote}"

    def _read(self, state: ParseState, tools: Sequence[Tool], lenient: bool) -> None:
        position = 0
        while (opened := state.find(self._open, position)) >= 0:
            body = opened + len(self._open)
            ends = [at for at in (state.find(self._close, body), state.find(self._open, body)) if at >= 0]
            limit = min(ends, default=state.end)
            after = limit + len(self._close) if state.text.startswith(self._close, limit) else limit
            try:
                call, position = self._read_call(state, body)
                state.add_calls([call], opened, position)
                continue
            except ParseError as error:
                reason, restart = error.reason, state.choose_restart(after, error.position)
            if lenient:
                try:
                    state.add_calls([self._guess_call(state, body, limit)], opened, restart)
                    position = restart
                    continue
                except ParseError as error:
                    reason = error.reason
            position = restart
            state.add_malformed(opened, position, reason)

    def _read_call(self, state: ParseState, body: int) -> tuple[Call, int]:
        """Return the complete call at a position, and the position after its closing mark."""
        head = _HEAD.match(state.text, body, state.end)
        if head is None:
            raise ParseError("expected call:name{", body)
        arguments, position = _ValueReader(state, self._quote, state.end).read_object(head.end(), 1)
        if not state.text.startswith(self._close, position):
            raise ParseError(f"not closed by {self._close}", position)
        return Call(head[1], arguments), position + len(self._close)

    def _guess_call(self, state: ParseState, body: int, limit: int) -> Call:
        """Return the call in ``text[body:limit]``, with all closed that is left open, as serving engines do."""
        head = _ANY_HEAD.match(state.text, body, limit)
        if head is None:
            raise ParseError("expected call:name{", body)
        arguments, _ = _ValueReader(state, self._quote, limit, lenient=True).read_object(head.end(), 1)
        return Call(head[1], arguments)


class Gemma4(_GemmaFormat):
    """``<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>``, as the chat templates of Gemma 4 write it."""

    name = "gemma4"
    template_signatures = (TemplateSignature(("<|tool_call>",)),)
    vllm_parser = "gemma4"
    sglang_parser = "gemma4"
    _open, _close, _quote = "<|tool_call>", "<tool_call|>", '<|"|>'


class FunctionGemma(_GemmaFormat):
    """Calls of FunctionGemma: ``<start_function_call>call:name{key:<escape>text<escape>,other:1}<end_function_call>``.

    The chat template of FunctionGemma.
    """

    name = "functiongemma"
    template_signatures = (TemplateSignature(("<start_function_call>",)),)
    vllm_parser = "functiongemma"
    _open, _close, _quote = "<start_function_call>", "<end_function_call>", "<escape>"


class _ValueReader:
    """Reader of values in ``text[:limit]``.

    Leniently, what is left open ends at the limit, a value without a mark is text, and the last of equal keys counts.
    """

    def __init__(self, state: ParseState, quote: str, limit: int, lenient: bool = False) -> None:
        self.state = state
        self.quote = quote
        self.limit = limit
        self.lenient = lenient

    def read_object(self, position: int, depth: int) -> tuple[dict[str, Any], int]:
        """Return the object whose opening brace is just before a position, and the position after it."""
        pairs: dict[str, Any] = {}
        position = self._skip_space(position)
        if self._is_at("}", position):
            return pairs, position + 1
        while True:
            if self.lenient:
                position = self._skip_separators(position)
                if position >= self.limit or self._is_at("}", position):
                    return pairs, position + 1
            start = position
            key, position = self._read_key(position)
            if key in pairs and not self.lenient:
                raise ParseError(f"duplicate key {key[:40]!r}", start, "duplicate_key")
            pairs[key], position = self._read_value(self._skip_space(position), depth)
            position = self._skip_space(position)
            if self._is_at("}", position):
                return pairs, position + 1
            if not self._is_at(",", position):
                if not self.lenient:
                    raise ParseError("expected ',' or '}' after a value", position)
                if position < self.limit and position == start:
                    raise ParseError("expected a key", position)
            else:
                position = self._skip_space(position + 1)

    def _read_array(self, position: int, depth: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        position = self._skip_space(position)
        if self._is_at("]", position):
            return items, position + 1
        while True:
            if self.lenient:
                position = self._skip_separators(position)
                if position >= self.limit or self._is_at("]", position):
                    return items, position + 1
            start = position
            item, position = self._read_value(position, depth)
            items.append(item)
            position = self._skip_space(position)
            if self._is_at("]", position):
                return items, position + 1
            if not self._is_at(",", position):
                if not self.lenient:
                    raise ParseError("expected ',' or ']' after an item", position)
                if position == start:
                    raise ParseError("expected a value", position)
            else:
                position = self._skip_space(position + 1)

    def _read_value(self, position: int, depth: int) -> tuple[Any, int]:
        text = self.state.text
        if text.startswith(self.quote, position, self.limit):
            return self._read_string(position)
        if self._is_at("{", position) or self._is_at("[", position):
            if depth >= MAX_DEPTH:
                raise ParseError(f"nested deeper than {MAX_DEPTH} levels", position, "too_deep")
            read = self.read_object if text[position] == "{" else self._read_array
            return read(position + 1, depth + 1)
        bare = _BARE.match(text, position, self.limit)
        assert bare is not None
        word = bare.group().strip()
        try:
            value = decode_json(word, self.lenient)
        except ParseError as error:
            if self.lenient and error.kind == "syntax":
                return word, bare.end()
            raise ParseError("expected a value", position, error.kind) from None
        if isinstance(value, str) and not self.lenient:
            raise ParseError(f"expected {self.quote} before a string", position)
        return value, bare.end()

    def _read_string(self, position: int) -> tuple[str, int]:
        start = position + len(self.quote)
        end = self.state.find(self.quote, start)
        if 0 <= end < self.limit:
            return self.state.text[start:end], end + len(self.quote)
        if not self.lenient:
            raise ParseError(f"not closed by {self.quote}", position)
        return self.state.text[start : self.limit], self.limit

    def _read_key(self, position: int) -> tuple[str, int]:
        """Return the key at a position, and the position after the colon."""
        if self.state.text.startswith(self.quote, position, self.limit):
            key, position = self._read_string(position)
            position = self._skip_space(position)
        else:
            bare = _BARE_KEY.match(self.state.text, position, self.limit)
            if bare is None:
                raise ParseError("expected a key", position)
            key, position = bare.group(), self._skip_space(bare.end())
        if not self._is_at(":", position):
            raise ParseError("expected ':' after a key", position)
        return key, position + 1

    def _is_at(self, mark: str, position: int) -> bool:
        return position < self.limit and self.state.text[position] == mark

    def _skip_space(self, position: int) -> int:
        space = _SPACE.match(self.state.text, position, self.limit)
        return space.end() if space else position

    def _skip_separators(self, position: int) -> int:
        space = _SEPARATORS.match(self.state.text, position, self.limit)
        return space.end() if space else position
