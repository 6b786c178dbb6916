"""``fctune sweep`` with fake runs: results, failures, kills, early stopping, and wrong input."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fctune.apps.sweep import launchers
from fctune.cli import main
from fctune.config.loading import load_config
from tests.cli.processes import wait_until
from tests.conftest import ROOT
from tests.pages.browser import needs_chromium, open_page
from tests.warm_interpreter import warm_python

WriteSweep = Callable[..., Path]


def read_rows(study: Path) -> list[dict[str, str]]:
    with open(study / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def read_attempts(study: Path, name: str) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads((study / "study.json").read_text())["runs"]
    attempts: list[dict[str, Any]] = runs[int(name)]["attempts"]
    return attempts


def test_a_sweep_runs_all_settings_and_leaves_the_best_config(
    write_sweep: WriteSweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", str(write_sweep(at_once=2))]) == 0
    study, shown = tmp_path / "study", capsys.readouterr()
    begun = sorted(json.loads(path.read_text())["at"] for path in study.glob("runs/*/attempts.jsonl"))
    ended = sorted(path.stat().st_mtime for path in study.glob("runs/*/exit.json"))
    assert len(begun) == 6
    for number, at in enumerate(begun):
        assert number - sum(end < at for end in ended) < 2, "two runs at once"
    rows = read_rows(study)
    assert {row["status"] for row in rows} == {"completed"}
    assert len(rows) == 6
    assert [float(row["optimizer.lr"]) for row in rows[:2]] == [1e-3, 1e-3], "the fake's loss is lowest there"
    assert [float(row["validation_loss"]) for row in rows] == sorted(float(row["validation_loss"]) for row in rows)
    best = load_config(study / "best.yaml")
    expected = load_config(
        "tiny_lora", ["max_steps=20", "optimizer.lr=1e-3", f"adapter.rank={rows[0]['adapter.rank']}"]
    )
    expected.output_dir = best.output_dir
    assert best.to_dict() == expected.to_dict()
    assert not best.output_dir.startswith(str(study))
    assert "best: fctune train" in shown.out
    for row in rows:
        config = load_config(study / "configs" / f"{row['run']}.yaml")
        assert str(config.optimizer["lr"]) == row["optimizer.lr"]
        assert config.output_dir == str(study / "runs" / f"study-{row['run']}")


@needs_chromium
def test_the_page_compares_the_runs_and_draws_its_charts(write_sweep: WriteSweep, tmp_path: Path) -> None:
    assert main(["sweep", str(write_sweep())]) == 0
    page = open_page(tmp_path / "study" / "comparison.html", width=400)
    assert not page.console
    assert not page.probe["violations"]
    assert all(page.probe["inked"])
    assert page.probe["scroll_width"] <= page.probe["width"]
    assert page.probe["cut_tables"] == 0
    text = page.probe["text"]
    for expected in (
        "6 of 6",
        "validation_loss by setting",
        "optimizer.lr",
        "adapter.rank",
        "best.yaml",
        "Validation loss",
    ):
        assert expected in text


def test_a_failed_run_is_tried_again_kept_and_does_not_end_the_others(
    write_sweep: WriteSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = {"000": ["crash"], "001": ["kill", "crash", "crash"], "002": ["config"]}
    monkeypatch.setenv("FAKE_FAULTS", json.dumps(faults))
    sweep, study = write_sweep(), tmp_path / "study"
    assert main(["sweep", str(sweep)]) == 1
    status = {row["run"]: (row["status"], int(row["attempts"])) for row in read_rows(study)}
    assert status["000"] == ("completed", 2)
    assert status["001"] == ("failed", 2)
    assert status["002"] == ("failed", 1), "wrong data is not tried again"
    assert all(status[name] == ("completed", 1) for name in ("003", "004", "005"))
    assert [attempt["reason"] for attempt in read_attempts(study, "001")] == ["killed by SIGKILL", "an injected crash"]
    assert "an injected config" in (study / "comparison.html").read_text()
    assert "an injected crash" in (study / "logs" / "000.log").read_text()
    assert "001 lr=0.0001 rank=16: failed: an injected crash" in capsys.readouterr().err

    assert main(["sweep", str(sweep)]) == 1, "nothing is tried again by itself"
    assert read_rows(study)[-1]["status"] == "failed"
    assert main(["sweep", str(sweep), "--retry-failed"]) == 0
    assert len(read_attempts(study, "001")) == 4
    assert {row["status"] for row in read_rows(study)} == {"completed"}


def test_the_worst_runs_are_stopped_early_and_are_not_started_again(
    write_sweep: WriteSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_HOLD", "[1e-4, 1e-2]")  # so that a loaded machine stops them before they complete, too
    sweep, study = write_sweep(early_stop={"first_step": 5, "factor": 3}, at_once=6), tmp_path / "study"
    assert main(["sweep", str(sweep)]) == 0
    rows = read_rows(study)
    stopped = [row for row in rows if row["status"] == "stopped early"]
    assert rows[0]["optimizer.lr"] == "0.001"
    assert {"0.0001", "0.01"} <= {row["optimizer.lr"] for row in stopped}
    assert all(int(row["steps"]) < 20 for row in stopped)
    before = {row["run"]: row["steps"] for row in rows}
    assert main(["sweep", str(sweep)]) == 0
    assert {row["run"]: row["steps"] for row in read_rows(study)} == before


def test_a_run_that_the_user_stops_for_good_is_not_resumed(
    write_sweep: WriteSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.03")
    process = start(write_sweep(at_once=6))
    run = tmp_path / "study" / "runs" / "study-003"
    wait_until(lambda: (run / "metrics.jsonl").exists(), process)
    (run / "stop-for-good").touch()
    (run / "stop").touch()
    assert process.wait(60) == 0, process.communicate()
    status = {row["run"]: row["status"] for row in read_rows(tmp_path / "study")}
    assert status.pop("003") == "stopped early"
    assert set(status.values()) == {"completed"}


CODE = """
import sys
from fctune.cli import main
from fctune.apps.sweep import launchers
launchers.LocalLauncher.command = ({python!r}, {fake!r})
launchers.list_gpus = lambda: []
sys.exit(main(["sweep", {sweep!r}]))
"""


def start(sweep: Path) -> subprocess.Popen[str]:
    """Start the sweep in a process of its own."""
    python, fake = launchers.LocalLauncher.command
    code = CODE.format(python=python, fake=fake, sweep=str(sweep))
    return subprocess.Popen(
        [warm_python(), "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, id="kill"), pytest.param(signal.SIGINT, id="ctrl_c", marks=pytest.mark.thorough)],
)
def test_a_sweep_ended_at_any_time_is_resumed_by_the_same_command(
    number: signal.Signals, write_sweep: WriteSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.08")
    sweep, study = write_sweep(), tmp_path / "study"
    process = start(sweep)
    wait_until(
        lambda: len(list(study.glob("runs/*/exit.json"))) >= 1 and len(list(study.glob("runs/*/metrics.jsonl"))) >= 4,
        process,
    )
    process.send_signal(number)
    code = process.wait(60)
    assert code == (-9 if number == signal.SIGKILL else 130)
    monkeypatch.setenv("FAKE_STEP_S", "0.005")
    assert main(["sweep", str(sweep)]) == 0
    rows = read_rows(study)
    assert {row["status"] for row in rows} == {"completed"}
    assert len(rows) == 6
    for run in (study / "runs").iterdir():
        steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(1, 21)), (
            f"{run.name}: a run resumes where it was stopped, and two never write at once"
        )
    attempts = [len(read_attempts(study, f"{n:03d}")) for n in range(6)]
    assert max(attempts) <= 2
    assert all(attempt["code"] in (None, 0, 75) for n in range(6) for attempt in read_attempts(study, f"{n:03d}"))


def test_a_second_sweep_in_the_same_directory_waits_outside(
    write_sweep: WriteSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.1")
    sweep = write_sweep()
    process = start(sweep)
    wait_until(lambda: list((tmp_path / "study" / "runs").glob("*/metrics.jsonl")), process)
    assert main(["sweep", str(sweep)]) == 2
    assert "a sweep is running in it" in capsys.readouterr().err
    process.send_signal(signal.SIGTERM)
    process.communicate()


@pytest.mark.thorough
def test_gpus_are_divided_among_the_runs_at_once(
    write_sweep: WriteSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "list_gpus", lambda: ["4", "5", "6", "7"])
    monkeypatch.setenv("FAKE_STEP_S", "0.02")
    assert main(["sweep", str(write_sweep(at_once=2))]) == 0
    seen = [json.loads(path.read_text()) for path in (tmp_path / "study" / "runs").glob("*/attempts.jsonl")]
    assert {one["gpus"] for one in seen} == {"4,5", "6,7"}
    assert {one["nproc"] for one in seen} == {"2"}


def test_optuna_sweeps_locally_and_resumes(write_sweep: WriteSweep, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    space = {"optimizer.lr": {"min": 1e-5, "max": 1e-1, "scale": "log"}}
    few = write_sweep(sampler="optuna", space=space, num_runs=3, at_once=2)
    assert main(["sweep", str(few)]) == 0
    first = {row["run"]: row["optimizer.lr"] for row in read_rows(tmp_path / "study")}
    assert main(["sweep", str(write_sweep(sampler="optuna", space=space, num_runs=6, at_once=2))]) == 0
    extended = {row["run"]: row["optimizer.lr"] for row in read_rows(tmp_path / "study")}
    assert len(extended) == 6
    assert {name: extended[name] for name in first} == first
    together = {
        "study_dir": str(tmp_path / "together"),
        "sampler": "optuna",
        "space": space,
        "num_runs": 6,
        "at_once": 2,
    }
    assert main(["sweep", str(write_sweep(**together))]) == 0
    assert {row["run"]: row["optimizer.lr"] for row in read_rows(tmp_path / "together")} == extended


def test_a_dry_run_lists_the_runs_and_writes_nothing(
    write_sweep: WriteSweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", str(write_sweep()), "--dry-run"]) == 0
    assert "005  lr=0.01 rank=16" in capsys.readouterr().out
    assert not (tmp_path / "study").exists()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "config_key": (
        {"space": {"optimizer.lrr": [1, 2]}},
        "optimizer.lrr: AdamW takes no such argument; did you mean optimizer.lr?",
    ),
    "config_section": ({"space": {"adaptor.rank": [1, 2]}}, "adaptor: unknown key; did you mean adapter?"),
    "config_value": ({"space": {"epochs": [1, 0]}}, "epochs=0: expected 1 or more (run 001)"),
    "sweep_key": ({"sampeler": "grid"}, "sampeler: unknown key; did you mean sampler?"),
    "empty_grid": ({"space": {}}, "space: empty; write e.g."),
    "empty_values": ({"space": {"epochs": []}}, "space.epochs=[]: empty"),
    "no_list": ({"space": {"epochs": 3}}, "space.epochs=3: expected a list of values, or a range"),
    "upside_down": (
        {"sampler": "random", "num_runs": 2, "space": {"optimizer.lr": {"min": 1e-2, "max": 1e-4}}},
        "space.optimizer.lr: min=0.01 is not less than max=0.0001; swap them",
    ),
    "log_of_zero": (
        {"sampler": "random", "num_runs": 2, "space": {"optimizer.lr": {"min": 0, "max": 1, "scale": "log"}}},
        "a logarithmic scale needs more than 0",
    ),
    "range_in_grid": ({"space": {"optimizer.lr": {"min": 1e-4, "max": 1e-2}}}, "a grid needs a list of values"),
    "no_number": ({"sampler": "random"}, "num_runs: missing"),
    "equal_runs": ({"sampler": "list", "space": None, "runs": [{"epochs": 1}, {"epochs": 1}]}, "equal settings"),
    "empty_list": ({"sampler": "list", "space": None}, "runs: empty"),
    "unknown_metric": ({"metric": "validation_los"}, "no metric that is a number; did you mean validation_loss?"),
    "unwritten_metric": ({"metric": "eval_accuracy"}, "metric=eval_accuracy: no run would write it"),
    "missing_config": ({"config": "tiny_lorra"}, "config=tiny_lorra: "),
    "no_config": ({"config": None}, "config: missing; it has no default"),
    "limit_of_0": ({"at_once": 0}, "at_once=0: expected 1 or more"),
    "no_attempts": ({"max_attempts": 0}, "max_attempts=0: expected 1 or more"),
    "factor": ({"early_stop": {"first_step": 5, "factor": 1}}, "early_stop.factor=1.0: expected more than 1"),
    "unused_key": ({"launcher": {"options": ["--x"]}}, "not used with launcher.kind=local"),
    "output_dir": ({"space": {"output_dir": ["a", "b"]}}, "space.output_dir: the sweep chooses it; remove it"),
    "dir_is_file": ({"study_dir": "README.md"}, "study_dir=README.md: is a file"),
    "dir_is_used": ({"study_dir": "docs"}, "is not empty and contains no sweep"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_sentence_and_starts_nothing(
    name: str, write_sweep: WriteSweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, message = WRONG[name]
    assert main(["sweep", str(write_sweep(**changes))]) == 2
    error = capsys.readouterr().err
    assert message in error, error
    assert len(error.strip().splitlines()) <= 2, error
    assert not (tmp_path / "study").exists()


def test_a_missing_sweep_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(tmp_path / "no.yaml")]) == 2
    assert "no.yaml: no such sweep file" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "command"), [("slurm", "sbatch"), ("sky", "sky")])
def test_a_launcher_that_is_not_installed_is_named(
    kind: str,
    command: str,
    write_sweep: WriteSweep,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sweep = write_sweep(launcher={"kind": kind})
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["sweep", str(sweep)]) == 2
    assert f"launcher.kind={kind}: {command} is not installed here" in capsys.readouterr().err


def test_more_runs_than_gpus_are_refused(
    write_sweep: WriteSweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launchers, "list_gpus", lambda: ["0", "1"])
    assert main(["sweep", str(write_sweep(at_once=3))]) == 2
    assert "at_once=3: this machine has 2 GPUs, and runs do not share GPUs; use at most 2" in capsys.readouterr().err


def test_the_directory_of_another_sweep_is_refused(write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(write_sweep(space={"epochs": [1]}))]) == 0
    for changes, what in (({"space": {"epochs": [2]}}, "space"), ({"overrides": {"seed": 1}}, "overrides")):
        assert main(["sweep", str(write_sweep(**({"space": {"epochs": [1]}} | changes)))]) == 2
        assert f"holds another sweep ({what} differs)" in capsys.readouterr().err


def test_a_metric_that_no_run_wrote_ends_the_sweep_after_the_first(
    write_sweep: WriteSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.02")
    assert main(["sweep", str(write_sweep(metric="gpu_utilization", at_once=1))]) == 2
    error = capsys.readouterr().err
    assert "metric=gpu_utilization: run 000 completed and did not write it; it wrote loss, step_time_s" in error
    assert not (tmp_path / "study" / "best.yaml").exists()
    assert len(list((tmp_path / "study" / "runs").iterdir())) == 1
    assert time.time() - os.stat(tmp_path / "study" / "study.json").st_mtime < 60
