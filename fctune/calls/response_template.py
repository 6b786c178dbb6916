"""transformers' ``response_template``: what ``tokenizer_config.json`` declares about reading a model's answers.

``tokenizer.parse_response``, ``transformers serve`` and vLLM's parser ``hf`` split an answer into thinking, content and
calls by it. It belongs to one chat template: an export with another one has one that was made for it, and tried on
seeded answers of that template, or none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fctune.base.errors import DataError, one_line
from fctune.calls.formats.base import CallFormat, ParseState
from fctune.calls.formats.call_objects import to_call
from fctune.calls.formats.registry import detect_format
from fctune.calls.formats.response_fields import Surroundings
from fctune.calls.matching import is_equal
from fctune.calls.reasoning.registry import detect_reasoning
from fctune.data.chat_template import ChatTemplate, load_tokenizer
from fctune.data.conversation import Call, Conversation, Message, Tool

KEY = "response_template"
# Its forerunner, which transformers reads no longer, but of which other programs may have the code.
_OLD_KEYS = ("response_schema",)

ResponseSpec = dict[str, Any]


class Answer(NamedTuple):
    """An answer as a model is trained to give it.

    Attributes:
        name: What is special about it.
        prompt: Text of the prompt.
        text: Text of the answer, with the mark that ends it.
        tools: The tools on offer.
        message: The message that it is read as.
    """

    name: str
    prompt: str
    text: str
    tools: tuple[Tool, ...]
    message: Message


class Reading(NamedTuple):
    """Comparison of one answer as read with what was written.

    Attributes:
        name: The answer's.
        kind: Refused if the parser raised an error; misread if it gave anything else than was written.
        detail: What is wrong; empty if nothing is.
    """

    name: str
    kind: Literal["read", "refused", "misread"]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ChosenResponse:
    """The response template of an export.

    Attributes:
        spec: The template; None if the export has none.
        origin: Who made it: the base's owner, or fctune for the chat template.
        note: Why there is none; else what its parser refuses, empty if nothing.
    """

    spec: ResponseSpec | None
    origin: Literal["base", "fctune"] = "fctune"
    note: str = ""


class DeclaredFormat(CallFormat):
    """The calls that a tokenizer's response template finds, for models whose format is known in no other way.

    Raises:
        DataError: It is not a valid one, or has no calls.
    """

    vllm_parser = "hf"

    def __init__(self, spec: ResponseSpec):
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self.name = KEY  # type: ignore[misc]  # a class with a name would be found as a format of its own
        try:
            self._loaded = load_response_template(spec)
        except ValueError as error:
            raise DataError(f"tokenizer_config.json: {KEY} is not valid ({one_line(error, 200)})") from None
        if "tool_calls" not in self._loaded.fields:
            raise DataError(f"tokenizer_config.json: {KEY} has no field tool_calls")

    @property
    def has_thinking(self) -> bool:
        """True if the template reads thinking, too."""
        return "thinking" in self._loaded.fields

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """Refuse: the template only says how calls are read."""
        if calls:
            raise DataError(f"a {KEY} only says how calls are read; the chat template writes them")
        return ""

    def _read(self, state: ParseState, tools: Sequence[Tool], lenient: bool) -> None:
        from transformers.utils.chat_parsing import parse_response

        declared = [tool.to_openai() for tool in tools] or None
        try:
            read = parse_response(state.text[: state.end], self._loaded, prefix="", tools=declared)
        except Exception as error:  # of the many kinds that a declaration can cause
            state.add_malformed(0, state.end, one_line(error, 200))
            return
        found = [to_call(item, "arguments", lenient=True) for item in read.get("tool_calls") or ()]
        if reasons := [call for call in found if isinstance(call, str)]:
            state.add_malformed(0, state.end, reasons[0])
        elif found:
            state.add_calls([call for call in found if isinstance(call, Call)], 0, state.end)
            state.prose.append(read.get("content") or "")


def find_call_format(template: ChatTemplate) -> CallFormat:
    """Return the format in which a chat template writes calls, or that its tokenizer's response template reads.

    Raises:
        DataError: The call format is unknown, and the tokenizer declares none.
    """
    try:
        return detect_format(template.source)
    except DataError:
        spec = getattr(template.tokenizer, KEY, None)
        if spec is None or template.is_chosen:
            raise
        return DeclaredFormat(spec)


def make_response_template(template: ChatTemplate) -> ResponseSpec:
    """Return the response template of a chat template.

    Raises:
        DataError: The chat template's call format is unknown, or the schema cannot express it.
    """
    call_format, reasoning = detect_format(template.source), detect_reasoning(template.source)
    end = f"(?:{'|'.join(re.escape(template.decode([stop])) for stop in sorted(template.stop_ids))})"
    # White space after the thinking is not part of the answer.
    after = rf"|(?<={reasoning.end_pattern}\s*)" if reasoning is not None and reasoning.end_pattern else ""
    found = call_format.describe_response(Surroundings(rf"(?:\A{after})", end))
    if found is None:
        raise DataError(f"a response_template cannot express the call format {call_format.name}")
    thinking = None if reasoning is None else reasoning.describe_response()
    anchors = _find_anchors(template, reasoning.opening if reasoning is not None else "")
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": anchors[0] if len(anchors) == 1 else anchors,
        "fields": {
            **({} if thinking is None else {"thinking": thinking}),
            "content": {"close_pattern": rf"\s*{end}", "content": "text"},
            **found,
        },
    }


def _find_anchors(template: ChatTemplate, opening: str) -> list[str]:
    """Return the texts after which the model's answer starts: a generation prompt without its thinking, or a tail."""
    anchors: dict[str, None] = {}
    for last in (Message("user", _WORD), Message("tool", _WORD, call_id=_ID, name=_CALL.name)):
        asked = Message("assistant", None, (replace(_CALL, id=_ID),))
        messages = (last,) if last.role == "user" else (Message("user", "Find it."), asked, last)
        try:
            prompt = template.render(Conversation(messages, _TOOLS), add_generation_prompt=True)
            plain = template.render(Conversation(messages, _TOOLS))
        except DataError:
            continue
        header = prompt.removeprefix(plain) if prompt.startswith(plain) else ""
        if opening:
            header = header.partition(opening)[0]
        anchors[header or _find_tail(prompt)] = None
    return list(anchors)


def _find_tail(prompt: str) -> str:
    """Return the last mark of a prompt that has no header of the answer, with the white space after it."""
    tail = prompt.rpartition(_WORD)[2]
    found = re.search(r"(?:<[^<>\s]+>|\[/?[A-Z_]+\])\s*\Z", tail)
    return found[0] if found else tail


def choose_response_template(template: ChatTemplate, *, is_own: bool) -> ChosenResponse:
    """Return the response template for an export with a chat template: the base's own if it is as good as ours.

    Each is tried on seeded answers. One that misreads any is not used, nor one that refuses an ordinary call.

    Args:
        template: The chat template of the export.
        is_own: It is the base's own, for which the base's tokenizer may declare a response template.
    """
    answers = list(iter_seeded_answers(template))
    declared = getattr(template.tokenizer, KEY, None) if is_own else None
    theirs = None if declared is None else [read_answer(template.tokenizer, answer, declared) for answer in answers]
    reason = ""
    try:
        spec = make_response_template(template)
        ours = [read_answer(template.tokenizer, answer, spec) for answer in answers]
        reason = _find_fault(ours)
    except DataError as error:
        spec, ours, reason = {}, [], one_line(error, 200)
    if theirs is not None and not _find_fault(theirs):
        refused = [reading.name for reading in theirs if reading.kind == "refused"]
        if reason or len(refused) <= sum(reading.kind == "refused" for reading in ours):
            return ChosenResponse(declared, "base", _describe_refused(refused))
    if reason:
        return ChosenResponse(None, "fctune", reason)
    return ChosenResponse(spec, "fctune", _describe_refused(reading.name for reading in ours if reading.detail))


def _find_fault(readings: Sequence[Reading]) -> str:
    """Return why a template is not used; empty if it is."""
    for reading in readings:
        if reading.kind == "misread" or (reading.kind == "refused" and reading.name in _ORDINARY):
            return f"{reading.kind} a seeded answer ({reading.name}): {reading.detail}"
    return ""


def _describe_refused(names: Any) -> str:
    refused = ", ".join(names)
    return f"its parser refuses calls with {refused}" if refused else ""


def iter_seeded_answers(template: ChatTemplate) -> Iterator[Answer]:
    """Yield answers of each kind that a chat template can write."""
    for name, message in _SEEDS.items():
        conversation = Conversation((Message("user", "Find it."), message), _TOOLS)
        try:
            yield from iter_answers(template, conversation, name)
        except DataError:  # the template writes no such answer
            continue


def iter_answers(template: ChatTemplate, conversation: Conversation, name: str = "") -> Iterator[Answer]:
    """Yield the answers of a conversation as a model is trained to give them.

    Raises:
        DataError: It cannot be trained on.
    """
    for index, message in enumerate(conversation.messages):
        if message.role != "assistant" or not message.weight:
            continue
        earlier = tuple(replace(before, weight=0.0) for before in conversation.messages[:index])
        samples = template.encode(replace(conversation, messages=(*earlier, message)))
        calls = list(message.calls)
        for sample in samples:
            tokens, weights = sample.tokens, sample.weights
            supervised = [position for position, weight in enumerate(weights) if weight > 0]
            if not supervised:
                continue
            first, end = supervised[0], supervised[-1] + 1
            # Parallel calls may have been divided among several turns.
            own = (calls.pop(0),) if len(samples) > 1 and calls else message.calls
            prompt, text = template.decode(tokens[:first]), template.decode(tokens[first:end])
            yield Answer(name, prompt, text, conversation.tools, replace(message, calls=own))


def read_answer(tokenizer: Any, answer: Answer, spec: Mapping[str, Any] | None = None) -> Reading:
    """Read an answer by ``tokenizer.parse_response``, and compare it with what was written.

    Args:
        tokenizer: transformers' tokenizer.
        answer: The answer.
        spec: A response template; None: the tokenizer's own.
    """
    tools = [tool.to_openai() for tool in answer.tools] or None
    try:
        read = tokenizer.parse_response(answer.text, spec, prefix=answer.prompt, tools=tools)
    except Exception as error:  # of the many kinds that a declaration can cause
        return Reading(answer.name, "refused", one_line(error, 160))
    message = answer.message
    calls = [_to_call(item) for item in read.get("tool_calls") or ()]
    if not is_equal([[call.name, call.arguments] for call in message.calls], calls):
        written = [[call.name, call.arguments] for call in message.calls]
        return Reading(answer.name, "misread", f"wrote {_quote(written)}, read {_quote(calls)}")
    content = (read.get("content") or "").strip()
    thinking = next((read[key] for key in ("thinking", "reasoning_content", "reasoning") if read.get(key)), "").strip()
    # Some templates write the content of a call as thinking.
    if (message.content or "").strip() not in ([content] if content or not message.calls else [content, thinking]):
        return Reading(answer.name, "misread", f"wrote the content {message.content!r:.80}, read {content!r:.80}")
    if message.reasoning and message.reasoning in answer.text and thinking != message.reasoning.strip():
        return Reading(answer.name, "misread", f"wrote the thinking {message.reasoning!r:.80}, read {thinking!r:.80}")
    return Reading(answer.name, "read")


def _to_call(item: Any) -> Any:
    function = item.get("function") if isinstance(item, dict) else None
    return [function.get("name"), function.get("arguments")] if isinstance(function, dict) else item


def _quote(calls: Any) -> str:
    text = json.dumps(calls, ensure_ascii=False, default=str)
    return text if len(text) <= 120 else f"{text[:120]}..."


def check_answers(folder: Path, answers: Iterable[Answer]) -> dict[str, Any]:
    """Read answers by the response template of a model directory, with the tokenizer that users load.

    Returns:
        ``calls`` and ``read``: the number of calls in the answers, and of those in answers that are read as written;
        ``wrong``: what is wrong with the first few others.
    """
    tokenizer = load_tokenizer(folder)
    num_calls = num_read = 0
    wrong: list[str] = []
    for answer in answers:
        found = read_answer(tokenizer, answer)
        num_calls += len(answer.message.calls)
        if found.kind == "read":
            num_read += len(answer.message.calls)
        elif len(wrong) < _NUM_SHOWN:
            wrong.append(f"{found.kind}: {found.detail}")
    return {"calls": num_calls, "read": num_read, "wrong": wrong}


def write_response_template(folder: Path, chosen: ChosenResponse) -> None:
    """Write an export's response template to its ``tokenizer_config.json``, and remove any other."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    written = {key: value for key, value in config.items() if key not in (KEY, *_OLD_KEYS)}
    if chosen.origin == "base":
        written = config
    elif chosen.spec is not None:
        written[KEY] = chosen.spec
    if written != config:
        path.write_text(json.dumps(written, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


_NUM_SHOWN = 3
_ID, _WORD = "call00001", "fctprobe"
_STRING = {"type": "string"}
_TOOLS = (
    Tool(
        {
            "name": "book_table",
            "description": "Book a table.",
            "parameters": {
                "type": "object",
                "properties": {
                    "name": _STRING,
                    "guests": {"type": "integer"},
                    "price": {"type": "number"},
                    "outside": {"type": "boolean"},
                    "note": {"type": ["string", "null"]},
                    "tags": {"type": "array", "items": _STRING},
                    "options": {"type": "object"},
                },
            },
        }
    ),
    Tool({"name": "ping", "description": "Ping.", "parameters": {"type": "object", "properties": {}}}),
)
_CALL = Call("book_table", {"name": "Paris", "guests": 3, "price": 2.5})


def _make_calls(*arguments: dict[str, Any]) -> Message:
    calls = [Call("book_table", given, f"call0000{number}") for number, given in enumerate(arguments, 1)]
    return Message("assistant", None, tuple(calls))


_SEEDS = {
    "a string and numbers": _make_calls(_CALL.arguments),
    "an answer": Message("assistant", "Here are 3 tables: [A], {B}; all (C)."),
    "several calls": _make_calls({"name": "A"}, {"guests": 2}, {"name": "B, (C)"}),
    "no arguments": Message("assistant", None, (Call("ping", {}, _ID),)),
    "other alphabets": _make_calls({"name": "Größe 東京都 👩‍👩‍👧 שלום"}),
    "markup": _make_calls({"name": "<b>x</b> } ] ) ; [1, 2] a=1, 100%"}),
    "lists and objects": _make_calls({"tags": ["x", "y z"], "options": {"a": {"b": [1, "x", -2.5]}}}),
    "True, False or None": _make_calls({"outside": True, "note": None}, {"outside": False}),
    "True, False or None within an object": _make_calls({"options": {"a": True, "b": [None, False]}}),
    "an apostrophe": _make_calls({"name": "it's"}),
    "quotes of both kinds": _make_calls({"name": "Bob's \"best\" table, 'the' one"}),
    "line breaks or backslashes": _make_calls({"name": "one\ntwo\\three\tfour"}),
    "a text that is a number": _make_calls({"name": "5", "note": "true"}),
    "content and a call": replace(_make_calls(_CALL.arguments), content="Let me see."),
    "thinking and a call": replace(_make_calls(_CALL.arguments), reasoning="They want a table.\nSo [book] it."),
    "thinking and an answer": Message("assistant", "There are 3.", reasoning="I know it."),
}
_ORDINARY = ("a string and numbers", "an answer", "several calls", "no arguments", "other alphabets")
