"""An evaluator of the part of Go's text/template that Modelfiles here use: if, else if, range, eq, and, or, fields."""

from __future__ import annotations

import json
import re
from typing import Any

from fctune.data.conversation import Conversation

_ACTION = re.compile(r"\{\{ (.*?) \}\}", re.DOTALL)


def render_go(source: str, data: dict[str, Any]) -> str:
    """Return what Ollama would send to the model; values of maps are printed as compact JSON, as Go's encoder does."""
    pieces = _ACTION.split(source)
    text, rest = _render(list(enumerate(pieces)), data, {})
    assert not rest, "an end without a beginning"
    return text


def to_go(conversation: Conversation) -> dict[str, Any]:
    """Return what Ollama gives a template of a conversation."""
    messages = []
    for message in conversation.messages:
        calls = [{"Function": {"Name": call.name, "Arguments": call.arguments}} for call in message.calls]
        messages.append({"Role": message.role, "Content": message.content or "", "ToolCalls": calls})
    system = next((m.content for m in conversation.messages if m.role == "system"), "")
    tools = [{**tool.to_openai(), "Function": tool.function} for tool in conversation.tools]
    return {"System": system, "Tools": tools, "Messages": messages}


Pieces = list[tuple[int, str]]


def _render(pieces: Pieces, dot: Any, names: dict[str, Any], is_shown: bool = True) -> tuple[str, Pieces]:
    """Render up to the matching end or else; returns the text and what is left, the end or else first."""
    out: list[str] = []
    while pieces:
        (number, piece), *pieces = pieces
        if number % 2 == 0:
            out.append(piece)
        elif piece == "end" or piece.startswith("else"):
            return "".join(out), [(number, piece), *pieces]
        elif piece.startswith("if "):
            text, pieces = _render_if(piece[3:], pieces, dot, names, is_shown)
            out.append(text)
        elif piece.startswith("range "):
            variables, _, expression = piece[6:].partition(" := ")
            index, item = (name.strip() for name in variables.split(","))
            items = _evaluate(expression, dot, names) if is_shown else []
            body, after = "", []
            for position, value in enumerate(items or []):
                body, after = _render(pieces, value, {**names, index: position, item: value}, is_shown)
                out.append(body)
            if not items:
                _, after = _render(pieces, {}, {**names, index: 0, item: {}}, False)
            pieces = after[1:]
        elif is_shown:
            value = _evaluate(piece, dot, names)
            out.append(value if isinstance(value, str) else _dump(value))
    return "".join(out), []


def _render_if(condition: str, pieces: Pieces, dot: Any, names: dict[str, Any], is_shown: bool) -> tuple[str, Pieces]:
    is_true = is_shown and bool(_evaluate(condition, dot, names))
    text, pieces = _render(pieces, dot, names, is_true)
    (_, word), *pieces = pieces
    if word == "end":
        return text if is_true else "", pieces
    if word == "else":
        other, pieces = _render(pieces, dot, names, is_shown and not is_true)
        return text if is_true else other, pieces[1:]
    other, pieces = _render_if(word.removeprefix("else if "), pieces, dot, names, is_shown and not is_true)
    return text if is_true else other, pieces


def _dump(value: Any) -> str:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _evaluate(expression: str, dot: Any, names: dict[str, Any]) -> Any:
    words = re.findall(r'"(?:[^"\\]|\\.)*"|\S+', expression)
    if words[0] == "eq":
        return _evaluate(words[1], dot, names) == _evaluate(words[2], dot, names)
    if words[0] in ("and", "or"):
        values = [_evaluate(word, dot, names) for word in words[1:]]
        return all(values) if words[0] == "and" else any(values)
    (word,) = words
    if word == "false":
        return False
    if word.startswith('"'):
        return json.loads(word)
    name, *fields = word.split(".")
    value = names[name] if name else dot
    for field in fields:
        value = value.get(field) if isinstance(value, dict) else ""
    return "" if value is None else value
