"""Losses far above the preceding ones are spikes; the noise of healthy runs is not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fctune.runs.metrics import SpikeDetector

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
