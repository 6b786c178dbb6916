"""A step sends only the gradients it must, and measures what its batches contain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fctune.base.distributed import World
from fctune.config.schema import RunConfig
from fctune.data.loader import GlobalLoader
from fctune.data.prepared_set import open_prepared, prepare
from fctune.models.attention import DocumentBounds, make_bounds
from fctune.parallel.sharding import GradientSync
from fctune.runs.sinks import SinkGroup
from fctune.training.callbacks.base import Callback
from fctune.training.loop import NonFiniteError, build_loader, train
from fctune.training.objective import Objective
from fctune.training.prefetch import Inputs, Prefetcher, make_inputs
from fctune.training.setup import start_state
from fctune.training.step import _clip_, evaluate_objective
from tests.ranks import run_ranks
from tests.training.training_runs import build_trainable, make_config

NUM_MICRO_BATCHES = 4


class Collectives(TorchDispatchMode):
    """Counts the collectives of this process, and the elements sent by each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.numbers: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            kind = function.__name__.split(".")[0].strip("_")
            self.calls[kind] += 1
            self.numbers[kind] += sum(t.numel() for t in torch.utils._pytree.tree_leaves(args[0]) if torch.is_tensor(t))
        return function(*args, **(kwargs or {}))


class CountingCallback(Callback):
    def __init__(self) -> None:
        self.steps: list[Collectives] = []

    def on_step_start(self, step: int) -> None:
        self.steps.append(Collectives())
        self.steps[-1].__enter__()

    def after_optimizer_update(self, step: int) -> None:
        self.steps[-1].__exit__(None, None, None)


def count_collectives(world: World, config: RunConfig, path: Path, holds_gradients: bool) -> dict[str, Any]:
    """Return the collectives of the first step, and the sizes to compare them with."""
    model, gradient_sync = build_trainable(config, world)
    if not holds_gradients:
        gradient_sync = GradientSync(model, gradient_sync.num_copies, holds_gradients=False)
    counter, loader = CountingCallback(), build_loader(config, open_prepared(path))
    train(config, start_state(model, config, 1, gradient_sync), loader, 1, world, SinkGroup(), [counter])
    return {
        "calls": counter.steps[0].calls,
        "numbers": counter.steps[0].numbers,
        "num_units": len(list(model.blocks)) + 1,
        "num_trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


@pytest.fixture
def counted(make_model: Callable[..., Path], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def count(world_size: int, holds_gradients: bool = True, **changes: Any) -> dict[str, Any]:
        sizes = {"global_batch_size": world_size * NUM_MICRO_BATCHES, "micro_batch_size": 1}
        config = make_config(make_model(), tmp_path, validation={"every": 0}, **sizes, **changes)
        prepared = prepare(config.data, Path(config.model.path), tmp_path / "prepared")
        result: dict[str, Any] = run_ranks(count_collectives, world_size, config, prepared.path, holds_gradients)[0]
        return result

    return count


def test_ddp_sends_each_adapter_gradient_once_and_nothing_else(counted: Callable[..., dict[str, Any]]) -> None:
    found = counted(2, parallel={"mode": "ddp"})
    assert found["calls"].keys() == {"allreduce", "allgather"}
    assert found["numbers"]["allreduce"] == found["num_trained"]
    assert found["numbers"]["allgather"] <= 16  # the step's metrics


def test_fsdp_reduces_small_gradients_once_per_accumulation(counted: Callable[..., dict[str, Any]]) -> None:
    found = counted(2, parallel={"mode": "fsdp"})
    assert found["calls"]["reduce_scatter_base"] == found["num_units"]


@pytest.mark.thorough
def test_hsdp_scatters_large_gradients_per_micro_batch_but_reduces_over_replicas_once(
    counted: Callable[..., dict[str, Any]],
) -> None:
    found = counted(4, holds_gradients=False, adapter=None, parallel={"mode": "hsdp", "replicate": 2})
    assert found["calls"]["reduce_scatter_base"] == found["num_units"] * NUM_MICRO_BATCHES
    over_copies = found["num_units"]
    assert found["calls"]["allreduce"] <= over_copies + 2  # plus the norm, over each axis of the mesh


def train_until_not_finite(world: World, config: RunConfig, path: Path) -> bool:
    """Return True if the final weights are bit-identical to those before the step that was not finite."""
    model, gradient_sync = build_trainable(config, world)
    state, loader = start_state(model, config, 8, gradient_sync), build_loader(config, open_prepared(path))
    trained = state.optimizer.param_groups[0]["params"]
    seen: list[list[Tensor]] = []

    class Snapshots(Callback):
        def before_optimizer_update(self, step: int) -> None:
            seen.append([p.detach().clone() for p in trained])

    with pytest.raises(NonFiniteError):
        train(config, state, loader, 8, world, SinkGroup(), [Snapshots()])
    moments = [value for s in state.optimizer.state.values() for value in s.values() if value.dim()]
    return (
        1 < len(seen) == state.step < 8
        and all(torch.equal(before, after) for before, after in zip(seen[-1], trained, strict=True))
        and all(torch.isfinite(moment).all() for moment in moments)
    )


@pytest.mark.parametrize("mode", ["ddp", "fsdp", "hsdp"])
def test_a_loss_that_is_not_finite_stops_before_the_update_on_all_ranks(
    mode: str, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    parallel = {"mode": mode} | ({"replicate": 2} if mode == "hsdp" else {})
    optimizer = {"_component_": "torch.optim.AdamW", "lr": 1e30}
    config = make_config(
        make_model(),
        tmp_path,
        precision="fp32",
        parallel=parallel,
        optimizer=optimizer,
        validation={"every": 0},
    )
    prepared = prepare(config.data, Path(config.model.path), tmp_path / "prepared")
    assert run_ranks(train_until_not_finite, 2, config, prepared.path) == [True, True]


def test_the_totals_of_a_step_match_its_batches(make_model: Callable[..., Path], tmp_path: Path) -> None:
    for is_packed in (True, False):
        data = {"packed": is_packed, "call_weight": 2.5}
        config = make_config(make_model(), tmp_path, data=data, global_batch_size=3)
        prepared = prepare(config.data, Path(config.model.path), tmp_path / "prepared")
        loader = GlobalLoader(prepared, "train", 3, 1)
        for number in range(1, loader.steps_per_epoch + 1):
            step = loader.step_at(number)
            totals = loader.totals(step)
            batches = [b for rank in range(2) for b in loader.micro_batches(step, rank, 2, 1)]
            assert totals.num_tokens == sum(b.num_tokens for b in batches)
            assert totals.num_supervised == sum(b.num_supervised for b in batches)
            assert totals.weight_sum == pytest.approx(sum(b.weight_sum for b in batches), rel=1e-12)
            lengths = [prepared.offsets[m + 1] - prepared.offsets[m] for p in step.packs for m in _members(prepared, p)]
            assert totals.num_pairs == sum(int(n) * (int(n) + 1) // 2 for n in lengths)


class Extremes(Objective):
    """Counts the supervised tokens of a batch, and finds its largest token id."""

    metrics = ("supervised", "largest")
    maxima = frozenset({"largest"})

    def compute(self, model: Any, inputs: Inputs, totals: Any, device: torch.device) -> tuple[Tensor, Tensor]:
        measured = torch.tensor([len(inputs.supervised), int(inputs.tokens.max())], dtype=torch.float64)
        return measured[0] / 2, measured


def evaluate_extremes(world: World, config: RunConfig, path: Path) -> dict[str, Any]:
    """Return what is measured over all batches, and the same of each batch of this rank."""
    model, _ = build_trainable(config, world)
    loader = build_loader(config, open_prepared(path))
    step = loader.step_at(1)
    batches = list(loader.micro_batches(step, world.rank, world.world_size, 1))
    loss, metrics = evaluate_objective(model, Extremes(), batches, loader.totals(step), world)
    each = [(len(b.supervised), int(b.tokens.max())) for b in (make_inputs(b, bounds_of) for b in batches)]
    return {"loss": loss, "metrics": metrics, "each": each}


def test_maxima_of_an_evaluation_are_those_of_all_batches_and_ranks(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    config = make_config(make_model(), tmp_path, global_batch_size=4, micro_batch_size=1)
    prepared = prepare(config.data, Path(config.model.path), tmp_path / "prepared")
    one, other = run_ranks(evaluate_extremes, 2, config, prepared.path)
    counts, largest = zip(*one["each"], *other["each"], strict=True)
    assert len(counts) == 4
    assert one["metrics"] == other["metrics"] == {"supervised": sum(counts), "largest": max(largest)}
    assert one["loss"] == sum(counts) / 2


def bounds_of(lengths: Sequence[Sequence[int]]) -> DocumentBounds:
    return make_bounds(lengths, "per_document")


def _members(prepared: Any, pack: int) -> list[int]:
    members: list[int] = prepared.members("train", pack)
    return members


def test_prefetched_inputs_equal_inputs_built_on_demand(make_model: Callable[..., Path], tmp_path: Path) -> None:
    config = make_config(make_model(), tmp_path, data={"packed": True}, global_batch_size=2)
    prepared = prepare(config.data, Path(config.model.path), tmp_path / "prepared")
    world = World(0, 1, 0, torch.device("cpu"))

    def feed(steps: list[int]) -> list[dict[str, Tensor]]:
        loader = GlobalLoader(prepared, "train", 2, 1)
        with Prefetcher(loader, world, 1, bounds_of, num_steps=9) as prefetcher:
            return [inputs.arguments(world.device) for step in steps for inputs in prefetcher.take(step).inputs]

    in_order, jumping = feed([3, 4, 5]), [inputs for step in (3, 4, 5) for inputs in feed([step])]
    assert len(in_order) == len(jumping) > 3
    for one, other in zip(in_order, jumping, strict=True):
        for name in ("tokens", "labels", "loss_weights", "positions", "row_keys", "supervised"):
            assert torch.equal(one[name], other[name]), name
        assert torch.equal(one["bounds"].ends, other["bounds"].ends)


def test_micro_batches_have_no_more_rows_than_a_rank_has_of_a_step(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    config = make_config(make_model(), tmp_path, data={"packed": True})
    prepared = prepare(config.data, Path(config.model.path), tmp_path / "prepared")
    for num_ranks, num_rows in ((1, 4), (2, 2), (3, 2), (9, 1)):
        loader = GlobalLoader(prepared, "train", 4, 1, has_full_batches=True)
        with Prefetcher(loader, World(0, num_ranks, 0, torch.device("cpu")), 8, bounds_of, 9) as prefetcher:
            (inputs,) = prefetcher.take(1).inputs
        assert inputs.tokens.shape == (num_rows, prepared.seq_len)


def test_an_error_while_prefetching_reaches_the_loop(make_model: Callable[..., Path], tmp_path: Path) -> None:
    config = make_config(make_model(), tmp_path)
    prepared = prepare(config.data, Path(config.model.path), tmp_path / "prepared")
    loader = GlobalLoader(prepared, "train", 2, 1)
    loader.collate = None  # type: ignore[assignment]
    with (
        Prefetcher(loader, World(0, 1, 0, torch.device("cpu")), 1, bounds_of, 9) as prefetcher,
        pytest.raises(TypeError),
    ):
        prefetcher.take(1)


def clip_by_both(world: World) -> dict[str, Any]:
    """Clip gradients of every layout of four ranks, by the step and by torch, which plans each DTensor."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    layouts: list[tuple[Any, Any]] = [
        (mesh, [Replicate(), Shard(0)]),
        (mesh, [Shard(0), Shard(0)]),
        (mesh, [Shard(1), Replicate()]),
        (mesh["shard"], [Shard(0)]),
        (None, None),
    ]
    results = {}
    for name, chosen in {"all": layouts, "one mesh": layouts[:3], "plain": layouts[4:]}.items():
        generator = torch.Generator().manual_seed(1)
        by_step, by_torch = [], []
        for target, placements in chosen:
            # Five rows on two or four ranks: shards of different lengths, of which one is empty.
            full = torch.randn(5, 3, generator=generator, dtype=torch.float64)
            for parameters in (by_step, by_torch):
                value = full.clone() if target is None else distribute_tensor(full.clone(), target, placements)
                parameters.append(torch.nn.Parameter(torch.zeros_like(value)))
                parameters[-1].grad = value
        norm = _clip_(by_step, 1.5)
        norms = [torch.nn.utils.get_total_norm([p.grad]) for p in by_torch if p.grad is not None]
        total = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).square().sum().sqrt()
        for parameter in by_torch:
            torch.nn.utils.clip_grads_with_norm_([parameter], 1.5, total)
        pairs = [
            tuple(g.full_tensor() if isinstance(g, DTensor) else g for g in (a.grad, b.grad))
            for a, b in zip(by_step, by_torch, strict=True)
        ]
        results[name] = (float(norm), float(total), max(float((a - b).abs().max()) for a, b in pairs))
    return results


def test_gradients_of_any_layout_are_clipped_as_by_torch() -> None:
    for result in run_ranks(clip_by_both, 4):
        for norm, expected, gap in result.values():
            assert norm == pytest.approx(expected, rel=1e-12)
            assert norm > 1.5
            assert gap < 1e-12


def test_a_norm_below_the_limit_changes_no_gradient() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([0.1, 0.2, 0.2])
    assert float(_clip_([parameter], 1.0)) == pytest.approx(0.3)
    assert torch.equal(parameter.grad, torch.tensor([0.1, 0.2, 0.2]))
