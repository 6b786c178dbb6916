"""Each alert is raised once, when it is due, and never for a healthy run."""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from fctune.runs.alerts import PERIOD_S, WINDOW, Alert, AlertRules
from fctune.runs.metrics import SpikeDetector
from tests.runs.generated_runs import Machine, draw_machine, make_run, slow_down_

SPEEDS = Path(__file__).with_name("healthy_speeds.json")  # five runs: tokens/s and seconds of each step


def make_healthy_steps(num_steps: int, seed: int = 0) -> list[dict[str, Any]]:
    """Make noisy steps: 10 % speed variation, uneven ranks, a first step that compiles, an occasional slow step."""
    rng, spikes = random.Random(seed), SpikeDetector()
    steps = []
    for step in range(1, num_steps + 1):
        seconds = rng.gauss(1.0, 0.1) + (40 if step == 1 else 0) + (8 if rng.random() < 0.02 else 0)
        loss = 2.0 * 0.99**step + 0.5 + rng.gauss(0, 0.05)
        steps.append(
            {
                "step": step,
                "loss": loss,
                "tokens_per_s": 1000 / seconds,
                "step_time_s": seconds,
                "data_time_s": seconds * rng.uniform(0, 0.08) if step > 1 else 30.0,
                "compute_skew": 1 + abs(rng.gauss(0, 0.2)),
                "slowest_rank": rng.randrange(8),
            }
        )
        if (limit := spikes.check(loss)) is not None:
            steps[-1] |= {"is_spike": True, "spike_limit": limit}
    return steps


def raise_alerts(steps: list[dict[str, Any]], **options: Any) -> list[Alert]:
    rules = AlertRules()
    return [alert for metrics in steps for alert in rules.observe(metrics, **options)]


def names_and_steps(alerts: list[Alert]) -> list[tuple[str, int]]:
    return [(alert.name, alert.step) for alert in alerts]


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_noisy_run_raises_no_alert(seed: int) -> None:
    rules = AlertRules()
    for metrics in make_healthy_steps(600, seed):
        assert not rules.observe(metrics, pause_s=metrics["step_time_s"] + 0.1, disk_free_share=0.3)
        assert not rules.observe_silence(60.0)


def test_a_slowdown_by_a_quarter_raises_one_alert_within_four_minutes() -> None:
    steps = make_healthy_steps(900, 1)
    slow_down_(steps[400:], 4 / 3)
    (alert,) = raise_alerts(steps)
    assert alert.name == "throughput"
    assert PERIOD_S <= sum(metrics["step_time_s"] for metrics in steps[400 : alert.step]) <= PERIOD_S + 60
    assert alert.value < alert.limit
    assert "25% below" in alert.message or "24% below" in alert.message or "26% below" in alert.message


def test_a_slowdown_by_a_tenth_raises_no_alert() -> None:
    steps = make_healthy_steps(1200, 1)
    slow_down_(steps[400:], 1 / 0.9)
    assert not raise_alerts(steps)


def test_a_second_slowdown_after_a_recovery_raises_another_alert_if_it_lasts_twice_as_long() -> None:
    steps = make_healthy_steps(1500, 2)
    slow_down_(steps[300:420] + steps[700:940], 2)  # 4 and 8 minutes
    assert [name for name, _ in names_and_steps(raise_alerts(steps))] == ["throughput", "throughput"]
    again = make_healthy_steps(1500, 2)
    slow_down_(again[300:420] + again[700:820], 2)  # 4 minutes each: this machine's habit
    assert [name for name, _ in names_and_steps(raise_alerts(again))] == ["throughput"]


def test_a_run_that_stays_slow_raises_one_alert() -> None:
    steps = make_healthy_steps(3000, 2)
    slow_down_(steps[300:], 2)
    assert [name for name, _ in names_and_steps(raise_alerts(steps))] == ["throughput"]


def test_a_loss_that_jumps_and_stays_high_raises_one_alert() -> None:
    steps = make_healthy_steps(100, 3)
    for metrics in steps[60:64]:
        metrics |= {"is_spike": True, "spike_limit": 2.5, "loss": 9.0}
    (alert,) = raise_alerts(steps)
    assert (alert.name, alert.step, alert.value, alert.limit) == ("loss_spike", 61, 9.0, 2.5)
    assert "(limit 2.5000)" in alert.message


def test_losses_that_spike_again_and_again_raise_one_alert_until_a_window_without() -> None:
    steps = make_healthy_steps(200, 3)
    for index in (60, 64, 70, 85, 120):
        steps[index] |= {"is_spike": True, "spike_limit": 2.5, "loss": 9.0}
    assert names_and_steps(raise_alerts(steps)) == [("loss_spike", 61), ("loss_spike", 121)]


def test_the_uneven_speed_of_a_shared_machine_raises_no_alert() -> None:
    rng, steps, level = random.Random(1), make_healthy_steps(600, 3), 1.0
    for metrics in steps:
        if metrics["step"] % 15 == 0:  # other programs start and stop
            level = rng.uniform(0.6, 1.6)
        slow_down_([metrics], level)
    assert not raise_alerts(steps)


@pytest.mark.parametrize("speeds", json.loads(SPEEDS.read_text()))
def test_a_recorded_healthy_run_on_a_shared_machine_raises_no_alert(speeds: list[tuple[float, float]]) -> None:
    steps = [
        {"step": step, "loss": 1.0, "tokens_per_s": speed, "step_time_s": seconds}
        for step, (speed, seconds) in enumerate(speeds, 1)
    ]
    assert not raise_alerts(steps)


def monitor_run(steps: list[dict[str, Any]], pauses: list[float]) -> list[tuple[str, int]]:
    """Return the alerts of a run, checking for silence at the end of each pause between two steps."""
    rules, alerts = AlertRules(), []
    for metrics, pause_s in zip(steps, pauses, strict=True):
        alerts += rules.observe_silence(pause_s)
        alerts += rules.observe(metrics, pause_s=pause_s, disk_free_share=0.5)
    return names_and_steps(alerts)


@pytest.mark.thorough
def test_fewer_than_one_in_twenty_healthy_runs_on_noisy_machines_raises_an_alert() -> None:
    false = {}
    for seed in range(100):
        rng = random.Random(seed)
        num_steps = int(math.exp(rng.uniform(math.log(20), math.log(5000))))
        if alerts := monitor_run(*make_run(num_steps, rng, draw_machine(rng))):
            false[seed] = alerts
    assert len(false) < 5, false


FAULTS = ("slower by 20 %", "slower by 30 %", "slower by 50 %", "straggler", "data wait", "stall")


@pytest.mark.sample(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_lasts_is_found_on_noisy_machines(fault: str) -> None:
    delays = []
    for seed in range(8):
        rng = random.Random(1000 + seed)
        noise, spells, uneven = rng.choice((0.02, 0.05, 0.1)), rng.choice((0, 5, 15)), rng.choice((0, 0.1, 0.2))
        machine = Machine(rng.choice((0.5, 1.0, 4.0)), rng.choice((2, 8)), noise, spells, rng.choice((5, 20)), uneven)
        begin = int(1200 / machine.step_s)
        steps, pauses = make_run(3 * begin, rng, machine)
        faulty, expected = steps[begin:], "throughput"
        if fault.startswith("slower"):
            slow_down_(faulty, 1 / (1 - int(fault.split()[2]) / 100))
        elif fault == "straggler":
            expected = "straggler"
            for metrics in faulty:
                skew = 1.4 * math.exp(noise * rng.gauss(0, 1))
                if skew > metrics["compute_skew"]:
                    metrics |= {"compute_skew": skew, "slowest_rank": 1}
        elif fault == "data wait":
            expected = "data_wait"
            for metrics in faulty:
                wait_s = 0.2 * metrics["step_time_s"]
                slow_down_([metrics], 1.2)
                metrics["data_time_s"] += wait_s
        else:
            expected, pauses[begin] = "no_progress", 2 * max(pauses[:begin]) + 121
        alerts = [step for name, step in monitor_run(steps, pauses) if name == expected and step >= begin]
        assert alerts, (seed, machine)
        delays.append(sum(metrics["step_time_s"] for metrics in steps[begin : alerts[0]]))
    assert statistics.median(delays) < 2 * PERIOD_S


def test_waiting_for_data_for_over_a_tenth_of_the_time_raises_one_alert() -> None:
    steps = make_healthy_steps(600, 4)
    for metrics in steps[100:]:
        metrics["data_time_s"] = 0.2 * metrics["step_time_s"]
    ((name, step),) = names_and_steps(raise_alerts(steps))
    assert name == "data_wait"
    assert 100 < step <= 100 + PERIOD_S + WINDOW


def test_a_minute_of_waiting_for_data_raises_no_alert() -> None:
    steps = make_healthy_steps(600, 4)
    for metrics in steps[100:160]:
        metrics["data_time_s"] = 0.5 * metrics["step_time_s"]
    assert not raise_alerts(steps)


def test_a_rank_that_stays_the_slowest_is_reported_as_straggler() -> None:
    steps = make_healthy_steps(400, 5)
    for metrics in steps[100:]:
        metrics |= {"compute_skew": 1.3, "slowest_rank": 6 if metrics["step"] % 15 else 2}
    (alert,) = raise_alerts(steps)
    assert alert.name == "straggler"
    assert 100 + PERIOD_S / 2 < alert.step <= 100 + PERIOD_S + WINDOW
    assert "rank 6" in alert.message
    for metrics in steps[100:]:
        metrics["slowest_rank"] = metrics["step"] % 2  # ranks take turns in being slow: uneven work, not a straggler
    assert not raise_alerts(steps)


def test_a_rank_that_is_the_slowest_for_a_minute_raises_no_alert() -> None:
    steps = make_healthy_steps(400, 5)
    for metrics in steps[100:160]:
        metrics |= {"compute_skew": 1.8, "slowest_rank": 6}
    assert not raise_alerts(steps)


def test_a_straggler_is_reported_with_its_host() -> None:
    rules = AlertRules(hosts=[f"node-{rank // 4}" for rank in range(8)])
    steps = make_healthy_steps(300, 5)
    for metrics in steps[20:]:
        metrics |= {"compute_skew": 1.3, "slowest_rank": 6}
    (alert,) = [alert for metrics in steps for alert in rules.observe(metrics)]
    assert alert.message.startswith("rank 6 (node-1) was the slowest")


@pytest.mark.parametrize("load", [0.5, 40.0])
def test_slow_processors_are_not_called_gpus(load: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    rules, steps = AlertRules(has_gpu=False), make_healthy_steps(600)
    slow_down_(steps[200:], 2.0)
    (alert,) = (alert for metrics in steps for alert in rules.observe(metrics))
    end = "Other processes may be using the processors"
    assert alert.message.endswith(f"{end} (load average 40.0 on 4 cores)." if load > 4 else f"{end}.")


def test_a_full_disk_raises_one_alert_until_there_is_space_again() -> None:
    rules, steps, raised = AlertRules(), make_healthy_steps(40), []
    for metrics, free in zip(steps, [0.06] * 10 + [0.049, 0.051] * 5 + [0.2] * 10 + [0.01] * 10, strict=True):
        raised += names_and_steps(rules.observe(metrics, disk_free_share=free))
    assert raised == [("disk", 11), ("disk", 31)]


def test_silence_longer_than_the_runs_usual_pauses_raises_one_alert() -> None:
    rules = AlertRules()
    assert not rules.observe_silence(3600)  # before the first step: loading, compiling
    for metrics in make_healthy_steps(50):
        rules.observe(metrics, pause_s=100.0 if metrics["step"] == 30 else 1.0)  # an evaluation of 100 s
    assert not rules.observe_silence(150)
    assert names_and_steps(rules.observe_silence(201)) == [("no_progress", 50)]
    assert not rules.observe_silence(300)
    rules.observe(make_healthy_steps(51)[-1], pause_s=300)
    assert not rules.observe_silence(400)
    assert names_and_steps(rules.observe_silence(700)) == [("no_progress", 51)]


def test_silence_during_the_first_steps_raises_an_alert_later() -> None:
    rules = AlertRules()
    for metrics in make_healthy_steps(3)[1:]:
        rules.observe(metrics, pause_s=1.0)
    assert not rules.observe_silence(590)  # one more may be compiled
    assert names_and_steps(rules.observe_silence(610)) == [("no_progress", 3)]
    slow = AlertRules()
    slow.observe({"step": 1, "loss": 1.0, "step_time_s": 60.0})
    assert not slow.observe_silence(1190)


def test_missing_metrics_raise_no_alert() -> None:
    assert not raise_alerts([{"step": step, "loss": 1.0} for step in range(1, 200)])
    rules = AlertRules()
    rules.observe({"step": 1})
    assert not rules.observe_silence(1e6)


def test_an_engine_that_is_another_model_raises_one_alert_until_it_has_recovered() -> None:
    calm = {"ratio_capped_share": 0.0, "engine_gap": 0.01}
    # The second is the case of another model: its tokens are less likely in training, so that few ratios are capped.
    for odd in (calm | {"ratio_capped_share": 0.2}, {"ratio_capped_share": 0.014, "engine_gap": 2.3}):
        rules = AlertRules()
        steps = [calm] * 10 + [odd] * 10 + [calm] * 5 + [odd] * 5
        alerts = [alert for step, one in enumerate(steps, start=1) for alert in rules.observe({"step": step, **one})]
        assert [(alert.name, alert.step) for alert in alerts] == [("engine_mismatch", 11), ("engine_mismatch", 26)]
        assert alerts[0].value > alerts[0].limit


def test_waiting_for_answers_is_not_waiting_for_data() -> None:
    names = []
    for generates in (True, False):
        rules = AlertRules()
        for step in range(1, 400):
            metrics: dict[str, Any] = {"step": step, "step_time_s": 10.0, "data_time_s": 8.0}
            metrics |= {"generation_time_s": 8.0} if generates and step % 2 else {}
            names += [alert.name for alert in rules.observe(metrics)]
    assert names == ["data_wait"]
