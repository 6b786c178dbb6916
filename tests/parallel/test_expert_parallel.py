"""Experts spread over ranks: the bytes that they send and hold, and when a run chooses to spread them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fctune.apps.plan.plan import Plan, make_plan
from fctune.apps.plan.request import PlanRequest
from fctune.base.distributed import World
from fctune.base.gpus import find_gpu
from fctune.config.loading import load_config
from fctune.config.schema import RunConfig
from fctune.models import frozen_experts
from fctune.models.planned_model import shape_model
from fctune.models.sources import read_architecture
from fctune.parallel.footprint import GIB
from fctune.parallel.layout import Hardware
from fctune.parallel.memory import MemoryModel, Setting
from fctune.parallel.search import choose_expert_ranks, list_overrides
from fctune.parallel.speed import count_communication, count_expert_exchange
from fctune.training.prefetch import make_inputs
from fctune.training.setup import start_state
from tests.models.expert_samples import quantize_to_mxfp4, save_base
from tests.parallel.split_rows import CPU, make_batch
from tests.ranks import run_ranks
from tests.training.training_runs import build_trainable, make_config

ADAPTER = {"rank": 4, "alpha": 8, "dropout": 0.0, "modules": ["q_proj", "experts.down_proj"]}


class CountedTraffic(TorchDispatchMode):
    """Counts the bytes that this rank exchanges with others, and of unsharded weights that it gathers."""

    def __init__(self, rank: int):
        super().__init__()
        self.rank, self.rows, self.sent, self.gathered = rank, 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.alltoall_base_.default and args[1].is_floating_point():
            rows, sizes = args[1], args[4]
            own = sizes[self.rank] * rows[:1].nbytes
            self.rows += rows.nbytes
            self.sent += rows.nbytes - own
        elif func is torch.ops.c10d._allgather_base_.default:
            self.gathered += args[0].nbytes
        return func(*args, **(kwargs or {}))


def plan_memory(config: RunConfig, is_cuda: bool = True) -> MemoryModel:
    model = shape_model(config, read_architecture(Path(config.model.path)), device_type="cpu")
    return MemoryModel(model, config, 80 * GIB, is_cuda=is_cuda)


def count_traffic(world: World, config: RunConfig) -> tuple[int, int, int]:
    """Return the bytes of rows for experts, of those that leave this rank, and of gathered weights, in a step."""
    model, _ = build_trainable(config, world)
    model.train()
    # Ranks have other tokens, and so other routes.
    inputs = make_inputs(make_batch(100 + world.rank, 28 - world.rank), model.make_bounds)
    with CountedTraffic(world.rank) as counted:
        model(**inputs.arguments(CPU)).backward()
    return counted.rows, counted.sent, counted.gathered


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model_type", "fraction", "expert"), [("qwen3_moe", 0.0, 2), ("qwen3_moe", 1.0, 2), ("gpt_oss", 0.0, 1)]
)
def test_ranks_send_and_gather_as_many_bytes_as_planned(
    model_type: str, fraction: float, expert: int, tmp_path: Path
) -> None:
    config = make_config(
        save_base(model_type, tmp_path / "base", num_experts=4),
        tmp_path,
        adapter=ADAPTER,
        precision="fp32",
        data={"seq_len": 128},
        parallel={"mode": "fsdp", "expert": expert},
        activation_checkpointing={"fraction": fraction},
    )
    found = run_ranks(count_traffic, 2, config)
    memory = plan_memory(config)
    setting = Setting("fsdp", 1, 2, fraction, 1, expert=expert)
    planned = count_expert_exchange(memory, setting, 128)
    gathered, _, _ = count_communication(memory, setting, 1)
    # Half of the rows stay if tokens choose all experts equally often. What returns is as many rows as arrived.
    if expert > 1:
        assert sum(rows for rows, _, _ in found) / 2 == 2 * planned
    for _, _, weights in found:
        assert weights == pytest.approx(gathered, rel=0.02)  # shards are filled up to equal sizes
    if expert == 1:
        assert planned == 0
    else:
        assert sum(sent for _, sent, _ in found) / 2 == pytest.approx(planned, rel=0.25)


def plan(name: str, request: PlanRequest, *overrides: str) -> Plan:
    return make_plan(load_config(name, ["success=null", *overrides]), request)


@pytest.mark.parametrize(
    ("name", "gpu", "nodes", "gpus", "overrides", "spreads"),
    [
        pytest.param("qwen3_30b_a3b_lora", "h100", 1, 8, (), False, marks=pytest.mark.thorough),  # which each GPU holds
        ("qwen3_30b_a3b_lora", "l40s", 1, 8, (), True),
        pytest.param("gpt_oss_20b_lora", "l40s", 1, 4, (), True, marks=pytest.mark.thorough),
        pytest.param(
            "qwen3_30b_a3b_lora", "h100", 2, 8, ("~adapter", "precision=bf16_mixed"), True, marks=pytest.mark.thorough
        ),
    ],
)
def test_auto_is_about_the_fastest_of_the_numbers_that_fit(
    name: str, gpu: str, nodes: int, gpus: int, overrides: tuple[str, ...], spreads: bool
) -> None:
    """Compared with the plan of each number, written as a number."""
    request = PlanRequest(find_gpu(gpu), nodes, gpus)
    auto = plan(name, request, "parallel.expert=auto", *overrides)
    numbers = [number for number in (1, 2, 4, 8, 16) if nodes * gpus % number == 0]
    plans = {number: plan(name, request, f"parallel.expert={number}", *overrides) for number in numbers}
    memory = 0.9 * request.gpu.memory_bytes
    times = {n: one.estimate.step_s for n, one in plans.items() if one.peak.footprint.total <= memory}
    chosen = auto.config.parallel.expert_ranks
    assert (chosen > 1) is spreads
    assert auto.estimate.step_s == pytest.approx(times[chosen])
    assert times[chosen] <= 1.051 * min(times.values())
    # What takes more ranks is faster by more than a plan is wrong by, or less does not fit.
    assert all(times[number] > 1.05 * times[chosen] for number in times if number < chosen)
    assert auto.setting.expert == chosen
    assert ("s a step by the plan" in auto.search.expert_reason) is (spreads and min(times) == 1)


def test_auto_spreads_experts_where_a_step_fits_in_no_other_way() -> None:
    name, overrides = "qwen3_30b_a3b_lora", ("~adapter", "precision=bf16_mixed", "micro_batch_size=1")
    request = PlanRequest(find_gpu("h100", {"--gpu-memory-gib": 73}), 1, 8)

    def fits(number: int | str) -> tuple[bool, Plan]:
        found = plan(name, request, f"parallel.expert={number}", *overrides)
        return found.peak.footprint.total <= 0.9 * request.gpu.memory_bytes, found

    assert not fits(1)[0]
    is_fitting, auto = fits("auto")
    assert is_fitting
    assert auto.config.parallel.expert_ranks > 1


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("compile=true", "blocks that exchange tokens are not compiled"),
        ("eval={every: 1}", "ranks generate at their own pace"),
        ("parallel.mode=ddp", "needs ranks that shard the other weights"),
        ("parallel.cpu_offload=true", "stay on their devices"),
        ("model.path=hf:Qwen/Qwen3-8B", "this model has no experts"),
    ],
)
def test_auto_is_one_rank_where_nothing_else_is_possible(override: str, words: str) -> None:
    overrides = ["parallel.expert=auto", "parallel.mode=fsdp", override]
    found = plan("qwen3_30b_a3b_lora", PlanRequest(find_gpu("l40s"), 1, 8), *overrides)
    assert found.config.parallel.expert == 1
    assert words in found.search.expert_reason


@pytest.mark.thorough
def test_each_number_of_nodes_is_searched_with_its_own_number_of_ranks() -> None:
    overrides = ("parallel.expert=auto", "~adapter", "precision=bf16_mixed")
    request = PlanRequest(find_gpu("h100"), 2, 8, is_searching=True)
    found = plan("qwen3_30b_a3b_lora", request, *overrides)
    (alone,) = (point for point in found.scaling if point.nodes == 1)
    single = plan("qwen3_30b_a3b_lora", PlanRequest(find_gpu("h100"), 1, 8), *overrides)
    best = single.fastest
    assert (alone.best is None) == (best is None)
    if alone.best is not None and best is not None:
        assert alone.best.setting.expert == best.setting.expert == single.config.parallel.expert_ranks
    setting = found.variants[0].setting
    assert "parallel.expert" not in list_overrides(found.config, setting)
    config = load_config("qwen3_30b_a3b_lora", ["parallel.expert=auto"])
    assert list_overrides(config, setting)["parallel.expert"] == setting.expert


def test_a_resumed_run_keeps_its_number_of_ranks_while_it_fits(tmp_path: Path) -> None:
    base = save_base("qwen3_moe", tmp_path / "base", num_experts=4)
    config = make_config(base, tmp_path, data={"seq_len": 128}, adapter=ADAPTER, parallel={"expert": "auto"})
    memory = plan_memory(config)
    model = shape_model(config, read_architecture(base), device_type="cpu")

    def choose(num_ranks: int, kept: int | None, gib: float = 8) -> tuple[int, str | None]:
        return choose_expert_ranks(model, Hardware("cpu", num_ranks, num_ranks, int(gib * GIB)), memory, kept)

    assert choose(4, None) == (1, "a step fits in memory without more")
    assert choose(4, 2) == (2, None)
    assert choose(4, 1) == (1, None)
    assert choose(3, 2)[0] == 1  # does not divide the ranks
    assert choose(4, 2, 1e-6)[1] == "a step fits with no number; this one needs the least memory"


# Weights that are dequantized at a time: of these small models a small part, as of large ones.
CHUNK = 1 << 17


def track_peak(world: World, config: RunConfig) -> int:
    """Return the peak bytes of this rank in two steps, by torch's tracker on real tensors."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    frozen_experts.CHUNK_ELEMENTS = CHUNK
    model, gradient_sync = build_trainable(config, world)
    model.train()
    state = start_state(model, config, 2, gradient_sync)
    inputs = make_inputs(make_batch(40, 24), model.make_bounds)
    # The tracker follows modules, and fails where one is differentiated within the forward pass, as the loss does.
    head: Any = model.head
    model.project = lambda hidden, _=None: head.forward(hidden)  # type: ignore[method-assign]
    tracker = FSDPMemTracker(model, state.optimizer)
    with tracker:
        for _ in range(2):
            model(**inputs.arguments(CPU)).backward()
            gradient_sync.finish()
            state.optimizer.step()
            state.optimizer.zero_grad()
            tracker.reset_mod_stats()
    peak = tracker.get_tracker_snapshot("peak")[CPU]
    return next(int(size) for kind, size in peak.items() if getattr(kind, "value", kind) == "Total")


@pytest.mark.sample(1)
@pytest.mark.parametrize("expert", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_the_planned_peak_with_experts_in_4_bits_is_the_trackers(
    expert: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fctune.parallel.block_memory.EXPERT_CHUNK", CHUNK)
    sizes = {"num_experts": 16, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    base = quantize_to_mxfp4(save_base("gpt_oss", tmp_path / "base", **sizes), tmp_path / "packed")
    config = make_config(
        base,
        tmp_path,
        adapter={"rank": 4, "alpha": 8, "dropout": 0.0, "modules": ["q_proj"], "base": "mxfp4"},
        precision="bf16",
        data={"seq_len": 64},
        micro_batch_size=1,
        parallel={"mode": "fsdp", "expert": expert},
        activation_checkpointing={"fraction": 0.0},
    )
    tracked = max(run_ranks(track_peak, 2, config))
    memory = plan_memory(config, is_cuda=False)
    planned = memory.peak(Setting("fsdp", 1, 2, 0.0, 1, expert=expert)).footprint.total
    assert planned == pytest.approx(tracked, rel=0.15)
