"""Each call format in a real vLLM on the CPU: what a tiny model was taught comes back as calls, streamed and not.

A server for one format of each family is started, or for those that FCTUNE_WIRE_FORMATS names: ``all``, or names with
commas between them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fctune.calls.formats.registry import FORMATS
from tests.ranks import find_port
from tests.serving.measuring import Record
from tests.serving.servers import complete, read_calls, serve_vllm, stream
from tests.serving.wire_formats import ANSWERS, TOOL_OBJECTS, TOOLS, WIRE_FORMATS, train

pytestmark = pytest.mark.serving

# One of each family: JSON and other syntaxes in tags, lists in JSON and Python, and the marks of one model each.
FAMILIES = ("hermes", "llama3_json", "pythonic", "granite3", "mistral_v13", "qwen3_coder", "gemma4", "deepseek_v31")
NAMED = os.environ.get("FCTUNE_WIRE_FORMATS", ",".join(FAMILIES))
CHOSEN = tuple(WIRE_FORMATS) if NAMED == "all" else tuple(NAMED.split(","))


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in CHOSEN])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def run(name: str) -> Path:
    return train(name)


@pytest.fixture(scope="module")
def address(run: Path, vllm_python: str) -> Iterator[str]:
    with serve_vllm(run, vllm_python, find_port()) as address:
        yield address


def write_here(run: Path) -> dict[str, str]:
    """Return the greedy answer to each question by transformers, with its special tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run / "export" / "merged"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    texts = {}
    for asked in ANSWERS:
        messages = [{"role": "user", "content": asked}]
        prompt = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, return_dict=False)
        with torch.no_grad():
            ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=256)[0, len(prompt) :]
        texts[asked] = tokenizer.decode(ids)
    return texts


def to_pairs(answer: Any) -> list[tuple[str, Any]]:
    return [] if isinstance(answer, str) else [(call.name, call.arguments) for call in answer]


def ask(asked: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": asked}]


def test_the_calls_that_were_taught_come_back_as_calls(
    name: str, run: Path, address: str, record_property: Record
) -> None:
    written = write_here(run)
    unread = WIRE_FORMATS[name].unread
    for asked, answer in ANSWERS.items():
        here = FORMATS[name].parse(written[asked], TOOL_OBJECTS)
        assert [(call.name, call.arguments) for call in here.calls] == to_pairs(answer), written[asked]
        assert not here.malformed
        for get in (complete, stream):
            message = get(address, ask(asked), TOOLS)
            if reason := unread.get((asked, "streamed" if get is stream else "whole")):
                record_property("served", f"{get.__name__}, {asked!r}: {reason}")
                continue
            assert read_calls(message) == to_pairs(answer), (get.__name__, written[asked], message)
            content = (message["content"] or "").strip()
            assert content == (answer if isinstance(answer, str) else ""), get.__name__


def test_tool_choice_is_respected(name: str, address: str, record_property: Record) -> None:
    single = next(asked for asked in ANSWERS if asked.startswith("Send"))
    named = {"type": "function", "function": {"name": "send"}}
    forced = WIRE_FORMATS[name].forced
    for get in (complete, stream):
        assert not read_calls(get(address, ask(single), TOOLS, tool_choice="none")), get.__name__
        for choice, names in (("required", {tool["function"]["name"] for tool in TOOLS}), (named, {"send"})):
            message = get(address, ask(single), TOOLS, tool_choice=choice)
            if forced is None:
                assert read_calls(message) == to_pairs(ANSWERS[single]), (get.__name__, choice, message)
            else:
                record_property("served", f"{get.__name__}, {choice if choice == 'required' else 'named'}: {forced}")
                assert {call["function"]["name"] for call in message.get("tool_calls") or []} <= names
