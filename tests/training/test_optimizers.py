"""Fused, 8-bit and stochastically rounded optimizers train as well as plain ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fctune.data.prepared_set import prepare
from tests.ranks import run_ranks
from tests.training.training_runs import compare, make_config, run_training


@pytest.fixture
def losses(make_model: Callable[..., Path], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def run(world_size: int, optimizer: dict[str, Any], **changes: Any) -> dict[str, Any]:
        path = make_model("llama", hidden_size=128, intermediate_size=256)  # large enough for blocks of 256
        config = make_config(
            path, tmp_path, adapter=None, optimizer=optimizer, max_steps=8, epochs=9, global_batch_size=3, **changes
        )
        prepared = prepare(config.data, path, tmp_path / "prepared")
        result: dict[str, Any] = run_ranks(run_training, world_size, config, prepared.path)[0]
        return result

    return run


@pytest.mark.thorough
def test_the_fused_update_matches_the_plain_one(losses: Callable[..., dict[str, Any]]) -> None:
    adamw = {"_component_": "torch.optim.AdamW", "lr": 1e-2}
    plain = losses(1, adamw)
    for world_size in (1, 2):
        compare(plain, losses(world_size, adamw | {"fused": True}, parallel={"mode": "fsdp"}), rtol=1e-9, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "precision", "near", "mode"),
    [
        ({"_component_": "torchao.optim.AdamW8bit"}, "bf16_mixed", 0.02, "ddp"),
        ({"_component_": "torchao.optim.AdamW8bit"}, "bf16_mixed", 0.02, "fsdp"),
        ({"_component_": "torchao.optim._AdamW", "bf16_stochastic_round": True}, "bf16", 0.05, "ddp"),
        ({"_component_": "torch.optim.AdamW", "fused": True}, "bf16", 0.05, "fsdp"),
    ],
    ids=["8 bits", "8 bits in shards", "stochastic rounding", "bfloat16 states"],
)
def test_low_precision_optimizer_states_train_nearly_as_well_as_float32(
    losses: Callable[..., dict[str, Any]],
    optimizer: dict[str, Any],
    precision: str,
    near: float,
    mode: str,
) -> None:
    options = {"lr": 2e-3, "weight_decay": 0.01}
    exact = losses(1, {"_component_": "torch.optim.AdamW", **options}, precision="fp32")["metrics"]
    small = losses(2, optimizer | options, precision=precision, parallel={"mode": mode})["metrics"]
    assert exact[-1]["loss"] < 0.8 * exact[0]["loss"]
    assert small[-1]["loss"] == pytest.approx(exact[-1]["loss"], rel=near)
