"""Reasoning reaches a template under the template's own name, and rows that it cannot render as they are are named."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fctune.base.errors import ConfigError, DataError
from fctune.data.chat_template import ChatTemplate
from fctune.data.check import check_sources
from fctune.data.check.reasoning import ReasoningUse
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.reasoning import ReasoningMode, find_reasoning_support
from fctune.data.supervision import SupervisionConfig
from fctune.data.tracing import TracedTemplate
from tests.thinking_templates import HYBRID, READS, write_thinking_model

_spec = importlib.util.find_spec("trl")
PUBLIC = Path(_spec.origin).parent / "chat_templates" if _spec and _spec.origin else None

TOOL = Tool(
    {
        "name": "find_place",
        "description": "Find a place.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    }
)
ASK = Message("user", "Find Bergen.")
CALL = Call("find_place", {"town": "Bergen"}, id="callAAAA1")
THOUGHT = "The user names a town, so look it up."
REASONED = Conversation((ASK, Message("assistant", "It is in Norway.", reasoning=THOUGHT)))
REASONED_CALL = Conversation((ASK, Message("assistant", None, (CALL,), reasoning=THOUGHT)), (TOOL,))


@pytest.fixture
def write_template(tiny_base: Path, tmp_path: Path) -> Callable[..., Path]:
    """Write a model directory whose template prints a block before an assistant's content."""
    return lambda block: write_thinking_model(tiny_base, tmp_path / "model", block)


def text_of(template: ChatTemplate, conversation: Conversation) -> str:
    (sample,) = template.encode(conversation)
    return template.decode(sample.tokens)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_passed_under_the_name_that_the_template_reads(
    key: str, write_template: Callable[..., Path]
) -> None:
    template = ChatTemplate(write_template(READS.replace("KEY", key)))
    assert template.reasoning.key == key
    for conversation in (REASONED, REASONED_CALL):
        (sample,) = template.encode(conversation)
        assert template.decode(sample.tokens).count(f"<think>\n{THOUGHT}\n</think>\n\n") == 1
        # transformers itself, given the reasoning under that name
        messages = [message.to_openai() for message in conversation.messages]
        messages[1][key] = messages[1].pop("reasoning_content")
        tools = [tool.to_openai() for tool in conversation.tools] or None
        assert sample.tokens == list(
            template.tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=True)["input_ids"]
        )


def test_a_template_that_reads_no_reasoning_is_named_with_the_remedies(
    tiny_base: Path, write_template: Callable[..., Path]
) -> None:
    plain = ChatTemplate(tiny_base)
    assert plain.reasoning.key is None
    with pytest.raises(DataError, match=r"messages\[1\] has reasoning.*data\.reasoning=drop.*data\.reasoning=in_con"):
        plain.encode(REASONED)
    without = plain.encode(Conversation((ASK, Message("assistant", "It is in Norway."))))
    modes: tuple[ReasoningMode, ...] = ("drop", "keep_printed")
    for mode in modes:
        assert ChatTemplate(tiny_base, SupervisionConfig(reasoning=mode)).encode(REASONED) == without
    inside = ChatTemplate(tiny_base, SupervisionConfig(reasoning="in_content"))
    assert f"<think>\n{THOUGHT}\n</think>\n\nIt is in Norway." in text_of(inside, REASONED)
    assert f"<think>\n{THOUGHT}\n</think>" in text_of(inside, REASONED_CALL)


def test_reasoning_in_content_is_not_in_the_history_as_it_will_not_be_at_inference(tiny_base: Path) -> None:
    template = ChatTemplate(tiny_base, SupervisionConfig(reasoning="in_content"))
    second = (ASK, Message("assistant", "It still is.", reasoning="Asked again."))
    first_sample, last_sample = template.encode(Conversation((*REASONED.messages, *second)))
    assert template.decode(first_sample.tokens) == text_of(template, REASONED)
    prompt = ChatTemplate(tiny_base).encode_prompt(Conversation((*REASONED.messages, ASK)))
    assert last_sample.tokens[: len(prompt)] == prompt  # of evaluation, which has the history's reasoning too
    answer = template.decode(last_sample.tokens[len(prompt) :])
    assert answer.startswith("<think>\nAsked again.\n</think>\n\nIt still is.")
    assert not any(last_sample.weights[: len(prompt)])
    assert all(last_sample.weights[len(prompt) :])


def test_drop_removes_reasoning_where_the_template_reads_it(write_template: Callable[..., Path]) -> None:
    model = write_template(READS.replace("KEY", "thinking"))
    assert THOUGHT not in text_of(ChatTemplate(model, SupervisionConfig(reasoning="drop")), REASONED)
    assert THOUGHT in text_of(ChatTemplate(model, SupervisionConfig(reasoning="keep_printed")), REASONED)


def test_switches_reach_every_rendering_and_unknown_ones_are_named(write_template: Callable[..., Path]) -> None:
    model = write_template(HYBRID)
    question = Conversation((ASK,))
    default, off = ChatTemplate(model), ChatTemplate(model, template_args={"enable_thinking": False})
    assert default.reasoning.switch == "enable_thinking"
    assert default.reasoning.variables == ("enable_thinking",)
    assert "<think>" not in default.decode(default.encode_prompt(question))
    assert off.decode(off.encode_prompt(question)).endswith("<think>\n\n</think>\n\n")
    assert "<think>" in off.render(question, add_generation_prompt=True)
    # a row's own switch comes first
    own = replace(question, template_args={"enable_thinking": True})
    assert off.encode_prompt(own) == default.encode_prompt(question)
    with pytest.raises(
        ConfigError, match=r"model: template_args sets enable_thinkin, .*did you mean enable_thinking\?"
    ):
        ChatTemplate(model, template_args={"enable_thinkin": True})
    with pytest.raises(DataError, match=r"sets effort, .* does not read \(it reads: enable_thinking\)"):
        default.encode(replace(REASONED, template_args={"effort": "low"}))
    ignoring = ChatTemplate(model, SupervisionConfig(thinking="config"))
    assert ignoring.encode(replace(REASONED, template_args={"effort": "low"})) == default.encode(REASONED)


def test_thinking_is_set_by_row_only_if_a_row_has_reasoning(write_template: Callable[..., Path]) -> None:
    model = write_template(HYBRID)
    plain = Conversation((ASK, Message("assistant", "It is in Norway.")))

    def switches(thinking: str, has_reasoning: bool, *rows: Conversation) -> list[Any]:
        template = ChatTemplate(model, SupervisionConfig(thinking=thinking))  # type: ignore[arg-type]
        template.resolve_thinking(lambda: has_reasoning)
        settings = template.encoder.supervision
        fitted = [template.reasoning.fit(row, settings.reasoning, settings.thinking) for row in rows]
        return [row.template_args.get("enable_thinking") for row in fitted]

    own = replace(plain, template_args={"enable_thinking": True})
    assert switches("auto", True, REASONED, plain, own) == [True, False, True]
    assert switches("auto", False, plain, own) == [None, True]
    assert switches("rows", True, REASONED, plain, own) == [None, None, True]
    assert switches("config", True, REASONED, plain, own) == [None, None, None]


# Of public templates: the name of reasoning, and of the thinking switch.
EXPECTED: dict[str, tuple[str | None, str | None]] = {
    "deepseek_r1_distill": (None, None),  # removes it
    "deepseek_r1_distill_training": ("content", None),
    "gemma4": ("reasoning_content", "enable_thinking"),
    "glm4moe": ("reasoning_content", "enable_thinking"),
    "gptoss": ("thinking", None),
    "lfm2_2_5": ("thinking", None),
    "llama3_1": (None, None),
    "muse_glimmer": ("reasoning_content", None),
    "nemotron_3_nano": ("reasoning_content", "enable_thinking"),
    "qwen2_5": (None, None),
    "qwen3": ("reasoning_content", "enable_thinking"),
    "qwen3_8": ("reasoning_content", "enable_thinking"),
}


@pytest.mark.skipif(PUBLIC is None, reason="trl is not installed: pip install -e '.[dev]'")
@pytest.mark.parametrize("name", EXPECTED)
def test_public_templates_name_their_reasoning_and_switches(name: str) -> None:
    assert PUBLIC is not None
    source = (PUBLIC / f"{name}.jinja").read_text()
    found = find_reasoning_support(TracedTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}))
    assert (found.key, found.switch) == EXPECTED[name]
    # a switch that is found is a word of the template, and no special token or input is one
    assert all(variable in source for variable in found.variables)
    assert not {"bos_token", "messages", "tools", "add_generation_prompt", "namespace"} & set(found.variables)


def test_a_conversation_with_reasoning_survives_json(tmp_path: Path) -> None:
    row = replace(REASONED_CALL, template_args={"enable_thinking": True}).to_openai()
    assert json.loads(json.dumps(row))["messages"][1]["reasoning_content"] == THOUGHT
    assert row["chat_template_kwargs"] == {"enable_thinking": True}
    digests = {
        conversation.digest()
        for conversation in (
            *(REASONED_CALL, replace(REASONED_CALL, template_args={"enable_thinking": False})),
            replace(REASONED_CALL, messages=(ASK, replace(REASONED_CALL.messages[1], reasoning=None))),
        )
    }
    assert len(digests) == 3


def check_rows(model: Path, rows: list[dict[str, Any]], path: Path, **options: Any) -> ReasoningUse:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    template_args = options.pop("template_args", None)
    template = ChatTemplate(model, SupervisionConfig(**({"thinking": "auto"} | options)), template_args)
    template.resolve_thinking(lambda: any("reasoning" in json.dumps(row) for row in rows))
    report = check_sources([str(path)], template=template)
    assert report.conversations == len(rows)
    return report.reasoning


def test_the_check_reports_shares_of_reasoning_and_what_they_would_teach(
    write_template: Callable[..., Path], tiny_base: Path, tmp_path: Path
) -> None:
    model, path = write_template(HYBRID), tmp_path / "rows.jsonl"
    plain = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
    thoughtful = REASONED.to_openai()
    two_turns = {"messages": thoughtful["messages"] + plain["messages"]}
    mixed = check_rows(model, [plain, thoughtful, two_turns, plain], path)
    tokenizer = ChatTemplate(model).tokenizer
    assert (mixed.rows, mixed.rows_share, mixed.turns, mixed.turns_share) == (2, 0.5, 2, 0.4)
    assert mixed.characters == 2 * len(THOUGHT)
    assert mixed.tokens == 2 * len(tokenizer.encode(THOUGHT, add_special_tokens=False))
    assert mixed.warning is None
    assert check_sources([str(path)]).reasoning.tokens is None

    never = check_rows(model, [plain], path).warning or ""
    assert "never to think" in never
    assert "model.template_args.enable_thinking=false" in never
    assert check_rows(model, [plain], path, template_args={"enable_thinking": False}).warning is None
    assert "never to think" in (check_rows(model, [thoughtful], path, reasoning="drop").warning or "")
    always = check_rows(model, [thoughtful, two_turns], path).warning or ""
    assert "always to think" in always
    assert check_rows(model, [thoughtful], path, template_args={"enable_thinking": True}).warning is None
    assert "rendered alike" in (check_rows(model, [plain, thoughtful], path, thinking="rows").warning or "")
    by_row = [{**plain, "enable_thinking": False}, {**thoughtful, "enable_thinking": True}]
    assert check_rows(model, by_row, path, thinking="rows").warning is None
    # a template that prints no reasoning can teach nothing about it
    assert check_rows(tiny_base, [plain], path).warning is None


def test_reasoning_must_be_printed_where_its_turn_is_trained(write_template: Callable[..., Path]) -> None:
    """A template may leave reasoning out of the history, as it does at inference, but not out of the turn itself."""
    only_calls = READS.replace("message.KEY %}", "message.reasoning and message.tool_calls %}").replace(
        "message.KEY", "message.reasoning"
    )
    model = write_template(only_calls)
    assert THOUGHT in text_of(ChatTemplate(model), REASONED_CALL)
    with pytest.raises(DataError, match=r"does not print the reasoning of messages\[1\].*data\.reasoning=keep_printed"):
        ChatTemplate(model).encode(REASONED)
    kept = ChatTemplate(model, SupervisionConfig(reasoning="keep_printed"))
    assert THOUGHT not in text_of(kept, REASONED)
    assert THOUGHT in text_of(kept, REASONED_CALL)


def test_reasoning_that_a_template_drops_from_the_history_is_trained_in_its_own_turn(
    write_template: Callable[..., Path],
) -> None:
    last_only = READS.replace("message.KEY %}", "message.reasoning and loop.last %}").replace("KEY", "reasoning")
    template = ChatTemplate(write_template(last_only))
    second = (ASK, Message("assistant", "It still is.", reasoning="Asked again."))
    samples = template.encode(Conversation((*REASONED.messages, *second)))
    trained = [
        "".join(template.decode([t for t, w in zip(s.tokens, s.weights, strict=True) if w > 0])) for s in samples
    ]
    assert [(THOUGHT in text, "Asked again." in text) for text in trained] == [(True, False), (False, True)]
    assert THOUGHT not in template.decode(samples[1].tokens)
