"""Preference pairs: reading, encoding, packing, and one sentence for each defect."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fctune.base.errors import DataError
from fctune.config.loading import parse_config
from fctune.config.schema import RunConfig
from fctune.data.chat_template import ChatTemplate
from fctune.data.loader import GlobalLoader
from fctune.data.pairs import Pair, PairReader, encode_pair
from fctune.data.prepared_set import SPLITS, describe_counts, prepare
from fctune.data.sources import Defect, UnreadRow
from tests.pair_rows import ANSWER, BAD_SHAPES, OTHER, OTHER_SHAPES, PAIR, USER, make_pairs, write_pairs


def make_config(model: Path, source: Path, **data: Any) -> RunConfig:
    raw = {
        "output_dir": "runs/none",
        "model": {"path": str(model)},
        "adapter": {"rank": 2, "alpha": 2},
        "preference": {"loss": "dpo"},
        "data": {"sources": [{"path": str(source)}], "pairs": True, "seq_len": 1024} | data,
    }
    problems: list[str] = []
    config = parse_config(raw, problems)
    assert config is not None, problems
    return config


def read(row: Any) -> Pair | Defect:
    return PairReader().read(UnreadRow("pairs.jsonl", 3, row))


BAD_ROWS: list[tuple[Any, str, str]] = [
    ({"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]}, "pair_equal", "rejected: is the same answer"),
    ({"prompt": [USER], "chosen": [ANSWER]}, "pair_shape", "rejected: expected a list of messages"),
    ({"prompt": [], "chosen": [ANSWER], "rejected": [OTHER]}, "pair_shape", "prompt: expected a list of messages"),
    ({"prompt": [USER, ANSWER], "chosen": [ANSWER], "rejected": [OTHER]}, "pair_shape", "ends with an assistant"),
    (
        {"prompt": [USER], "chosen": [USER, ANSWER], "rejected": [OTHER]},
        "pair_shape",
        "chosen[0]: an answer starts with",
    ),
    ({"messages": [USER, ANSWER]}, "pair_shape", "expected prompt, chosen and rejected"),
    (
        {"chosen": [USER, ANSWER], "rejected": [{"role": "user", "content": "Rain?"}, OTHER]},
        "pair_prompts",
        "the two conversations differ before their last message (in message 0), so they share no prompt",
    ),
    ({"prompt": [USER], "chosen": [{"role": "assistant"}], "rejected": [OTHER]}, "content_not_text", "chosen[0]"),
    ({"prompt": [{"role": "user"}], "chosen": [ANSWER], "rejected": [OTHER]}, "content_not_text", "prompt[0].content"),
    ({"prompt": [USER], "chosen_token_ids": ["a"], "rejected": [OTHER]}, "pair_shape", "a list of token ids"),
]


@pytest.mark.parametrize(("row", "kind", "words"), BAD_ROWS, ids=[f"{i}-{row[1]}" for i, row in enumerate(BAD_ROWS)])
def test_a_bad_pair_is_named_in_one_sentence(row: Any, kind: str, words: str) -> None:
    defect = read(row)
    assert isinstance(defect, Defect)
    assert defect.kind == kind
    assert words in str(defect)
    assert str(defect).startswith("pairs.jsonl:3: ")


def test_two_conversations_with_one_prompt_are_a_pair() -> None:
    implicit = read({"chosen": [USER, ANSWER], "rejected": [USER, OTHER]})
    assert implicit == read({"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]})


@pytest.mark.parametrize("shape", OTHER_SHAPES)
def test_pairs_of_other_shapes_are_the_same_pair(shape: str) -> None:
    pair = read(OTHER_SHAPES[shape])
    assert isinstance(pair, Pair), pair
    assert pair == read(PAIR)
    assert pair.chosen.messages[0].calls[0].arguments == {"city": "Oslo"}


@pytest.mark.parametrize(("shape", "change", "kind", "words"), BAD_SHAPES)
def test_a_defect_of_another_shape_is_named_by_its_own_columns(
    shape: str, change: dict[str, Any], kind: str, words: str
) -> None:
    defect = read(OTHER_SHAPES[shape] | change)
    assert isinstance(defect, Defect), defect
    assert defect.kind == kind
    assert words in str(defect)


def test_answers_follow_the_prompt_and_only_they_are_supervised(tiny_base: Path) -> None:
    template = ChatTemplate(tiny_base)
    for row in make_pairs(6):
        pair = read(row)
        assert isinstance(pair, Pair)
        prompt = template.encode_prompt(pair.prompt)
        for sample, key in zip(encode_pair(pair, template.encoder), ("chosen", "rejected"), strict=True):
            assert sample.tokens[: len(prompt)] == prompt
            assert set(sample.weights[: len(prompt)]) == {0.0}
            assert set(sample.weights[len(prompt) :]) == {1.0}
            whole = template.encode(_join(pair, key))
            assert sample.tokens == whole[-1].tokens


def test_token_ids_are_used_as_they_are(tiny_base: Path) -> None:
    template = ChatTemplate(tiny_base)
    pair = read({"prompt": [USER], "chosen_token_ids": [5, 6, 7], "rejected": [OTHER]})
    assert isinstance(pair, Pair)
    chosen, rejected = encode_pair(pair, template.encoder)
    prompt = template.encode_prompt(pair.prompt)
    assert chosen.tokens == [*prompt, 5, 6, 7]
    assert rejected.tokens[: len(prompt)] == prompt


def test_a_pair_that_cannot_be_encoded_is_named(tiny_base: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER | {"weight": 0}]},
        {"prompt": [USER], "chosen_token_ids": [10**6], "rejected": [OTHER]},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "No. " * 900}]},
    ]
    config = make_config(tiny_base, write_pairs(tmp_path / "pairs.jsonl", rows))
    with pytest.raises(DataError) as raised:
        prepare(config.data, tiny_base, tmp_path / "prepared")
    message = str(raised.value)
    assert "rejected: has no supervised token under data.train_on and its weights" in message
    assert "chosen_token_ids: 1000000 is not a token of this model's" in message
    assert "tokens of both answers, over data.seq_len=1024; raise it, or set data.overlong to drop" in message


def test_both_answers_of_a_pair_share_a_pack_and_a_split(tiny_base: Path, tmp_path: Path) -> None:
    source = write_pairs(tmp_path / "pairs.jsonl", make_pairs(40))
    raw = make_config(tiny_base, source, validation_share=0.2)
    raw.data.sources[0].weight = 1.5
    prepared = prepare(raw.data, tiny_base, tmp_path / "prepared")
    assert prepared.is_paired
    assert "preference pairs from" in describe_counts(prepared)[0]
    seen: list[int] = []
    for split in ("train", "validation"):
        assert prepared.num_packs(split) > 0  # type: ignore[arg-type]
        for pack in range(prepared.num_packs(split)):  # type: ignore[arg-type]
            members = np.array(prepared.members(split, pack)).reshape(-1, 2)  # type: ignore[arg-type]
            assert (members[:, 0] % 2 == 0).all()
            assert (members[:, 1] == members[:, 0] + 1).all()
            lengths = prepared.offsets[members + 1] - prepared.offsets[members]
            assert lengths.sum() <= 1024
            seen += members[:, 0].tolist()
    assert len(set(seen)) == prepared.counts.conversations < len(seen)  # some pairs come twice
    loader = GlobalLoader(prepared, "train", 3, 1)
    for number in range(1, loader.steps_per_epoch + 1):
        step = loader.step_at(number)
        batches = [b for rank in range(2) for b in loader.micro_batches(step, rank, 2, 1)]
        lengths_by_answer = [length for batch in batches for length in batch.answer_lengths or ()]
        totals = loader.totals(step)
        assert len(lengths_by_answer) == 2 * totals.num_preferences
        assert sum(lengths_by_answer) == totals.num_supervised
        assert sum(length for b in batches for length in (b.answer_lengths or ())[0::2]) == totals.num_chosen


def test_the_pairs_of_a_prompt_share_a_split(tiny_base: Path, tmp_path: Path) -> None:
    rows = []
    for number in range(40):
        user = {"role": "user", "content": f"Weather in town {number}?"}
        wrong = [{"role": "assistant", "content": f"No, {reason}."} for reason in ("never", "later", "ask again")]
        rows += [{"prompt": [user], "chosen": [ANSWER], "rejected": [answer]} for answer in wrong]
    raw = make_config(tiny_base, write_pairs(tmp_path / "pairs.jsonl", rows), validation_share=0.3)
    prepared = prepare(raw.data, tiny_base, tmp_path / "prepared")
    prompt_of = {int(read(row).digest(), 16): row["prompt"][0]["content"] for row in rows}  # type: ignore[union-attr]
    prompts = {
        split: {
            prompt_of[int(prepared.digests[member])]
            for pack in range(prepared.num_packs(split))
            for member in prepared.members(split, pack)
        }
        for split in SPLITS
    }
    assert prompts["train"] | prompts["validation"] == set(prompt_of.values())
    assert prompts["validation"]
    assert not prompts["train"] & prompts["validation"]


BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"data": {"packed": False}}, "data.packed=false: the two answers of a pair share a packed row"),
    ({"data": {"overlong": "cut"}}, "data.overlong=cut: an answer of a pair cannot be cut"),
    ({"data": {"call_weight": 2.0}}, "data.call_weight=2"),
    ({"data": {"pairs": False}}, "preference: trains on preference pairs; set data.pairs=true"),
    ({"preference": None}, "data.pairs=true: rows are preference pairs, but preference is missing"),
    ({"adapter": None}, "preference: the reference is the base with the adapter switched off, but adapter is missing"),
    ({"preference": {"loss": "ipo", "margin": 2.0}}, "preference.margin: belongs to loss=simpo"),
    ({"preference": {"loss": "orpo", "sft_weight": 1.0}}, "loss=orpo contains the supervised loss"),
    ({"eval": {"every": 5}}, "eval.cases=validation: pairs have no expected calls"),
]


@pytest.mark.parametrize(("change", "words"), BAD_CONFIGS, ids=[str(i) for i in range(len(BAD_CONFIGS))])
def test_a_bad_config_is_named_in_one_sentence(
    change: dict[str, Any], words: str, tiny_base: Path, tmp_path: Path
) -> None:
    source = write_pairs(tmp_path / "pairs.jsonl", make_pairs(2))
    raw = make_config(tiny_base, source).to_dict()
    for key, value in change.items():
        raw[key] = raw[key] | value if isinstance(value, dict) and raw[key] else value
    problems: list[str] = []
    parse_config(raw, problems)
    assert any(words in problem for problem in problems), problems


def test_supervised_training_names_the_rows_of_pairs(tmp_path: Path, tiny_base: Path) -> None:
    source = write_pairs(tmp_path / "pairs.jsonl", make_pairs(2))
    config = make_config(tiny_base, source)
    config.data.pairs = False
    with pytest.raises(DataError, match=r"Rows of preference pairs need data\.pairs=true"):
        prepare(config.data, tiny_base, tmp_path / "prepared")


def _join(pair: Pair, key: str) -> Any:
    return replace(pair.prompt, messages=pair.prompt.messages + getattr(pair, key).messages)
