"""Healthy runs as shared machines produce them: bursts of other programs, slow spells, uneven rows and pauses."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Machine:
    """Noise of a machine.

    Attributes:
        step_s: Median step time.
        num_ranks: Of the run.
        noise: Standard deviation of the logarithm of a step's time, beyond a heavy tail.
        spells_per_hour: Slow spells, during which other programs take a share of the machine.
        spell_s: Median duration of a spell; a quarter of them last twice as long.
        uneven: Standard deviation of the logarithm of tokens/s between batches, as with unpacked rows.
    """

    step_s: float
    num_ranks: int
    noise: float
    spells_per_hour: float
    spell_s: float
    uneven: float


def draw_machine(rng: random.Random) -> Machine:
    """Draw a machine between a quiet GPU node and a crowded laptop."""
    return Machine(
        step_s=math.exp(rng.uniform(math.log(0.1), math.log(10))),
        num_ranks=rng.choice((1, 2, 4, 8, 16)),
        noise=rng.choice((0.02, 0.05, 0.1, 0.2)),
        spells_per_hour=rng.choice((0, 5, 15, 30)),
        spell_s=rng.choice((5, 20, 45)),
        uneven=rng.choice((0, 0, 0.1, 0.3)),
    )


def make_run(num_steps: int, rng: random.Random, machine: Machine) -> tuple[list[dict[str, Any]], list[float]]:
    """Make the metrics of a healthy run, and the seconds between one step's metrics and the next's.

    Steps are log-normal with a heavy tail (Student's t with 3 degrees of freedom); a spell slows all ranks or one by up
    to half. Every 100th to 300th step is followed by an evaluation or a save, after which a few steps are slow.
    """
    steps, pauses, now, spell_until, factor, victim = [], [], 0.0, 0.0, 1.0, -1
    pause_every, pause_s = rng.randrange(100, 300), rng.uniform(1, 90)
    for step in range(1, num_steps + 1):
        if now >= spell_until:
            factor, victim = 1.0, -1
            if rng.random() < machine.spells_per_hour / 3600 * machine.step_s:
                spell_until = now + machine.spell_s * rng.lognormvariate(0, 0.7)
                factor, victim = rng.uniform(1.1, 2.0), rng.randrange(-1, machine.num_ranks)
        tail = rng.gauss(0, 1) / math.sqrt(rng.gammavariate(1.5, 1 / 1.5))
        times = [math.exp(machine.noise * rng.gauss(0, 1)) for _ in range(machine.num_ranks)]
        if victim >= 0:
            times[victim] *= factor
        common = machine.step_s * math.exp(machine.noise * min(tail, 10)) * (factor if victim < 0 else 1.0)
        common *= 1 + (step == 1) * 20 + (step % pause_every < 3 and step > pause_every) * rng.uniform(0, 1)
        seconds, median = common * max(times), sorted(times)[(len(times) - 1) // 2]
        pause = pause_s * rng.lognormvariate(0, 0.2) if step % pause_every == 0 else 0.0
        now += seconds + pause
        pauses.append(seconds + pause)
        steps.append(
            {
                "step": step,
                "loss": 2.0 * 0.99**step + 0.5 + rng.gauss(0, 0.05),
                "tokens_per_s": 2000 * math.exp(machine.uneven * rng.gauss(0, 1)) / seconds,
                "step_time_s": seconds,
                "data_time_s": seconds * (rng.uniform(0, 0.05) + (factor > 1.5) * rng.uniform(0, 0.2)),
                "compute_skew": max(times) / median,
                "slowest_rank": times.index(max(times)),
            }
        )
    return steps, pauses


def slow_down_(steps: list[dict[str, Any]], factor: float) -> None:
    """Multiply the duration of steps."""
    for metrics in steps:
        metrics["step_time_s"] *= factor
        metrics["data_time_s"] *= factor
        metrics["tokens_per_s"] /= factor
