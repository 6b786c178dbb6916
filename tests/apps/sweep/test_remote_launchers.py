"""Sweeps through Slurm's and SkyPilot's commands, with stand-ins for these; tests/slurm has the real ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fctune.apps.sweep.spec import load_sweep
from fctune.apps.sweep.study import Study
from fctune.base.errors import ConfigError
from fctune.cli import main
from tests.apps.sweep.fake_cluster import install

WriteSweep = Callable[..., Path]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[str]]]:
    """Install the stand-ins; returns a function that lists the commands that were called."""
    install(tmp_path / "bin")
    (tmp_path / "jobs").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_JOBS", str(tmp_path / "jobs"))
    monkeypatch.setenv("SEED", "3")  # would change every run, were it passed on
    log = tmp_path / "jobs.log"
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]


def read_runs(study: Path) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads((study / "study.json").read_text())["runs"]
    return runs


def test_slurm_gets_one_array_with_a_limit_and_one_more_for_what_failed(
    write_sweep: WriteSweep, commands: Callable[[], list[list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAULTS", json.dumps({"002": ["crash"], "004": ["kill"]}))
    launcher = {"kind": "slurm", "options": ["--nodes=1"], "poll_s": 0.1}
    assert main(["sweep", str(write_sweep(launcher=launcher, at_once=4))]) == 0
    submitted = [words for words in commands() if words[0] == "sbatch"]
    assert "--array=0,1,2,3,4,5%4" in submitted[0]
    assert "--nodes=1" in submitted[0]
    assert submitted[0][-1] == "sky/slurm/finetune_venv.sbatch"
    again = {word.partition("=")[2].partition("%")[0] for words in submitted[1:] for word in words if "--array" in word}
    assert ",".join(sorted(again)) == "2,4"
    assert len({word for words in submitted for word in words if "--job-name" in word}) == len(submitted)
    runs = read_runs(tmp_path / "study")
    assert [len(run["attempts"]) for run in runs] == [1, 1, 2, 1, 2, 1]
    assert runs[4]["attempts"][0]["reason"] == "left no exit.json"


def test_names_of_jobs_have_no_spaces_and_differ_between_studies(write_sweep: WriteSweep, tmp_path: Path) -> None:
    found = []
    for folder in ("llama/my sweep", "qwen/my sweep", "3: é"):
        study = Study(load_sweep(write_sweep(study_dir=str(tmp_path / folder), launcher={"kind": "sky"})))
        found.append(study.job_prefix)
    assert len(set(found)) == 3
    assert [re.sub(r"-[0-9a-f]{6}$", "", name) for name in found] == ["my-sweep", "my-sweep", "sweep-3"]


def test_a_study_whose_name_has_a_space_submits_each_run_once(
    write_sweep: WriteSweep, commands: Callable[[], list[list[str]]], tmp_path: Path
) -> None:
    study = tmp_path / "my sweep"
    assert main(["sweep", str(write_sweep(study_dir=str(study), launcher={"kind": "slurm", "poll_s": 0.1}))]) == 0
    assert {len(run["attempts"]) for run in read_runs(study)} == {1}


@pytest.mark.thorough
def test_managed_jobs_are_limited_and_adopted_by_a_restarted_sweep(
    write_sweep: WriteSweep, commands: Callable[[], list[list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.03")
    sweep = write_sweep(launcher={"kind": "sky", "poll_s": 0.1, "options": ["--secret", "HF_TOKEN"]}, at_once=2)
    prefix = Study(load_sweep(sweep)).job_prefix
    with monkeypatch.context() as patch:
        ended = SimpleNamespace(sleep=lambda seconds: os.kill(os.getpid(), signal.SIGTERM))
        patch.setattr("fctune.apps.sweep.driver.time", ended)
        assert main(["sweep", str(sweep)]) == 130
    assert [words[words.index("--name") + 1] for words in commands() if words[1:3] == ["jobs", "launch"]] == [
        f"{prefix}-000-1",
        f"{prefix}-001-1",
    ]
    assert main(["sweep", str(sweep)]) == 0
    launched = [words for words in commands() if words[1:3] == ["jobs", "launch"]]
    assert [words[words.index("--name") + 1] for words in launched] == [f"{prefix}-{n:03d}-1" for n in range(6)]
    assert all(words[-2:] == ["--secret", "HF_TOKEN"] and "sky/finetune.yaml" in words for words in launched)
    assert {len(run["attempts"]) for run in read_runs(tmp_path / "study")} == {1}


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("rsync") is None, reason="needs rsync")
def test_a_study_on_another_disk_is_mirrored_over_ssh(
    write_sweep: WriteSweep, commands: Callable[[], list[list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.15")
    remote = tmp_path / "remote"
    remote.mkdir()
    launcher = {"kind": "sky", "poll_s": 0.1, "host": "desk", "remote_dir": str(remote)}
    stop = {"first_step": 4, "factor": 3}
    assert main(["sweep", str(write_sweep(launcher=launcher, at_once=6, early_stop=stop))]) == 0
    study = tmp_path / "study"
    assert "stopped early" in (study / "results.csv").read_text()
    assert (study / "results.csv").read_text().splitlines()[1].split(",")[3] == "0.001"
    for number in range(6):
        copied, original = (folder / "runs" / f"study-{number:03d}" for folder in (study, remote))
        assert (copied / "metrics.jsonl").read_text() == (original / "metrics.jsonl").read_text()
        assert f"output_dir: {original} " in (study / "configs" / f"{number:03d}.yaml").read_text()
    assert not list(study.glob("runs/*/attempts.jsonl")), "only what the sweep reads is copied"


def test_a_command_that_fails_ends_the_sweep_with_its_last_line(
    write_sweep: WriteSweep, commands: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = {"kind": "sky", "options": ["refuse"], "poll_s": 0.1}
    assert main(["sweep", str(write_sweep(launcher=launcher))]) == 2
    assert "sky jobs launch failed: ValueError: no resource matches" in capsys.readouterr().err
    assert not any(run["attempts"] for run in read_runs(tmp_path / "study")), "no run has failed"
    assert main(["sweep", str(write_sweep(launcher=launcher | {"options": []}))]) == 0


def test_a_command_that_hangs_is_given_up(
    write_sweep: WriteSweep,
    commands: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr("fctune.apps.sweep.launchers.COMMAND_LIMIT_S", 0.5)
    assert main(["sweep", str(write_sweep(launcher={"kind": "slurm", "poll_s": 0.1}))]) == 2
    assert "sbatch failed: no answer within 0.5 s" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "key"), [("slurm", "script"), ("sky", "task")])
def test_a_missing_script_or_task_is_named(
    kind: str, key: str, write_sweep: WriteSweep, commands: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", str(write_sweep(launcher={"kind": kind, key: "no/such"}))]) == 2
    assert f"launcher.{key}=no/such: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("launcher", "reason"),
    [
        ({"kind": "sky", "host": "-oProxyCommand=id", "remote_dir": "/mnt"}, "host=-oProxyCommand=id: not a host"),
        ({"kind": "sky", "host": "desk:x", "remote_dir": "/mnt"}, "host=desk:x: not a host"),
        (
            {"kind": "sky", "host": "desk", "remote_dir": "/mnt;id"},
            "remote_dir=/mnt;id: is read by jobs and by a shell",
        ),
        (
            {"kind": "sky", "host": "desk", "remote_dir": "~/study"},
            "remote_dir=~/study: is read by jobs and by a shell",
        ),
        ({"kind": "sky", "host": "desk", "remote_dir": "--help"}, "remote_dir=--help: is read by jobs and by a shell"),
        (
            {"kind": "sky", "task": "--env-file=x"},
            "task=--env-file=x: would be read as an option; write ./--env-file=x",
        ),
        ({"kind": "slurm", "script": "--wrap=id"}, "script=--wrap=id: would be read as an option; write ./--wrap=id"),
    ],
    ids=range(7),
)
def test_values_of_a_sweep_cannot_become_options_or_commands(
    launcher: dict[str, str], reason: str, write_sweep: WriteSweep
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"launcher.{reason}")):
        load_sweep(write_sweep(launcher=launcher))
