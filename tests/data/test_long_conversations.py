"""Conversations longer than a row: parts that fit, each turn trained once, after the history that the server sends."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.templates import find_templates, write_model, write_tokenizer
from fctune.base.errors import ConfigError, DataError
from fctune.base.terminal import Terminal
from fctune.config.loading import load_config
from fctune.config.sections.data import DataConfig, SourceConfig
from fctune.data.chat_template import ChatTemplate
from fctune.data.check import check_sources
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.conversation_encoder import Encoded
from fctune.data.long_conversations import measure, split_conversation
from fctune.data.prepared_set import describe_counts, prepare
from fctune.data.supervision import SupervisionConfig

TOOL = Tool(
    {
        "name": "run",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    }
)
SYSTEM = Message("system", "You mend programs.")
FIRST = Message("user", "The first request: mend the parser.")
SECOND = Message("user", "The second request: now the printer.")


def make_steps(name: str, count: int, thought: str | None = None) -> tuple[Message, ...]:
    messages: list[Message] = []
    for i in range(count):
        call = Call("run", {"command": f"{name} number {i}"}, id=f"call{name[:1] * 3}{i:02d}"[:9])
        messages.append(Message("assistant", None, (call,), reasoning=thought and f"{thought} {i}."))
        messages.append(Message("tool", f"line {i} of {name}", call_id=call.id, name="run"))
    return tuple(messages)


TRACE = Conversation(
    (
        *(SYSTEM, FIRST, *make_steps("mend", 12), Message("assistant", "The parser is mended.")),
        *(SECOND, *make_steps("print", 8), Message("assistant", "The printer is mended.")),
    ),
    (TOOL,),
)


def read_turns(template: ChatTemplate, samples: list[Encoded]) -> Counter[str]:
    """Return the text of each run of supervised tokens."""
    turns: list[list[int]] = []
    for sample in samples:
        before = 0.0
        for token, weight in zip(sample.tokens, sample.weights, strict=True):
            if weight > 0:
                turns += [[]] if not before else []
                turns[-1].append(token)
            before = weight
    return Counter(map(template.decode, turns))


@pytest.fixture(scope="module")
def template(tiny_base: Path) -> ChatTemplate:
    return ChatTemplate(tiny_base)


@pytest.mark.parametrize("share", [0.25, 0.4, 0.7, 0.95])
def test_every_turn_is_trained_once_after_its_request_and_the_last_turns_before_it(
    template: ChatTemplate, share: float
) -> None:
    whole = template.encode(TRACE)
    seq_len = int(measure(whole) * share)
    parts = split_conversation(TRACE, template.encoder, seq_len)
    assert not parts.num_lost
    assert len(parts.conversations) > 1
    assert measure(parts.samples) <= seq_len
    assert read_turns(template, parts.samples) == read_turns(template, whole)
    seen = 0
    for number, part in enumerate(parts.conversations):
        messages = part.messages
        assert messages[0] == SYSTEM
        assert part.tools == TRACE.tools
        trained = [m for m in messages if m.role == "assistant" and m.weight]
        due = [m for m in TRACE.messages if m.role == "assistant"][seen : seen + len(trained)]
        assert trained == due  # in order, none twice
        seen += len(trained)
        first = TRACE.messages.index(trained[0])
        request = FIRST if first < TRACE.messages.index(SECOND) else SECOND
        assert request in messages[: messages.index(trained[0])]
        # What is left out is one stretch, between the system prompt or the request and the history.
        history = [replace(m, weight=1.0) for m in messages[1 : messages.index(trained[0])]]
        recent = history[1:] if history[0] in (FIRST, SECOND) else history
        assert list(TRACE.messages[first - len(recent) : first]) == recent
        assert number == 0 or len(recent) > 0
        for i, message in enumerate(messages):
            assert message.role != "tool" or messages[i - 1].calls  # a result follows its call
        if number:  # one more step of history would not have fitted
            earlier = TRACE.messages[first - len(recent) - 2 : first - len(recent)]
            if earlier and earlier[0].calls:
                start = 2 if messages[1] in (FIRST, SECOND) else 1
                longer = replace(part, messages=(*messages[:start], *earlier, *messages[start:]))
                assert measure(template.encode(longer)) > seq_len


def test_a_turn_that_fits_no_part_is_counted_and_the_others_are_trained(template: ChatTemplate) -> None:
    large = Message("assistant", "word " * 400)
    messages = (*TRACE.messages[:6], large, SECOND, *make_steps("print", 8))
    parts = split_conversation(replace(TRACE, messages=messages), template.encoder, 300)
    whole = read_turns(template, template.encode(replace(TRACE, messages=messages)))
    trained = read_turns(template, parts.samples)
    assert parts.num_lost == 1
    assert [len(text) > 1000 for text in whole - trained] == [True]
    assert not trained - whole


def test_tools_that_fill_a_row_leave_no_part(template: ChatTemplate) -> None:
    parts = split_conversation(TRACE, template.encoder, 40)
    assert (parts.samples, parts.num_lost) == ([], 22)


def test_only_the_turns_that_are_supervised_make_parts(tiny_base: Path) -> None:
    last = ChatTemplate(tiny_base, SupervisionConfig(train_on="last_assistant"))
    (part,) = split_conversation(TRACE, last.encoder, 400).conversations
    assert part.messages[-1] == TRACE.messages[-1]
    assert SECOND in part.messages
    assert [m.weight for m in part.messages if m.role == "assistant"][-1] == 1.0
    calls = ChatTemplate(tiny_base, SupervisionConfig(train_on="calls"))
    parts = split_conversation(TRACE, calls.encoder, 400)
    assert read_turns(calls, parts.samples) == read_turns(calls, calls.encode(TRACE))


@pytest.mark.thorough
@pytest.mark.skipif(len(find_templates()) < 10, reason="trl is not installed: pip install -e '.[dev]'")
def test_parts_of_every_public_template_train_what_the_whole_trains(tmp_path: Path) -> None:
    """Of templates that rewrite earlier turns, with reasoning in every turn."""
    thinking = Conversation(
        (
            *(SYSTEM, FIRST, *make_steps("mend", 3, "I see"), Message("assistant", "Mended.", reasoning="It runs.")),
            *(SECOND, *make_steps("print", 3, "I look"), Message("assistant", "Done.", reasoning="All is well.")),
        ),
        (TOOL,),
    )
    plain = replace(thinking, messages=tuple(replace(m, reasoning=None) for m in thinking.messages))
    write_tokenizer(tmp_path / "tokenizer", [str(thinking.to_openai())])
    num_rewriting, compared = 0, []
    for public in find_templates():
        if public.name.endswith("_training"):
            continue  # the same text as without, for training with another program
        write_model(tmp_path / public.name, tmp_path / "tokenizer", public)
        try:
            template = ChatTemplate(tmp_path / public.name)
        except DataError:
            continue  # prints no tools or no calls
        for conversation in (thinking, plain):
            try:
                whole = template.encode(conversation)
            except DataError:
                continue  # this template prints no reasoning
            shortest = measure(template.encode(replace(conversation, messages=conversation.messages[:3])))
            seq_len = (shortest + measure(whole)) // 2  # some templates explain calls at length
            parts = split_conversation(conversation, template.encoder, seq_len)
            assert measure(parts.samples) <= seq_len, public.name
            assert parts.num_lost == 0, public.name
            assert read_turns(template, parts.samples) == read_turns(template, whole), public.name
            num_rewriting += len(whole) > 1
            compared.append(public.name)
    assert len(set(compared)) > 15
    assert num_rewriting > 3


def prepare_rows(path: Path, base: Path, root: Path, **changes: Any) -> Any:
    options = {"seq_len": 400, "validation_share": 0.0, "overlong": "split_turns"} | changes
    return prepare(DataConfig(sources=[SourceConfig(path=str(path))], **options), base, root)


def test_a_prepared_set_has_the_parts_and_says_how_many(
    tiny_base: Path, template: ChatTemplate, write_rows: Callable[..., Path], tmp_path: Path
) -> None:
    short = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    large = [*short, {"role": "user", "content": "Tell me."}, {"role": "assistant", "content": "word " * 600}]
    rows = write_rows([TRACE.to_openai(), {"messages": short}, {"messages": large}])
    prepared = prepare_rows(rows, tiny_base, tmp_path)
    counts = prepared.counts
    assert (counts.rows, counts.conversations, counts.split, counts.lost_turns, counts.overlong) == (3, 3, 2, 1, 0)
    parts = split_conversation(TRACE, template.encoder, 400)
    assert counts.parts == len(parts.conversations) + 1
    shown = "\n".join(describe_counts(prepared))
    assert f"2 conversations divided into {counts.parts} parts of at most 400 tokens; 1 turn too long for any" in shown
    assert "rewrites" not in shown
    supervised = sum(sample.num_supervised for sample in parts.samples)
    assert counts.supervised > supervised
    assert prepare_rows(rows, tiny_base, tmp_path, overlong="drop").counts.overlong == 2


def test_parts_of_a_conversation_share_its_split(
    tiny_base: Path, write_rows: Callable[..., Path], tmp_path: Path
) -> None:
    rows = []
    for i in range(30):
        messages = (SYSTEM, Message("user", f"Request {i}."), *make_steps(f"step{i}", 20))
        rows.append(Conversation(messages, (TOOL,)).to_openai())
    prepared = prepare_rows(write_rows(rows), tiny_base, tmp_path, validation_share=0.3)
    digests = {split: {int(prepared.digests[i]) for i in prepared.packs[split][0]} for split in ("train", "validation")}
    assert min(map(len, digests.values())) > 1
    assert not digests["train"] & digests["validation"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train_reasoning=last", "data.overlong=split_turns: a part does not have the last user message"),
        ("data.pairs=true", "data.overlong=split_turns: an answer of a pair cannot be divided"),
    ],
)
def test_what_parts_cannot_be_combined_with_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("configs/tiny_lora.yaml", ["data.overlong=split_turns", override])


def test_the_check_says_what_a_run_would_lose(
    tiny_base: Path, template: ChatTemplate, write_rows: Callable[..., Path], tmp_path: Path
) -> None:
    huge = (SYSTEM, FIRST, Message("assistant", "words " * 400), *make_steps("mend", 3), Message("assistant", "Done."))
    conversations = [replace(TRACE, messages=TRACE.messages[:9]), TRACE, replace(TRACE, messages=huge)]
    path = write_rows([conversation.to_openai() for conversation in conversations])
    seq_len = int(measure(template.encode(TRACE)) * 0.5)

    def encode(conversation: Conversation) -> tuple[int, int]:
        (sample,) = template.encode(conversation)
        return len(sample.tokens), sample.num_supervised

    report = check_sources([str(path)], encode=encode, seq_len=seq_len, template=template)
    assert report.tokens is not None
    assert report.tokens.num_over_seq_len == 2
    long = report.tokens.long
    assert long is not None
    assert (long.num_measured, long.dropped_by_cut, long.lost_turns) == (2, 1, 1)
    # What the run itself makes of the same rows.
    kept = {}
    for overlong in ("drop", "cut", "split_turns"):
        kept[overlong] = prepare_rows(path, tiny_base, tmp_path, seq_len=seq_len, overlong=overlong).counts
    short = kept["drop"].supervised
    assert long.num_supervised == report.tokens.supervised - short
    assert long.kept_by_cut == kept["cut"].supervised - short
    assert long.kept_by_split == kept["split_turns"].supervised - short
    assert (long.num_parts, long.lost_turns) == (kept["split_turns"].parts, kept["split_turns"].lost_turns)
    lost = 1 - long.kept_by_split / long.num_supervised
    text = report.tokens.describe_long()
    assert f"and drops 1, split_turns {lost:.1%}, in {long.num_parts} parts, and 1 turn fits in no part" in text
    shown = Terminal(file=(written := io.StringIO()), width=200)
    shown.print(report.render_text())
    assert "over seq_len" in written.getvalue()
    bars = [line for line in written.getvalue().splitlines() if "\u2588" in line]
    assert sum(int(line.split()[1].replace(",", "")) for line in bars) == 3
