"""Seeded model outputs in any call format, to compare how this project and the servers' own parsers read them."""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fctune.base.errors import DataError
from fctune.calls.argument_types import argument_schemas, argument_types
from fctune.calls.formats.base import CallFormat, Parsed, Server
from fctune.calls.matching import is_equal
from fctune.data.conversation import Call, Tool


class Output(NamedTuple):
    """One text that a model might write, and the tools on offer.

    Attributes:
        kind: What is special about it; one of ``KINDS``.
        text: The text of the turn, without the mark that ends it.
        tools: The tools on offer.
        calls: The calls that were rendered into the text before it was cut or damaged.
    """

    kind: str
    text: str
    tools: tuple[Tool, ...]
    calls: tuple[Call, ...]


# What a server's parser made of a text: calls with decoded arguments, or the error it raised.
Read = list[tuple[str, Any]] | str


def _tool(name: str, **properties: Any) -> Tool:
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return Tool({"name": name, "description": f"The tool {name}.", "parameters": parameters})


_STRING, _INTEGER, _NUMBER, _BOOLEAN = ({"type": name} for name in ("string", "integer", "number", "boolean"))
_TOOLS = (
    _tool("get_weather", city=_STRING, days=_INTEGER),
    _tool("send_message", to=_STRING, text=_STRING, urgent=_BOOLEAN),
    _tool("convert", amount=_NUMBER, source={"type": "string", "enum": ["EUR", "USD"]}, target=_STRING),
    _tool("plan_trip", stops={"type": "array", "items": _STRING}, options={"type": "object"}, budget=_NUMBER),
    _tool(
        "book",
        guests={"type": "array", "items": {"type": "object", "properties": {"name": _STRING, "age": _INTEGER}}},
        room={"type": "object", "properties": {"floor": _INTEGER, "view": _STRING, "smoking": _BOOLEAN}},
    ),
    _tool("note", text=_STRING, reminder={"type": ["string", "null"]}, tags={"type": "array", "items": _STRING}),
    Tool({"name": "ping", "description": "No arguments.", "parameters": {"type": "object", "properties": {}}}),
)
_WORDS = (
    "the", "weather", "in", "Paris", "is", "fine", "today", "and", "tomorrow", "it", "may", "rain", "so", "take",
    "your", "coat", "please", "thanks",
)  # fmt: skip
_UNICODE = ("Größe", "東京都", "👩‍👩‍👧‍👦", "שלום", "naïve café", "🇫🇷 Paris", "Ω≈ç√", "новости", "｜", "\u2028", "ﬁ")
_MARKUP = (
    "<b>bold</b>", "a < b > c", '{"a": 1}', "[1, 2]", 'say "hi"', "it's", "C:\\new\\table", "two\nlines", "a, b: c",
    "100%", "f(x)", "`code`", "key:value", "}", "]", " padded ", "tab\there", "null", "true", "5", "1.50",
)  # fmt: skip


def make_outputs(call_format: CallFormat, count: int, seed: int = 0) -> list[Output]:
    """Return ``count`` outputs of a format, of each kind in turn; the same for the same arguments."""
    rng = random.Random(f"{call_format.name}:{seed}")
    makers = list(_MAKERS.items())
    outputs: list[Output] = []
    while len(outputs) < count:
        kind, make = makers[len(outputs) % len(makers)]
        tools = tuple(rng.sample(_TOOLS, rng.randint(1, 4)))
        try:
            outputs.append(make(call_format, tools, rng))
        except DataError:  # the format cannot write such a value
            continue
        assert outputs[-1].kind == kind
    return outputs


def _make_value(schema: Any, rng: random.Random, strings: Callable[[random.Random], str], depth: int = 2) -> Any:
    """Return a value that fits a schema."""
    kind = rng.choice(sorted(argument_types(schema)))
    if isinstance(schema, dict) and "enum" in schema:
        return rng.choice(schema["enum"])
    if kind == "string" or (kind in ("array", "object") and depth == 0):
        return strings(rng)
    if kind == "integer":
        return rng.choice((0, 1, -7, 42, 2024, 10**12))
    if kind == "number":
        return rng.choice((0.5, -3.25, 19.99, 1e21, 100, 7))
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "array":
        items = schema.get("items", _STRING) if isinstance(schema, dict) else _STRING
        return [_make_value(items, rng, strings, depth - 1) for _ in range(rng.randint(0, 3))]
    if kind == "object":
        properties = (schema.get("properties") if isinstance(schema, dict) else None) or {
            key: rng.choice((_STRING, _INTEGER, _BOOLEAN)) for key in rng.sample(("mode", "level", "quiet"), 2)
        }
        return {key: _make_value(inner, rng, strings, depth - 1) for key, inner in properties.items()}
    return None


def _plain(rng: random.Random) -> str:
    return " ".join(rng.sample(_WORDS, rng.randint(1, 4)))


def _unicode(rng: random.Random) -> str:
    return " ".join(rng.sample(_UNICODE, rng.randint(1, 2)))


def _markup(rng: random.Random) -> str:
    return rng.choice(_MARKUP) if rng.random() < 0.6 else f"{_plain(rng)} {rng.choice(_MARKUP)}"


def _make_call(
    tools: Sequence[Tool], rng: random.Random, strings: Callable[[random.Random], str] = _plain, depth: int = 2
) -> Call:
    tool = rng.choice(tools)
    schemas = argument_schemas(tools, tool.name)
    required = tool.parameters.get("required", ())
    given = {key: schema for key, schema in schemas.items() if key in required or rng.random() < 0.7}
    return Call(tool.name, {key: _make_value(schema, rng, strings, depth) for key, schema in given.items()})


Maker = Callable[[CallFormat, tuple[Tool, ...], random.Random], Output]


def _written(kind: str, call_format: CallFormat, tools: tuple[Tool, ...], calls: list[Call]) -> Output:
    return Output(kind, call_format.render(calls, tools), tools, tuple(calls))


def _one(call_format: CallFormat, tools: tuple[Tool, ...], rng: random.Random) -> Output:
    return _written("one call", call_format, tools, [_make_call(tools, rng)])


def _parallel(call_format: CallFormat, tools: tuple[Tool, ...], rng: random.Random) -> Output:
    return _written("parallel calls", call_format, tools, [_make_call(tools, rng) for _ in range(rng.randint(2, 4))])


# In these formats prose is a message of its own.
_PROSE = {
    "gpt_oss": "<|channel|>analysis<|message|>{}.<|end|>",
    "muse": " to=user<|message|>{}.<|eom|>",
}


def _prose(call_format: CallFormat, tools: tuple[Tool, ...], rng: random.Random) -> Output:
    done = _written("prose before", call_format, tools, [_make_call(tools, rng) for _ in range(rng.randint(1, 2))])
    prose = _PROSE.get(call_format.name, f"{{}}.{rng.choice((' ', chr(10), chr(10) * 2))}")
    return done._replace(text=prose.format(_plain(rng).capitalize()) + done.text)


def _words(call_format: CallFormat, tools: tuple[Tool, ...], rng: random.Random) -> Output:
    return Output("no call", f"{_plain(rng).capitalize()}, {_markup(rng)}.", tools, ())


def _nested(call_format: CallFormat, tools: tuple[Tool, ...], rng: random.Random) -> Output:
    tools = (*tools, *(tool for tool in _TOOLS if tool.name in ("book", "plan_trip") and tool not in tools))
    nested = tuple(tool for tool in tools if tool.name in ("book", "plan_trip"))
    return _written("nested values", call_format, tools, [_make_call(nested, rng, _plain, 4)])


def _letters(call_format: CallFormat, tools: tuple[Tool, ...], rng: random.Random) -> Output:
    return _written("unicode", call_format, tools, [_make_call(tools, rng, _unicode)])


def _marked(call_format: CallFormat, tools: tuple[Tool, ...], rng: random.Random) -> Output:
    return _written("markup in values", call_format, tools, [_make_call(tools, rng, _markup)])


def _empty(call_format: CallFormat, tools: tuple[Tool, ...], rng: random.Random) -> Output:
    return _written("no arguments", call_format, tools, [Call(rng.choice(tools).name, {})])


def _mistyped(call_format: CallFormat, tools: tuple[Tool, ...], rng: random.Random) -> Output:
    call = _make_call(tools, rng)
    stray = ("5", "five", 5, 2.5, True, None, ["a"], {"b": 1}, "", "true", "null", "[1]")
    wrong = {key: rng.choice(stray) if rng.random() < 0.6 else value for key, value in call.arguments.items()}
    return _written("wrong types", call_format, tools, [Call(call.name, wrong)])


def _unknown_argument(call_format: CallFormat, tools: tuple[Tool, ...], rng: random.Random) -> Output:
    call = _make_call(tools, rng)
    extra = {rng.choice(("mode", "note_2", "x")): rng.choice(("fast", 3, 0.5, False, ["a"]))}
    return _written("unknown argument", call_format, tools, [Call(call.name, call.arguments | extra)])


def _unknown_tool(call_format: CallFormat, tools: tuple[Tool, ...], rng: random.Random) -> Output:
    calls = [_make_call(tools, rng) for _ in range(rng.randint(0, 1))]
    calls.insert(rng.randint(0, len(calls)), Call(rng.choice(("get_time", "search")), {"query": _plain(rng)}))
    return _written("unknown tool", call_format, tools, calls)


def _cut(call_format: CallFormat, tools: tuple[Tool, ...], rng: random.Random) -> Output:
    done = _written("cut", call_format, tools, [_make_call(tools, rng) for _ in range(rng.randint(1, 2))])
    return done._replace(text=done.text[: rng.randrange(1, len(done.text))])


def _damaged(call_format: CallFormat, tools: tuple[Tool, ...], rng: random.Random) -> Output:
    done = _written("damaged", call_format, tools, [_make_call(tools, rng) for _ in range(rng.randint(1, 2))])
    text = done.text
    for _ in range(rng.randint(1, 2)):
        pieces = [match.span() for match in re.finditer(r"\w+|\s+|[^\w\s]", text)]
        start, end = rng.choice(pieces)
        kept = rng.choice(("", text[start:end] * 2, rng.choice(string.punctuation), "\n" + text[start:end]))
        text = text[:start] + kept + text[end:] or "."
    return done._replace(text=text)


_MAKERS: dict[str, Maker] = {
    "one call": _one,
    "parallel calls": _parallel,
    "prose before": _prose,
    "no call": _words,
    "nested values": _nested,
    "unicode": _letters,
    "markup in values": _marked,
    "no arguments": _empty,
    "wrong types": _mistyped,
    "unknown argument": _unknown_argument,
    "unknown tool": _unknown_tool,
    "cut": _cut,
    "damaged": _damaged,
}
KINDS = tuple(_MAKERS)
# In these the text is no longer what the format says, so that each reader guesses.
DAMAGED = ("cut", "damaged")


def to_requests(outputs: Sequence[Output]) -> list[dict[str, Any]]:
    """Return the outputs as ``fctune.tasks.evaluation.serving.run_server_parser`` takes them."""
    return [
        {"id": index, "text": output.text, "tools": [tool.to_openai() for tool in output.tools]}
        for index, output in enumerate(outputs)
    ]


def read_reply(reply: dict[str, Any]) -> Read:
    """Return the calls of a server's reply, with decoded arguments; or its error.

    Arguments that are not JSON stay the string that a client would get.
    """
    if "error" in reply:
        return str(reply["error"])
    calls: list[tuple[str, Any]] = []
    for call in reply["calls"]:
        try:
            calls.append((call["name"], json.loads(call["arguments"])))
        except ValueError:
            calls.append((call["name"], call["arguments"]))
    return calls


def is_same(ours: Parsed, theirs: Read) -> bool:
    """Return True if both have the same calls in the same order, ``5`` and ``5.0`` apart."""
    return (
        not isinstance(theirs, str)
        and len(ours.calls) == len(theirs)
        and all(
            call.name == name and is_equal(call.arguments, arguments, is_same_number_type=True)
            for call, (name, arguments) in zip(ours.calls, theirs, strict=True)
        )
    )


def explain_difference(output: Output, ours: Parsed, theirs: Read, server: Server) -> tuple[str, ...]:
    """Return why a server reads an output differently, in words of ``REASONS``; empty if nothing known explains it.

    Of text that was cut or damaged, anything may be read: what no reason explains is named by how the readings differ.
    """
    if isinstance(theirs, str):
        return ("error",)
    if output.kind in DAMAGED:
        return _explain_calls(output, ours, theirs) or (_describe_guess(ours, theirs),)
    for reason, holds in _RULES:
        if holds(output, ours, theirs, server):
            return (reason,)
    return _explain_calls(output, ours, theirs)


def _explain_calls(output: Output, ours: Parsed, theirs: list[tuple[str, Any]]) -> tuple[str, ...]:
    """Return why a server drops calls or has other values; empty if nothing explains it."""
    calls = [(call.name, call.arguments) for call in ours.calls]
    names = [name for name, _ in theirs]
    found: set[str] = set()
    if [name for name, _ in calls] != names:
        calls = _list_offered(output, ours)
        found.add("unknown tool")
    if [name for name, _ in calls] != names:
        return ()
    for (name, arguments), (_, given) in zip(calls, theirs, strict=True):
        schemas = argument_schemas(output.tools, name)
        if not isinstance(given, dict) or list(given) != list(arguments):
            return ()
        for key, value in arguments.items():
            reasons = _explain_value(value, given[key], schemas.get(key), key in schemas, output)
            if reasons is None:
                return ()
            found |= reasons
    return tuple(sorted(found))


def _describe_guess(ours: Parsed, theirs: list[tuple[str, Any]]) -> str:
    """Return the kind of difference between two readings of a text that was cut or damaged."""
    if not theirs or not ours.calls:
        return "gives up" if ours.calls else "makes a call"
    if len(theirs) != len(ours.calls):
        return "fewer calls" if len(theirs) < len(ours.calls) else "more calls"
    if [name for name, _ in theirs] != [call.name for call in ours.calls]:
        return "other name"
    differing = [(c.arguments, given) for c, (_, given) in zip(ours.calls, theirs, strict=True) if c.arguments != given]
    if any(not isinstance(given, dict) for _, given in differing):
        return "not JSON"
    keys = [(arguments.keys(), given.keys()) for arguments, given in differing]
    if all(given <= own for own, given in keys) and any(given < own for own, given in keys):
        return "fewer arguments"
    if all(given >= own for own, given in keys) and any(given > own for own, given in keys):
        return "more arguments"
    return "other arguments"


def _explain_value(value: Any, given: Any, schema: Any, is_known: bool, output: Output) -> set[str] | None:
    """Return why a server has another value for an argument or a part of one; None if nothing explains it."""
    if is_equal(value, given, is_same_number_type=True):
        return set()
    rules = {
        "number": is_equal(value, given),
        "nullable": given is None and value is not None and is_known and "null" in argument_types(schema),
        "null word": given is None and isinstance(value, str) and value.lower() in ("null", "none", "nil"),
        "misfit": is_known and not _fits(value, schema),
        "untyped": not is_known and _is_text_of(given, value),
        "kept": is_known and _is_text_of(given, value),
        "stripped": isinstance(value, str) and isinstance(given, str) and given == value.strip(),
        "decoded": isinstance(value, str) and not isinstance(given, str) and is_equal(_decode(value), given),
        "respelled": isinstance(value, str) and isinstance(given, str) and given == str(_decode(value)),
        "escape": "<json>" in output.text,
    }
    for reason, holds in rules.items():
        if holds:
            return {reason}
    parts: list[tuple[Any, Any, Any, bool]] = []
    if isinstance(value, dict) and isinstance(given, dict) and list(value) == list(given):
        inner = (schema.get("properties") if isinstance(schema, dict) else None) or {}
        parts = [(value[key], given[key], inner.get(key), key in inner) for key in value]
    elif isinstance(value, list) and isinstance(given, list) and len(value) == len(given):
        items = schema.get("items") if isinstance(schema, dict) else None
        parts = [(one, other, items, items is not None) for one, other in zip(value, given, strict=True)]
    found = [_explain_value(*part, output) for part in parts]
    if not found or None in found:
        return None
    return {reason for reasons in found if reasons for reason in reasons}


def _is_text_of(text: Any, value: Any) -> bool:
    """Return True if a text is what a format without types writes for a value: JSON, or Python's words."""
    return (
        isinstance(text, str)
        and not isinstance(value, str)
        and text.strip() in (json.dumps(value, ensure_ascii=False), str(value))
    )


def _fits(value: Any, schema: Any) -> bool:
    """Return True if a value is of a type that its schema allows, nested values included."""
    types = argument_types(schema)
    if isinstance(value, bool) or value is None:
        return ("null" if value is None else "boolean") in types
    if isinstance(value, dict):
        inner = schema.get("properties", {}) if isinstance(schema, dict) else {}
        return "object" in types and all(key not in inner or _fits(item, inner[key]) for key, item in value.items())
    if isinstance(value, list):
        items = schema.get("items", {}) if isinstance(schema, dict) else {}
        return "array" in types and all(_fits(item, items) for item in value)
    if isinstance(value, str):
        return "string" in types
    return "number" in types or (isinstance(value, int) and "integer" in types)


def _list_offered(output: Output, ours: Parsed) -> list[tuple[str, Any]]:
    names = {tool.name for tool in output.tools}
    return [(call.name, call.arguments) for call in ours.calls if call.name in names]


def _reads_escaped_only(output: Output, ours: Parsed, theirs: Read, server: Server) -> bool:
    """Only FunctionGemma is concerned: each argument of theirs is a key with text between its marks."""
    expected = []
    for call, (start, end) in zip(ours.calls, ours.spans, strict=True):
        found = re.findall(r"(\w+):<escape>(.*?)<escape>", output.text[start:end], re.DOTALL)
        expected.append((call.name, {key: _decode(text) for key, text in found}))
    return "<start_function_call>" in output.text and theirs == expected


def _decode(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _wants_channel_first(output: Output, ours: Parsed, theirs: Read, server: Server) -> bool:
    return server == "sglang" and " to=functions." in output.text and theirs == []


def _starts_with_prose(output: Output, ours: Parsed, theirs: Read, server: Server) -> bool:
    """Only formats without marks are concerned: their calls begin with the bracket of a list or an object."""
    return (
        theirs == [] and bool(ours.prose) and bool(ours.spans) and output.text[ours.spans[0][0] :].lstrip()[0] in "[{"
    )


def _has_negative(value: Any) -> bool:
    if isinstance(value, (dict, list)):
        return any(map(_has_negative, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (int, float)) and value < 0


def _drops_negative(output: Output, ours: Parsed, theirs: Read, server: Server) -> bool:
    kept = [(name, arguments) for name, arguments in _list_offered(output, ours) if not _has_negative(arguments)]
    return bool(_PYTHON_LIST.search(output.text)) and len(kept) < len(ours.calls) and kept == theirs


def _ends_at_bracket(output: Output, ours: Parsed, theirs: Read, server: Server) -> bool:
    _, mark, listed = output.text.partition("functools[")
    return bool(mark) and listed.count("]") > 1 and theirs == []


def _splits_lines(output: Output, ours: Parsed, theirs: Read, server: Server) -> bool:
    has_separator = len(output.text.splitlines()) > len(output.text.split("\n"))
    return "<function_calls>" in output.text and has_separator and len(theirs) in (0, len(ours.calls))


def _wants_space(output: Output, ours: Parsed, theirs: Read, server: Server) -> bool:
    return server == "sglang" and "[TOOL_CALLS][" in output.text and theirs == []


def _returns_empty_text(output: Output, ours: Parsed, theirs: Read, server: Server) -> bool:
    if isinstance(theirs, str) or len(theirs) != len(ours.calls) or all(given != "" for _, given in theirs):
        return False
    return all(
        call.name == name and (is_equal(call.arguments, given) or (given == "" and not call.arguments))
        for call, (name, given) in zip(ours.calls, theirs, strict=True)
    )


def _wants_separator(output: Output, ours: Parsed, theirs: Read, server: Server) -> bool:
    return server == "vllm" and '}{"name": ' in output.text and theirs == []


_PYTHON_LIST = re.compile(r"(?:\A|\s)\[\w+\(")

# How readings of truncated or damaged text differ.
GUESSES: dict[str, str] = {
    "gives up": "The server finds no call.",
    "makes a call": "The server finds a call, but the lenient reading does not.",
    "fewer calls": "The server finds fewer calls.",
    "more calls": "The server finds more calls.",
    "other name": "The server finds a call with a different name.",
    "not JSON": "The server passes on arguments that are not a JSON object.",
    "fewer arguments": "The server finds fewer arguments.",
    "more arguments": "The server finds more arguments.",
    "other arguments": "The server finds different arguments.",
}

Rule = Callable[[Output, Parsed, Read, Server], bool]
# Why a value differs.
REASONS: dict[str, str] = {
    "unknown tool": "The server drops calls of tools that are not on offer.",
    "number": "`5` for `5.0`, or `5.0` for `5`.",
    "nullable": "An argument that may be null is read as null: always by SGLang for MiniMax, else for the word null.",
    "null word": "The server reads the word null as null although the schema has a string.",
    "misfit": "The value does not have a type of the tool's schema, and the server converts or keeps it.",
    "untyped": "The schema does not describe the value, and the server keeps its text.",
    "kept": "The server keeps the text of a value that its conversion does not know, such as `1e+21` or `null`.",
    "stripped": "The server strips white space around a string.",
    "decoded": "The server decodes a string that is valid JSON, whatever the schema says.",
    "respelled": "The server writes a string that is a JSON word or number as Python does, such as `True`.",
    "escape": "The format cannot express the value. It is escaped as `<json>`, which no server reads.",
    "error": "The parser raises, or takes over two seconds for one answer.",
}
# Why calls differ: tried in this order, before values are compared; the first that holds is the reason.
_RULES: list[tuple[str, Rule]] = []


def _add_reason(name: str, explanation: str, rule: Rule) -> None:
    REASONS[name] = explanation
    _RULES.append((name, rule))


_add_reason("bracket", "The server ends the list at the first `]`, even within a value.", _ends_at_bracket)
_add_reason("space", "The server expects a space between the mark and the list, as older tokenizers do.", _wants_space)
_add_reason("adjacent", "The server finds no call if objects follow one another without a separator.", _wants_separator)
_add_reason("prose", "The server finds no call after prose; neither does the strict reading.", _starts_with_prose)
_add_reason("negative", "The server drops a call that has a negative number.", _drops_negative)
_add_reason("line", "The server splits calls at any of Unicode's line separators, even within a value.", _splits_lines)
_add_reason("empty", "A call without arguments has an empty string instead of `{}`.", _returns_empty_text)
_add_reason("escaped only", "The server finds only text between marks, but no numbers or lists.", _reads_escaped_only)
_add_reason(
    "header", "The server expects the channel before the recipient; templates write it after.", _wants_channel_first
)
