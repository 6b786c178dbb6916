"""Settings of a sweep's runs: every combination, a list, random draws, or Optuna's proposals."""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fctune.apps.sweep.spec import NumberRange, SweepConfig, flatten
from fctune.base.errors import ConfigError

Settings = dict[str, Any]

_NUM_TRIES = 100  # draws of a run's settings until they differ from those of the runs before


@dataclass(frozen=True, slots=True)
class Observation:
    """Settings of an earlier run and how it went, for a sampler that proposes the next."""

    settings: Settings
    value: float | None = None  # of the metric; None: failed, still running, or nothing was measured
    stopped_at: int | None = None  # step at which early stopping ended it
    is_over: bool = True


def plan_settings(spec: SweepConfig) -> list[Settings]:
    """Return the settings of all runs of a sweep that does not learn from finished ones, dotted key -> value.

    Raises:
        ConfigError: Two runs are equal, or the space has fewer settings than there shall be runs.
    """
    if spec.sampler == "random":
        return _draw_all(spec)
    if spec.sampler == "list":
        planned = [flatten(settings) for settings in spec.runs]
    else:
        dimensions = {key: values for key, values in spec.list_dimensions().items() if isinstance(values, list)}
        planned = [dict(zip(dimensions, chosen, strict=True)) for chosen in itertools.product(*dimensions.values())]
    seen: dict[str, int] = {}
    for number, settings in enumerate(planned):
        if (first := seen.setdefault(identify(settings), number)) != number:
            raise ConfigError(
                f"runs {first} and {number} have equal settings ({describe_settings(settings)}); remove one"
            )
    return planned


def propose(spec: SweepConfig, number: int, observations: Sequence[Observation]) -> Settings:
    """Return Optuna's settings for run ``number``, a function of the seed, the number and the observations alone.

    Args:
        spec: The sweep.
        number: Number of the run, from 0.
        observations: Observations of all runs before it, in their order.

    Raises:
        ConfigError: Optuna is not installed, or all settings that it proposes were tried.
    """
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            "sampler=optuna: Optuna is not installed; pip install '.[sweep]' in the clone of fctune"
        ) from None
    optuna.logging.set_verbosity(logging.WARNING)
    dimensions = {key: _to_distribution(optuna, dimension) for key, dimension in spec.list_dimensions().items()}
    choices = {key: values for key, values in spec.list_dimensions().items() if isinstance(values, list)}
    # Choices are passed to Optuna by index, because it takes only scalars.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # Without the option, runs at the same time are proposed near the same optimum.
        sampler = optuna.samplers.TPESampler(seed=spec.seed + number, constant_liar=True)
    study = optuna.create_study(direction="maximize" if spec.is_maximized else "minimize", sampler=sampler)
    for one in observations:
        params = {
            key: choices[key].index(value) if key in choices else value
            for key, value in one.settings.items()
            if key in dimensions
        }
        study.add_trial(_to_trial(optuna, one, params, dimensions))
    seen = {identify(one.settings) for one in observations}
    for _ in range(_NUM_TRIES):
        asked = study.ask(dimensions).params
        settings = {key: choices[key][value] if key in choices else value for key, value in asked.items()}
        if identify(settings) not in seen:
            return settings
    raise ConfigError(f"num_runs={spec.num_runs}: after {number} runs, Optuna proposes no new settings; lower it")


def describe_settings(settings: Settings) -> str:
    """Return settings in one line: ``lr=0.001 rank=8``, by the last part of each key if that is unambiguous."""
    pairs = zip(short_names(settings), settings.values(), strict=True)
    return " ".join(f"{name}={_format(value)}" for name, value in pairs)


def short_names(keys: Sequence[str] | Settings) -> list[str]:
    """Return the last part of each key, or the full key where two end alike."""
    ends = [key.rpartition(".")[2] for key in keys]
    return [end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)]


def identify(settings: Settings) -> str:
    """Return a text that equal settings share; 1 and 1.0 are equal."""
    return json.dumps({key: _normalize(value) for key, value in settings.items()}, sort_keys=True)


def _draw_all(spec: SweepConfig) -> list[Settings]:
    """Draw each run from the seed and the run's number, so that a larger ``num_runs`` extends the same draws."""
    dimensions = spec.list_dimensions()
    assert spec.num_runs is not None
    planned: list[Settings] = []
    seen: set[str] = set()
    for number in range(spec.num_runs):
        generator = random.Random(f"{spec.seed}:{number}")
        for _ in range(_NUM_TRIES):
            settings = {key: _draw(generator, dimension) for key, dimension in dimensions.items()}
            if identify(settings) not in seen:
                break
        else:
            raise ConfigError(
                f"num_runs={spec.num_runs}: more than the different settings of the space; {number} were found"
            )
        seen.add(identify(settings))
        planned.append(settings)
    return planned


def _draw(generator: random.Random, dimension: list[Any] | NumberRange) -> Any:
    if isinstance(dimension, list):
        return generator.choice(dimension)
    low, high = dimension.minimum, dimension.maximum
    if dimension.is_log:
        # An integer stands for the half below and above it, so that both ends are as likely as their neighbours.
        ends = (low - 0.5, high + 0.5) if dimension.is_integer else (low, high)
        value = math.exp(generator.uniform(math.log(ends[0]), math.log(ends[1])))
    elif dimension.is_integer:
        return generator.randint(int(low), int(high))
    else:
        value = generator.uniform(low, high)
    value = min(max(value, low), high)
    return round(value) if dimension.is_integer else float(f"{value:.6g}")


def _to_distribution(optuna: Any, dimension: list[Any] | NumberRange) -> Any:
    if isinstance(dimension, list):
        return optuna.distributions.CategoricalDistribution(tuple(range(len(dimension))))
    ends = (dimension.minimum, dimension.maximum)
    if dimension.is_integer:
        return optuna.distributions.IntDistribution(int(ends[0]), int(ends[1]), log=dimension.is_log)
    return optuna.distributions.FloatDistribution(*ends, log=dimension.is_log)


def _to_trial(optuna: Any, one: Observation, params: Settings, dimensions: dict[str, Any]) -> Any:
    states = optuna.trial.TrialState
    steps = {}
    if not one.is_over:
        state = states.RUNNING
    elif one.value is None:
        state = states.FAIL
    elif one.stopped_at is not None:
        state, steps = states.PRUNED, {one.stopped_at: one.value}
    else:
        state = states.COMPLETE
    return optuna.trial.create_trial(
        state=state,
        value=one.value if state == states.COMPLETE else None,
        params=params,
        distributions=dimensions,
        intermediate_values=steps,
    )


def _normalize(value: Any) -> Any:
    if isinstance(value, list):
        return [_normalize(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _format(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
