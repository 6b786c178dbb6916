"""Answers to the leaderboard's own prompt, decoded as ``default_decode_ast_prompting`` of bfcl-eval 2026.3.23 does.

The wheel parses an answer as Python, drops positional arguments whatever they are, and evaluates arithmetic. The parser
used here is the same, Python's own, as only that reads any expression as the wheel does; it runs nothing. Arithmetic is
computed over literals only, within bounds. The tests compare the two.
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from fctune.base.json_reader import MAX_DIGITS
from fctune.calls.formats.base import CallFormat, Parsed, ParseState
from fctune.calls.formats.pythonic import CALL_START, render_python_call
from fctune.data.conversation import Call, Tool

TUPLE_KEY = "tuple"
"""The one key of the object that stands for a tuple, which JSON does not have and the leaderboard tells from a list."""

PYTHON_KEY = "python"
"""The one key of the object that stands for a value of Python that JSON does not have, such as bytes: its source."""

# Python's parser reads a longer answer too, but takes more than a second.
MAX_LENGTH = 200_000
_MAX_ITEMS = 10_000  # of a text or list that arithmetic makes
_MAX_BITS = 14_000  # of an integer that arithmetic makes: MAX_DIGITS decimal digits

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.BitXor: operator.xor,
}
_SIGNS: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
    ast.Not: operator.not_,
}
_WIDTH = re.compile(r"%[^%a-zA-Z]*[\d*]")
_UNREADABLE = (SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError, MemoryError)


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
        try:
            calls = _read_calls(opening + answer + closing)
        except _UNREADABLE as error:
            # Without anything like a call it is an answer in prose.
            if CALL_START.search(state.text, 0, state.end):
                state.add_malformed(0, state.end, str(error.args[0]) if error.args else type(error).__name__)
            return
        state.add_calls(calls, 0, state.end)


def _read_calls(text: str) -> list[Call]:
    """Return the calls of a list in Python's syntax; raises one of ``_UNREADABLE`` if the wheel does."""
    if len(text) > MAX_LENGTH:
        raise ValueError(f"longer than {MAX_LENGTH:,} characters")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that Python does not know
        body = ast.parse(text, mode="eval").body
    if isinstance(body, ast.Call):
        return [_read_call(body)]
    if not isinstance(body, (ast.List, ast.Tuple)):
        raise ValueError("expected a list of calls")
    return [_read_call(item) for item in body.elts]


def _read_call(node: ast.expr) -> Call:
    """Return a call without its positional arguments; the last of equal keywords counts."""
    if not isinstance(node, ast.Call):
        raise ValueError("expected a call")
    parts, function = [], node.func
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if isinstance(function, ast.Name):
        parts.append(function.id)
    # ``**`` is no parameter's name.
    arguments = {keyword.arg or "**": _encode(_read_value(keyword.value)) for keyword in node.keywords}
    return Call(".".join(reversed(parts)), arguments)


def _read_value(node: ast.expr | None) -> Any:
    """Return the value of an argument; names, subscripts and calls without keywords stand for their own text."""
    match node:
        case ast.Constant():
            return "..." if node.value is ... else node.value
        case ast.UnaryOp(operand=ast.Constant(value=bool() | int() | float() | complex() as number)):
            return -number  # whatever the sign
        case ast.List():
            return [_read_value(item) for item in node.elts]
        case ast.Dict():
            return {_read_value(key): _read_value(value) for key, value in zip(node.keys, node.values, strict=True)}
        case ast.BinOp():
            return _compute(node)
        case ast.Name():
            return node.id
        case ast.Call():
            if not node.keywords:
                return ast.unparse(node)
            call = _read_call(node)
            return {call.name: _Encoded(call.arguments)}
        case ast.Tuple():
            return tuple(_read_value(item) for item in node.elts)
        case ast.Subscript():
            return f"{ast.unparse(node.value)}[{ast.unparse(node.slice)}]"
    raise ValueError(f"unsupported expression: {type(node).__name__}")


def _compute(node: ast.expr) -> Any:
    """Compute arithmetic over literals, which the wheel evaluates."""
    match node:
        case ast.Constant():
            return node.value
        case ast.List():
            return [_compute(item) for item in node.elts]
        case ast.Tuple():
            return tuple(_compute(item) for item in node.elts)
        case ast.Set():
            return {_compute(item) for item in node.elts}
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {_compute(key): _compute(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case ast.Subscript():
            return _compute(node.value)[_compute(node.slice)]
        case ast.Slice():
            return slice(*(None if part is None else _compute(part) for part in (node.lower, node.upper, node.step)))
        case ast.UnaryOp():
            return _SIGNS[type(node.op)](_compute(node.operand))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATORS:
            sides = _compute(left), _compute(right)
            _require_bounded(operation, *sides)
            return _OPERATORS[type(operation)](*sides)
    raise ValueError(f"arithmetic over something other than literals: {type(node).__name__}")


def _require_bounded(operation: ast.operator, left: Any, right: Any) -> None:
    """Raise for arithmetic whose result may be far longer than its text."""
    if isinstance(operation, ast.Mod) and isinstance(left, (str, bytes)) and _WIDTH.search(str(left)):
        raise ValueError("formatting of text with a width")
    num_bits = num_items = 0
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        if isinstance(operation, ast.Pow) and abs(left) > 1:
            num_bits = bits * right
        elif isinstance(operation, (ast.LShift, ast.Mult)):
            num_bits = bits + (right if isinstance(operation, ast.LShift) else right.bit_length())
    elif isinstance(operation, ast.Mult):
        num_items = max(_count_items(left) * right if isinstance(right, int) else 0, 0)
        num_items = max(_count_items(right) * left if isinstance(left, int) else 0, num_items)
    if num_bits > _MAX_BITS or num_items > _MAX_ITEMS:
        raise ValueError(f"arithmetic with a result of more than {MAX_DIGITS} digits or {_MAX_ITEMS} items")


def _count_items(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    return 1 + sum(map(_count_items, value)) if isinstance(value, (list, tuple)) else 1


class _Encoded(dict[str, Any]):
    """The arguments of a call inside an argument, which are encoded already."""


def _encode(value: Any) -> Any:
    """Return a value of Python as JSON, with objects in place of what JSON does not have."""
    match value:
        case _Encoded():
            return dict(value)
        case tuple():
            return {TUPLE_KEY: [_encode(item) for item in value]}
        case list():
            return [_encode(item) for item in value]
        case dict():
            if all(isinstance(key, str) for key in value) and value.keys() != {TUPLE_KEY}:
                return {key: _encode(item) for key, item in value.items()}
        case None | bool() | str():
            return value
        case int():
            if value.bit_length() <= _MAX_BITS:
                return value
            return {PYTHON_KEY: hex(value)}
        case float() if value - value == 0:
            return value
    return {PYTHON_KEY: repr(value)}


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
