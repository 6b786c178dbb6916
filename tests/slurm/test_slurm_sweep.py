"""Sweeps on a real Slurm: as an array, and as SkyPilot's managed jobs on the same cluster."""

from __future__ import annotations

import csv
import json
import re
import shlex
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.slurm.client import SkyPilot
from tests.slurm.cluster import Cluster, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

PYTHON = str(ROOT / ".venv" / "bin" / "python")


def write_sweep(cluster: Cluster, trial: str, name: str, **changes: Any) -> str:
    """Write a sweep of short runs to the shared disk, which all machines see."""
    folder = cluster.shared / "sweeps"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    sweep = {
        "config": trial,
        "study_dir": f"/mnt/shared/sweeps/{name}",
        "overrides": {
            "data.sources": [{"path": "synthetic:train:300:1"}],
            "max_steps": 12,
            "checkpoint.every": 6,
            "validation.every": 4,
        },
        "at_once": 2,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(sweep | changes, sort_keys=False))
    return f"/mnt/shared/sweeps/{name}.yaml"


def read_rows(study: Path) -> dict[str, dict[str, str]]:
    with open(study / "results.csv", newline="") as file:
        return {row["run"]: row for row in csv.DictReader(file)}


def count_most_at_once(study: Path) -> int:
    """Return the largest number of runs that had started and not ended at the same time."""
    events = []
    for run in (study / "runs").glob(f"{study.name}-*"):
        started = datetime.fromisoformat(json.loads((run / "run.json").read_text())["started_at"]).timestamp()
        events += [(started, 1), ((run / "exit.json").stat().st_mtime, -1)]
    return max(accumulate(change for _, change in sorted(events)))


def test_an_array_of_six_runs_survives_the_sweeps_own_death(cluster: Cluster, clone: Path, trial: str) -> None:
    study = cluster.shared / "sweeps" / "array"
    # A job cannot call srun on the other node of this cluster (see cluster.py), so both at once are on n0.
    options = ["--nodes=1", "--nodelist=n0", "--gpus-per-node=4", "--cpus-per-task=32", "--mem=500G"]
    launcher = {"kind": "slurm", "options": options, "poll_s": 2}
    space = {"optimizer.lr": [1e-5, 4e-3, 1e-2], "adapter.rank": [8, 32]}
    stop = {"first_step": 4, "factor": 2}
    sweep = write_sweep(cluster, trial, "array", space=space, launcher=launcher, early_stop=stop)
    variables = "FCTUNE_CPU_RANKS=1 FCTUNE_SHARED=/mnt/shared FCTUNE_NETWORK=/mnt/network"
    command = f"cd {clone} && {variables} {PYTHON} -m fctune.cli sweep {sweep}"
    cluster.ssh(f"setsid bash -c {shlex.quote(command)} < /dev/null > /mnt/shared/sweeps/first.log 2>&1 &")
    wait_until(lambda: list(study.glob("runs/*/metrics.jsonl")), "a run trains", 240)
    queue = cluster.ssh("squeue --array --noheader --format '%j_%K %T'").splitlines()
    assert all(re.fullmatch(r"array-[0-9a-f]{6}-0_[0-5]", line.split()[0]) for line in queue), queue
    assert sum(line.endswith("RUNNING") for line in queue) <= 2
    cluster.ssh("pkill --signal KILL --full 'fctune.cli [s]weep'")
    assert cluster.ssh("squeue --noheader"), "jobs continue"

    shown = cluster.ssh(f"{command} 2>&1", timeout_s=500)
    rows = read_rows(study)
    assert len(rows) == 6, shown
    assert {row["status"] for row in rows.values()} <= {"completed", "stopped early"}, shown
    assert {row["attempts"] for row in rows.values()} == {"1"}, "one array, and nothing is submitted again"
    assert next(iter(rows.values()))["optimizer.lr"] != "1e-05", shown
    assert "best: fctune train /mnt/shared/sweeps/array/best.yaml" in shown
    assert count_most_at_once(study) <= 2
    assert (study / "comparison.html").is_file()
    for name, row in rows.items():
        steps = [
            json.loads(line)["step"]
            for line in (study / "runs" / f"array-{name}" / "metrics.jsonl").read_text().splitlines()
        ]
        assert steps == list(range(1, int(row["steps"]) + 1))
        assert "preflight: " in (study / "logs" / f"{name}.log").read_text()
    jobs = cluster.ssh("scontrol show job --oneliner", check=False)
    assert set(re.findall(r"JobName=array-\w{6}-0 .*? Restarts=(\d+)", jobs)) <= {"0"}, "stopped tasks are not requeued"
    checked = cluster.ssh(f"cd {clone} && {PYTHON} -m fctune.cli config check /mnt/shared/sweeps/array/best.yaml")
    assert "valid" in checked


@pytest.mark.timeout(1500)
def test_three_managed_jobs_run_a_sweep_two_at_a_time(cluster: Cluster, sky: SkyPilot, trial: str) -> None:
    study = cluster.shared / "sweeps" / "managed"
    # All jobs fit on n0, since a new one may start before ended ones are removed: the other node of this cluster runs
    # no job that calls srun.
    resources = {"--num-nodes": "1", "--cpus": "16", "--memory": "200", "--gpus": "H100:1"}
    variables = ("FCTUNE_CPU_RANKS=1", "OMP_NUM_THREADS=1")
    options = [word for pair in resources.items() for word in pair]
    options += [word for variable in variables for word in ("--env", variable)]
    launcher = {"kind": "sky", "task": "sky/slurm/finetune.yaml", "options": options, "poll_s": 5}
    space = {"optimizer.lr": [1e-3, 4e-3, 1e-2], "adapter.rank": [8]}
    sweep = write_sweep(cluster, trial, "managed", space=space, launcher=launcher, at_once=2)
    sky.run("down", "--all", "--yes", check=False)
    # The desk's user is root, and that of the jobs is not: both write to the study's directory.
    program = ["bash", "-c", 'umask 0 && exec "$0" "$@"', PYTHON]
    done = sky.run("-m", "fctune.cli", "sweep", sweep, timeout_s=1200, program=program)
    rows = read_rows(study)
    assert len(rows) == 3
    assert {row["status"] for row in rows.values()} == {"completed"}, done.stderr
    assert {row["attempts"] for row in rows.values()} == {"1"}
    assert {(row["optimizer.lr"], row["adapter.rank"]) for row in rows.values()} == {
        (str(lr), str(rank)) for lr in space["optimizer.lr"] for rank in space["adapter.rank"]
    }
    assert count_most_at_once(study) <= 2
    queue = sky.run("jobs", "queue", "--all").stdout
    assert len(re.findall(r"managed-\w{6}-00\d-1 .*SUCCEEDED", queue)) == 3, queue
