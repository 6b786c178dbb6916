"""Training of mixtures of experts does not depend on the number of ranks or on micro-batches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fctune.data.prepared_set import prepare
from fctune.training.meter import count_flops
from tests.models.expert_samples import make_model, make_reference, save_base
from tests.ranks import run_ranks
from tests.training.training_runs import compare, make_config, run_training

ADAPTER = {
    "rank": 3,
    "alpha": 6,
    "dropout": 0.1,
    "modules": ["q_proj", "experts.gate_up_proj", "experts.down_proj", "gate"],
}
SMALL = {"sources": [{"path": "synthetic:train:24:3"}], "seq_len": 384}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base("qwen3_moe", tmp_path_factory.mktemp("base"), with_tokenizer=True)


def train_all(base: Path, folder: Path, runs: list[tuple[int, dict[str, Any]]], **common: Any) -> list[dict[str, Any]]:
    """Return the results of runs that balance their routers, each given by its ranks and changes to the config."""
    results = []
    for world_size, changes in runs:
        keys = {"max_steps": 2, "validation": {"every": 0}, "data": SMALL} | common | changes
        config = make_config(base, folder, **keys)
        config.model.router_aux_loss = 0.05
        prepared = prepare(config.data, base, folder / "prepared")
        results.append(run_ranks(run_training, world_size, config, prepared.path)[0])
    return results


def check_equal(results: list[dict[str, Any]]) -> None:
    first, *others = results
    for other in others:
        compare(first, other, rtol=1e-9, atol=1e-9)
        for a, b in zip(first["metrics"], other["metrics"], strict=True):
            assert math.isclose(a["router_aux_loss"], b["router_aux_loss"], rel_tol=1e-9)
    # Every token chooses two of five experts, so a balanced loss is two.
    assert all(2.0 <= metrics["router_aux_loss"] < 5.0 for metrics in first["metrics"])


@pytest.mark.slow
def test_adapters_on_experts_train_alike_on_any_number_of_ranks(base: Path, tmp_path: Path) -> None:
    fsdp = {"parallel": {"mode": "fsdp"}, "activation_checkpointing": {"fraction": 1.0}}
    runs = [
        (1, {"micro_batch_size": 7}),
        (2, fsdp),
        (4, {"parallel": {"mode": "ddp"}, "micro_batch_size": 1}),
    ]
    check_equal(train_all(base, tmp_path, runs, adapter=ADAPTER))


@pytest.mark.thorough
def test_all_weights_train_alike_on_any_number_of_ranks(base: Path, tmp_path: Path) -> None:
    # Five experts do not divide over the ranks, so shards are uneven.
    runs = [(1, {}), (2, {"parallel": {"mode": "fsdp"}}), (4, {"parallel": {"mode": "hsdp", "replicate": 2}})]
    runs.append((2, {"parallel": {"mode": "fsdp", "context": 2}}))
    check_equal(train_all(base, tmp_path, runs, adapter=None))


def test_spread_experts_train_as_on_one_rank(tmp_path: Path) -> None:
    base = save_base("qwen3_moe", tmp_path / "base", with_tokenizer=True, num_experts=4)
    spread = {"parallel": {"mode": "fsdp", "expert": 2}}
    runs = [
        (1, {"micro_batch_size": 7}),
        (2, spread | {"activation_checkpointing": {"fraction": 1.0}}),
        (4, {"parallel": {"mode": "hsdp", "replicate": 2, "expert": 4, "context": 2}}),
    ]
    check_equal(train_all(base, tmp_path, runs, adapter=ADAPTER))


@pytest.mark.slow
def test_spread_experts_with_biases_train_all_their_weights_as_on_one_rank(tmp_path: Path) -> None:
    base = save_base("gpt_oss", tmp_path / "base", with_tokenizer=True, num_experts=4)
    runs = [(1, {}), (4, {"parallel": {"expert": 2}})]  # two groups of two
    check_equal(train_all(base, tmp_path, runs, adapter=None))


@pytest.mark.thorough
def test_a_float32_router_in_a_bfloat16_model_trains_in_shards(tmp_path: Path) -> None:
    base = save_base("ernie4_5_moe", tmp_path / "base", with_tokenizer=True, num_experts=4)
    common = {"adapter": None, "precision": "bf16", "max_steps": 3, "validation": {"every": 0}, "data": SMALL}
    results = []
    for world_size in (1, 2):
        config = make_config(base, tmp_path, **common, optimizer={"_component_": "torch.optim.AdamW", "lr": 1e-3})
        config.parallel.mode = "fsdp"
        prepared = prepare(config.data, base, tmp_path / "prepared")
        results.append(run_ranks(run_training, world_size, config, prepared.path)[0])
    router = "model.layers.1.mlp.gate.weight"
    moved, other = (torch.from_numpy(result["weights"][router]) for result in results)
    start = load_file(base / "model.safetensors")[router]
    assert float((moved - start).abs().median()) > 1e-3  # three steps of 1e-3
    assert float((moved - other).abs().median()) < 1e-4
    assert not torch.equal(other, other.bfloat16().float())
    for one, two in zip(results[0]["metrics"], results[1]["metrics"], strict=True):
        assert math.isclose(one["loss"], two["loss"], rel_tol=5e-3)


def test_flops_count_the_experts_that_a_token_chooses() -> None:
    model = make_model(make_reference("qwen3_moe"))
    experts = sum(model.get_submodule(w.path).get_parameter(w.name).numel() for w in model.expert_weights())
    total = sum(p.numel() for p in model.parameters())
    assert count_flops(model).num_parameters == total - experts * 3 // 5  # two of five are chosen
