"""Training with rows that are split over ranks equals training with whole rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fctune.data.prepared_set import prepare
from tests.models.expert_samples import save_base
from tests.ranks import run_ranks
from tests.training.training_runs import ADAPTER, compare, make_config, run_training

PACKED = {"sources": [{"path": "synthetic:train:24:3"}], "seq_len": 768, "packed": True}
UNPACKED = {"sources": [{"path": "synthetic:train:24:3"}], "seq_len": 384}


def train_all(base: Path, folder: Path, runs: list[tuple[int, dict[str, Any]]], **common: Any) -> None:
    """Train with each number of ranks and changes to the config, and compare all with the first."""
    results = []
    for world_size, changes in runs:
        config = make_config(base, folder, **{"validation": {"every": 5}, "data": PACKED} | common | changes)
        prepared = prepare(config.data, base, folder / "prepared")
        results.append(run_ranks(run_training, world_size, config, prepared.path)[0])
    for other in results[1:]:
        compare(results[0], other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("adapter", [ADAPTER, None], ids=["lora", "full"])
def test_conversations_that_cross_the_split_train_as_on_one_rank(
    adapter: dict[str, Any] | None, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    base = make_model("llama")
    runs = [
        (1, {}),
        (2, {"parallel": {"mode": "fsdp", "context": 2}}),
        (4, {"parallel": {"mode": "hsdp", "replicate": 2, "context": 2}, "activation_checkpointing": {"fraction": 1.0}}),
    ]
    train_all(base, tmp_path, runs, adapter=adapter)
