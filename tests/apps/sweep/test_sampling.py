"""Settings of a sweep are planned and proposed, and its worst runs stopped early."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fctune.apps.sweep.driver import Progress, choose_worst, find_rung, measure
from fctune.apps.sweep.sampling import Observation, plan_settings, propose
from fctune.apps.sweep.spec import EarlyStopConfig, SweepConfig
from fctune.base.errors import ConfigError
from fctune.runs.record import MetricsFile


def make_spec(**changes: Any) -> SweepConfig:
    return SweepConfig(config="tiny_lora", study_dir="runs/study", **changes)


def test_a_grid_is_every_combination_once() -> None:
    planned = plan_settings(make_spec(space={"optimizer": {"lr": [1e-3, 2e-3]}, "adapter.rank": [8, 16, 32]}))
    assert len(planned) == 6
    assert {(one["optimizer.lr"], one["adapter.rank"]) for one in planned} == {
        (lr, rank) for lr in (1e-3, 2e-3) for rank in (8, 16, 32)
    }


def test_a_list_is_taken_as_it_is_with_nested_keys_joined() -> None:
    planned = plan_settings(make_spec(sampler="list", runs=[{"adapter": {"rank": 8}, "epochs": 2}, {}]))
    assert planned == [{"adapter.rank": 8, "epochs": 2}, {}]


@pytest.mark.parametrize(
    ("changes", "runs"),
    [
        ({"space": {"epochs": [1, 2, 1.0]}}, "runs 0 and 2"),
        ({"sampler": "list", "runs": [{"adapter.rank": 8}, {"epochs": 3}, {"adapter": {"rank": 8}}]}, "runs 0 and 2"),
    ],
    ids=["grid", "list"],
)
def test_equal_settings_are_refused(changes: dict[str, Any], runs: str) -> None:
    with pytest.raises(ConfigError, match=f"{runs} have equal settings"):
        plan_settings(make_spec(**changes))


def test_draws_depend_on_the_seed_and_more_of_them_extend_the_same() -> None:
    space = {"optimizer.lr": {"min": 1e-5, "max": 1e-2, "scale": "log"}, "adapter.rank": [8, 16]}
    few, many = (plan_settings(make_spec(sampler="random", space=space, num_runs=n)) for n in (5, 12))
    assert many[:5] == few
    assert plan_settings(make_spec(sampler="random", space=space, num_runs=5, seed=7)) != few


def test_draws_on_a_logarithmic_scale_are_as_frequent_in_each_decade() -> None:
    space = {"optimizer.lr": {"min": 1e-5, "max": 1e-2, "scale": "log"}}
    drawn = [one["optimizer.lr"] for one in plan_settings(make_spec(sampler="random", space=space, num_runs=600))]
    assert all(1e-5 <= lr <= 1e-2 for lr in drawn)
    decades = [sum(math.floor(math.log10(lr)) == exponent for lr in drawn) for exponent in (-5, -4, -3)]
    # Each count is binomial with n = 600 and p = 1/3: 200 with a standard deviation of 11.5.
    assert all(abs(count - 200) < 5 * 11.5 for count in decades), decades


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_integers_include_both_ends(scale: str) -> None:
    space = {"adapter.rank": {"min": 2, "max": 5, "scale": scale, "type": "integer"}}
    spec = make_spec(sampler="random", space=space, num_runs=4)
    assert sorted(one["adapter.rank"] for one in plan_settings(spec)) == [2, 3, 4, 5]
    with pytest.raises(ConfigError, match="more than the different settings of the space; 4 were found"):
        plan_settings(make_spec(sampler="random", space=space, num_runs=5))


SPACE = {"optimizer.lr": {"min": 1e-5, "max": 1e-1, "scale": "log"}, "lr_scheduler.name": ["cosine", "linear"]}


def run_optuna(spec: SweepConfig) -> list[Observation]:
    observations: list[Observation] = []
    for number in range(spec.num_runs or 0):
        settings = propose(spec, number, observations)
        value = abs(math.log10(settings["optimizer.lr"]) + 3) + (settings["lr_scheduler.name"] == "linear")
        observations.append(Observation(settings, value))
    return observations


def test_optuna_proposes_the_same_again_and_learns() -> None:
    pytest.importorskip("optuna")
    spec = make_spec(sampler="optuna", space=SPACE, num_runs=25, seed=1)
    first = run_optuna(spec)
    assert first == run_optuna(spec)
    # Uniform draws from the space are worth 1.5 on average; proposals that learn come close to the optimum, which is 0.
    late = [one.value for one in first[15:] if one.value is not None]
    assert sum(late) / len(late) < 0.9
    assert propose(spec, 3, first[:3]) != propose(make_spec(sampler="optuna", space=SPACE, num_runs=25), 3, first[:3])


def test_optuna_takes_failed_stopped_and_running_runs_into_account() -> None:
    pytest.importorskip("optuna")
    spec = make_spec(sampler="optuna", space={"epochs": [1, 2, 3, 4]}, num_runs=4)
    seen = [
        Observation({"epochs": 1}, None),
        Observation({"epochs": 2}, 0.5, stopped_at=10),
        Observation({"epochs": 3}, is_over=False),
    ]
    assert propose(spec, 3, seen) == {"epochs": 4}
    with pytest.raises(ConfigError, match="proposes no new settings"):
        propose(spec, 4, [*seen, Observation({"epochs": 4}, 0.1)])


HALVE = EarlyStopConfig(first_step=10, factor=2)


def write_metrics(path: Path, values: list[float | None], metric: str = "validation_loss") -> MetricsFile:
    rows = [{"step": step, **({metric: value} if value is not None else {})} for step, value in enumerate(values, 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = MetricsFile(path)
    metrics.update()
    return metrics


def make_progress(folder: Path, values: list[float], num_steps: list[int]) -> dict[int, Progress]:
    return {
        number: Progress(write_metrics(folder / f"{number}.jsonl", [value] * steps), 100, True)
        for number, (value, steps) in enumerate(zip(values, num_steps, strict=True))
    }


def test_the_worse_half_of_those_at_a_rung_is_stopped(tmp_path: Path) -> None:
    runs = make_progress(tmp_path, [0.4, 0.1, 0.3, 0.2, 0.0], [12, 12, 12, 12, 9])
    assert choose_worst(HALVE, runs, "validation_loss", False) == {0: 10, 2: 10}
    assert choose_worst(HALVE, runs, "validation_loss", True) == {1: 10, 3: 10}


def test_a_run_is_compared_at_the_last_rung_it_reached_by_its_value_there(tmp_path: Path) -> None:
    late_loser = write_metrics(tmp_path / "late.jsonl", [0.1] * 19 + [0.5] * 6)
    steady = write_metrics(tmp_path / "steady.jsonl", [0.3] * 25)
    runs = {0: Progress(late_loser, 100, True), 1: Progress(steady, 100, True)}
    assert choose_worst(HALVE, runs, "validation_loss", False) == {0: 20}
    assert measure(late_loser, "validation_loss", 19) == 0.1


def test_ended_runs_count_and_are_not_stopped_again(tmp_path: Path) -> None:
    runs = make_progress(tmp_path, [0.1, 0.2], [30, 10])
    ended = {0: Progress(runs[0].metrics, 100, False), 1: runs[1]}
    assert choose_worst(HALVE, ended, "validation_loss", False) == {1: 10}
    assert choose_worst(HALVE, {0: ended[0], 1: Progress(runs[1].metrics, 100, False)}, "validation_loss", False) == {}


@pytest.mark.parametrize(
    ("values", "steps", "num_steps"),
    [([0.9], [50], 100), ([0.9, 0.1], [9, 50], 100), ([0.9, 0.1], [40, 40], 40)],
    ids=["alone", "before_the_first_rung", "at_its_last_step"],
)
def test_runs_are_left_alone(values: list[float], steps: list[int], num_steps: int, tmp_path: Path) -> None:
    runs = {
        number: Progress(one.metrics, num_steps, True) for number, one in make_progress(tmp_path, values, steps).items()
    }
    assert choose_worst(HALVE, runs, "validation_loss", False) == {}


def test_the_best_run_is_never_stopped(tmp_path: Path) -> None:
    for best in range(5):
        values = [0.5 + number for number in range(5)]
        values[best] = 0.1
        runs = make_progress(tmp_path, values, [10, 20, 15, 40, 33])
        assert best not in choose_worst(EarlyStopConfig(first_step=10, factor=4), runs, "validation_loss", False)


def test_rungs_grow_by_the_factor() -> None:
    assert [find_rung(HALVE, step) for step in (10, 19, 20, 39, 40, 81)] == [10, 10, 20, 20, 40, 80]
    assert find_rung(EarlyStopConfig(first_step=1, factor=1.1), 5) == 5


def test_the_loss_is_averaged_and_other_metrics_are_the_latest(tmp_path: Path) -> None:
    loss = write_metrics(tmp_path / "loss.jsonl", [100.0] * 10 + [1.0, 3.0] * 10, "loss")
    assert measure(loss, "loss") == 2.0
    sparse = write_metrics(tmp_path / "sparse.jsonl", [None, 0.7, None, 0.4, None])
    assert (measure(sparse, "validation_loss"), measure(sparse, "validation_loss", 3)) == (0.4, 0.7)
    assert measure(sparse, "validation_loss", 1) is None
