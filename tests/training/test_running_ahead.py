"""Steps that start before the results of the one before are known: equal updates and metrics, and no wait in a step."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fctune.base.distributed import World
from fctune.config.schema import RunConfig
from fctune.data.loader import StepTotals
from fctune.data.prepared_set import open_prepared, prepare
from fctune.models.causal_lm import CausalLM
from fctune.runs.sinks import SinkGroup
from fctune.training import loop
from fctune.training.callbacks.base import Callback
from fctune.training.callbacks.hang_watch import HangWatch
from fctune.training.loop import NonFiniteError, build_loader, train
from fctune.training.objective import SupervisedObjective
from fctune.training.prefetch import Inputs
from fctune.training.setup import start_state
from fctune.training.step import LaunchedStep, UpdateGuard, can_skip_on_device
from tests.ranks import run_ranks
from tests.training.training_runs import MEASURED, Recorder, build_trainable, make_config

NUM_STEPS = 6
FUSED = {"_component_": "torch.optim.AdamW", "lr": 1e-2, "weight_decay": 0.1, "fused": True}


class SpoiledObjective(SupervisedObjective):
    """Supervised loss that is not a number in some steps, on the last rank alone."""

    def __init__(self, world: World, spoiled: frozenset[int]):
        self.is_bad_rank, self.spoiled, self.step = world.rank == world.world_size - 1, spoiled, 0

    def compute(
        self, model: CausalLM, inputs: Inputs, totals: StepTotals, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        loss, metrics = super().compute(model, inputs, totals, device)
        return loss * (math.nan if self.is_bad_rank and self.step in self.spoiled else 1.0), metrics


class Watching(Callback):
    """Keeps the weights before and after each update, and which steps were written by when."""

    def __init__(self, objective: SpoiledObjective, parameters: list[Tensor], recorder: Recorder, save_at: int = 0):
        self.objective, self.parameters, self.recorder, self.save_at = objective, parameters, recorder, save_at
        self.settle: Callable[[], None] = lambda: None
        self.after: dict[int, list[Tensor]] = {}
        self.written: dict[int, int] = {}

    def on_step_start(self, step: int) -> None:
        self.objective.step = step
        self.written[step] = len(self.recorder.metrics)

    def after_optimizer_update(self, step: int) -> None:
        self.after[step] = [p.detach().clone() for p in self.parameters]

    def on_step_end(self, step: int, is_last: bool) -> bool:
        if step == self.save_at:
            self.settle()
            assert self.recorder.metrics[-1]["step"] == step
        return False


def train_spoiled(
    world: World, config: RunConfig, path: Path, runs_ahead: bool, spoiled: frozenset[int], save_at: int = 0
) -> dict[str, Any]:
    """Train with steps that are not finite; returns the metrics, the weights, and what ended the run."""
    model, gradient_sync = build_trainable(config, world)
    state, loader = start_state(model, config, NUM_STEPS, gradient_sync), build_loader(config, open_prepared(path))
    trained = [p for group in state.optimizer.param_groups for p in group["params"]]
    local = [p.to_local() if hasattr(p, "to_local") else p for p in trained]
    recorder, objective = Recorder(), SpoiledObjective(world, spoiled)
    watching = Watching(objective, local, recorder, save_at)
    watching.settle = lambda: state.settle()
    error = ""
    try:
        arguments = (config, state, loader, NUM_STEPS, world, SinkGroup(recorder), [watching])
        train(*arguments, objective=objective, runs_ahead=runs_ahead)
    except NonFiniteError as caught:
        error = str(caught)
    moments = [value for s in state.optimizer.state.values() for value in s.values()]
    return {
        "metrics": [
            {name: repr(value) for name, value in row.items() if name not in MEASURED} for row in recorder.metrics
        ],
        "weights": [p.detach().clone().numpy() for p in local],
        "after": {step: [p.numpy() for p in weights] for step, weights in watching.after.items()},
        "moments": [(m.to_local() if hasattr(m, "to_local") else m).clone().numpy() for m in moments],
        "written": watching.written,
        "elapsed_s": state.timers.elapsed_s,
        "lr": state.scheduler.get_last_lr(),
        "num_tokens": state.num_tokens,
        "step": state.step,
        "error": error,
    }


@pytest.fixture
def run(make_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Any]:
    def run_both(world_size: int, spoiled: set[int], save_at: int = 0, **changes: Any) -> list[list[dict[str, Any]]]:
        changes = {
            "precision": "fp32",
            "optimizer": FUSED,
            "validation": {"every": 4},
            "max_steps": NUM_STEPS,
        } | changes
        config = make_config(make_model(), tmp_path, **changes)
        path = prepare(config.data, Path(config.model.path), tmp_path / "prepared").path
        arguments = (config, path)
        return [
            run_ranks(train_spoiled, world_size, *arguments, runs_ahead, frozenset(spoiled), save_at)
            for runs_ahead in (False, True)
        ]

    return run_both


def check_equal(waiting: dict[str, Any], ahead: dict[str, Any]) -> None:
    assert ahead["metrics"] == waiting["metrics"]
    for name in ("weights", "moments"):
        assert len(ahead[name]) == len(waiting[name]) > 0
        assert all((a == b).all() for a, b in zip(ahead[name], waiting[name], strict=True)), name
    for name in ("lr", "num_tokens", "step", "error"):
        assert ahead[name] == waiting[name], name


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("world_size", "mode", "spoiled"), [(1, "auto", set()), (2, "ddp", {3}), (2, "fsdp", {1, 4, 5})], ids=str
)
def test_running_ahead_trains_skips_and_logs_as_waiting_does(
    world_size: int, mode: str, spoiled: set[int], run: Callable[..., Any]
) -> None:
    for waiting, ahead in zip(*run(world_size, spoiled, on_nonfinite="skip", parallel={"mode": mode}), strict=True):
        check_equal(waiting, ahead)
        assert [int(row["step"]) for row in ahead["metrics"]] == list(range(1, NUM_STEPS + 1))
        assert {int(row["step"]) for row in ahead["metrics"] if "is_skipped" in row} == spoiled
        assert ahead["elapsed_s"] > 0


def test_metrics_of_a_step_are_written_during_the_next_or_when_the_run_saves(run: Callable[..., Any]) -> None:
    (waiting,), (ahead,) = run(1, set(), save_at=2)
    assert waiting["written"] == {step: step - 1 for step in range(1, NUM_STEPS + 1)}
    assert ahead["written"] == {1: 0, 2: 0, 3: 2, 4: 2, 5: 3, 6: 4}
    check_equal(waiting, ahead)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "spoiled", "ends_at"),
    [({}, {3}, 3), ({"on_nonfinite": "skip", "max_nonfinite": 2}, {2, 4, 5}, 5)],
    ids=["stop", "skip"],
)
def test_a_run_that_ends_keeps_the_weights_from_before_the_step_that_was_not_finite(
    options: dict[str, Any], spoiled: set[int], ends_at: int, run: Callable[..., Any]
) -> None:
    for waiting, ahead in zip(*run(2, spoiled, parallel={"mode": "ddp"}, **options), strict=True):
        assert f"step {ends_at}: loss nan" in ahead["error"]
        check_equal(waiting, ahead)
        # The next step had been launched, and was not applied.
        assert max(ahead["metrics"], key=lambda row: int(row["step"]))["step"] == str(ends_at)
        before = min(step for step in spoiled if step >= ends_at - 1) - 1
        assert all((a == b).all() for a, b in zip(ahead["weights"], ahead["after"][before], strict=True))


def test_a_save_at_a_step_that_ends_the_run_is_not_taken(run: Callable[..., Any]) -> None:
    (waiting,), (ahead,) = run(1, {3}, save_at=3)
    assert "step 3: loss nan" in ahead["error"]
    check_equal(waiting, ahead)
    assert max(ahead["written"]) == 3  # the save has settled it before the next step


class HostReads(TorchFunctionMode):
    """Counts what would make the host wait for a CUDA device: numbers read from tensors, and sizes that depend on them.

    On CPU tensors, ``tolist`` and ``numpy`` reach no operator, so calls are counted, and operators beneath them.
    """

    CALLS = frozenset({"tolist", "numpy", "cpu", "item", "__bool__", "__float__", "__int__", "__index__", "nonzero"})
    OPERATORS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        reads = self

        class Operators(TorchDispatchMode):
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if function.__name__.split(".")[0].rstrip("_") in reads.OPERATORS:
                    reads.found[function.__name__] += 1
                return function(*args, **(kwargs or {}))

        self.operators = Operators()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in self.CALLS:
            self.found[function.__name__] += 1
        return function(*args, **(kwargs or {}))


class CountingReads(Callback):
    """Counts from the start of each step's forward pass to where its update is launched."""

    def __init__(self) -> None:
        self.steps: list[Counter[str]] = []

    def on_step_start(self, step: int) -> None:
        self.reads = HostReads()
        self.reads.operators.__enter__()
        self.reads.__enter__()

    def stop(self) -> None:
        self.reads.__exit__(None, None, None)
        self.reads.operators.__exit__(None, None, None)
        self.steps.append(self.reads.found)


def count_reads(world: World, config: RunConfig, path: Path, runs_ahead: bool) -> list[Counter[str]]:
    model, gradient_sync = build_trainable(config, world)
    state, loader = start_state(model, config, 3, gradient_sync), build_loader(config, open_prepared(path))
    counting, launch = CountingReads(), loop.launch_step

    def launch_step(*arguments: Any, **options: Any) -> LaunchedStep:
        launched = launch(*arguments, **options)
        counting.stop()  # the host may wait from here on, for the step before
        return launched

    loop.launch_step = launch_step
    train(config, state, loader, 3, world, SinkGroup(), [counting], runs_ahead=runs_ahead)
    return counting.steps


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("changes", [{}, {"adapter": None}], ids=["lora", "full"])
def test_a_step_reads_no_number_from_the_device_before_its_update_is_launched(
    mode: str, changes: dict[str, Any], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    changes = {
        "precision": "fp32",
        "optimizer": FUSED,
        "validation": {"every": 0},
        "parallel": {"mode": mode},
    } | changes
    config = make_config(make_model(), tmp_path, **changes)
    path = prepare(config.data, Path(config.model.path), tmp_path / "prepared").path
    for steps in run_ranks(count_reads, 2, config, path, True):
        assert steps == [Counter()] * 3
    for steps in run_ranks(count_reads, 2, config, path, False):
        assert [step["tolist"] for step in steps] == [1] * 3  # which shows that it would be found


def train_with_slow_measurements(world: World, config: RunConfig, path: Path, runs_ahead: bool) -> list[dict[str, Any]]:
    model, gradient_sync = build_trainable(config, world)
    state, loader = start_state(model, config, 3, gradient_sync), build_loader(config, open_prepared(path))
    recorder = Recorder()

    def validate(*_: Any) -> dict[str, float]:
        time.sleep(5)
        return {}

    class Evaluating(Callback):
        def measure(self, step: int, is_last: bool) -> dict[str, Any]:
            if step == 1:
                state.wait()
                time.sleep(5)
            return {}

    loop.validate = validate
    train(config, state, loader, 3, world, SinkGroup(recorder), [Evaluating()], runs_ahead=runs_ahead)
    return recorder.metrics


@pytest.mark.parametrize("runs_ahead", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_a_steps_time_is_without_validation_and_evaluation(
    runs_ahead: bool, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    config = make_config(make_model(), tmp_path, precision="fp32", optimizer=FUSED, validation={"every": 2})
    path = prepare(config.data, Path(config.model.path), tmp_path / "prepared").path
    (metrics,) = run_ranks(train_with_slow_measurements, 1, config, path, runs_ahead)
    assert [row["step"] for row in metrics if row.get("validation_time_s", 0) >= 5] == [2, 3]
    assert max(row["step_time_s"] for row in metrics) < 5


def test_only_fused_optimizers_can_skip_on_the_device() -> None:
    weights = [torch.zeros(2, requires_grad=True)]
    for optimizer in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        assert can_skip_on_device(optimizer(weights, lr=0.1, fused=True))
        assert not can_skip_on_device(optimizer(weights, lr=0.1))
    assert not can_skip_on_device(torch.optim.Adafactor(weights))


def test_a_momentum_that_a_skipped_first_step_leaves_undefined_is_not_left_to_the_device() -> None:
    weight = torch.zeros(2, requires_grad=True)
    assert not can_skip_on_device(torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True))


def test_an_optimizer_of_a_users_own_is_not_left_to_the_device() -> None:
    class Own(torch.optim.AdamW):
        pass

    assert not can_skip_on_device(Own([torch.zeros(2, requires_grad=True)], fused=True))


def test_a_guard_skips_what_is_not_finite_and_everything_after_the_last_allowed_step() -> None:
    good, bad = torch.tensor([[1.0, 2.0, 0.0, math.nan]]), torch.tensor([[1.0, math.inf, 0.0, 5.0]])
    guard = UpdateGuard(2, torch.device("cpu"))
    rows = [good, bad, good, bad, torch.cat([good, bad]), good, good]
    assert [guard.skip(row).item() for row in rows] == [0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert [UpdateGuard(1, torch.device("cpu")).skip(row).item() for row in (good, bad)] == [0.0, 1.0]


def test_a_wait_between_steps_has_the_limit_of_a_step(tmp_path: Path) -> None:
    watch = HangWatch(tmp_path, 0, lambda *_: None, timeout_s=600)
    try:
        with watch.waiting(3):
            assert watch._step is not None
            assert watch._step.limit_s == 600
        assert watch._step is None
        watch.on_step_start(4)
        with watch.waiting(3):
            pass
        assert watch._step is not None  # the step's own limit goes on
    finally:
        watch.close()
