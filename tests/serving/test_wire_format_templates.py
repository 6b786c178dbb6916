"""The templates that tiny models of each call format are taught with write that format."""

from __future__ import annotations

import json

import pytest

from fctune.calls.formats.registry import FORMATS, detect_format
from fctune.data.conversation import Call
from tests.serving.wire_formats import ANSWERS, TOOL_OBJECTS, WIRE_FORMATS, read_template, to_rows, with_ids

# vLLM reads gpt_oss from the ids of a vocabulary that its parser downloads.
NOT_SERVED = {"gpt_oss"}
# Their templates spell some values differently from ``render``; both are read as the same calls.
SPELLED_OTHERWISE = {"qwen3_coder", "lfm", "muse", "pythonic", "llama3_json", "seed_oss"}


def test_every_format_with_a_parser_in_vllm_has_a_model() -> None:
    assert {name for name, found in FORMATS.items() if found.vllm_parser} - NOT_SERVED == set(WIRE_FORMATS)


@pytest.mark.parametrize("name", sorted(WIRE_FORMATS))
def test_the_template_writes_what_the_format_writes(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = read_template(name)
    assert detect_format(source).name == name
    for row in to_rows():
        for call in row["messages"][-1].get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        tokens = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
        words = {"tools": row["tools"], "chat_template": source, **tokens}
        prompt = render_jinja_template([row["messages"][:1]], add_generation_prompt=True, **words)[0][0]
        text = render_jinja_template([row["messages"]], **words)[0][0]
        assert text.startswith(prompt)
        answer = ANSWERS[row["messages"][0]["content"]]
        calls: list[Call] = [] if isinstance(answer, str) else answer
        found = FORMATS[name].parse(text[len(prompt) :], TOOL_OBJECTS)
        assert not found.malformed
        assert [(call.name, call.arguments) for call in found.calls] == [(c.name, c.arguments) for c in calls]
        if calls and name not in SPELLED_OTHERWISE:
            assert FORMATS[name].render(with_ids(calls), TOOL_OBJECTS) in text[len(prompt) :]
