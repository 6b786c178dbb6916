"""Settings of a sweep's runs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fctune.apps.sweep.sampling import Observation, plan_settings, propose
from fctune.apps.sweep.spec import SweepConfig
from fctune.base.errors import ConfigError


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
