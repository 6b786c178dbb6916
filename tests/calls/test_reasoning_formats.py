"""Reasoning is taken out of a model's text as servers do, and a call inside it does not count."""

from __future__ import annotations

import importlib.util
import os
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fctune.calls.answers import read_text
from fctune.calls.formats.base import SERVERS, Server
from fctune.calls.formats.registry import FORMATS, get_format
from fctune.calls.reasoning.base import Reasoning
from fctune.calls.reasoning.registry import REASONING_FORMATS, detect_reasoning, find_reasoning
from fctune.data.conversation import Call, Tool
from fctune.tasks.evaluation.serving import run_server_parser

TOOL = Tool({"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}})
HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
F1 = (Call("f", {"a": 1}),)
HARMONY_CALL = '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
each_reasoning = pytest.mark.parametrize("name", list(REASONING_FORMATS))


def split_all(text: str, name: str | None, is_open: bool | None) -> tuple[str | None, str, bool]:
    """Return reasoning, stripped answer and whether the reasoning is closed."""
    found = REASONING_FORMATS[name].split(text, is_open) if name else find_reasoning(text)
    if found is None:
        return None, text.strip(), True
    return found.text, " ".join(found.blank(text).split()), found.is_closed


@pytest.mark.parametrize(
    ("name", "is_open", "text", "expected"),
    [
        ("qwen3", False, "<think>\nHm.\n</think>\n\nHi.", ("Hm.", "Hi.", True)),
        ("qwen3", False, "<think>\n\n</think>\n\nHi.", ("", "Hi.", True)),
        ("qwen3", False, "Hi.", (None, "Hi.", True)),
        ("qwen3", False, "Use <think> and </think>.", (None, "Use <think> and </think>.", True)),
        ("qwen3", False, "<think>\nHm.", ("Hm.", "", False)),
        ("qwen3", False, "<think>\nHm.<|im_end|>", ("Hm.", "<|im_end|>", False)),
        ("qwen3", True, "Hm.\n</think>\n\nHi.", ("Hm.", "Hi.", True)),
        ("qwen3", True, "Hm.</think>Hi.", ("Hm.", "Hi.", True)),
        ("qwen3", True, "<think>Hm.</think>Hi.", ("Hm.", "Hi.", True)),
        ("qwen3", True, "</think>\n\nHi.", ("", "Hi.", True)),
        ("qwen3", True, "Hm. And", ("Hm. And", "", False)),
        ("qwen3", True, "a</think></think>b", ("a", "b", True)),
        ("qwen3", None, "Hm.\n</think>\nHi.", ("Hm.", "Hi.", True)),
        ("qwen3", None, "The tag </think> ends it.", (None, "The tag </think> ends it.", True)),
        ("qwen3", False, "<think>a</think>b<think>c</think>", ("a", "b<think>c</think>", True)),
        ("glm45", False, "<think>a</think>b<think>c</think>d", ("a\n\nc", "b d", True)),
        ("seed_oss", False, "<seed:think>a</seed:think>b", ("a", "b", True)),
        ("mistral", False, "[THINK]a[/THINK]b", ("a", "b", True)),
        ("mistral", False, '[TOOL_CALLS]f[ARGS]{"a": "[THINK]"}', (None, '[TOOL_CALLS]f[ARGS]{"a": "[THINK]"}', True)),
        ("gemma4", False, "<|channel>thought\na\n<channel|>b", ("a", "b", True)),
        ("gemma4", False, "<|channel>thought\n<channel|>b", ("", "b", True)),
        ("gemma4", False, "thought\na<channel|>b", ("a", "b", True)),
        ("gemma4", True, "a<channel|>b", ("a", "b", True)),
        ("cohere", False, "<|START_THINKING|>a<|END_THINKING|>b", ("a", "b", True)),
        ("granite32", False, "Here is my thought process: a. Here is my response: b", ("a.", "b", True)),
        ("granite32", False, "Here's my thought process: a.", (None, "Here's my thought process: a.", True)),
        ("gpt_oss", False, "<|channel|>analysis<|message|>a<|end|>" + HARMONY_CALL, ("a", HARMONY_CALL, True)),
        ("gpt_oss", False, "<|channel|>analysis<|message|>a", ("a", "", False)),
        ("gpt_oss", False, "<|channel|>analysis to=functions.f<|message|>{}<|call|>",
         (None, "<|channel|>analysis to=functions.f<|message|>{}<|call|>", True)),
        ("gpt_oss", False, "<|channel|>final<|message|>b", (None, "<|channel|>final<|message|>b", True)),
        ("gpt_oss", True, "a<|end|><|start|>assistant<|channel|>final<|message|>b",
         ("a", "<|start|>assistant<|channel|>final<|message|>b", True)),
        ("muse", False, "to=self<|message|>a<|eom|><|start|>assistant to=user<|message|>b<|eot|>",
         ("a", "<|start|>assistant to=user<|message|>b<|eot|>", True)),
        ("muse", False, "to=self<|message|>a to=f<|message|>b<|eom|>", ("a", "to=f<|message|>b<|eom|>", True)),
        ("muse", False, "to=self<|message|>a", ("a", "", False)),
        (None, None, "<think>a</think>b", ("a", "b", True)),
        (None, None, "[THINK]a[/THINK]b", ("a", "b", True)),
        (None, None, "<|channel>thought\na<channel|>b", ("a", "b", True)),
        (None, None, "<|channel|>analysis<|message|>a<|end|>", ("a", "", True)),
        (None, None, "Use [THINK] or <|channel>.", (None, "Use [THINK] or <|channel>.", True)),
        (None, None, "<think>a</think>b<think>c", ("a", "b<think>c", True)),
        (None, None, "Hello.", (None, "Hello.", True)),
        (None, None, "", (None, "", True)),
    ],
)  # fmt: skip
def test_the_reasoning_the_answer_and_whether_it_was_closed(
    name: str | None, is_open: bool | None, text: str, expected: tuple[str | None, str, bool]
) -> None:
    assert split_all(text, name, is_open) == expected


@pytest.mark.parametrize("is_lenient", [False, True])
@pytest.mark.parametrize(
    ("text", "is_open", "calls"),
    [
        ("<think>" + HERMES + "</think>", False, ()),
        ("<think>" + HERMES, False, ()),
        ('<think>I write {"name": "f", "arguments": {"a": 1}}.', False, ()),
        (HERMES + "\n</think>\nNo.", True, ()),
        (HERMES, True, ()),
        (HERMES, False, F1),
        ("<think>" + HERMES + "</think>" + HERMES, False, F1),
        (HERMES + "\n</think>\n" + HERMES, True, F1),
        (HERMES + "\n</think>\n" + HERMES, None, F1),
    ],
)
def test_a_call_inside_the_reasoning_is_none(
    text: str, is_open: bool | None, calls: tuple[Call, ...], is_lenient: bool
) -> None:
    reading = read_text(text, get_format("hermes"), [TOOL], REASONING_FORMATS["qwen3"].split(text, is_open))
    parsed = reading.lenient if is_lenient else reading.strict
    assert (parsed.calls, parsed.malformed) == (calls, ())
    assert "think" not in parsed.prose


def test_a_harmony_call_in_the_analysis_is_none_and_the_next_one_is_read() -> None:
    text = '<|channel|>analysis<|message|>I could use {"name": "f", "arguments": {"a": 2}}.<|end|>' + HARMONY_CALL
    for parsed in read_text(text, get_format("gpt_oss"), [TOOL], find_reasoning(text)):
        assert (parsed.calls, parsed.malformed, parsed.prose) == (F1, (), "")
    parsed = read_text(text[:90], get_format("gpt_oss"), [TOOL], find_reasoning(text[:90])).lenient
    assert parsed.calls == ()


@pytest.mark.parametrize("name", list(FORMATS))
def test_the_positions_of_calls_are_those_of_the_complete_text(name: str) -> None:
    call_format = FORMATS[name]
    rendered = call_format.render([Call("f", {"a": 1}, "abcdef123")], [TOOL])
    text = f"<think>\nI call f(a=2) or {rendered}.\n</think>\n\n{rendered}"
    strict = read_text(text, call_format, [TOOL], find_reasoning(text)).strict
    assert [(call.name, call.arguments) for call in strict.calls] == [("f", {"a": 1})]
    start, end = strict.spans[0]
    assert start >= len(text) - len(rendered)
    assert text[start:end].strip() in rendered


MARKS = [
    "<think>", "</think>", "\n</think>\n", "[THINK]", "[/THINK]", "<|channel>", "<channel|>", "thought\n",
    "<seed:think>", "</seed:think>", "<|channel|>analysis", "<|message|>", "<|end|>", "<|start|>assistant", "to=self",
    "to=functions.f", "<|eom|>", "Here is my thought process:", "Here is my response:", "<tool_call>", "[TOOL_CALLS]",
    "<|tool_call>", "<|im_end|>", "<|return|>", " ", "\n", "a", "é", "\ud800",
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from(MARKS), max_size=14).map("".join),
    st.sampled_from([None, *REASONING_FORMATS]),
    st.sampled_from([None, False, True]),
)
def test_nothing_is_lost_and_nothing_raises(text: str, name: str | None, is_open: bool | None) -> None:
    found = REASONING_FORMATS[name].split(text, is_open) if name else find_reasoning(text)
    if found is None:
        assert not is_open or name == "granite32" or name is None
        return
    assert found.spans
    position = 0
    for start, end in found.spans:
        assert position <= start <= end <= len(text)
        position = end
    answer = found.blank(text)
    assert len(answer) == len(text)
    kept = [char for start, char in enumerate(text) if not any(a <= start < b for a, b in found.spans)]
    assert answer.replace(" ", "") == "".join(kept).replace(" ", "")
    # The reasoning comes from the spans, in order.
    inside = iter("".join(text[start:end] for start, end in found.spans))
    assert all(char in inside for char in found.text if not char.isspace())


@each_reasoning
def test_splitting_takes_linear_time(name: str) -> None:
    rng = random.Random(1)
    pieces = [*MARKS, "word "]
    texts = ["".join(rng.choice(pieces) for _ in range(20_000))]
    texts += [mark * 20_000 for mark in ("<think>", "<think></think>", "[THINK][/THINK]", "<|channel><channel|>",
                                          "<|channel|>analysis<|message|>", "to=self<|message|>", "to=", "<|start|>",
                                          "Here is my thought process:")]  # fmt: skip

    def cpu_time(text: str, is_open: bool | None) -> float:
        begun = time.process_time()
        REASONING_FORMATS[name].split(text, is_open)
        return time.process_time() - begun

    for text in texts:
        for is_open in (None, False, True):
            # A machine that others share may stall in one measurement; quadratic time is too long in each.
            assert any(cpu_time(text, is_open) < 1 for _ in range(3)), text[:40]


@pytest.mark.parametrize(
    ("prompt", "name", "expected"),
    [
        ("<|im_start|>assistant\n<think>\n", "qwen3", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "qwen3", False),
        ("<|im_start|>assistant\n", "qwen3", False),
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", "qwen3", False),
        ("<|turn>model\n<|channel>thought\n", "gemma4", True),
        ("<|turn>model\n<|channel>thought\n<channel|>", "gemma4", False),
        ("<|start|>assistant<|channel|>analysis<|message|>", "gpt_oss", True),
        ("<|start|>assistant<|channel|>final<|message|>", "gpt_oss", False),
        ("<|start|>assistant", "gpt_oss", False),
        ("<|start|>assistant to=self<|message|>", "muse", True),
    ],
)
def test_a_prompt_that_opens_the_reasoning_is_recognised(prompt: str, name: str, expected: bool) -> None:
    assert REASONING_FORMATS[name].is_opened_by(prompt) is expected


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed: pip install --no-deps trl")
def test_formats_are_detected_in_official_templates() -> None:
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    templates = Path(spec.submodule_search_locations[0]) / "chat_templates"
    expected = {
        "qwen3": "qwen3", "qwen3_5_think": "qwen3", "qwen3_8": "qwen3", "nemotron_3_nano": "nemotron3",
        "nemotron_3_ultra": "nemotron3", "glm4moe": "glm45", "gemma4": "gemma4", "gemma4_v2": "gemma4",
        "gemma4_v5": "gemma4", "gptoss": "gpt_oss", "muse_glimmer": "muse", "deepseek_r1_distill": "deepseek_r1",
        "lfm2_2_5_v2": "qwen3", "qwen2_5": None, "llama3_1": None, "qwen3_instruct_2507": None, "gemma3": None,
        "cohere": None,
    }  # fmt: skip
    found = {name: detect_reasoning((templates / f"{name}.jinja").read_text(encoding="utf-8")) for name in expected}
    assert {name: one.name if one else None for name, one in found.items()} == expected


def test_every_format_is_named_once_and_recognised_by_its_own_signature() -> None:
    for name, found in REASONING_FORMATS.items():
        for signature in found.template_signatures:
            assert getattr(detect_reasoning(" ".join(signature.marks)), "name", None) == name, signature


# Tags of the formats, and the mark that opens a call.
_TAGS = {
    "deepseek_r1": ("<think>", "</think>", "<tool_call>"),
    "deepseek_v31": ("<think>", "</think>", "<tool_call>"),
    "qwen3": ("<think>", "</think>", "<tool_call>"),
    "nemotron3": ("<think>", "</think>", "<tool_call>"),
    "granite42": ("<think>", "</think>", "<tool_call>"),
    "glm45": ("<think>", "</think>", "<tool_call>"),
    "kimi_k2": ("<think>", "</think>", "<|tool_calls_section_begin|>"),
    "minimax_m2": ("<think>", "</think>", "<minimax:tool_call>"),
    "seed_oss": ("<seed:think>", "</seed:think>", "<seed:tool_call>"),
    "mistral": ("[THINK]", "[/THINK]", "[TOOL_CALLS]"),
    "gemma4": ("<|channel>thought\n", "<channel|>", "<|tool_call>"),
    "granite32": ("Here is my thought process:", "Here is my response:", "<tool_call>"),
    "muse": ("to=self<|message|>", "<|eom|>", "to=f<|message|><atem:function_calls>"),
}
_WORDS = ("I", "need", "the", "weather:", "Paris", "{", "}", "<b>", "é", "\n", "then\n\n", "<", "think", "a=1")


def make_output(rng: random.Random, name: str, is_open: bool) -> str:
    """Return a turn: reasoning or none, closed or cut, with tags that are doubled or stray, and an answer or a call."""
    opening, closing, call = _TAGS[name]

    def words(most: int = 8) -> str:
        return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(0, most)))

    body = rng.choice(["", "\n"]) + words() + rng.choice(["", "\n"])
    text = "" if is_open and rng.random() < 0.8 else ("\n" if rng.random() < 0.05 else "") + opening
    text += body
    if rng.random() < 0.15:
        return text
    text += closing + (closing if rng.random() < 0.05 else "") + rng.choice(["", "\n\n"])
    if name in ("glm45", "mistral", "gemma4") and rng.random() < 0.2:
        text += words() + opening + words() + closing
    if name == "muse":
        return text + rng.choice([f"to=user<|message|>{words()}<|eot|>", f"{call}x</atem:function_calls><|eom|>"])
    return text + rng.choice([words(), words() + f"{call}x", f"{call}x"])


def explain(text: str, name: str, server: Server) -> bool:
    """Return True if a server reads a text differently for a known reason."""
    opening, closing, call = _TAGS[name]
    reasoning = text.partition(closing)[0]
    return (
        call in reasoning  # servers end the reasoning there
        or text.count(closing) > 1  # they drop further closings anywhere, or none
        or text.count(opening.strip()) > 1
        or (server == "sglang" and text[0].isspace() and opening in text)  # it expects the tag to come first
    )


def remove_space(text: str | None) -> str:
    return "".join((text or "").split())


@pytest.mark.slow
@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("name", list(_TAGS))
def test_servers_own_reasoning_parsers_split_alike(name: str, server: Server, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    found = REASONING_FORMATS[name]
    python, parser = os.environ.get(f"FCTUNE_{server.upper()}_PYTHON"), found.get_server_parser(server)
    if python is None or parser is None:
        pytest.skip(f"needs a parser of {server}, and a Python that has it in FCTUNE_{server.upper()}_PYTHON")
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "fctune" / "assets" / "tiny_base")
    tokenizer.add_tokens([*{tag.strip() for tag in _TAGS[name]}, "<|channel>", "[ARGS]"], special_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    is_open = name not in ("mistral", "gemma4", "granite32", "muse")
    rng = random.Random(name)
    outputs = [make_output(rng, name, is_open) for _ in range(2_000)]
    template_args = {"thinking": True} if name == "deepseek_v31" else {}
    requests = [
        {"id": index, "text": text, "tools": [], "template_args": template_args, "is_open": is_open}
        for index, text in enumerate(outputs)
    ]
    version, replies = run_server_parser(server, "hermes", tmp_path, requests, python, reasoning_parser=parser)
    num_explained = 0
    for index, text in enumerate(outputs):
        reply = replies[index]
        assert "error" not in reply, (text, reply)
        ours = found.split(text, is_open) or Reasoning("")
        is_same = remove_space(ours.text) == remove_space(reply["reasoning"])
        if name != "muse":  # whose parsers also take the answer out of its message
            is_same &= remove_space(ours.blank(text)) == remove_space(reply["content"])
        if not is_same:
            assert explain(text, name, server), (text, ours, reply)
            num_explained += 1
    print(f"{version} {parser}: {len(outputs) - num_explained:,} of {len(outputs):,} alike")
    assert num_explained < 0.3 * len(outputs)
