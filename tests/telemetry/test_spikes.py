"""Losses far above the preceding ones are spikes; ordinary noise is not."""

from __future__ import annotations

import random

from fctune.telemetry.metrics import SpikeDetector


def make_falling_losses(num_steps: int, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [2.0 * 0.99**step + 0.5 + rng.gauss(0, 0.05) for step in range(num_steps)]


def test_a_falling_noisy_loss_has_no_spikes() -> None:
    for seed in range(20):
        detector = SpikeDetector()
        assert not any(detector.is_spike(loss) for loss in make_falling_losses(400, seed))


def test_a_loss_that_jumps_is_a_spike_and_the_steps_around_it_are_not() -> None:
    detector = SpikeDetector()
    losses = make_falling_losses(200, 1)
    losses[120] *= 3
    assert [step for step, loss in enumerate(losses) if detector.is_spike(loss)] == [120]
