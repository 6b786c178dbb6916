"""Training of hybrid models on packed rows does not depend on the number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from fctune.data.prepared_set import prepare
from tests.models.hybrid_samples import save_hybrid
from tests.ranks import run_ranks
from tests.training.training_runs import compare, make_config, run_training

ADAPTER = {"rank": 2, "alpha": 4, "dropout": 0.1, "modules": "all-linear"}
DATA = {"sources": [{"path": "synthetic:train:24:3"}], "seq_len": 768, "packed": True}


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [ADAPTER, None], ids=["lora", "full"])
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "lfm2", "bamba"])
def test_two_ranks_match_one_process(model_type: str, adapter: dict[str, object] | None, tmp_path: Path) -> None:
    base = save_hybrid(model_type, tmp_path / "base", with_tokenizer=True)
    results = []
    for world_size, changes in (
        (1, {}),
        (2, {"parallel": {"mode": "fsdp"}, "activation_checkpointing": {"fraction": 1.0}}),
    ):
        keys = {"max_steps": 5, "global_batch_size": 3, "validation": {"every": 0}, "data": DATA} | changes
        config = make_config(base, tmp_path, adapter=adapter, **keys)
        prepared = prepare(config.data, base, tmp_path / "prepared")
        results.append(run_ranks(run_training, world_size, config, prepared.path)[0])
    compare(*results, rtol=1e-9, atol=1e-9)
