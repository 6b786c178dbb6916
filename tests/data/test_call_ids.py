"""Templates that print a call's id in place of its name get ids with names, in training and in prompts alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fctune.base.errors import DataError
from fctune.calls.formats.registry import detect_format
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.supervision import SupervisionConfig

# Calls and results as Kimi K2's template prints them, within the turns of the tiny base.
TEMPLATE = """
{%- if tools %}<|start_header_id|>system<|end_header_id|>\n\n{{ tools | tojson }}<|eot_id|>{% endif %}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
{%- if message.role == 'tool' %}{{- '## Return of ' + message.tool_call_id + '\n' }}{% endif %}
{%- if message.content %}{{- message.content }}{% endif %}
{%- if message.tool_calls %}{{- '<|tool_calls_section_begin|>' }}{% for call in message.tool_calls %}
{{- '<|tool_call_begin|>' + CALL + '<|tool_call_argument_begin|>' }}{{ call.function.arguments | tojson -}}
{{- '<|tool_call_end|>' }}{% endfor %}{{- '<|tool_calls_section_end|>' }}{% endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
BY_ID, BY_BOTH = "call.id", "'functions.' + call.function.name + ':' + call.id"

TOOLS = tuple(
    Tool({"name": name, "description": name, "parameters": {"type": "object", "properties": {"a": {}}}})
    for name in ("find_place", "book_room")
)
FIND, AGAIN, BOOK = Call("find_place", {"a": 1}), Call("find_place", {"a": 2}), Call("book_room", {"a": "x"})
IDS = ["functions.find_place:0", "functions.find_place:1", "functions.book_room:2"]


def converse(first: str | None, second: str | None, third: str | None, named: bool = False) -> Conversation:
    """Return a conversation with two parallel calls, whose results come in reverse, and one call more."""
    names = ("find_place", "book_room") if named else (None, None)
    return Conversation(
        (
            Message("user", "Find them."),
            Message("assistant", "Both.", (replace(FIND, id=first), replace(AGAIN, id=second))),
            Message("tool", "two", call_id=second, name=names[0]),
            Message("tool", "one", call_id=first, name=names[0]),
            Message("user", "Book it."),
            Message("assistant", None, (replace(BOOK, id=third),)),
            Message("tool", "done", call_id=third, name=names[1]),
            Message("assistant", "Booked."),
        ),
        TOOLS,
    )


@pytest.fixture
def make_template(tiny_base: Path, tmp_path: Path) -> Callable[..., ChatTemplate]:
    """Return a function that makes a template printing calls in a given way."""

    def make(call: str = BY_ID, supervision: SupervisionConfig | None = None) -> ChatTemplate:
        model = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tiny_base, model)
        config = json.loads((model / "tokenizer_config.json").read_text())
        config["chat_template"] = TEMPLATE.replace("CALL", call)
        (model / "tokenizer_config.json").write_text(json.dumps(config))
        return ChatTemplate(model, supervision)

    return make


def render_with_ids(template: ChatTemplate, conversation: Conversation, ids: list[str], results: list[str]) -> Any:
    """Return transformers' token ids of a conversation whose calls and results have the given ids."""
    rows = [message.to_openai() for message in conversation.messages]
    calls = [call for row in rows for call in row.get("tool_calls", ())]
    for call, identity in zip(calls, ids, strict=True):
        call["id"] = identity
    for row, identity in zip([row for row in rows if row["role"] == "tool"], results, strict=True):
        row["tool_call_id"] = identity
    tools = [tool.to_openai() for tool in conversation.tools]
    return template.tokenizer.apply_chat_template(rows, tools=tools, return_dict=True)["input_ids"]


@pytest.mark.parametrize("conversation", [converse("a", "b", "c"), converse("call_1", "call_0", "call_1")])
def test_ids_count_the_calls_of_the_conversation_and_results_follow_them(
    conversation: Conversation, make_template: Callable[..., ChatTemplate]
) -> None:
    template = make_template()
    (sample,) = template.encode(conversation)
    assert sample.tokens == render_with_ids(template, conversation, IDS, [IDS[1], IDS[0], IDS[2]])


@pytest.mark.parametrize("named", [True, False])
def test_results_without_ids_belong_to_the_oldest_call_of_their_tool(
    named: bool, make_template: Callable[..., ChatTemplate]
) -> None:
    template = make_template()
    conversation = converse(None, None, None, named)
    (sample,) = template.encode(conversation)
    assert sample.tokens == render_with_ids(template, conversation, IDS, IDS)


def test_every_call_is_read_back_from_what_is_supervised_and_prompts_hold_the_same_history(
    make_template: Callable[..., ChatTemplate],
) -> None:
    template = make_template()
    conversation = converse("a", "b", "c")
    (sample,) = template.encode(conversation)
    kimi = detect_format(template.source)
    read = []
    for index, message in enumerate(conversation.messages):
        if message.role == "assistant":
            prompt = template.encode_prompt(replace(conversation, messages=conversation.messages[:index]))
            assert sample.tokens[: len(prompt)] == prompt
            assert sample.weights[len(prompt) - 1 : len(prompt) + 1] == [0.0, 1.0]
            end = sample.weights.index(0.0, len(prompt)) if 0.0 in sample.weights[len(prompt) :] else None
            read += kimi.parse(template.decode(sample.tokens[len(prompt) : end])).calls
    assert [(call.name, call.arguments) for call in read] == [(c.name, c.arguments) for c in (FIND, AGAIN, BOOK)]


def test_calls_that_are_split_into_turns_are_counted_as_they_come(make_template: Callable[..., ChatTemplate]) -> None:
    template = make_template(supervision=SupervisionConfig(parallel_calls="split"))
    text = template.decode(template.encode(converse("a", "b", "c"))[-1].tokens)
    places = [text.index(words) for words in (IDS[0], f"Return of {IDS[0]}", IDS[1], f"Return of {IDS[1]}", IDS[2])]
    assert places == sorted(places)


def test_a_template_that_prints_names_keeps_the_ids_of_the_row(make_template: Callable[..., ChatTemplate]) -> None:
    template = make_template(BY_BOTH)
    text = template.render(converse("a", "b", "c"))
    assert all(part in text for part in ("functions.find_place:a", "Return of b", "functions.book_room:c"))


def test_a_template_that_prints_neither_names_nor_ids_is_refused(make_template: Callable[..., ChatTemplate]) -> None:
    with pytest.raises(DataError, match="does not render calls"):
        make_template("'call'")
