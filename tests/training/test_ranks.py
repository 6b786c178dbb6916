"""Losses and weights do not depend on the number of ranks or the parallel layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fctune.data.loader import GlobalLoader
from fctune.data.prepared_set import prepare
from fctune.models.sources import read_architecture
from tests.ranks import run_ranks
from tests.training.training_runs import ADAPTER, MEASURED, WIDE, compare, make_config, run_training

MODELS: dict[str | None, dict[str, Any]] = {None: {}, "untied": {}, "tied": {"tie_word_embeddings": True}, "wide": WIDE}


@pytest.fixture(scope="module")
def runs(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Run a config on a number of ranks; each combination runs once."""
    output = tmp_path_factory.mktemp("ranks")
    done: dict[str, dict[str, Any]] = {}

    def run(world_size: int, holds_gradients: bool = True, **changes: Any) -> dict[str, Any]:
        key = f"{world_size} {holds_gradients} {changes}"
        if key not in done:
            path = make_model(**MODELS[changes.pop("model", None)])
            config = make_config(path, output, **changes)
            prepared = prepare(config.data, Path(config.model.path), output / "prepared")
            done[key] = run_ranks(run_training, world_size, config, prepared.path, holds_gradients)[0]
        return done[key]

    return run


# Layouts of two, three and four ranks. A global batch of 7 with micro-batches of 2 accumulates over several of them.
LAYOUTS = [
    pytest.param(
        world_size, {"mode": mode} | ({"replicate": replicate} if replicate else {}), id=f"{name} on {world_size}"
    )
    for mode, replicate, name, worlds in (
        ("ddp", None, "ddp", (2, 3, 4)),
        ("fsdp", None, "fsdp", (1, 2, 3, 4)),
        ("hsdp", 2, "hsdp 2 copies", (2, 4)),
        ("hsdp", 4, "hsdp 4 copies", (4,)),
        ("auto", None, "auto", (2,)),
    )
    for world_size in worlds
]


@pytest.mark.parametrize(("world_size", "parallel"), LAYOUTS)
def test_every_layout_trains_all_weights_as_one_process_in_float64(
    runs: Callable[..., dict[str, Any]], world_size: int, parallel: dict[str, Any]
) -> None:
    compare(runs(1, adapter=None), runs(world_size, adapter=None, parallel=parallel), rtol=1e-9, atol=0)


@pytest.mark.parametrize(("world_size", "parallel"), LAYOUTS)
def test_every_layout_trains_adapters_as_one_process_in_float64_and_keeps_frozen_weights(
    runs: Callable[..., dict[str, Any]], make_model: Callable[..., Path], world_size: int, parallel: dict[str, Any]
) -> None:
    trained = runs(world_size, adapter=ADAPTER, parallel=parallel)
    compare(runs(1, adapter=ADAPTER), trained, rtol=1e-9, atol=0)
    architecture = read_architecture(make_model())
    for name, weight in load_file(make_model() / "model.safetensors").items():
        ours = torch.from_numpy(trained["weights"][name])
        if name.startswith("model.layers"):
            kind = next((kind for kind in ("q_proj", "k_proj") if kind in name), "v_proj")
            ours = architecture.to_hf_layout(f"layers.0.attn.{kind}.weight", ours)
        assert torch.equal(ours, weight.double()), name


ROWS = ADAPTER | {"modules": ["q_proj", "down_proj"], "train_tokens": ["<tool_call>", "</tool_call>", "<|eot_id|>"]}


@pytest.mark.parametrize("model", ["untied", "tied"])
@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [(2, {"mode": "ddp"}), (2, {"mode": "fsdp"}), (4, {"mode": "fsdp"}), (4, {"mode": "hsdp", "replicate": 2})],
    ids=["ddp on 2", "fsdp on 2", "fsdp on 4", "hsdp on 4"],
)
def test_token_rows_train_equally_on_any_layout(
    runs: Callable[..., dict[str, Any]], world_size: int, parallel: dict[str, Any], model: str
) -> None:
    one, other = (runs(n, adapter=ROWS, model=model, **p) for n, p in ((1, {}), (world_size, {"parallel": parallel})))
    names = {name for name in one["weights"] if name.endswith("token_rows")}
    assert names == {"model.embed_tokens.token_rows"} | ({"lm_head.token_rows"} if model == "untied" else set())
    compare(one, other, rtol=1e-9, atol=0)


@pytest.mark.parametrize("parallel", [{"mode": "fsdp"}, {"mode": "hsdp", "replicate": 2}], ids=["fsdp", "hsdp"])
def test_scattering_large_gradients_gives_the_same_numbers(
    runs: Callable[..., dict[str, Any]], parallel: dict[str, Any]
) -> None:
    scattered = runs(4, adapter=None, parallel=parallel, holds_gradients=False)
    compare(runs(1, adapter=None), scattered, rtol=1e-9, atol=0)


SHARDED = [pytest.param({"mode": "ddp"}, marks=pytest.mark.slow), {"mode": "fsdp"}, {"mode": "hsdp", "replicate": 2}]


@pytest.mark.parametrize("parallel", SHARDED, ids=lambda p: p["mode"])
def test_dora_on_four_ranks_matches_one_process(runs: Callable[..., dict[str, Any]], parallel: dict[str, Any]) -> None:
    adapter = ADAPTER | {"dora": True}
    compare(runs(1, adapter=adapter), runs(4, adapter=adapter, parallel=parallel), rtol=1e-9, atol=0)


@pytest.mark.parametrize("base", ["nf4", "float8"])
@pytest.mark.parametrize("parallel", SHARDED, ids=lambda p: p["mode"])
def test_a_quantized_base_trains_equally_on_any_layout(
    runs: Callable[..., dict[str, Any]], parallel: dict[str, Any], base: str
) -> None:
    changes = {"adapter": ADAPTER | {"base": base}, "model": "wide", "max_steps": 3}
    one, four = runs(1, **changes), runs(4, parallel=parallel, **changes)
    compare(one, four, rtol=1e-9, atol=0)


@pytest.mark.parametrize("parallel", SHARDED, ids=lambda p: p["mode"])
@pytest.mark.parametrize("policy", ["block", "op"])
def test_activation_checkpointing_trains_equally_on_any_layout(
    runs: Callable[..., dict[str, Any]], parallel: dict[str, Any], policy: str
) -> None:
    checkpointing = {"fraction": 0.5 if policy == "block" else 1.0, "policy": policy}
    compare(runs(1), runs(4, parallel=parallel, activation_checkpointing=checkpointing), rtol=1e-9, atol=0)


@pytest.mark.parametrize("mode", ["fsdp", "hsdp"])
def test_keeping_weights_gathered_gives_the_same_numbers(runs: Callable[..., dict[str, Any]], mode: str) -> None:
    parallel = {"mode": mode, "reshard_after_forward": False} | ({"replicate": 2} if mode == "hsdp" else {})
    compare(runs(1), runs(4, parallel=parallel), rtol=1e-9, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [ADAPTER, None], ids=["lora", "full"])
@pytest.mark.parametrize("parallel", SHARDED, ids=lambda p: p["mode"])
def test_compiled_blocks_train_equally_on_any_layout(
    runs: Callable[..., dict[str, Any]], parallel: dict[str, Any], adapter: dict[str, Any] | None
) -> None:
    changes: dict[str, Any] = {"adapter": adapter, "data": {"packed": True}, "global_batch_size": 6}
    checkpointing = {"fraction": 0.5, "policy": "op"}
    world_size = 4 if parallel["mode"] == "hsdp" else 2
    compiled = runs(world_size, parallel=parallel, compile=True, activation_checkpointing=checkpointing, **changes)
    compare(runs(1, **changes), compiled, rtol=1e-9, atol=0)


@pytest.mark.parametrize("parallel", SHARDED, ids=lambda p: p["mode"])
def test_mixed_precision_trains_equally_on_any_layout(
    runs: Callable[..., dict[str, Any]], parallel: dict[str, Any]
) -> None:
    # One row at a time, so that each is rounded alike wherever it runs; sums are float32.
    sgd = {"_component_": "torch.optim.SGD", "lr": 0.1}
    changes: dict[str, Any] = {"adapter": None, "precision": "bf16_mixed", "micro_batch_size": 1, "optimizer": sgd}
    one = runs(1, **changes)
    for holds_gradients in (True, False):
        four = runs(4, parallel=parallel, holds_gradients=holds_gradients, **changes)
        assert all(weight.dtype.name == "float32" for weight in four["weights"].values())
        # Before the first update, only the order of float32 sums differs.
        for key in ("loss", "grad_norm"):
            assert math.isclose(one["metrics"][0][key], four["metrics"][0][key], rel_tol=1e-5)
        # Afterwards weights differ in their last float32 digit. Where one lies between two bfloat16 numbers it is
        # rounded another way, by up to 1/256 of itself; how many are depends on the processor.
        compare(one, four, rtol=1e-3, atol=1e-4)


def test_two_ranks_match_one_process_in_float32(runs: Callable[..., dict[str, Any]]) -> None:
    # AdamW divides by the root of the second moment, so rounding of tiny gradients moves a weight by up to lr a step.
    compare(runs(1, precision="fp32"), runs(2, precision="fp32"), rtol=1e-4, atol=2e-3)


def test_packed_rows_on_two_ranks_match_one_process(runs: Callable[..., dict[str, Any]]) -> None:
    packed = {"packed": True}
    compare(runs(1, data=packed, global_batch_size=3), runs(2, data=packed, global_batch_size=3), rtol=1e-9, atol=0)


def test_micro_batches_do_not_change_the_numbers(runs: Callable[..., dict[str, Any]]) -> None:
    compare(runs(1), runs(1, micro_batch_size=7), rtol=1e-9, atol=0)


def test_four_micro_batches_of_one_equal_one_of_four(runs: Callable[..., dict[str, Any]]) -> None:
    ones = runs(1, global_batch_size=4, micro_batch_size=1)
    compare(ones, runs(1, global_batch_size=4, micro_batch_size=4), rtol=1e-9, atol=0)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_two_ranks_with_two_rows_equal_four_ranks_with_one(runs: Callable[..., dict[str, Any]], mode: str) -> None:
    two = runs(2, global_batch_size=8, micro_batch_size=2, parallel={"mode": mode})
    compare(two, runs(4, global_batch_size=8, micro_batch_size=1, parallel={"mode": mode}), rtol=1e-9, atol=0)


def test_training_twice_gives_the_same_metrics(runs: Callable[..., dict[str, Any]]) -> None:
    first, second = runs(2), runs(2, log_every_n_steps=3)  # another key, the same training
    for a, b in zip(first["metrics"], second["metrics"], strict=True):
        for key in a.keys() - MEASURED:
            assert a[key] == b[key], key


def test_another_data_order_gives_other_losses(runs: Callable[..., dict[str, Any]]) -> None:
    assert runs(1)["metrics"][0]["loss"] != runs(1, seed=43)["metrics"][0]["loss"]


def test_every_rank_runs_the_same_number_of_micro_batches(
    runs: Callable[..., dict[str, Any]], tmp_path: Path, make_model: Callable[..., Path]
) -> None:
    config = make_config(make_model(), tmp_path)
    prepared = prepare(config.data, Path(config.model.path), tmp_path / "prepared")
    loader = GlobalLoader(prepared, "train", 7, 42)
    for world_size in range(1, 9):
        for number in range(1, loader.steps_per_epoch + 1):
            shares = [loader.micro_batches(loader.step_at(number), rank, world_size, 2) for rank in range(world_size)]
            assert len({len(share) for share in shares}) == 1
