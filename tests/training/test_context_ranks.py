"""Training with rows that are split over ranks equals training with whole rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fctune.data.prepared_set import prepare
from tests.models.tiny_models import copy_tokenizer, save_tiny_model
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import arguments_for, check_single_reports, run_kind_on_rank
from tests.training.training_runs import ADAPTER, compare, make_config, run_training

PACKED = {"sources": [{"path": "synthetic:train:24:3"}], "seq_len": 768, "packed": True}


def train_all(base: Path, folder: Path, runs: list[tuple[int, dict[str, Any]]], **common: Any) -> None:
    """Train with each number of ranks and changes to the config, and compare all with the first."""
    results = []
    for world_size, changes in runs:
        config = make_config(base, folder, **{"validation": {"every": 5}, "data": PACKED} | common | changes)
        prepared = prepare(config.data, base, folder / "prepared")
        results.append(run_ranks(run_training, world_size, config, prepared.path)[0])
    for other in results[1:]:
        compare(results[0], other, rtol=1e-9, atol=1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "adapter", [pytest.param(ADAPTER, id="lora"), pytest.param(None, id="full", marks=pytest.mark.thorough)]
)
def test_conversations_that_cross_the_split_train_as_on_one_rank(
    adapter: dict[str, Any] | None, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    base = make_model("llama")
    runs = [
        (1, {}),
        (2, {"parallel": {"mode": "fsdp", "context": 2}}),
        (
            4,
            {"parallel": {"mode": "hsdp", "replicate": 2, "context": 2}, "activation_checkpointing": {"fraction": 1.0}},
        ),
    ]
    train_all(base, tmp_path, runs, adapter=adapter)


@pytest.mark.parametrize(
    ("model_type", "adapter"),
    [
        ("gpt_oss", ADAPTER | {"modules": ["q_proj", "o_proj", "lm_head"]}),  # sinks, and windows in every second layer
        pytest.param(
            "gemma3_text",
            ADAPTER | {"modules": ["q_proj", "v_proj", "o_proj", "down_proj"]},
            marks=pytest.mark.thorough,
        ),  # lm_head is tied
        pytest.param("gemma3_text", None, marks=pytest.mark.slow),
    ],
)
def test_windows_sinks_and_tiles_train_as_on_one_rank(
    model_type: str, adapter: dict[str, Any] | None, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    save_tiny_model(model_type, base, **{"max_position_embeddings": 2048} | copy_tokenizer(base))
    tiles = {"mlp_tiles": 1 if model_type == "gpt_oss" else 8}
    runs = [
        (1, {"activation_checkpointing": {"mlp_tiles": 1}}),
        (2, {"parallel": {"mode": "fsdp", "context": 2}, "activation_checkpointing": tiles | {"fraction": 0.5}}),
        (4, {"parallel": {"mode": "ddp", "context": 4}, "activation_checkpointing": tiles}),
    ]
    train_all(base, tmp_path, runs, adapter=adapter)


@pytest.mark.slow
def test_micro_batches_of_unpacked_rows_and_key_heads_that_are_repeated(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    base = make_model("llama")  # two key heads
    unpacked = {"sources": [{"path": "synthetic:train:24:3"}], "seq_len": 384}
    runs = [
        (1, {}),
        (4, {"parallel": {"mode": "ddp", "context": 4}}),
        (4, {"parallel": {"mode": "fsdp", "context": 2}, "micro_batch_size": 1}),
    ]
    train_all(base, tmp_path, runs, data=unpacked)


@pytest.mark.thorough
def test_a_run_resumes_with_other_ranks_to_a_row_and_other_tiles(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = ("precision=fp64", "checkpoint.every=2", "validation.every=0", "eval.every=0", "data.packed=true")
    common += ("lr_scheduler.name=constant", "lr_scheduler.warmup=0", "data.seq_len=512", "success=null")
    common += ("global_batch_size=3", "epochs=4")
    runs = [
        (whole, 1, ("max_steps=6",)),
        (parts, 2, ("max_steps=2", "parallel.context=2", "activation_checkpointing.mlp_tiles=8")),
        (parts, 2, ("max_steps=4", "parallel.context=1")),
        (parts, 4, ("max_steps=6", "parallel.context=2")),
    ]
    for folder, num_ranks, changes in runs:
        done = run_ranks(run_kind_on_rank, num_ranks, arguments_for(folder, *common, *changes), "lora")[0]
        assert done["code"] == 0, done["err"]
        if "parallel.context=2" in changes:
            assert "rows shared by 2 ranks" in done["out"] + done["err"]
    expected, found = (
        [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        for folder in (whole, parts)
    )
    assert [one["step"] for one in found] == [one["step"] for one in expected] == [1, 2, 3, 4, 5, 6]
    for one, other in zip(expected, found, strict=True):
        assert one["data_digest"] == other["data_digest"]
        for key in ("loss", "grad_norm"):
            assert math.isclose(one[key], other[key], rel_tol=1e-9), (key, one["step"])


def test_what_needs_whole_rows_is_refused_before_training(tmp_path: Path) -> None:
    pairs = arguments_for(tmp_path, "parallel.context=2", kind="dpo")
    check_single_reports(
        [
            (arguments_for(tmp_path, "parallel.context=3"), "parallel.context=3: does not divide the 2 ranks", "lora"),
            (pairs, "parallel.context=2: preference compares whole answers", "dpo"),
        ]
    )
