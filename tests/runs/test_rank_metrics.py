"""Metrics of all ranks are aggregated from each rank's own figures with one collective per logging interval."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fctune.base.distributed import World
from fctune.config.schema import RunConfig
from fctune.data.prepared_set import open_prepared, prepare
from fctune.models.lora import apply_lora_, init_adapters_
from fctune.runs.metrics import RankMetrics, aggregate_ranks
from fctune.runs.sinks import SinkGroup
from fctune.training.loop import build_loader, train
from fctune.training.prefetch import Prefetcher, StepData
from fctune.training.setup import build_base, shard_and_load_, start_state
from tests.ranks import run_ranks
from tests.training.training_runs import Recorder, make_config

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
