"""A teacher behind a real HTTP server: it answers each prompt of ``data generate`` from what the prompt itself says.

It writes requests whose values follow from a digest of the prompt's seed, so that equal seeds have equal rows. What it
answers to a request follows from the words of that request, since it does not see what was intended.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.engines.fault_server import Handler, Log, serve

TOOLS: list[dict[str, Any]] = [
    {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
    {
        "name": "set_alarm",
        "description": "Set an alarm.",
        "parameters": {
            "type": "object",
            "properties": {"hour": {"type": "integer"}, "label": {"type": "string"}},
            "required": ["hour"],
        },
    },
    {
        "name": "find_user",
        "description": "Find the id of a user by name.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    {
        "name": "send_note",
        "description": "Send a note to a user.",
        "parameters": {"type": "object", "properties": {"user_id": {"type": "string"}}, "required": ["user_id"]},
    },
]
KEYS = {"get_weather": "city", "set_alarm": "hour", "find_user": "name", "send_note": "user_id"}
WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "inlet", "knoll", "larch", "maple")
# "do get_weather city=amber" is a wish; the scripted teacher reads it back from the request.
_WISH = re.compile(r"\bdo (\w+) (\w+)=(\S+?)(?=[;.]|\s|$)")

Misbehave = Callable[[Handler, str, dict[str, Any]], bool]


class Teacher:
    """Answers prompts; ``misbehave`` gets each first, with the kind of its prompt, and returns True if it answered.

    Attributes:
        asked: Number of prompts of each kind: write, list, reword, answer, results, judge.
    """

    def __init__(self, misbehave: Misbehave = lambda handler, kind, body: False, reports_tokens: bool = True):
        self.misbehave, self.reports_tokens = misbehave, reports_tokens
        self.asked = Counter[str]()

    def __call__(self, handler: Handler, number: int, body: dict[str, Any]) -> None:
        kind = name_prompt(body)
        self.asked[kind] += 1
        if self.misbehave(handler, kind, body):
            return
        text, calls = make_answer(kind, body)
        self.say(handler, text, calls)

    def say(self, handler: Handler, text: str | None, calls: list[dict[str, Any]] | None = None) -> None:
        """Send an answer with its usage."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {"id": f"c{i}", "type": "function", "function": {**call, "arguments": json.dumps(call["arguments"])}}
                for i, call in enumerate(calls)
            ]
        body: dict[str, Any] = {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}
        if self.reports_tokens:
            body["usage"] = {"prompt_tokens": 100, "completion_tokens": 10}
        handler.send(200, json.dumps(body))


def name_prompt(body: dict[str, Any]) -> str:
    """Return what a prompt asks for."""
    system = body["messages"][0]["content"]
    if system.startswith("You write"):
        return "write"
    if system.startswith("You make up test data"):
        return "list"
    if system.startswith("You reword"):
        return "reword"
    return "results" if system.startswith("You play") else "judge" if system.startswith("You check") else "answer"


def make_answer(kind: str, body: dict[str, Any]) -> tuple[str | None, list[dict[str, Any]] | None]:
    """Return the text and the calls of a good answer."""
    if kind == "write":
        return json.dumps({"turns": write_turns(body["messages"][1]["content"], random.Random(body["seed"]))}), None
    if kind == "list":
        is_number = "hour" in body["messages"][1]["content"].splitlines()[0]
        return json.dumps({"values": [*range(6, 18)] if is_number else list(WORDS)}), None
    if kind == "reword":
        return json.dumps({"message": "Well, " + body["messages"][1]["content"].partition("reword:\n")[2]}), None
    if kind == "judge":
        return json.dumps({"good": True, "reason": "fine"}), None
    if kind == "results":
        calls = json.loads(body["messages"][1]["content"].rpartition("Calls:\n")[2])
        return json.dumps({"results": [{"user_id": f"u-{i}", "ok": True} for i, _ in enumerate(calls)]}), None
    return answer(body)


def answer(body: dict[str, Any]) -> tuple[str | None, list[dict[str, Any]] | None]:
    """Answer a row's last message: wishes for tools on offer are called, after results there is a text."""
    if "tools" not in body:
        return answer_as_json(body), None
    offered = {tool["function"]["name"] for tool in body["tools"]}
    request = next(m["content"] for m in reversed(body["messages"]) if m["role"] == "user")
    last = body["messages"][-1]
    if last["role"] == "tool":
        found = json.loads(last["content"])
        if "then send_note" in request and last["tool_call_id"] == "call_1" and "send_note" in offered:
            return None, [{"name": "send_note", "arguments": {"user_id": found.get("user_id", "?")}}]
        return f"Done: {last['content'][:40]}", None
    calls = [
        {"name": name, "arguments": {key: int(value) if key == "hour" else value}}
        for name, key, value in _WISH.findall(request)
        if name in offered
    ]
    return (None, calls) if calls else (f"I can't do that: {request[:30]}", None)


def answer_as_json(body: dict[str, Any]) -> str:
    """Answer a prompt of ``--answers json``: the tools are in its system prompt, and results are a user's message."""
    tools = json.loads(body["messages"][0]["content"].partition("Functions:\n")[2].splitlines()[0])
    messages = [m for m in body["messages"][:-1] if not m["content"].startswith("Results: ")] + [body["messages"][-1]]
    if (last := messages[-1]["content"]).startswith("Results: "):
        number = sum(len(json.loads(m["content"]).get("calls", ())) for m in messages if m["role"] == "assistant")
        result = json.loads(last.removeprefix("Results: "))[-1]
        messages[-1] = {"role": "tool", "content": result, "tool_call_id": f"call_{number}"}
    text, calls = answer({"messages": messages, "tools": [{"function": tool} for tool in tools]})
    return json.dumps({"calls": calls} if calls else {"say": text})


def write_turns(prompt: str, rng: random.Random) -> list[dict[str, Any]]:
    """Write the turns of the kind that a prompt asks for, of the tools that it names."""
    rule = prompt[prompt.index("Kind: ") :].splitlines()[0]
    offered = [tool["name"] for tool in json.loads(prompt.splitlines()[1])]
    named = [tool["name"] for tool in TOOLS if re.search(rf"\b{tool['name']}\b", rule)]
    noise = " ".join(rng.choices(WORDS, k=8))

    def make(name: str) -> dict[str, Any]:
        value: Any = rng.randrange(24) if name == "set_alarm" else "".join(rng.choices("abcdefghij", k=6))
        return {"name": name, "arguments": {KEYS[name]: value}}

    def turn(*calls: dict[str, Any], more: str = "", steps: list[Any] | None = None) -> dict[str, Any]:
        wishes = "; ".join(
            f"do {call['name']} {key}={value}" for call in calls for key, value in call["arguments"].items()
        )
        return {
            "request": f"{noise} {wishes}{more}",
            "steps": ([list(calls)] if calls else []) if steps is None else steps,
        }

    if "exactly one call, of" in rule:
        return [turn(make(named[0]))]
    if "a call of each" in rule:
        return [turn(*map(make, named))]
    if "two to four" in rule:
        return [turn(make(named[0]), make(named[0]))]
    if "two steps" in rule:
        first = make("find_user")
        return [turn(first, more=" then send_note", steps=[[first], [{"name": "send_note", "arguments": {}}]])]
    if "Two or three" in rule:
        return [turn(make(named[0])), turn(make(rng.choice(named)))]
    if "Two messages" in rule:
        return [{"request": f"{noise} something", "steps": []}, turn(make(named[0]))]
    assert offered
    return [{"request": f"{noise} hello there", "steps": []}]


@contextmanager
def serve_teacher(teacher: Teacher) -> Iterator[Log]:
    """Run a server with this teacher during the block."""
    with serve(teacher) as log:
        yield log
