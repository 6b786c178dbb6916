"""Losses that stand out are marked, ordinary noise is not."""

from __future__ import annotations

import random

from fctune.telemetry.metrics import SpikeDetector


def falling(num_steps: int, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [2.0 * 0.99**step + 0.5 + rng.gauss(0, 0.05) for step in range(num_steps)]


def test_a_falling_noisy_loss_has_no_spikes() -> None:
    for seed in range(20):
        finder = SpikeDetector()
        assert not any(finder.is_spike(loss) for loss in falling(400, seed))


def test_a_loss_that_jumps_is_a_spike_and_the_steps_around_it_are_not() -> None:
    finder = SpikeDetector()
    losses = falling(200, 1)
    losses[120] *= 3
    assert [step for step, loss in enumerate(losses) if finder.is_spike(loss)] == [120]
