"""Metrics of a step: from this rank at every step, and from all ranks at every ``log_every_n_steps``."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from fctune.base import distributed
from fctune.base.distributed import World
from fctune.config.schema import RunConfig
from fctune.data.loader import StepTotals
from fctune.models.causal_lm import CausalLM
from fctune.models.lora import count_parameters, is_adapter
from fctune.runs.device import DeviceSampler, peak_tflops, read_device
from fctune.runs.metrics import (
    GIB,
    FlopCounter,
    RankMetrics,
    SpanTimer,
    SpikeDetector,
    StepTimeStats,
    active_memory_gib,
    aggregate_ranks,
    measure_skew,
    peak_memory_gib,
)
from fctune.runs.profiler import StepProfiler
from fctune.training.prefetch import StepData
from fctune.training.step import StepResult

logger = logging.getLogger("fctune")


class Meter:
    """Computes the metrics of each step. Every rank calls it at the same step.

    Args:
        config: Config of the run.
        model: Model in training.
        world: This rank.
        gpu_hours: GPU-hours of the run before this process started.
    """

    def __init__(self, config: RunConfig, model: CausalLM, world: World, gpu_hours: float = 0.0):
        self.clock = SpanTimer(world.device)
        self._config, self._world = config, world
        self._flops = count_flops(model, config)
        self._peak_tflops = peak_tflops(world.device)
        self._spikes, self._times = SpikeDetector(), StepTimeStats()
        self._gpu_hours, self._began = gpu_hours, time.monotonic()
        self._data_s = self._save_wait_s = 0.0  # since ranks last exchanged them
        self._profiler = StepProfiler(config.profile, Path(config.output_dir), world.rank, world.device)
        if config.profile is not None and world.is_main and max(config.profile.ranks) >= world.world_size:
            logger.warning(
                "profile.ranks=%s: this run has %d ranks, 0 to %d; the others are ignored",
                config.profile.ranks,
                world.world_size,
                world.world_size - 1,
            )
        self._sampler: DeviceSampler | None = None
        if world.device.type == "cuda":
            self._sampler = DeviceSampler(functools.partial(read_device, world.device.index or 0))

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profiler.close()
        if self._sampler is not None:
            self._sampler.close()

    def profile(self, step: int) -> AbstractContextManager[None]:
        """Return a context that profiles the computation of a step, if ``profile`` covers it."""
        return self._profiler.step(step)

    def measure(
        self,
        data: StepData,
        result: StepResult,
        lr: float,
        wait_s: float,
        elapsed_s: float,
        costs: Mapping[str, float],
    ) -> dict[str, Any]:
        """Return the metrics of a step.

        Args:
            data: Data of the step.
            result: Result of the step.
            lr: Learning rate of the update.
            wait_s: Wait for the data.
            elapsed_s: Seconds from requesting the data to the end of the update.
            costs: Seconds spent by callbacks, by metric.
        """
        step = data.step
        metrics: dict[str, Any] = {
            "loss": result.loss,
            **result.metrics,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "tokens_total": result.num_tokens,
            "tokens_supervised": result.num_supervised,
            "tokens_padding": result.num_slots - result.num_tokens,
            "tokens_per_s": result.num_tokens / elapsed_s,
            "tokens_per_s_per_device": result.num_tokens / elapsed_s / self._world.world_size,
            "step_time_s": elapsed_s,
            "step": step.step,
            "epoch": step.epoch,
            "data_digest": step.data_digest,
            "data_time_s": wait_s,
            **costs,
        }
        if result.router_aux_loss is not None:
            metrics["router_aux_loss"] = result.router_aux_loss
        if not result.is_applied:
            metrics["is_skipped"] = True
        elif self._config.rollouts is None and (limit := self._spikes.check(result.loss)) is not None:
            metrics |= {"is_spike": True, "spike_limit": limit}
        metrics |= self._measure_work(result, data.totals, elapsed_s)
        self._times.add(elapsed_s)
        self._data_s += wait_s
        self._save_wait_s += costs.get("save_wait_s", 0.0)
        if step.step % self._config.log_every_n_steps == 0:
            metrics |= self._aggregate_ranks()
        return metrics

    def _measure_work(self, result: StepResult, totals: StepTotals, elapsed_s: float) -> dict[str, Any]:
        device_s = elapsed_s * self._world.world_size
        tokens, pairs = totals.num_tokens, totals.num_pairs
        model_flops = self._flops.weights(tokens) + self._flops.attention(tokens, pairs)
        hardware_flops = self._flops.hardware(result.num_slots, tokens, totals.num_supervised, pairs)
        metrics: dict[str, Any] = {
            "tflops_per_device": model_flops / device_s / 1e12,
            "hardware_tflops_per_device": hardware_flops / device_s / 1e12,
            "peak_memory_gib": peak_memory_gib(self._world.device),
        }
        if self._peak_tflops is not None:
            metrics["mfu"] = metrics["tflops_per_device"] / self._peak_tflops
        if all(map(math.isfinite, result.compute_s)):  # measured in the step before, so missing in the first
            metrics["compute_time_s"] = sum(result.compute_s) / self._world.world_size
            metrics |= measure_skew(result.compute_s)
        return metrics

    def _aggregate_ranks(self) -> dict[str, Any]:
        """Return metrics over all ranks, by one small collective, and totals of the run."""
        row = torch.tensor(self._measure_rank().to_row(), dtype=torch.float64)
        ranks = [RankMetrics.from_row(row) for row in distributed.all_gather_rows(row).tolist()]
        self._data_s = self._save_wait_s = 0.0
        hours = self._gpu_hours + (time.monotonic() - self._began) / 3600 * self._world.world_size
        metrics = {**aggregate_ranks(ranks), **self._times.describe(), "gpu_hours": hours}
        if self._config.price_per_gpu_hour is not None:
            metrics["cost"] = hours * self._config.price_per_gpu_hour
        return metrics

    def _measure_rank(self) -> RankMetrics:
        device, nan = self._world.device, math.nan
        use = None if self._sampler is None else self._sampler.take()
        stats = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
        return RankMetrics(
            data_s=self._data_s,
            save_wait_s=self._save_wait_s,
            memory_active_gib=active_memory_gib(device),
            memory_reserved_gib=stats["reserved_bytes.all.current"] / GIB if stats else nan,
            peak_memory_gib=peak_memory_gib(device),
            num_alloc_retries=float(stats["num_alloc_retries"]) if stats else nan,
            gpu_utilization=nan if use is None or use.utilization is None else use.utilization,
            gpu_temperature_c=nan if use is None or use.temperature_c is None else use.temperature_c,
            gpu_power_w=nan if use is None or use.power_w is None else use.power_w,
        )


def count_flops(model: CausalLM, config: RunConfig | None = None) -> FlopCounter:
    """Build the FLOP counter of a model; without a config, no recomputation of activations is assumed."""
    a = model.architecture
    sizes = _count_used(model)
    base = [p for name, p in model.named_parameters() if not is_adapter(name)]
    head = a.vocab_size * a.embed_dim
    products = recomputed = 0.0
    if config is not None:
        fraction = config.activation_checkpointing.fraction or 0.0  # a run has chosen it by now
        recomputed = int(a.num_layers * fraction + 1e-9) / a.num_layers
        if config.activation_checkpointing.policy == "op":
            products, recomputed = recomputed / 2, 0.0  # every second product
        else:
            products = recomputed
        if (config.activation_checkpointing.mlp_tiles or 1) > 1:
            all_weights = sum(block.num_active_weights for block in a.blocks)
            rest = sum(block.without_mlps.num_active_weights for block in a.blocks)
            # Compiled, a product is recomputed once; otherwise checkpointed blocks recompute their MLPs twice.
            products += (1 - rest / all_weights) * (1 - recomputed if config.compile else 1)
    return FlopCounter(
        sum(size for name, size in sizes.items() if not is_adapter(name)),
        model.attention_layers,
        is_frozen=not any(p.requires_grad for p in base),
        num_head=head,
        num_embedding=0 if a.is_tied else head,
        num_adapter=sum(size for name, size in sizes.items() if is_adapter(name)),
        recomputed=products,
        recomputed_attention=recomputed,
        num_reference=int(config is not None and config.has_reference),
    )


def _count_used(model: CausalLM) -> dict[str, int]:
    """Return how many elements of each parameter a token meets: of experts, those of the ones that it chooses."""
    experts = [expert for block in model.architecture.blocks for expert in block.experts]
    owners = tuple(f"{weight.path}." for weight in model.expert_weights())
    return {
        name: size * experts[0].num_chosen // experts[0].num_experts if owners and name.startswith(owners) else size
        for name, size in count_parameters(model).items()
    }
