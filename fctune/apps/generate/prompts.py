"""What the teacher and the judge are asked, and the reading of what they answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fctune.apps.generate.plan import RowPlan
from fctune.apps.generate.references import loosen_references
from fctune.apps.generate.values import is_valid
from fctune.base.json_reader import ParseError, decode_json
from fctune.calls.tool_calls import read_tool_calls
from fctune.data.augment.spoken import list_properties, say_name, split_words
from fctune.data.conversation import Call, Conversation, Message, Tool

VERSION = 6
"""Changes with the prompts, so that a run that began with others is not resumed."""

# The calls come before the request because a request that is written to known values states them.
_WRITER = """\
You write realistic test conversations for an assistant that calls functions. You are given the functions as JSON and \
the kind of conversation to write. Answer with one JSON object and nothing else:
{"turns": [{"steps": [[{"name": "...", "arguments": {}}]], "request": "..."}]}
"turns" are the user's messages in order. "steps" are the calls that a perfect assistant makes in answer to one \
message: a list of steps, each a list of calls that can be made at once; [] if it should call nothing. "request" is \
what the user says.
Rules:
- The request states every value of the arguments, or says it in other words that leave no doubt. Write dates and \
times in full, never "tomorrow". Make up plausible, varied values.
- Keep the calls and values that you are given, and make up what is missing. Leave out other optional arguments.
- The user does not know the functions: never mention their names, "function", "tool", "call" or parameter names.
- If you cannot write it, answer {"refuse": "..."} with the reason."""

_KIND_RULES = {
    "one_call": "One message that needs exactly one call, of {targets}.",
    "several_calls": "One message that needs a call of each of {targets}, which can all be made at once (one step).",
    "repeated_tool": "One message that needs two to four calls of {targets} with different arguments, in one step.",
    "dependent_calls": "One message that needs two steps: a call whose result is needed for a second call. Use "
    "{targets} among others. In the second step give only the function's name, with empty arguments, since they are "
    "not known.",
    "multi_turn": "Two or three messages of one conversation, with calls of {targets}. Later messages refer to earlier "
    "ones without repeating what is known (for example another value, a correction, or thanks, which needs no call).",
    "missing_value": "Two messages. The first needs {targets}, but lacks the value for its required parameter "
    "{missing}, and nothing lets one guess it; its steps are []. The second message is the user's answer to the "
    "question for it, after which exactly one call is made.",
    "no_tool": "One message with a realistic wish in the same field as the functions that none of them can fulfil; its "
    "steps are [].",
    "small_talk": "One message that needs no call at all: a greeting, thanks, a remark, a question about the assistant "
    "or about a general term; its steps are [].",
}

_WITH_CALLS = frozenset({"one_call", "several_calls", "repeated_tool", "multi_turn", "missing_value"})

ANSWERER = (
    "You are an assistant with functions. If the user's wish can be fulfilled by them, call them, all that can be made "
    "at once in one go, with the values that the user gave and no others; leave out optional arguments that the user "
    "did not ask for. If a required value is missing, ask for it in your own words and call nothing. If no function "
    "fits, say in your own words what you cannot do and call nothing. If nothing has to be called, simply reply. After "
    "the results, go on calling only if more is needed, else answer from the results in one or two sentences."
)

_JSON_ANSWERER = """

Functions:
{tools}

Answer with one JSON object and nothing else: {{"calls": [{{"name": "function", "arguments": {{}}}}]}} to call \
functions, whose results are sent to you, or {{"say": "..."}} with your words to the user to call nothing."""

_JSON_SPEAKER = """

Functions:
{tools}

Answer the user in words, in one or two sentences, with one JSON object and nothing else: {{"say": "..."}}"""

_LISTER = """\
You make up test data. Answer with one JSON object and nothing else: {"values": [...]} with {number} different values, \
as real users would have them, common ones and rare ones."""

_REWORDER = """\
You reword messages that users send to an assistant. Answer with one JSON object and nothing else: {"message": "..."}. \
The new message asks for the same thing with the same values, in other words. It adds nothing and answers nothing."""

NUM_LISTED = (24, 8)
"""Values of a parameter that a teacher is asked for, and asked again if it lists hardly any."""

_SIMULATOR = """\
You play the backend of functions. You are given the functions, a conversation and its last calls. Answer with one \
JSON object and nothing else: {"results": [...]} with one realistic, short result for each call, in order: what the \
function would return as JSON, consistent with the conversation. If you cannot, answer {"refuse": "..."} with the \
reason."""

_JUDGE = """\
You check training data for an assistant that calls functions. You are given the functions and a conversation. It is \
good if the calls are exactly what the user asked for, every argument follows from what was said or returned, nothing \
needed was left out, no call was made that should not be, and the assistant's texts are true. Answer with one JSON \
object and nothing else: {"good": true or false, "reason": "one sentence"}."""


class UnusableText(ValueError):
    """A teacher's text that cannot be used; ``kind`` is the reason that is counted."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of the user, and the calls that were intended in answer to it, step by step.

    Attributes:
        request: The message.
        steps: The calls.
        knows_all: The arguments of later steps are known as well, not only the names of their tools.
    """

    request: str
    steps: tuple[tuple[Call, ...], ...]
    knows_all: bool = False


VERDICT_SCHEMA = {
    "type": "object",
    "properties": {"good": {"type": "boolean"}, "reason": {"type": "string"}},
    "required": ["good", "reason"],
    "additionalProperties": False,
}
"""JSON Schema of a judge's verdict."""


def ask_for_request(plan: RowPlan) -> tuple[Message, ...]:
    """Return the prompt that asks for the user's messages of a row."""
    rule = _KIND_RULES[plan.kind] if plan.hidden is None else _KIND_RULES["one_call"]
    targets = " and ".join(tool.name for tool in plan.targets)
    # A teacher that sees little besides the targets writes better requests to them, and reads a shorter prompt.
    needs_all = plan.kind in ("dependent_calls", "no_tool", "small_talk")
    tools = [plan.hidden] if plan.hidden is not None else plan.tools if needs_all else plan.targets
    lines = [
        f"Functions:\n{_show_tools(tools)}",
        f"Kind: {rule.format(targets=targets, missing=plan.missing)}",
        f"Calls to write for: {_show_calls(plan.calls)}" if plan.kind in _WITH_CALLS or plan.hidden is not None else "",
        f"The user is {plan.persona}. The first message is {plan.style}.",
    ]
    if plan.examples:
        shown = "\n".join(f"- {json.dumps(example, ensure_ascii=False)}" for example in plan.examples)
        lines.append(f"Write in the manner of these messages of real users, about something else:\n{shown}")
    return Message("system", _WRITER), Message("user", "\n\n".join(filter(None, lines)))


def request_schema(plan: RowPlan) -> dict[str, Any]:
    """Return the JSON Schema of the turns of a kind, for servers that can hold an answer to it."""
    kind = plan.kind if plan.hidden is None else "one_call"
    named = [plan.hidden] if plan.hidden is not None else plan.targets
    tools = {tool.name: tool for tool in (*plan.tools, *named)}
    calls = [_call_schema(tools[call.name], call.arguments) for call in plan.calls]
    nothing = _turn_schema(_list_of({}, 0, 0))
    match kind:
        case "one_call" | "several_calls" | "repeated_tool":
            turns = _tuple_of(_turn_schema(_tuple_of(_tuple_of(*calls))))
        case "dependent_calls":
            names = {"type": "string", "enum": [tool.name for tool in plan.tools]}
            unknown = _object_of(name=names, arguments={"type": "object", "maxProperties": 0})
            first = {"anyOf": [_call_schema(tool) for tool in plan.tools]}
            turns = _tuple_of(_turn_schema(_tuple_of(_list_of(first, 1, 2), _list_of(unknown, 1, 2))))
        case "multi_turn":
            later = {"anyOf": [_call_schema(tool) for tool in named]}
            opening = _turn_schema(_tuple_of(_tuple_of(*calls)))
            turns = _tuple_of(opening, _turn_schema(_list_of(_list_of(later, 1, 2), 0, 1)))
        case "missing_value":
            turns = _tuple_of(nothing, _turn_schema(_tuple_of(_tuple_of(*calls))))
        case _:
            turns = _tuple_of(nothing)
    return {"anyOf": [_object_of(turns=turns), _object_of(refuse={"type": "string"})]}


def results_schema(num_calls: int) -> dict[str, Any]:
    """Return the JSON Schema of the results of calls."""
    return {"anyOf": [_object_of(results=_list_of({}, num_calls, num_calls)), _object_of(refuse={"type": "string"})]}


def as_json_question(
    system: str, row: Conversation, words_only: bool = False
) -> tuple[tuple[Message, ...], dict[str, Any]]:
    """Return a row as a prompt whose answer is a JSON object of calls or of words, and the schema of that object.

    It serves teachers that write JSON but have no call format that their server parses. With ``words_only``, the schema
    has no calls.
    """
    rules = _JSON_SPEAKER if words_only else _JSON_ANSWERER
    messages = [Message("system", system + rules.format(tools=_show_tools(row.tools)))]
    results: list[str] = []
    for message in row.messages:
        if message.role == "tool":
            results.append(message.content or "")
            continue
        if results:
            messages.append(Message("user", f"Results: {json.dumps(results, ensure_ascii=False)}"))
            results = []
        if message.calls:
            made = {"calls": [{"name": call.name, "arguments": call.arguments} for call in message.calls]}
            messages.append(Message("assistant", json.dumps(made, ensure_ascii=False)))
        elif message.role == "assistant":
            messages.append(Message("assistant", json.dumps({"say": message.content}, ensure_ascii=False)))
        else:
            messages.append(message)
    if results:
        messages.append(Message("user", f"Results: {json.dumps(results, ensure_ascii=False)}"))
    calls = _list_of({"anyOf": [_call_schema(tool) for tool in row.tools]}, 1, 8)
    words = _object_of(say={"type": "string"})
    return tuple(messages), words if words_only else {"anyOf": [_object_of(calls=calls), words]}


def read_json_answer(text: str) -> tuple[list[Any], str]:
    """Return the calls and the words of such an answer.

    Raises:
        UnusableText: ``garbage``.
    """
    answer = _read_object(text)
    calls, words = answer.get("calls", []), answer.get("say", "")
    if not isinstance(calls, list) or not isinstance(words, str) or not (calls or words):
        raise UnusableText("garbage", "neither calls nor words")
    if words and not any(map(str.isalnum, words)):
        raise UnusableText("garbage", "words without a word")  # "...", which weak teachers copy from the prompt
    return calls, words


def _call_schema(tool: Tool, drawn: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the schema of a call; drawn values are required as they are."""
    arguments: dict[str, Any] = {"type": "object", **loosen_references(tool.parameters)}
    if drawn:
        properties = {**arguments["properties"], **{name: {"enum": [value]} for name, value in drawn.items()}}
        required = list(dict.fromkeys([*(arguments.get("required") or ()), *drawn]))
        arguments = {**arguments, "properties": properties, "required": required}
    return _object_of(name={"type": "string", "enum": [tool.name]}, arguments=arguments)


def _turn_schema(steps: dict[str, Any]) -> dict[str, Any]:
    return _object_of(steps=steps, request={"type": "string", "minLength": 1})


def _object_of(**properties: Any) -> dict[str, Any]:
    keys = {"properties": properties, "required": list(properties)}
    return {"type": "object", **keys, "additionalProperties": False}


def _list_of(items: Any, least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _tuple_of(*items: Any) -> dict[str, Any]:
    return {"type": "array", "prefixItems": list(items), "items": False, "minItems": len(items), "maxItems": len(items)}


def read_request(text: str, plan: RowPlan) -> tuple[Turn, ...]:
    """Return the turns that a teacher wrote, of the kind that was planned.

    Raises:
        UnusableText: ``refused``, ``garbage``, or ``wrong_kind``.
    """
    turns = _read_object(text).get("turns")
    if not isinstance(turns, list) or not turns:
        raise UnusableText("garbage", "no list of turns")
    made = tuple(_read_turn(turn) for turn in turns)
    kind = plan.kind if plan.hidden is None else "one_call"
    if not _is_of_kind(kind, made, plan):
        raise UnusableText("wrong_kind", f"its turns and calls are not those of {kind}")
    return made if plan.hidden is None else (Turn(made[0].request, ()),)


def _read_turn(turn: Any) -> Turn:
    request, steps = (turn.get("request"), turn.get("steps")) if isinstance(turn, dict) else (None, None)
    if not isinstance(request, str) or not request.strip() or not isinstance(steps, list):
        raise UnusableText("garbage", "a turn without request or steps")
    made = []
    for step in steps:
        reading = read_tool_calls(step).strict
        if reading.malformed:
            raise UnusableText("garbage", reading.malformed[0].reason)
        if reading.calls:
            made.append(reading.calls)
    return Turn(request.strip(), tuple(made))


def _is_of_kind(kind: str, turns: Sequence[Turn], plan: RowPlan) -> bool:
    sizes = [[len(step) for step in turn.steps] for turn in turns]
    names = [call.name for turn in turns for step in turn.steps for call in step]
    targets = {tool.name for tool in plan.targets}
    match kind:
        case "one_call":
            return sizes == [[1]] and set(names) == targets
        case "several_calls":
            return len(sizes) == len(sizes[0]) == 1 and len(names) > 1 and targets <= set(names)
        case "repeated_tool":
            return len(sizes) == len(sizes[0]) == 1 and len(names) > 1 and set(names) == targets
        case "dependent_calls":
            return len(sizes) == 1 and len(sizes[0]) > 1
        case "multi_turn":
            return len(sizes) > 1 and bool(names)
        case "missing_value":
            return sizes == [[], [1]] and set(names) == targets
    return sizes == [[]]


def ask_for_values(tool: Tool, parameter: str, attempt: int) -> tuple[tuple[Message, ...], dict[str, Any]]:
    """Return the prompt that asks for values of a parameter, worded anew in each attempt, and the answer's schema.

    The rest of the tool would mislead a small model, which copies the examples of other descriptions.
    """
    schema = list_properties(tool)[parameter]
    described = " ".join(str(schema.get("description", "")).split()) or say_name(parameter)
    wordings = (
        "{described}",
        "{name}: {described}. Give {number} examples of it.",
    )
    number = NUM_LISTED[attempt]
    text = wordings[attempt].format(described=described, number=number, name=say_name(parameter))
    values = _list_of(loosen_references(schema), number // 2, number)
    system = _LISTER.replace("{number}", str(number))
    return (Message("system", system), Message("user", text)), _object_of(values=values)


def read_values(text: str, tool: Tool, parameter: str) -> list[Any]:
    """Return the different values of an answer that match the parameter's schema, without repetitions of its name.

    Raises:
        UnusableText: ``refused`` or ``garbage``.
    """
    values = _read_object(text).get("values")
    if not isinstance(values, list):
        raise UnusableText("garbage", "no list of values")
    schema = list_properties(tool)[parameter]
    asked = {*split_words(parameter), *split_words(str(schema.get("description", "")))}
    distinct = {json.dumps(value, sort_keys=True): value for value in values if is_valid(value, schema)}
    return [value for value in distinct.values() if not isinstance(value, str) or _says_more(value, asked)]


def _says_more(value: str, asked: set[str]) -> bool:
    """Return True if a value is more than words that it was asked for with: "boat name" is no name of a boat."""
    words = {*split_words(value)}
    return bool(value.strip()) and (not words or not words <= asked)


def ask_for_rewording(plan: RowPlan, text: str, stated: Sequence[str]) -> tuple[tuple[Message, ...], dict[str, Any]]:
    """Return the prompt that asks for a message in other words, and the schema of the answer."""
    # The message is last, because small models take what follows it for a part of it.
    kept = f" It has to contain {', '.join(map(json.dumps, dict.fromkeys(stated)))}." if stated else ""
    # Small talk has no wish, and the styles are of wishes.
    style = "" if plan.kind == "small_talk" else f" The new message is {plan.style}."
    wish = f"The user is {plan.persona}.{style}{kept}\n\nMessage to reword:\n{text}"
    schema = _object_of(message={"type": "string", "minLength": 1})
    return (Message("system", _REWORDER), Message("user", wish)), schema


def read_rewording(text: str) -> str:
    """Return the reworded message.

    Raises:
        UnusableText: ``refused`` or ``garbage``.
    """
    message = _read_object(text).get("message")
    if not isinstance(message, str):
        raise UnusableText("garbage", "no message")
    return message.strip()


def ask_for_results(history: Conversation, calls: Sequence[Call]) -> tuple[Message, ...]:
    """Return the prompt that asks for the results of calls."""
    called = {call.name for call in calls}
    tools = _show_tools([tool for tool in history.tools if tool.name in called])
    shown = _show_messages(history.messages)
    text = f"Functions:\n{tools}\n\nConversation:\n{shown}\n\nCalls:\n{_show_calls(calls)}"
    return Message("system", _SIMULATOR), Message("user", text)


def read_results(text: str, num_calls: int) -> list[str]:
    """Return the results of calls as the texts of tools' messages.

    Raises:
        UnusableText: ``refused`` or ``garbage``.
    """
    results = _read_object(text).get("results")
    if not isinstance(results, list) or len(results) != num_calls:
        raise UnusableText("garbage", f"expected {num_calls} results")
    for item in results:
        if isinstance(item, dict) and "refuse" in item:
            raise UnusableText("refused", " ".join(str(item["refuse"]).split())[:200])
    return [item if isinstance(item, str) else json.dumps(item, ensure_ascii=False) for item in results]


def ask_for_verdict(conversation: Conversation) -> tuple[Message, ...]:
    """Return the prompt that asks a judge about a complete row."""
    text = f"Functions:\n{_show_tools(conversation.tools)}\n\nConversation:\n{_show_messages(conversation.messages)}"
    return Message("system", _JUDGE), Message("user", text)


def read_verdict(text: str) -> tuple[bool, str]:
    """Return a judge's verdict and its reason.

    Raises:
        UnusableText: ``refused`` or ``garbage``.
    """
    verdict = _read_object(text)
    if not isinstance(verdict.get("good"), bool):
        raise UnusableText("garbage", "no verdict true or false")
    return verdict["good"], " ".join(str(verdict.get("reason", "")).split())[:200]


def _read_object(text: str) -> dict[str, Any]:
    """Return the JSON object in a text, which models like to put into a code block or between sentences."""
    start, end = text.find("{"), text.rfind("}")
    try:
        value = decode_json(text[start : end + 1]) if start >= 0 else None
    except ParseError as error:
        raise UnusableText("garbage", f"not JSON ({error.reason})") from None
    if not isinstance(value, dict):
        raise UnusableText("garbage", "no JSON object")
    if "refuse" in value:
        raise UnusableText("refused", " ".join(str(value["refuse"]).split())[:200])
    return value


def _show_tools(tools: Sequence[Tool]) -> str:
    return json.dumps([tool.function for tool in tools], ensure_ascii=False)


def _show_calls(calls: Sequence[Call]) -> str:
    return json.dumps([{"name": call.name, "arguments": call.arguments} for call in calls], ensure_ascii=False)


def _show_messages(messages: Sequence[Message]) -> str:
    return json.dumps([message.to_openai() for message in messages], ensure_ascii=False)
