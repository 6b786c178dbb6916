"""The length of a training row by those of the conversations: what it holds, what stands in its way, and for how long
it stays known.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fctune.base.errors import ConfigError, DataError
from fctune.cli import main
from fctune.config.cache import prepared_root
from fctune.config.loading import load_config
from fctune.config.schema import RunConfig
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Conversation, Message
from fctune.data.long_conversations import measure
from fctune.data.prepared_set import prepare
from fctune.data.row_lengths import RowLengths, choose_seq_len, find_lengths, measure_lengths
from fctune.data.synthetic import iter_conversations
from fctune.parallel.search import fit_seq_len
from tests.conftest import ROOT, TINY_BASE
from tests.thinking_templates import READS, write_thinking_model


def make_lengths(*lengths: int, supervised: int = 10) -> RowLengths:
    made = RowLengths()
    for length in lengths:
        made.add(length, supervised)
    return made


def test_the_length_is_the_smallest_power_of_two_that_holds_all() -> None:
    generator = random.Random(0)
    for _ in range(200):
        drawn = [generator.randrange(1, 60_000) for _ in range(generator.randrange(1, 30))]
        tokens, reason = choose_seq_len(make_lengths(*drawn), 131_072)
        assert tokens == max(1024, 2 ** math.ceil(math.log2(max(drawn))))
        assert reason.startswith(f"holds the longest row, {max(drawn):,} token")


@pytest.mark.parametrize("overlong", ["drop", "cut", "split_turns"])
def test_a_few_long_conversations_do_not_decide_where_they_need_not_fit(overlong: str) -> None:
    lengths = make_lengths(*range(3_001, 5_000), 100_000, supervised=4)
    lengths.add(100_000, 996)
    assert choose_seq_len(lengths, 131_072, "fail")[0] == 131_072
    tokens, reason = choose_seq_len(lengths, 131_072, overlong)
    assert tokens == 8192
    assert "holds 99.9% of the rows; the longest row has 100,000" in reason
    assert "2 of 2,001 conversations are longer, with 11.1% of the supervised tokens" in reason
    more = make_lengths(*range(3_001, 5_000), 100_000, 100_000, 100_000)  # over a thousandth
    assert choose_seq_len(more, 131_072, overlong)[0] == 131_072


def test_a_conversation_that_is_dropped_at_any_length_lengthens_no_rows() -> None:
    lengths = make_lengths(*range(500, 1_300), 1_000_000, supervised=4)
    tokens, reason = choose_seq_len(lengths, 131_072, "drop")
    assert tokens == 2048
    assert reason.startswith("the model reads 131,072 tokens, and more than 2,048 would hold no other row; ")
    assert "the longest row has 1,000,000, and 1 of 801 conversations is longer" in reason
    assert choose_seq_len(lengths, 131_072, "drop", lambda tokens: "no memory" if tokens > 1024 else None)[0] == 1024
    assert choose_seq_len(lengths, 131_072, "split_turns")[0] == 131_072, "as much as can be is kept together"
    assert choose_seq_len(make_lengths(1_000_000), 131_072, "drop")[0] == 131_072


@pytest.mark.parametrize(("positions", "longest"), [(40_960, 40_960), (1000, 992), (8, 8), (2048, 2048)])
def test_the_models_positions_are_the_most(positions: int, longest: int) -> None:
    """In steps of 16 tokens, as rows are padded and 8-bit products need."""
    lengths = make_lengths(8, 200_000)
    tokens, reason = choose_seq_len(lengths, positions)
    assert tokens == longest
    assert reason.startswith(f"the model reads {positions:,} tokens; the longest row has 200,000")
    with pytest.raises(ConfigError, match=r"1 of 2 conversations is longer.*Let data.overlong"):
        choose_seq_len(lengths, positions, "fail")


def test_the_longest_length_without_an_obstacle_is_taken_and_the_obstacle_told() -> None:
    lengths, tried = make_lengths(100, 3_000, 9_000), []

    def find_obstacle(tokens: int) -> str | None:
        tried.append(tokens)
        return f"{tokens:,} tokens do not fit" if tokens > 4096 else None

    tokens, reason = choose_seq_len(lengths, 131_072, "drop", find_obstacle)
    assert (tokens, tried) == (4096, [16_384, 8192, 4096])
    assert reason.startswith("8,192 tokens do not fit; the longest row has 9,000")
    with pytest.raises(ConfigError, match=r"rows of at most 4,096 tokens.*8,192 tokens do not fit"):
        choose_seq_len(lengths, 131_072, "fail", find_obstacle)
    with pytest.raises(ConfigError, match=r"no length can be trained on: no memory. .*data.seq_len=1024"):
        choose_seq_len(lengths, 131_072, "drop", lambda tokens: "no memory")


def load(tmp_path: Path, rows: Path, *overrides: str, base: Path = TINY_BASE) -> RunConfig:
    common = [f"output_dir={tmp_path}/run", f"model.path={base}", f"data.sources=[{{path: {rows}}}]"]
    return load_config(ROOT / "configs" / "tiny_lora.yaml", [*common, "data.seq_len=auto", *overrides])


def test_the_measured_lengths_are_those_of_the_rows_under_the_template(
    tmp_path: Path, write_rows: Callable[..., Path]
) -> None:
    """Of a template that rewrites earlier turns, with several samples a conversation, the longest sample counts."""
    block = READS.replace("if message.KEY", "if message.KEY and loop.last").replace("KEY", "reasoning_content")
    base = write_thinking_model(TINY_BASE, tmp_path / "base", block)
    plain = list(iter_conversations("train", 12, 3))
    thinking = Conversation(
        tuple(
            message
            for turn in range(3)
            for message in (
                Message("user", f"Question {turn}?"),
                Message("assistant", f"Answer {turn}.", reasoning="Let me think about it. " * (3 - turn)),
            )
        )
    )
    rows = write_rows([one.to_openai() for one in (*plain, thinking, plain[0])])
    config = load(tmp_path, rows, "data.validation_share=0.2", base=base)
    lengths = measure_lengths(config, base, lambda counts: None)
    template = ChatTemplate(base)
    template.resolve_thinking(lambda: True)
    expected: dict[int, tuple[int, int]] = {}
    encoded = [template.encode(one) for one in (*plain, thinking, plain[0])]
    assert max(map(len, encoded)) > 1
    for samples in encoded:
        number, total = expected.get(measure(samples), (0, 0))
        expected[measure(samples)] = number + 1, total + sum(one.num_supervised for one in samples)
    assert lengths.counts == expected


def test_a_pair_needs_the_tokens_of_both_answers(tmp_path: Path) -> None:
    common = [f"output_dir={tmp_path}/run", "data.seq_len=auto", "data.sources=[{path: synthetic:pairs:20}]"]
    config = load_config(ROOT / "configs" / "tiny_dpo.yaml", common)
    lengths = measure_lengths(config, TINY_BASE, lambda counts: None)
    chosen, _ = fit_seq_len(config, lengths, read(TINY_BASE), None)
    prepared = prepare(chosen.data, TINY_BASE, prepared_root(config))
    flat, ends = prepared.packs["train"]
    sizes = prepared.offsets[flat + 1] - prepared.offsets[flat]
    held, _ = prepared.packs["validation"]
    pairs = [*sizes.reshape(-1, 2).sum(1), *(prepared.offsets[held + 1] - prepared.offsets[held]).reshape(-1, 2).sum(1)]
    assert sorted(pairs) == sorted(n for n, (number, _) in lengths.counts.items() for _ in range(number))
    assert len(ends) > 1


def read(base: Path) -> Any:
    from fctune.models.sources import read_architecture

    return read_architecture(base)


def test_lengths_stay_known_until_the_rows_or_the_template_change(
    tmp_path: Path, write_rows: Callable[..., Path]
) -> None:
    rows = write_rows([one.to_openai() for one in iter_conversations("train", 20, 1)])
    config, reads = load(tmp_path, rows), list[int]()
    assert find_lengths(config, TINY_BASE) is None
    first = measure_lengths(config, TINY_BASE, lambda counts: reads.append(counts.rows))
    assert reads == [20]
    same = load(tmp_path, rows, "data.overlong=drop", "global_batch_size=2", "data.packed=false", "seed=7")
    assert measure_lengths(same, TINY_BASE, lambda counts: reads.append(counts.rows)).counts == first.counts
    for model_dir in (TINY_BASE, None):  # without the tokenizer, by the settings
        found = find_lengths(same, model_dir)
        assert found is not None
        assert found.counts == first.counts
    assert reads == [20]
    other = load(tmp_path, rows, "model.chat_template=hermes")
    assert measure_lengths(other, TINY_BASE, lambda counts: reads.append(counts.rows)).counts != first.counts
    write_rows([one.to_openai() for one in iter_conversations("train", 21, 1)])
    assert sum(n for n, _ in measure_lengths(config, TINY_BASE, lambda counts: None).counts.values()) == 21


def test_rows_without_anything_to_train_on_are_refused_with_the_reason_and_measured_again(
    tmp_path: Path, write_rows: Callable[..., Path]
) -> None:
    talk = Conversation((Message("user", "Tell me."), Message("assistant", "No."))).to_openai()
    config = load(tmp_path, write_rows([talk] * 3), "data.train_on=calls")
    for _ in range(2):
        with pytest.raises(DataError, match=r"no row to train on: 3 read, 3 without supervised .*data.train_on=calls"):
            measure_lengths(config, TINY_BASE, lambda counts: None)


def test_the_check_chooses_as_a_run_with_enough_memory_does(
    tmp_path: Path, write_rows: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    short = [one.to_openai() for one in iter_conversations("train", 20, 1)]
    long = Conversation((Message("user", "Tell me."), Message("assistant", "word " * 800))).to_openai()
    rows = write_rows([*short, long])
    report = tmp_path / "report.json"
    command = ["data", "check", str(rows), "--tokenizer", str(TINY_BASE), "--seq-len", "auto", "--json", str(report)]
    assert main(command) == 0
    config = load(tmp_path, rows)
    chosen, reason = fit_seq_len(config, measure_lengths(config, TINY_BASE, print), read(TINY_BASE), None)
    assert chosen.data.seq_len == 2048
    assert f"auto is 2,048 tokens where they fit in memory ({reason})" in " ".join(capsys.readouterr().out.split())
    tokens = json.loads(report.read_text())["tokens"]
    assert (tokens["seq_len"], tokens["num_over_seq_len"]) == (2048, 0)
    huge = Conversation((Message("user", "Tell me."), Message("assistant", "word " * 20_000))).to_openai()
    rows.write_text(rows.read_text() + json.dumps(huge) + "\n")
    assert main(command) == 0
    tokens = json.loads(report.read_text())["tokens"]
    positions = read(TINY_BASE).max_position_embeddings
    assert (tokens["seq_len"], tokens["num_over_seq_len"], tokens["long"]["num_measured"]) == (positions, 1, 1)


def test_the_check_refuses_other_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["data", "check", "rows.jsonl", "--seq-len", "aut"])
    assert "argument --seq-len: invalid value: 'aut'; expected a number of tokens, or auto" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.seq_len=aut", r"data.seq_len='aut': expected an integer.*, or auto"),
        ("data.seq_len=4", "data.seq_len=4: expected 8 or more"),
        ("grpo={cases: x.jsonl}", "data.seq_len=auto: is chosen from training rows, and a run with grpo has none"),
    ],
)
def test_other_words_and_runs_without_rows_are_refused(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, tmp_path, override)
