"""Small training runs: their config, their metrics and weights, and how they are compared."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from fctune.base.distributed import World
from fctune.config.loading import parse_config
from fctune.config.schema import RunConfig
from fctune.data.prepared_set import open_prepared
from fctune.models.causal_lm import CausalLM
from fctune.models.lora import apply_lora_, init_adapters_
from fctune.models.token_choice import find_token_ids
from fctune.models.token_rows import init_token_rows_, train_tokens_
from fctune.parallel.sharding import GradientSync
from fctune.runs.sinks import SinkGroup
from fctune.training.loop import build_loader, count_steps, train
from fctune.training.preference import PreferenceObjective
from fctune.training.setup import build_base, shard_and_load_, start_state

ADAPTER = {"rank": 4, "alpha": 8, "dropout": 0.1, "modules": ["q_proj", "v_proj", "o_proj", "down_proj", "lm_head"]}

# Metrics of the machine, which differ between equal runs.
MEASURED = {
    *("tokens_per_s", "step_time_s", "data_time_s", "compute_time_s", "compute_skew", "slowest_rank"),
    *("tflops_per_device", "hardware_tflops_per_device", "tokens_per_s_per_device", "peak_memory_gib"),
    *("validation_time_s", "step_time_p50_s", "step_time_p99_s", "data_time_max_s", "save_wait_max_s"),
    *("peak_memory_max_gib", "memory_active_gib", "gpu_hours"),
}

# 4-bit weights share a scale among 16,384.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4}


class Recorder:
    """Sink that keeps all metrics."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, Any]] = []

    def write(self, metrics: dict[str, Any]) -> None:
        self.metrics.append(metrics)

    def close(self) -> None:
        pass


def make_config(model: Path, output: Path, **changes: Any) -> RunConfig:
    """Return the config of a small float64 run; dicts in ``changes`` extend the default ones."""
    raw = {
        "output_dir": str(output / "run"),
        "model": {"path": str(model)},
        "adapter": ADAPTER,
        "precision": "fp64",
        "data": {
            "sources": [{"path": "synthetic:train:44:3"}],
            "validation_share": 0.2,
            "seq_len": 512,
            "packed": False,
            "prepared_dir": str(output / "prepared"),
        },
        # 7 packs a step over 2 or 3 ranks with micro-batches of 2: uneven shares, and ranks that run an empty one.
        "global_batch_size": 7,
        "micro_batch_size": 2,
        "max_steps": 5,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-2},
        "lr_scheduler": {"name": "constant"},
        "clip_grad_norm": 0.5,
        "validation": {"every": 5},
    }
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(raw.get(key), dict):
            raw[key] = raw[key] | value
        else:
            raw[key] = value
    problems: list[str] = []
    config = parse_config(raw, problems)
    assert config is not None, problems
    return config


def build_trainable(config: RunConfig, world: World) -> tuple[CausalLM, GradientSync]:
    """Build, shard and load a model with initialized adapters, as a recipe does."""
    model = build_base(config, Path(config.model.path), world)
    if config.adapter is not None:
        apply_lora_(model, config.adapter)
        if isinstance(config.adapter.train_tokens, list):
            tokens = find_token_ids(config.adapter.train_tokens, Path(config.model.path), model.architecture)
            train_tokens_(model, tokens)
    gradient_sync = shard_and_load_(model, config, Path(config.model.path), world)
    init_adapters_(model, config.seed)
    init_token_rows_(model, Path(config.model.path))
    return model, gradient_sync


def run_training(world: World, config: RunConfig, prepared_path: Path, holds_gradients: bool = True) -> dict[str, Any]:
    """Train like the recipe; returns the metrics and the full weights."""
    loader = build_loader(config, open_prepared(prepared_path))
    num_steps = count_steps(config, loader, world)
    model, gradient_sync = build_trainable(config, world)
    if not holds_gradients:
        gradient_sync = GradientSync(model, gradient_sync.num_copies, holds_gradients=False)
    state = start_state(model, config, num_steps, gradient_sync)
    recorder = Recorder()
    objective = None if config.preference is None else PreferenceObjective(config.preference)
    train(config, state, loader, num_steps, world, SinkGroup(recorder), objective=objective)
    weights = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and config.adapter is not None and config.adapter.base != "bf16":
            continue
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        full = full.float() if full.dtype is torch.bfloat16 else full  # which numpy lacks
        weights[model.architecture.to_hf_name(name)] = full.detach().clone().numpy()
    return {"metrics": recorder.metrics, "weights": weights}


def compare(one: dict[str, Any], other: dict[str, Any], rtol: float, atol: float) -> None:
    """Compare the data, losses and weights of two results of ``run_training``."""
    assert len(one["metrics"]) == len(other["metrics"]) > 0
    for a, b in zip(one["metrics"], other["metrics"], strict=True):
        assert a["data_digest"] == b["data_digest"]
        assert (a["tokens_total"], a["tokens_supervised"]) == (b["tokens_total"], b["tokens_supervised"])
        for key in ("loss", "grad_norm", "validation_loss"):
            if key in a:
                assert math.isclose(a[key], b[key], rel_tol=rtol, abs_tol=atol), (key, a["step"], a[key], b[key])
    for name, weight in one["weights"].items():
        torch.testing.assert_close(
            torch.from_numpy(other["weights"][name]), torch.from_numpy(weight), rtol=rtol, atol=max(atol, 1e-12)
        )
