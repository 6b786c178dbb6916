"""Every public chat template that renders tools and calls: token ids, masks, stop tokens and calls, or its defect.

The templates are those of the ``trl`` and ``transformers`` wheels, each with a byte-level tokenizer that has the
special tokens of all. What must be supervised is computed here with transformers alone: the messages before a turn with
the generation prompt, and the messages up to the turn; their difference is the turn.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.templates import PublicTemplate, find_templates, stops_of, write_model, write_tokenizer
from fctune.base.errors import DataError
from fctune.calls.formats.registry import detect_format
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.conversation_encoder import Encoded
from fctune.data.supervision import SupervisionConfig

TEMPLATES = find_templates()

pytestmark = pytest.mark.skipif(len(TEMPLATES) < 10, reason="trl is not installed: pip install -e '.[dev]'")

# Names under which the families' templates read reasoning.
REASONING_KEYS = {
    "gptoss": "thinking",
    "lfm2_2_5_v": "reasoning_content",
    "lfm2_2_5": "thinking",
    "gemma4": "reasoning",
    "": "reasoning_content",
}

# Why the others cannot be trained on: the template prints no tools, or no calls.
NO_CALLS = ("lfm2", "lfm2_training")
NO_TOOLS = (
    "cohere", "cohere2", "cohere2_training", "cohere_training", "deepseek_r1_distill", "deepseek_r1_distill_training",
    "deepseekv3", "deepseekv3_training", "gemma", "gemma3", "gemma3_training", "gemma_training", "idefics3",
    "idefics3_training", "llama3", "llama3_training", "llava_next", "llava_next_training", "phi3", "phi3_5",
    "phi3_5_training", "phi3_training", "qwen2_5_vl", "qwen2_5_vl_training", "smolvlm", "smolvlm_training",
    "transformers_qwen2_audio", "transformers_smolvlm",
)  # fmt: skip
ACCEPTED = [template for template in TEMPLATES if template.name not in (*NO_CALLS, *NO_TOOLS)]

TOOL = Tool(
    {
        "name": "find_place",
        "description": "Find a place.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["town"],
        },
    }
)


def call(identity: str, **arguments: Any) -> Call:
    return Call("find_place", arguments, id=identity)


def result(identity: str, content: str) -> Message:
    return Message("tool", content, call_id=identity, name="find_place")


def answer(content: str | None, *calls: Call, reasoning: str | None = None) -> Message:
    return Message("assistant", content, calls, reasoning=reasoning)


SYSTEM = Message("system", "Be brief.")
HI, HELLO = Message("user", "Hi"), answer("Hello there.")
ASK = Message("user", "Find Bergen for 3 days.")
BERGEN, OSLO = call("callAAAA1", town="Bergen", days=3), call("callBBBB2", town="Oslo")
CALLS = answer(None, BERGEN)
FOUND = result("callAAAA1", '{"found": true}')
THERE = answer("It is there.")
AGAIN = Message("user", "And Oslo?")
THOUGHT = "The user wants a place.\n\nI look it up."
MARKUP = '<b>1 < 2</b> & "x" [x] {{ y }} </tools>'
CONVERSATIONS = {
    name: Conversation(messages, (TOOL,))
    for name, messages in {
        "no call": (HI, HELLO),
        "single": (SYSTEM, ASK, CALLS),
        "result and answer": (ASK, CALLS, FOUND, THERE),
        "several turns": (SYSTEM, HI, HELLO, ASK, CALLS, FOUND, THERE, AGAIN, answer(None, OSLO)),
        "several answers": (HI, HELLO, Message("user", "Who?"), answer("Me."), Message("user", "Why?"), answer("So.")),
        "two steps": (ASK, CALLS, FOUND, answer(None, OSLO), result("callBBBB2", "[]"), THERE),
        "unicode": (ASK, answer(None, call("callAAAA1", town="Ærø 北京 🎉")), FOUND, answer("Ærø 北京 🎉!")),
        "empty arguments": (ASK, answer(None, call("callAAAA1")), FOUND, THERE),
        "empty content": (ASK, answer("", BERGEN), FOUND, THERE),
        "whitespace": (HI, answer("\n Hello there. \n\n"), ASK, answer(" Yes.\n")),
        "content with a call": (ASK, answer("Let me look.", BERGEN), FOUND, THERE),
        "content with the last call": (HI, HELLO, ASK, answer("Let me look.", BERGEN)),
        "markup": (Message("user", MARKUP), CALLS, result("callAAAA1", MARKUP), answer(MARKUP)),
        "a result that looks like a turn": (
            ASK,
            CALLS,
            result("callAAAA1", "<tool_response>\nx</tool_response>"),
            THERE,
        ),
        "parallel": (
            *(ASK, answer(None, BERGEN, OSLO), result("callAAAA1", "1"), result("callBBBB2", "2"), answer("Both.")),
        ),
        "reasoning": (ASK, answer("Hello there.", reasoning=THOUGHT)),
        "reasoning before a call": (
            ASK,
            answer(None, BERGEN, reasoning=THOUGHT),
            FOUND,
            answer("Yes.", reasoning="So."),
        ),
        "reasoning in several turns": (
            *(
                SYSTEM,
                HI,
                answer("Hello.", reasoning="They greet."),
                ASK,
                answer(None, BERGEN, reasoning=THOUGHT),
                FOUND,
            ),
            *(answer("It is there.", reasoning="Found."), AGAIN, answer(None, OSLO, reasoning="Now Oslo.")),
        ),
        "reasoning in one turn": (HI, HELLO, ASK, answer("It is there.", reasoning="Known."), AGAIN, answer("No.")),
        "reasoning, content and a call": (ASK, answer("Let me look.", BERGEN, reasoning=THOUGHT), FOUND, THERE),
    }.items()
}


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes the model directory of a template."""
    root = tmp_path_factory.mktemp("models")
    write_tokenizer(root / "tokenizer", [str(c.to_openai()) for c in CONVERSATIONS.values()])

    def make(name: str) -> Path:
        if not (root / name).exists():
            write_model(root / name, root / "tokenizer", next(t for t in TEMPLATES if t.name == name))
        return root / name

    return make


class Reference:
    """What transformers renders, and what follows from it; nothing here uses this project's encoding."""

    def __init__(self, template: ChatTemplate, name: str):
        self.tokenizer, self.name = template.tokenizer, name
        self.reasoning_key = next(key for family, key in REASONING_KEYS.items() if name.startswith(family))
        self.switches = [
            s for s in ("enable_thinking", "thinking") if re.search(rf"\b{s} is|if {s}\b", template.source)
        ]

    def render(self, messages: tuple[Message, ...], **options: Any) -> str:
        rows = [m.to_openai() for m in messages]
        for row in rows:
            if "reasoning_content" in row:
                row[self.reasoning_key] = row.pop("reasoning_content")
        text = self.tokenizer.apply_chat_template(rows, tools=[TOOL.to_openai()], tokenize=False, **options)
        assert isinstance(text, str)
        return text

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def turn(self, messages: tuple[Message, ...], index: int) -> tuple[list[int], list[int], str]:
        """Return the prompt's ids, the ids due from the model with its stop token, and the text of these."""
        options = [{}, *({name: value} for value in (False, True) for name in self.switches)]
        for option in options:
            prompt = self.render(messages[:index], add_generation_prompt=True, **option)
            until = self.render(messages[: index + 1], **option)
            if until.startswith(prompt):
                text = until[len(prompt) :]
                break
        else:  # the turn changes what is printed before it, so it follows a prompt that is not in the same rendering
            prompt = self.render(messages[:index], add_generation_prompt=True)
            until = self.render(messages[: index + 1])
            if self.name.startswith("gptoss"):  # without the reasoning before a call, once an answer follows
                header = "<|start|>assistant"
                text = until[until.index(header, until.rindex("<|start|>functions.")) + len(header) :]
            else:  # Gemma ends the turn with the call only where no answer continues it
                shared = next(i for i, (a, b) in enumerate(zip(prompt, until, strict=False)) if a != b)
                text = until[shared - prompt[:shared].endswith("<") :]
        if text.rstrip().endswith(stops_of(self.name)):
            text = text.rstrip()
        else:
            following = [m.role for m in messages[index + 1 : index + 2]]
            is_result = following == ["tool"] or (not following and bool(messages[index].calls))
            text += "<|observation|>" if is_result else "<|user|>"
        prompt_ids, ids = self.ids(prompt), self.ids(prompt + text)
        if ids[: len(prompt_ids)] != prompt_ids:  # a token crosses the end of the prompt, which is encoded alone
            return prompt_ids, self.ids(text), text
        return prompt_ids, ids[len(prompt_ids) :], text

    def is_complete(self, message: Message, text: str) -> bool:
        values = [str(value) for c in message.calls for value in c.arguments.values()]
        escaped = text + text.encode("ascii", "ignore").decode() + json.dumps(text, ensure_ascii=False)
        with contextlib.suppress(ValueError):
            escaped += json.loads('"' + text.replace('"', '\\"').replace("\n", "\\n") + '"')
        parts = [message.content, message.reasoning, *values, *(c.name for c in message.calls)]
        return all(part.strip() in escaped for part in parts if part)


def runs_of(sample: Encoded) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each run of supervised tokens."""
    edges = [0.0, *sample.weights, 0.0]
    changes = [i for i in range(len(edges) - 1) if (edges[i] > 0) != (edges[i + 1] > 0)]
    yield from zip(changes[::2], changes[1::2], strict=True)


@pytest.mark.sample(15)
@pytest.mark.parametrize("public", ACCEPTED, ids=lambda public: public.name)
def test_ids_masks_stop_tokens_and_calls_of_twenty_conversations(
    public: PublicTemplate, make_model: Callable[[str], Path]
) -> None:
    template = ChatTemplate(make_model(public.name))
    reference = Reference(template, public.name)
    outcomes = {name: compare(template, reference, c.messages) for name, c in CONVERSATIONS.items()}
    assert len(outcomes) == 20
    assert {name for name, outcome in outcomes.items() if outcome != "equal"} == refused_by(public.name)


def refused_by(name: str) -> set[str]:
    """Return the conversations of which a template prints a part nowhere, or which it rejects."""
    reasoning = {"reasoning", "reasoning before a call", "reasoning in several turns", "reasoning in one turn"}
    mixed, content = "reasoning, content and a call", {"content with a call", "content with the last call"}
    family = name.removesuffix("_training")
    printing_none = ("lfm2_v2", "qwen2_5", "qwen3_instruct_2507", "qwen3_vl", "gemma4_v2", "transformers_llama4")
    if family in printing_none:  # no reasoning
        return reasoning | {mixed}
    if family in ("gemma4", "gemma4_v3", "gemma4_v4"):  # it prints reasoning before calls only
        return reasoning
    if family in ("llama3_1", "llama3_2"):  # it prints one call, and nothing with it
        return reasoning | content | {mixed, "parallel"}
    return {"gptoss": {"parallel", mixed}, "muse_glimmer": {*content, mixed}}.get(family, set())


def compare(template: ChatTemplate, reference: Reference, messages: tuple[Message, ...]) -> str:
    """Compare all samples of a conversation with the reference; return equal, rejected or incomplete."""
    conversation = Conversation(messages, (TOOL,))
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    try:
        reference.render(messages)
        due = {index: reference.turn(messages, index) for index in turns}
    except Exception:  # transformers lets a template's own error through
        with pytest.raises(DataError, match="the chat template"):
            template.encode(conversation)
        return "rejected"
    if not all(reference.is_complete(messages[index], due[index][2]) for index in turns):
        with pytest.raises(DataError, match=r"does not print|does not read"):
            template.encode(conversation)
        return "incomplete"
    samples = template.encode(conversation)
    whole = [reference.ids(reference.render(messages))]
    whole += [reference.ids(reference.render(messages[: index + 1])) for index in turns]
    for index, (prompt, answered, text) in due.items():
        holding = [
            sample
            for sample in samples
            if sample.tokens[: len(prompt)] == prompt
            and sample.tokens[len(prompt) : len(prompt) + len(answered)] == answered
            and all(weight > 0 for weight in sample.weights[len(prompt) : len(prompt) + len(answered)])
        ]
        assert len(holding) == 1, (index, text)
        assert answered[-1] in template.stop_ids
        check_calls(template, messages[index], text)
    num_due = sum(len(answered) for _, answered, _ in due.values())
    assert sum(sample.num_supervised for sample in samples) == num_due
    split = [[*prompt, *answered] for prompt, answered, _ in due.values()]
    for sample in samples:
        is_appended = sample.tokens[:-1] in whole and sample.tokens[-1] in template.stop_ids
        is_alone = any(sample.tokens[: len(ids)] == ids for ids in split)
        assert sample.tokens in whole or is_appended or is_alone
    return "equal"


def check_calls(template: ChatTemplate, message: Message, text: str) -> None:
    """Require that a parser finds the calls of a message in the text due, and none in the text of an answer."""
    try:
        call_format = detect_format(template.source)
    except DataError:
        return  # formats are tested on their own
    plain = template.decode([i for i in template.tokenizer(text)["input_ids"] if i not in template.stop_ids])
    found = call_format.parse(plain, (TOOL,)).calls
    assert [(c.name, c.arguments) for c in found] == [(c.name, c.arguments) for c in message.calls], text


@pytest.mark.parametrize("public", [t for t in TEMPLATES if t not in ACCEPTED], ids=lambda t: t.name)
def test_a_template_that_prints_no_tools_or_no_calls_is_refused_for_that(
    public: PublicTemplate, make_model: Callable[[str], Path]
) -> None:
    reason = "does not render calls" if public.name in NO_CALLS else "ignores tools"
    with pytest.raises(DataError, match=reason):
        ChatTemplate(make_model(public.name))
    source = public.source
    assert (
        "tool_calls" not in source
        if reason == "does not render calls"
        else not re.search(r"(?<!_)\btools\b(?! in)", source)
    )


@pytest.mark.parametrize("name", ["llama3_1", "qwen2_5"])
def test_a_template_with_one_call_per_turn_rejects_or_splits_parallel_calls(
    name: str, make_model: Callable[[str], Path]
) -> None:
    model = make_model(name)
    parallel = CONVERSATIONS["parallel"]
    if name == "llama3_1":
        with pytest.raises(DataError, match="single tool-calls"):
            ChatTemplate(model).encode(parallel)
    (split,) = ChatTemplate(model, SupervisionConfig(parallel_calls="split")).encode(parallel)
    text = ChatTemplate(model).tokenizer.decode(split.tokens)
    assert text.index('"Bergen"') < text.index("Oslo")
    assert json.dumps({"town": "Oslo"}) in text


def test_a_call_that_the_template_drops_is_named_with_the_remedy(make_model: Callable[[str], Path]) -> None:
    parallel, model = CONVERSATIONS["parallel"], make_model("gptoss")
    with pytest.raises(DataError, match=r"call 2 of 2 of messages\[1\] \(find_place\); set data.parallel_calls=split"):
        ChatTemplate(model).encode(parallel)
    template = ChatTemplate(model, SupervisionConfig(parallel_calls="split"))
    text = template.decode(template.encode(parallel)[-1].tokens)
    assert "Bergen" in text
    assert "Oslo" in text


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2", "muse_glimmer"])
def test_text_that_the_template_drops_next_to_a_call_is_named_or_dropped_on_request(
    name: str, make_model: Callable[[str], Path]
) -> None:
    conversation = CONVERSATIONS["content with a call"]
    with pytest.raises(DataError, match=r"the text next to a call in messages\[1\]; set data.content_with_calls=drop"):
        ChatTemplate(make_model(name)).encode(conversation)
    template = ChatTemplate(make_model(name), SupervisionConfig(content_with_calls="drop"))
    assert template.encode(conversation) == template.encode(Conversation((ASK, CALLS, FOUND, THERE), (TOOL,)))


def test_text_next_to_a_call_that_the_template_drops_after_an_answer_is_trained_and_stays_in_the_prompt(
    make_model: Callable[[str], Path],
) -> None:
    template = ChatTemplate(make_model("gptoss"))
    conversation = CONVERSATIONS["content with a call"]
    assert "Let me look." not in template.render(conversation)
    (sample,) = template.encode(conversation)
    (first, _), (last, end) = runs_of(sample)
    assert "Let me look." in template.decode(sample.tokens[first:last])
    assert sample.tokens[:last] == template.encode_prompt(Conversation(conversation.messages[:3], (TOOL,)))
    assert template.decode(sample.tokens[last:end]) == "<|channel|>final<|message|>It is there.<|return|>"


def test_content_is_kept_on_request_to_drop_it_where_the_template_prints_it(make_model: Callable[[str], Path]) -> None:
    template = ChatTemplate(make_model("qwen3"), SupervisionConfig(content_with_calls="drop"))
    samples = template.encode(CONVERSATIONS["content with a call"])
    assert all("Let me look." in template.decode(sample.tokens) for sample in samples)


def test_a_call_whose_quotes_are_not_escaped_is_named(make_model: Callable[[str], Path]) -> None:
    template = ChatTemplate(make_model("lfm2_2_5"))
    for town in ("Land's End", "C:\\new", "a\nb"):
        conversation = Conversation((ASK, answer(None, call("callAAAA1", town=town))), (TOOL,))
        with pytest.raises(DataError, match=r"find_place\.town of messages\[1\] in quotes .* cannot be parsed back"):
            template.encode(conversation)
    fine = Conversation((ASK, answer(None, call("callAAAA1", town='say "hi"'))), (TOOL,))
    assert template.encode(fine)[0].num_supervised


VALUES: dict[str, Any] = {
    "quotes": 'She said "it\'s here" \\ there',
    "newline": " two\n lines ",
    "number": -1.5e-7,
    "large": 12345678901234567890,
    "truth": True,
    "apostrophe": "Land's End",
    "nothing": None,
    "empty": "",
    "list": ["Ærø", 1, False, {"deep": ["北京", "it's"]}],
    "dict": {"a b": {"c": []}},
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("public", ACCEPTED, ids=lambda public: public.name)
def test_no_template_that_prints_every_value_is_rejected(
    public: PublicTemplate, make_model: Callable[[str], Path]
) -> None:
    template = ChatTemplate(make_model(public.name))
    values = (
        {k: v for k, v in VALUES.items() if k not in ("quotes", "newline", "apostrophe")}
        if "lfm2_2_5" in public.name
        else VALUES
    )
    messages = (
        *(Message("system", " Be\n brief. "), ASK, answer(None, call("callAAAA1", **values))),
        *(result("callAAAA1", '{"a": "b \\"c\\""}'), answer("Look:\n\n- one  \n- two")),
    )
    assert all(sample.num_supervised for sample in template.encode(Conversation(messages, (TOOL,))))


@pytest.mark.parametrize("name", ["qwen3", "gemma4_v5", "muse_glimmer", "glm4moe", "nemotron_3_nano"])
def test_reasoning_is_trained_everywhere_after_the_last_question_or_nowhere(
    name: str, make_model: Callable[[str], Path]
) -> None:
    conversation = CONVERSATIONS["reasoning in several turns"]
    thoughts = [m.reasoning for m in conversation.messages if m.reasoning]
    expected = {"all": thoughts, "last": thoughts[-1:], "none": []}
    plain = {}
    for choice, trained in expected.items():
        template = ChatTemplate(make_model(name), SupervisionConfig(train_reasoning=choice))  # type: ignore[arg-type]
        samples = template.encode(conversation)
        text = "\0".join(
            template.decode(sample.tokens[start:stop]) for sample in samples for start, stop in runs_of(sample)
        )
        assert [thought for thought in thoughts if thought in text] == trained
        plain[choice] = [sample.tokens for sample in samples]
        for message in conversation.messages:  # the rest is supervised all the same
            if message.role == "assistant":
                assert (message.content or message.calls[0].arguments["town"]) in text
        num_turns = sum(m.role == "assistant" for m in conversation.messages)
        stops = [sample.tokens[stop - 1] in template.stop_ids for sample in samples for _, stop in runs_of(sample)]
        assert stops == [True] * num_turns
    assert plain["all"] == plain["last"] == plain["none"]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_training", "qwen3_5_think", "qwen3_6", "qwen3_8"])
@pytest.mark.parametrize("is_thinking", [True, False, None])
def test_the_empty_block_is_due_from_the_model_unless_the_prompt_holds_it(
    name: str, is_thinking: bool | None, make_model: Callable[[str], Path]
) -> None:
    switches = {} if is_thinking is None else {"enable_thinking": is_thinking}
    template = ChatTemplate(make_model(name), template_args=switches)
    (sample,) = template.encode(CONVERSATIONS["no call"])
    ((start, stop),) = runs_of(sample)
    assert sample.tokens[:start] == template.encode_prompt(Conversation((HI,), (TOOL,)))
    due = template.decode(sample.tokens[start:stop])
    in_prompt = template.decode(sample.tokens[:start]).count("</think>")
    assert due.removesuffix("<|im_end|>").endswith("Hello there.")
    assert (due.count("</think>") + in_prompt, in_prompt) == (1, int(is_thinking is False))


def test_a_turn_is_trained_once_in_one_of_its_samples(make_model: Callable[[str], Path]) -> None:
    conversation = CONVERSATIONS["reasoning in several turns"]
    messages = [
        replace(m, weight=0.25 * i) if m.role == "assistant" else m for i, m in enumerate(conversation.messages)
    ]
    template = ChatTemplate(make_model("qwen3"))
    samples = template.encode(Conversation(tuple(messages), (TOOL,)))
    assert len(samples) == 3
    weights = [sorted({weight for weight in sample.weights if weight}) for sample in samples]
    assert weights == [[0.5], [1.0, 1.5], [2.0]]


def test_a_greeting_before_the_first_question_is_context_if_the_template_cannot_prompt_for_it(
    make_model: Callable[[str], Path],
) -> None:
    conversation = Conversation((SYSTEM, HELLO, HI, answer("Yes?")), (TOOL,))
    for name, expected in (("qwen3_5_nothink", ["Yes?"]), ("qwen2_5", ["Hello there.", "Yes?"])):
        template = ChatTemplate(make_model(name))
        samples = template.encode(conversation)
        texts = [template.decode(s.tokens[start:stop]) for s in samples for start, stop in runs_of(s)]
        assert [text.removesuffix("<|im_end|>").split("\n")[-1] for text in texts] == expected
        assert all("Hello there." in template.decode(sample.tokens) for sample in samples)


def test_templates_are_found() -> None:
    assert len(TEMPLATES) == 72 + 3
    assert len(ACCEPTED) == 44 + 1
