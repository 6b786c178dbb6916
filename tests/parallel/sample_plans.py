"""Configs, memory models and rates that the planner's tests share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fctune.base.gpus import Gpu
from fctune.config.loading import parse_config
from fctune.config.schema import RunConfig
from fctune.models.planned_model import find_architecture, shape_model
from fctune.parallel.memory import MemoryModel, Setting
from fctune.parallel.speed import count_flops, estimate_step_time

GIB = 1024**3
LLAMA = "hf:meta-llama/Llama-3.1-8B"
WIDE = {"hidden_size": 256, "intermediate_size": 640, "num_key_value_heads": 2}  # sizes of a small model


def make_config(path: str, seq_len: int, **raw: Any) -> RunConfig:
    problems: list[str] = []
    data = {"sources": [{"path": "hf:some/rows"}], "seq_len": seq_len}
    config = parse_config({"output_dir": "runs/x", "model": {"path": path}, "data": data} | raw, problems)
    assert config is not None, problems
    return config


def parse_small_config(raw: dict[str, Any]) -> RunConfig:
    """Parse a config for rows of 64 tokens; ``raw`` must contain the model."""
    problems: list[str] = []
    base = {"output_dir": "runs/x", "data": {"sources": [{"path": "synthetic:train:10"}], "seq_len": 64}}
    config = parse_config(base | raw, problems)
    assert config is not None, problems
    return config


def make_memory(config: RunConfig, gpu_gib: float, **options: Any) -> MemoryModel:
    architecture, _, _ = find_architecture(config.model.path)
    return MemoryModel(shape_model(config, architecture), config, int(gpu_gib * GIB), **options)


def estimate_rate(memory: MemoryModel, gpu: Gpu, setting: Setting, **options: Any) -> float:
    """Tokens per second and GPU with full, fully supervised packs of one conversation each."""
    seq_len = memory.config.data.seq_len
    flops = count_flops(memory, setting.fraction, 1.0, (seq_len + 1) / 2, **options)
    packs = setting.world_size * setting.micro_batch_size
    time = estimate_step_time(memory, gpu, setting, flops, packs, 8)
    return packs * seq_len / time.total_s / setting.world_size


def cap_power(gpu: Gpu, watts: float, rated_watts: float) -> Gpu:
    """Limit a GPU's power: dynamic power grows with the cube of the clock (P = C V^2 f, V proportional to f).

    Source: Chandrakasan, Sheng, Brodersen, Low-power CMOS digital design, IEEE JSSC 27(4), 1992.
    """
    share = (watts / rated_watts) ** (1 / 3)
    fp8, fp32 = (None if rate is None else rate * share for rate in (gpu.fp8_tflops, gpu.fp32_tflops))
    return replace(gpu, bf16_tflops=gpu.bf16_tflops * share, fp8_tflops=fp8, fp32_tflops=fp32)
