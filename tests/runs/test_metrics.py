"""Metrics of steps and of ranks, and the detector of loss spikes."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from fctune.base.distributed import World
from fctune.config.schema import RunConfig
from fctune.data.prepared_set import open_prepared, prepare
from fctune.models.architecture import AttentionLayer
from fctune.models.lora import apply_lora_, init_adapters_
from fctune.runs.device import compute_capability, describe_device, read_device, total_memory
from fctune.runs.metrics import (
    FlopCounter,
    RankMetrics,
    SpanTimer,
    SpikeDetector,
    StepTimeStats,
    aggregate_ranks,
    measure_skew,
    peak_memory_gib,
)
from fctune.runs.sinks import SinkGroup
from fctune.training.loop import build_loader, train
from fctune.training.prefetch import Prefetcher, StepData
from fctune.training.setup import build_base, shard_and_load_, start_state
from tests.ranks import run_ranks
from tests.training.training_runs import Recorder, make_config

LLAMA_8B = 8_030_261_248, (AttentionLayer(32, 8, 128),) * 32


def test_flops_match_published_figures() -> None:
    lora, full = (FlopCounter(*LLAMA_8B, is_frozen=is_frozen) for is_frozen in (True, False))
    # NeMo Automodel: 402 TFLOP/s at 12,472.87 tokens/s of LoRA on Llama 3 8B, attention not counted.
    assert lora.weights(12_473) == pytest.approx(402e12, rel=0.005)
    # torchtitan: 5,762 tokens/s at 8,192 tokens are 33.7 % of 989 TFLOP/s, with dense attention and without the 525M
    # weights of the embedding.
    titan = FlopCounter(8_030_261_248 - 128_256 * 4096, LLAMA_8B[1], is_frozen=False)
    assert titan.weights(5762) + titan.dense_attention(5762, 8192) == pytest.approx(0.337 * 989e12, rel=0.01)
    assert full.weights(10) == 6 * 8_030_261_248 * 10


def test_attention_is_counted_within_conversations() -> None:
    counter = FlopCounter(1, (AttentionLayer(4, 2, 16),) * 2, is_frozen=False)
    lengths = [3, 5]
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    # Query times key and weight times value: 2 x 2 x 64 per layer; backward twice that.
    assert counter.attention(8, pairs) == 3 * 2 * (4 * 64) * pairs
    assert counter.dense_attention(8, 8) > 3 * counter.attention(8, pairs) / 2


@pytest.mark.parametrize(("length", "window"), [(5, 5), (5, 4), (7, 3), (64, 1), (1000, 128), (1000, 1001)])
def test_a_window_limits_the_pairs_that_are_counted(length: int, window: int) -> None:
    seen = [[query - key < window for key in range(query + 1)] for query in range(length)]
    layers = (AttentionLayer(4, 2, 16, window), AttentionLayer(4, 2, 16))
    found = FlopCounter(1, layers, is_frozen=False).attention(10 * length, 10 * length * (length + 1) // 2)
    pairs = 10 * (sum(map(sum, seen)) + length * (length + 1) // 2)  # of ten conversations
    assert found == pytest.approx(3 * (4 * 64) * pairs)


def test_skew_names_the_slowest_rank() -> None:
    assert measure_skew([1.0, 1.0, 1.5, 1.0]) == {"compute_skew": 1.5, "slowest_rank": 2}
    assert measure_skew([2.0]) == {"compute_skew": 1.0, "slowest_rank": 0}
    assert measure_skew([1.0, 1.3]) == {
        "compute_skew": 1.3,
        "slowest_rank": 1,
    }  # compared with the other rank, not with the mean of both
    assert measure_skew([4.0, 1.0, 3.0, 2.0]) == {"compute_skew": 2.0, "slowest_rank": 0}


def test_a_timer_returns_the_settled_span() -> None:
    timer = SpanTimer(torch.device("cpu"))
    assert timer.last_s != timer.last_s  # NaN: nothing measured
    timer.start()
    time.sleep(0.02)
    timer.stop()
    time.sleep(0.02)
    timer.settle()
    assert 0.02 <= timer.last_s < 0.04


def test_peak_memory_of_this_process_grows_with_its_tensors() -> None:
    before = peak_memory_gib(torch.device("cpu"))
    held = torch.ones(64 * 1024 * 1024)  # 256 MiB, touched
    assert peak_memory_gib(torch.device("cpu")) >= max(before, held.nbytes / 1024**3)


def test_a_cpu_has_no_compute_capability() -> None:
    device = torch.device("cpu")
    assert compute_capability(device) is None
    assert describe_device(device).startswith("cpu, ")
    assert total_memory(device, 2) == total_memory(device, 1) // 2 > 0
    if not torch.cuda.is_available():
        assert read_device(0) is None


@pytest.mark.gpu
def test_nvml_reads_the_gpu_of_the_torch_index() -> None:
    pytest.importorskip("pynvml")
    reading = read_device(0)
    assert reading is not None
    assert torch.cuda.get_device_name(0).split()[-1] in reading.name
    assert reading.memory_used_bytes is not None
    assert 0 < reading.memory_used_bytes <= total_memory(torch.device("cuda", 0), 1) * 1.1
    assert reading.power_w is None or 0 < reading.power_w < 2000


def count_products(model: torch.nn.Module, run: Callable[[], torch.Tensor]) -> int:
    """Count the FLOPs of all matrix products in a forward and a backward, by torch's counter."""
    with FlopCounterMode(display=False) as counter:
        run().backward()
    kinds = {"mm", "addmm", "bmm", "baddbmm"}
    return sum(int(n) for op, n in counter.get_flop_counts()["Global"].items() if str(op).split(".")[-1] in kinds)


@pytest.mark.parametrize(("fraction", "mlp_tiles"), [(0.0, 1), (0.5, 1), (1.0, 1), (0.0, 8), (1.0, 8)])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_hardware_flops_match_torchs_counter(
    kind: str, fraction: float, mlp_tiles: int, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    from fctune.models.base_weights import load_base_
    from fctune.models.causal_lm import materialize_
    from fctune.models.lora import apply_lora_, init_adapters_
    from fctune.models.precision import PrecisionPolicy
    from fctune.models.sources import build_model, read_architecture
    from fctune.parallel.activations import apply_activation_checkpointing_
    from fctune.training.meter import count_flops
    from tests.training.training_runs import make_config

    path = make_model(num_hidden_layers=4)
    checkpointing = {"fraction": fraction, "mlp_tiles": mlp_tiles}
    config = make_config(path, tmp_path, activation_checkpointing=checkpointing, precision="fp32")
    model = build_model(read_architecture(path), 64, PrecisionPolicy.uniform(torch.float32))
    if kind == "lora":
        assert config.adapter is not None
        apply_lora_(model, replace(config.adapter, dropout=0.0, modules=["q_proj", "down_proj"]))
    materialize_(model, torch.device("cpu"), False)
    load_base_(model, path)
    if kind == "lora":
        init_adapters_(model, 0)
    apply_activation_checkpointing_(model, config.activation_checkpointing, "cpu")
    model.train()
    tokens = torch.randint(0, model.architecture.vocab_size, (2, 64))
    labels = torch.full_like(tokens, -100)
    labels[:, 40:] = tokens[:, 40:]
    counted = count_products(model, lambda: model(tokens, labels=labels))
    ours = count_flops(model, config).hardware(tokens.numel(), tokens.numel(), 2 * 24, 0)
    # The input of the first adapter needs no gradient, and the last product of a block or tile is not recomputed.
    is_rough = kind == "lora" or fraction or mlp_tiles > 1
    assert ours == pytest.approx(counted, rel=0.06 if is_rough else 0.005)
    assert ours >= 0.995 * counted


def test_percentiles_leave_out_the_first_steps() -> None:
    times = StepTimeStats(num_kept=200, num_skipped=2)
    times.add(60.0)
    times.add(30.0)
    assert times.describe() == {}
    for n in range(1, 301):
        times.add(float(n))
    kept = np.arange(101, 301)
    assert times.describe() == {
        "step_time_p50_s": np.median(kept),
        "step_time_p99_s": np.percentile(kept, 99, method="inverted_cdf"),
    }


NUM_STEPS = 7


def test_each_figure_is_aggregated_over_ranks() -> None:
    found = aggregate_ranks(
        [
            RankMetrics(0.1, 0.0, 4.0, 6.0, 5.0, 1.0, 0.9, 61.0, 400.0),
            RankMetrics(0.4, 0.2, 3.0, 7.0, 8.0, 2.0, 0.7, 66.0, 300.0),
        ]
    )
    assert found == {
        "data_time_max_s": 0.4,
        "save_wait_max_s": 0.2,
        "memory_active_gib": 4.0,
        "memory_reserved_gib": 7.0,
        "peak_memory_max_gib": 8.0,
        "alloc_retries": 3.0,
        "gpu_utilization": pytest.approx(0.8),
        "gpu_utilization_min": 0.7,
        "gpu_temperature_c": 66.0,
        "gpu_power_w": 700.0,
    }


def test_a_figure_that_no_rank_has_is_left_out_and_one_that_any_rank_has_is_reported() -> None:
    found = aggregate_ranks([RankMetrics(data_s=0.1), RankMetrics(data_s=0.2, gpu_temperature_c=50.0)])
    assert found == {"data_time_max_s": 0.2, "gpu_temperature_c": 50.0}
    row = RankMetrics(data_s=0.1).to_row()
    assert RankMetrics.from_row(row).data_s == 0.1
    assert math.isnan(RankMetrics.from_row(row).gpu_power_w)


def train_with_a_slow_disk(world: World, config: RunConfig, prepared_path: Path) -> dict[str, Any]:
    """Train two ranks of which the second waits 0.1 s for the data of each step; count the gathers."""
    take, gather, gathers = Prefetcher.take, dist.all_gather, 0

    def take_late(self: Prefetcher, step: int) -> StepData:
        if world.rank == 1:
            time.sleep(0.1)
        return take(self, step)

    def count_gather(*given: Any, **more: Any) -> Any:
        nonlocal gathers
        gathers += 1
        return gather(*given, **more)

    Prefetcher.take = take_late  # type: ignore[method-assign]
    dist.all_gather = count_gather
    loader = build_loader(config, open_prepared(prepared_path))
    model = build_base(config, Path(config.model.path), world)
    assert config.adapter is not None
    apply_lora_(model, config.adapter)
    gradient_sync = shard_and_load_(model, config, Path(config.model.path), world)
    init_adapters_(model, config.seed)
    recorder = Recorder()
    state = start_state(model, config, NUM_STEPS, gradient_sync)
    train(config, state, loader, NUM_STEPS, world, SinkGroup(recorder), gpu_hours=100.0)
    return {"metrics": recorder.metrics, "gathers": gathers}


def test_a_waiting_rank_is_seen_by_all_ranks_with_one_collective_per_interval(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_model()
    changes = {"parallel": {"mode": "ddp"}, "validation": {"every": 0}, "max_steps": NUM_STEPS}
    config = make_config(model, tmp_path, log_every_n_steps=3, price_per_gpu_hour=2.0, **changes)
    path = prepare(config.data, model, tmp_path / "prepared").path
    first, second = run_ranks(train_with_a_slow_disk, 2, config, path)
    reported = [m for m in first["metrics"] if "data_time_max_s" in m]
    assert [m["step"] for m in reported] == [3, 6]
    for metrics in reported:
        assert 0.3 <= metrics["data_time_max_s"] < 1.0
        assert metrics["peak_memory_max_gib"] >= metrics["peak_memory_gib"] > 0
        assert 0 < metrics["memory_active_gib"] <= metrics["peak_memory_max_gib"] + 0.01
        assert 100 < metrics["gpu_hours"] < 100.1
        assert metrics["cost"] == pytest.approx(2 * metrics["gpu_hours"])
        assert "gpu_utilization" not in metrics  # no GPU here
    assert sum(m["data_time_s"] for m in first["metrics"][:3]) < 0.2
    assert reported[1]["step_time_p50_s"] <= reported[1]["step_time_p99_s"]
    same = {"data_time_max_s", "peak_memory_max_gib", "memory_active_gib"}
    theirs = [m for m in second["metrics"] if "data_time_max_s" in m]
    assert [{key: m[key] for key in same} for m in reported] == [{key: m[key] for key in same} for m in theirs]
    assert (
        first["gathers"] == NUM_STEPS + 2
    )  # one per step, which decides if the update is applied, and one per interval


# Losses of healthy runs of the demo (configs/tiny_lora.yaml): other seeds, data, sequence lengths and learning rates.
HEALTHY_RUNS: list[list[float]] = json.loads(Path(__file__).with_name("healthy_losses.json").read_text())

NOISE: dict[str, Callable[[random.Random, int], float]] = {
    "falling": lambda rng, step: 2.0 * 0.99**step + 0.5 + rng.gauss(0, 0.05),
    "skewed": lambda rng, step: rng.lognormvariate(0, 0.3),
    "near zero": lambda rng, step: 0.03 * rng.lognormvariate(0, 0.9),
    "small batches": lambda rng, step: rng.gammavariate(4, 0.25),
}


def make_losses(kind: str, num_steps: int, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [NOISE[kind](rng, step) for step in range(num_steps)]


def find_spikes(losses: Sequence[float]) -> list[int]:
    """Return the indices of the losses that are spikes."""
    detector = SpikeDetector()
    return [index for index, loss in enumerate(losses) if detector.check(loss) is not None]


def test_recorded_healthy_runs_have_no_spikes() -> None:
    assert [spikes for losses in HEALTHY_RUNS if (spikes := find_spikes(losses))] == []


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", NOISE)
def test_fewer_than_one_in_twenty_noisy_healthy_runs_has_a_spike(kind: str) -> None:
    assert sum(bool(find_spikes(make_losses(kind, 400, seed))) for seed in range(40)) <= 1


def test_a_loss_that_jumps_is_a_spike_and_the_steps_around_it_are_not() -> None:
    losses = make_losses("falling", 200, 1)
    losses[120] *= 3
    assert find_spikes(losses) == [120]


@pytest.mark.parametrize("step", [60, 100, 150])
def test_a_batch_with_wrong_labels_is_a_spike_in_every_recorded_run(step: int) -> None:
    for losses in HEALTHY_RUNS:
        at = min(step, len(losses) - 1)
        broken = [*losses[:at], 6.0, *losses[at + 1 :]]  # untrained, the demo's loss is 6
        assert find_spikes(broken) == [at]


@pytest.mark.parametrize("growth", [1.3, 2.0])
def test_a_diverging_loss_is_found_within_a_few_steps_in_every_recorded_run(growth: float) -> None:
    for losses in HEALTHY_RUNS:
        at = min(100, len(losses) - 30)
        diverging = [min(loss * growth**step, 9.0) for step, loss in enumerate(losses[at : at + 25])]
        assert min(find_spikes([*losses[:at], *diverging])) >= at


def test_a_spike_reports_the_limit_that_it_exceeds() -> None:
    detector = SpikeDetector()
    assert all(detector.check(loss) is None for loss in (1.0, 1.1, 0.9) * 10)
    assert detector.check(9.0) == pytest.approx(1.1**10)
