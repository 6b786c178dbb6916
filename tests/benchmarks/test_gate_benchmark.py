"""The benchmark of the gate simulates gates with the noise and the falls that it is given."""

from __future__ import annotations

import random

import pytest

from benchmarks import gate

FLIPS = {
    "calls": {"n": 200, "right_before": 180, "changed": 10},
    "over_calling": {"n": 200, "right_before": 190, "changed": 8},
}


def test_simulated_gates_have_the_accuracy_and_the_fall_that_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, config = random.Random(0), gate.GateConfig(max_cases=2000)
    first, second = gate.simulate_gate(FLIPS, config, rng, fall=0.2)
    assert first.interval[0] == pytest.approx(-0.2, abs=0.03)
    assert second.interval[0] == pytest.approx(0.0, abs=0.02)
    assert second.comparison.num_right_before / 2000 == pytest.approx(0.95, abs=0.02)
    monkeypatch.setattr(gate, "NUM_GATES", 10)
    monkeypatch.setattr(gate, "FALLS", (0.3,))
    found = gate.simulate(FLIPS)
    assert found["quick"]["false_alarms"]["count"] == 0
    assert found["quick"]["power_by_fall"]["30%"]["share"] == 1.0
    assert found["thorough"]["smallest_fall"] < found["quick"]["smallest_fall"]
