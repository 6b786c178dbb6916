"""Warnings of a config that does not suit the length of its run, for the planner, the preflight and the run itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fctune.config.intervals import format_count, format_duration, parse_interval, parse_interval_or_auto
from fctune.config.schema import RunConfig

_FEW_STEPS = 50  # fewer are too few for a schedule to warm up and decay
_SMALL_EPOCH = 10  # steps
USUAL_STEPS = 100  # aimed at where a smaller batch is suggested
_LONG_RUN_S = 600.0  # a run that is lost without a checkpoint


@dataclass(frozen=True, slots=True)
class RunLength:
    """Length of a run in steps, with the packs and seconds behind them; None for what is unknown."""

    num_steps: int
    packs: int | None = None  # of an epoch
    step_s: float | None = None
    save_s: float | None = None  # to write a checkpoint
    is_upper_bound: bool = False  # the run may have fewer steps
    has_validation: bool = True  # something is held out

    @property
    def seconds(self) -> float | None:
        """Duration of all steps together, in seconds."""
        return None if self.step_s is None else self.num_steps * self.step_s


def find_length_warnings(config: RunConfig, length: RunLength) -> list[str]:
    """List what of a config does not suit the length of its run, one sentence each with its remedy."""
    return [
        *_check_steps(config, length),
        *_check_warmup(config, length),
        *_check_saves(config, length),
        *_check_validation(config, length),
    ]


def _check_steps(config: RunConfig, length: RunLength) -> list[str]:
    only, steps = "" if length.is_upper_bound else "only ", _count(length, length.num_steps, "optimizer step")
    if config.max_steps is not None and config.max_steps <= length.num_steps:
        return []  # a trial
    if length.num_steps < _FEW_STEPS:
        cause = "" if config.data.max_samples is None else f"data.max_samples={config.data.max_samples} leaves "
        return [f"{cause}{only}{steps}; expect little change; {_more_steps(config, length)}"]
    if _answers_per_step(config) is not None:
        return []  # which are no packs
    if length.packs is not None and (of_epoch := math.ceil(length.packs / config.global_batch_size)) < _SMALL_EPOCH:
        return [f"an epoch is only {_count(length, of_epoch, 'step')}; {_more_steps(config, length)}"]
    return []


def _count(length: RunLength, number: int, noun: str) -> str:
    return f"{'at most ' if length.is_upper_bound else ''}{format_count(number, noun)}"


def _more_steps(config: RunConfig, length: RunLength) -> str:
    key, size, unit = _answers_per_step(config) or ("global_batch_size", config.global_batch_size, "packs")
    more = "cases" if config.rollouts is not None else "rows"
    smaller = length.num_steps * size // USUAL_STEPS
    if 1 <= smaller < size:
        return f"lower {key} ({size:,} {unit}) to {smaller:,} or so, or train on more {more}"
    return f"train on more {more}, or for more epochs"


def _answers_per_step(config: RunConfig) -> tuple[str, int, str] | None:
    """Return the key, size and unit of a step in a run that learns from answers; None for one that trains packs."""
    if config.distill is not None:
        return "distill.answers_per_step", config.distill.answers_per_step, "answers"
    if config.grpo is not None:
        return "grpo.prompts_per_step", config.grpo.prompts_per_step, "prompts"
    return None


def _check_warmup(config: RunConfig, length: RunLength) -> list[str]:
    warmup = parse_interval(config.lr_scheduler.warmup).in_steps(length.num_steps) or 0
    if warmup <= length.num_steps / 2:
        return []
    reach = "never reaches optimizer.lr" if warmup >= length.num_steps else "is below optimizer.lr for most of them"
    return [
        f"lr_scheduler.warmup={config.lr_scheduler.warmup}: the run has {_count(length, length.num_steps, 'step')}, so "
        f"the learning rate {reach}; set lr_scheduler.warmup=3%"
    ]


def _check_saves(config: RunConfig, length: RunLength) -> list[str]:
    every = parse_interval(config.checkpoint.every)
    elastic = parse_interval_or_auto(config.checkpoint.elastic_every)
    if length.seconds is not None and length.seconds < _LONG_RUN_S:
        return []
    if length.save_s is not None and every.seconds is not None and every.seconds < length.save_s:
        return [
            f"checkpoint.every={config.checkpoint.every}: a save takes {format_duration(length.save_s)}, so training "
            "would wait for the disk; set a longer interval"
        ]
    first, first_elastic = (interval.in_steps(length.num_steps, length.step_s) for interval in (every, elastic))
    if first is None or any(steps and steps < length.num_steps for steps in (first, first_elastic)):
        return []
    if not first and length.seconds is None:
        return []  # may be right for a short run
    lasts = "" if length.seconds is None else f", {format_duration(length.seconds)}"
    return [
        f"checkpoint.every={config.checkpoint.every}: the run has {_count(length, length.num_steps, 'step')}{lasts}, "
        "so nothing is saved before its end and a failure starts it over; set checkpoint.every=10min"
    ]


def _check_validation(config: RunConfig, length: RunLength) -> list[str]:
    if length.num_steps < _FEW_STEPS:
        return []
    every = parse_interval(config.validation.every)
    if every.is_never:
        return ["validation.every=0: validation loss is never measured; set validation.every=10%"]
    if config.data.validation_share == 0 and config.gate is not None:
        return []  # chosen, since the gate measures the result with cases of their own
    if not length.has_validation or config.data.validation_share == 0:
        share = f"data.validation_share={config.data.validation_share:g}"
        is_of_few = config.data.validation_share > 0
        remedy = "set it higher, or train on 20 rows or more" if is_of_few else "set data.validation_share=0.02"
        return [f"{share}: nothing is held out, so validation loss is never measured; {remedy}"]
    first = every.in_steps(length.num_steps, length.step_s)
    if first is None or first <= length.num_steps:
        return []
    return [
        f"validation.every={config.validation.every}: the run has {_count(length, length.num_steps, 'step')}, so "
        "validation loss is measured only at its end; set validation.every=10%"
    ]
