"""Servers that answer held-out cases by a rule: right, or harmful in one way."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fctune.data.synthetic import iter_cases
from tests.engines.fault_server import Handler, Log, serve

Calls = list[dict[str, Any]]


def write_cases(path: Path, count: int, seed: int = 3) -> dict[str, Calls]:
    """Write synthetic held-out cases of one turn, and return the calls that each question needs."""
    rows = [case.to_json() for case in iter_cases(10 * count, seed)]
    users = [[message["content"] for message in row["messages"] if message["role"] == "user"] for row in rows]
    kept = {turns[0]: row for turns, row in zip(users, rows, strict=True) if len(row["messages"]) == len(turns) == 1}
    chosen = dict(list(kept.items())[:count])
    path.write_text("".join(json.dumps(row) + "\n" for row in chosen.values()))
    return {question: row["expected_calls"] for question, row in chosen.items()}


@contextmanager
def serve_rule(expected: Mapping[str, Calls], rule: str = "right") -> Iterator[Log]:
    """Serve a model that answers by a rule.

    Args:
        expected: The calls that each question needs.
        rule: ``right``; ``eager`` calls the first tool where none is due; ``timid`` never calls; ``silent`` says
            nothing where no call is due; ``inventive`` calls a tool that is not on offer, or adds an argument;
            ``torn`` breaks its calls in streams only.
    """

    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        if (rule == "unguided" and "tool_choice" in body) or (rule == "unstreamed" and body.get("stream")):
            handler.send(400, '{"error": {"message": "not supported"}}')
            return
        if rule == "crashing" and body.get("stream"):
            handler.send(500, '{"error": {"message": "a bug of the parser"}}')
            return
        if rule == "heedless":
            body.pop("tool_choice", None)
        tools = [tool["function"]["name"] for tool in body.get("tools", ())]
        due = [call for call in expected.get(body["messages"][-1]["content"], ()) if call["name"] in tools]
        calls = due
        if body.get("tool_choice") == "required" and not calls:
            calls = [{"name": tools[0], "arguments": {}}]
        if rule == "eager" and not due:
            calls = [{"name": tools[0], "arguments": {}}]
        elif rule in ("timid", "heedless") and body.get("tool_choice") != "required":
            calls = []
        elif rule == "inventive" and due:
            calls = [{**due[0], "name": "made_up"}] if number % 2 else [{**due[0], "arguments": {"made_up": 1}}]
        text = None if calls or rule == "silent" else "No tool does that."
        sent = [
            {"id": f"c{i}", "type": "function", "function": {**call, "arguments": json.dumps(call["arguments"])}}
            for i, call in enumerate(calls)
        ]
        if rule == "textual" and due:
            text = f"<tool_call>\n{json.dumps(due[0])}\n</tool_call>"
            handler.say(text[: len(text) // 2] if number % 2 else text)
        elif rule == "thoughtful":
            handler.say(text, tool_calls=sent, reasoning="Which tool does that?")
        elif body.get("stream"):
            handler.stream(*_make_events(text, sent, is_torn=rule == "torn"), "[DONE]")
        else:
            handler.say(text, tool_calls=sent)

    with serve(behave) as log:
        yield log


def _make_events(text: str | None, calls: Calls, is_torn: bool) -> Iterator[str]:
    """Yield the events of an answer: a call's name first, then its arguments in two parts."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": text}]
    for index, call in enumerate(calls):
        arguments = call["function"]["arguments"]
        half = len(arguments) // 2
        head = {"index": index, "id": call["id"], "function": {"name": call["function"]["name"], "arguments": ""}}
        deltas.append({"tool_calls": [head]})
        for part in (arguments[:half],) if is_torn else (arguments[:half], arguments[half:]):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": part}}]})
    for delta in deltas:
        yield json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    yield json.dumps({"choices": [], "usage": {"completion_tokens": 9}})
