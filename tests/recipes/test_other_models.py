"""The recipes train models that torchtune does not have: a dense one and a mixture of experts from transformers."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import accelerate
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fctune.base.distributed import World
from tests.models.tiny_models import copy_tokenizer
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import CONFIGS, run_on_rank

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
}


def run_and_list_builders(world: World, argv: list[str]) -> dict[str, Any]:
    """Run the recipe; returns the threads in which models were built without weights, too."""
    threads, build = set(), accelerate.init_empty_weights

    def record(*arguments: Any, **options: Any) -> Any:
        threads.add(threading.current_thread().name)
        return build(*arguments, **options)

    with patch.object(accelerate, "init_empty_weights", record):
        return run_on_rank(world, argv) | {"builders": threads}


@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.slow), "gpt_oss"])
def test_a_model_from_transformers_trains_on_two_ranks_and_its_export_loads(family: str, tmp_path: Path) -> None:
    tokens = copy_tokenizer(tmp_path / "model")
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family] | tokens)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    overrides = [f"model.path={tmp_path / 'model'}", "max_steps=3", "data.sources.0.path=synthetic:train:60:1"]
    overrides += ["adapter.modules=all-linear", "data.seq_len=512", "data.overlong=drop", "validation.every=0"]
    argv = ["--config", CONFIGS["lora"], f"output_dir={tmp_path / 'run'}", *overrides]
    results = run_ranks(run_and_list_builders, 2, argv)
    assert [result["code"] for result in results] == [0, 0], results
    # A thread that saves would change torch's default dtype under the one that trains.
    assert [result["builders"] for result in results] == [{"MainThread"}] * 2
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 3
    assert losses[-1] < losses[0]

    merged = tmp_path / "run" / "export" / "merged"
    assert json.loads((merged / "config.json").read_text())["model_type"] == family
    model, base = (AutoModelForCausalLM.from_pretrained(path) for path in (merged, tmp_path / "model"))
    assert model.state_dict().keys() == base.state_dict().keys()
    weight = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(model.get_parameter(weight), base.get_parameter(weight))
