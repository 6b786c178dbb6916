"""One model trains alike whether torchtune or transformers builds it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fctune.base.distributed import World
from fctune.config.schema import RunConfig
from fctune.data.prepared_set import prepare
from tests.ranks import run_ranks
from tests.training.training_runs import ADAPTER, compare, make_config, run_training

NUM_STEPS = 4
STEPS: dict[str, Any] = {
    "max_steps": NUM_STEPS,
    "epochs": 30,
    "data": {"packed": True, "seq_len": 512, "overlong": "drop"},
    "global_batch_size": 3,
    "validation": {"every": 0},
}


def train_all(world: World, configs: list[RunConfig], prepared_path: Path) -> list[dict[str, Any]]:
    return [run_training(world, config, prepared_path) for config in configs]


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_steps_are_equal_through_both_sources(make_model: Callable[..., Path], tmp_path: Path, family: str) -> None:
    path = make_model(family)
    configs = []
    for adapter in (ADAPTER, None):
        for source in ("torchtune", "transformers"):
            config = make_config(path, tmp_path, adapter=adapter, **STEPS)
            config.model.source = source  # type: ignore[assignment]
            configs.append(config)
    prepared = prepare(configs[0].data, path, tmp_path / "prepared")
    (results,) = run_ranks(train_all, 1, configs, prepared.path)
    for ours, theirs in (results[:2], results[2:]):
        assert len(ours["metrics"]) == NUM_STEPS
        assert ours["metrics"][-1]["loss"] < ours["metrics"][0]["loss"]
        # Weights have Hugging Face's names and torchtune's layout of rows, so only the numbers of the steps compare.
        compare({**ours, "weights": {}}, {**theirs, "weights": {}}, rtol=1e-9, atol=0)
