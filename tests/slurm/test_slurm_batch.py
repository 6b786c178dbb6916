"""The sbatch script under a real Slurm: output files, stopping, resuming, and failures that end the job."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, wait_until, workers

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]

SCRIPT = "sky/slurm/finetune_venv.sbatch"


class Job:
    """A job submitted from a clone in the user's home, on two nodes with one CPU rank each."""

    def __init__(
        self, cluster: Cluster, clone: Path, trial: str, name: str, *overrides: str, options: str = ""
    ) -> None:
        self.cluster, self.clone = cluster, clone
        self.run = cluster.run_files(name)
        variables = f"CONFIG={trial} OUTPUT_DIR=runs/{name} DATASET=synthetic:train:2000:1 FCTUNE_CPU_RANKS=1"
        disks = "FCTUNE_SHARED=/mnt/shared FCTUNE_NETWORK=/mnt/network"
        words = " ".join(overrides)
        submit = f"cd {clone} && {variables} {disks} sbatch --parsable {options} {SCRIPT} {words}"
        self.id = cluster.ssh(submit).strip()

    def facts(self) -> dict[str, str]:
        """Return the job's properties according to Slurm."""
        return dict(re.findall(r"(\w+)=(\S*)", self.cluster.ssh(f"scontrol show job --oneliner {self.id}")))

    def wait_for_state(self, *states: str, timeout_s: float = 120) -> dict[str, str]:
        """Wait until the job is in one of these states, and return its properties."""
        seen: dict[str, str] = {}

        def is_there() -> bool:
            seen.update(self.facts())
            return seen["JobState"] in states

        wait_until(is_there, f"job {self.id} in {states}; it is in {seen}", timeout_s)
        return seen

    def path(self, name: str) -> Path:
        """Return one of the files that the job writes to the directory it was submitted from."""
        return self.clone / f"train_{self.id}{name}"

    def text(self, name: str) -> str:
        """Read one of these files."""
        return self.path(name).read_text()

    def wait_for_checkpoint(self) -> int:
        """Wait for the job's first complete checkpoint, and return its step."""
        wait_until(lambda: self.run.newest_checkpoint() or self.run.ended(), f"a checkpoint of job {self.id}", 120)
        assert self.run.ended() is None, self.run.ended()
        return self.run.newest_checkpoint()


@pytest.fixture(autouse=True)
def free_nodes(cluster: Cluster) -> Iterator[None]:
    """Cancel all jobs after each test."""
    yield
    cluster.ssh("scancel --user $USER", check=False)
    cluster.wait_idle()


def test_a_job_trains_on_both_nodes_and_writes_a_log_and_a_summary(cluster: Cluster, clone: Path, trial: str) -> None:
    job = Job(cluster, clone, trial, "complete", "max_steps=12")
    job.wait_for_state("COMPLETED")
    assert "preflight: 2 nodes are fit (n0, n1)" in job.text(".log")
    assert job.run.steps() == list(range(1, 13))
    assert (job.run.folder / "checkpoints" / "checkpoint-10").is_dir()
    assert (job.run.folder / "export" / "merged" / "model.safetensors").is_file()
    summary = job.text("_summary.txt")
    assert f"job        {job.id} (restart 0) on 2 nodes, n[0-1]" in summary
    assert "exit code  0\n" in summary
    assert job.text(".err") == ""


@pytest.mark.timeout(900)
def test_a_job_that_depends_on_a_preparation_trains_on_the_set_that_it_wrote(
    cluster: Cluster, clone: Path, trial: str
) -> None:
    rows = "data.sources.0.path=synthetic:train:1900:1"
    disks = "FCTUNE_SHARED=/mnt/shared FCTUNE_NETWORK=/mnt/network"
    submit = f"cd {clone} && CONFIG={trial} {disks} sbatch --parsable sky/slurm/prepare.sbatch {rows}"
    first = cluster.ssh(submit).strip()
    job = Job(cluster, clone, trial, "prepared", rows, "max_steps=2", options=f"--dependency=afterok:{first}")
    facts = job.wait_for_state("COMPLETED", "FAILED", timeout_s=600)
    assert facts["JobState"] == "COMPLETED", (clone / f"prepare_{first}.log").read_text() + job.text(".log")
    assert "prepared: a launch with the same variables" in (clone / f"prepare_{first}.log").read_text()
    prepared = json.loads((job.run.folder / "run.json").read_text())["data"]["path"]
    written = cluster.shared / Path(prepared).relative_to("/mnt/shared") / "meta.json"
    started = datetime.fromisoformat(facts["StartTime"]).timestamp()  # in whole seconds, rounded down
    assert int(written.stat().st_mtime) <= started


def test_a_job_that_slurm_asks_to_stop_saves_is_requeued_and_resumes_at_the_next_step(
    cluster: Cluster, clone: Path, trial: str
) -> None:
    job = Job(cluster, clone, trial, "requested", "max_steps=80")
    job.wait_for_checkpoint()
    cluster.ssh(f"scancel --signal=USR1 --batch {job.id}")  # as --signal=B:USR1@300 does
    ended = wait_until(job.run.ended, "the run ends", 60)
    assert ended["code"] == 75, ended
    assert "stopped by SIGUSR1 after" in ended["reason"]
    assert 10 <= ended["step"] < 80
    facts = job.wait_for_state("COMPLETED")
    assert facts["Restarts"] == "1"
    assert job.run.steps() == list(range(1, 81)), "no step is lost or repeated"
    log = job.text(".log")
    assert f"resuming from {ended['checkpoint']}, after step {ended['step']}" in log
    assert Path(ended["checkpoint"]).name.endswith(f"checkpoint-{ended['step']}")
    assert "(restart 1)" in job.text("_summary.txt")


def test_a_stop_of_one_task_of_an_array_leaves_the_others_running(cluster: Cluster, clone: Path) -> None:
    script = clone / "array.sbatch"
    wait = 'trap "exit 75" USR1; touch /mnt/shared/array-$SLURM_ARRAY_TASK_ID; while sleep 0.2; do :; done'
    script.write_text(
        "#!/bin/bash\n#SBATCH --array=0-2 --requeue --output=array_%a.log\n#SBATCH --nodelist=n0 --mem=1G\n"
        f"set -uo pipefail\n. sky/slurm/batch.sh\nrun_and_report bash -c '{wait}'\n"
    )
    disks = "FCTUNE_SHARED=/mnt/shared FCTUNE_NETWORK=/mnt/network"
    array = cluster.ssh(f"cd {clone} && {disks} sbatch --parsable array.sbatch").strip()
    wait_until(lambda: len(list(cluster.shared.glob("array-[012]"))) == 3, "all tasks run", 60)

    def count_restarts() -> dict[str, tuple[str, str]]:
        shown = cluster.ssh(f"scontrol show job --oneliner {array}").splitlines()
        facts = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in shown]
        return {one["ArrayTaskId"]: (one["JobState"], one["Restarts"]) for one in facts}

    # The task that starts last has the number of the array as its own.
    cluster.ssh(f"scancel --signal=USR1 --batch {array}_2")
    wait_until(lambda: count_restarts()["2"][1] == "1", "the task is requeued", 60)
    assert count_restarts()["0"] == count_restarts()["1"] == ("RUNNING", "0")


def test_a_job_whose_node_dies_resumes_from_its_last_checkpoint(cluster: Cluster, clone: Path, trial: str) -> None:
    job = Job(cluster, clone, trial, "interrupted", "max_steps=50")
    saved = job.wait_for_checkpoint()
    cluster.kill_machine("n1")
    job.wait_for_state("PENDING", "COMPLETING", "REQUEUED", "FAILED", "NODE_FAIL")
    cluster.start_machine("n1")
    facts = job.wait_for_state("COMPLETED", "FAILED", timeout_s=150)
    assert facts["JobState"] == "COMPLETED", job.text(".log")[-3000:] + job.text(".err")
    assert facts["Restarts"] == "1"
    (step,) = re.findall(r"resuming from \S+, after step (\d+)", job.text(".log"))
    assert saved <= int(step) < 50
    assert job.run.steps() == list(range(1, 51))


def test_a_job_whose_rank_is_aborted_continues_on_another_node(cluster: Cluster, clone: Path, trial: str) -> None:
    job = Job(cluster, clone, trial, "aborted", "max_steps=40", options="--nodes=1")
    saved = job.wait_for_checkpoint()
    (rank,) = workers()
    os.kill(rank.pid, signal.SIGABRT)  # as NCCL's watchdog does after its time-out
    # The head is always n0 here, because srun cannot start on n1 (tests/slurm/cluster.py), so the job ends there.
    facts: dict[str, str] = {}
    wait_until(lambda: facts.update(job.facts()) or facts["NodeList"] == "n1", "the job starts on the other node", 60)
    assert (facts["Restarts"], facts["ExcNodeList"]) == ("1", "n0")
    assert "n0 failed: the job continues on other nodes" in job.text(".err")
    summary = job.text("_summary.txt")
    assert "exit code  76\n" in summary
    assert "SIGABRT" in job.text(".log")
    (count,) = (cluster.shared / "restarts").glob(f"slurm-{job.id}.[0-9]*")
    step, fruitless = count.read_text().split()
    assert int(step) >= saved
    assert fruitless == "0"


def test_a_job_with_an_invalid_config_ends_with_exit_code_2(cluster: Cluster, clone: Path, trial: str) -> None:
    job = Job(cluster, clone, trial, "wrong", "optimizer.lrr=1")
    facts = job.wait_for_state("FAILED")
    assert facts["ExitCode"] == "2:0"
    assert facts["Restarts"] == "0"
    assert "did you mean optimizer.lr?" in job.text(".log")
    assert "exit code  2\n" in job.text("_summary.txt")
    assert not job.run.folder.exists()


def test_a_task_for_each_gpu_is_refused_with_what_to_write(cluster: Cluster, clone: Path, trial: str) -> None:
    job = Job(cluster, clone, trial, "tasks", options="--ntasks-per-node=8 --cpus-per-task=1")
    assert job.wait_for_state("FAILED")["ExitCode"] == "2:0"
    assert "16 tasks on 2 nodes" in job.text(".err")
    variables = f"CONFIG={trial} FCTUNE_CPU_RANKS=1 FCTUNE_SHARED=/mnt/shared FCTUNE_NETWORK=/mnt/network"
    step = "srun --nodes=2 --ntasks-per-node=2 sky/run_node.sh"
    said = cluster.ssh(f"cd {clone} && {{ {variables} {step} 2>&1; echo code $?; }}")
    assert "srun started this script in 4 tasks on 2 nodes" in said
    assert "code 2" in said


def test_a_node_without_the_shared_disk_stops_both_nodes_with_one_line_each(
    cluster: Cluster, clone: Path, trial: str
) -> None:
    subprocess.run(cluster.on_machine("n1", ["umount", "/mnt/shared"]), check=True)
    try:
        job = Job(cluster, clone, trial, "alone", "max_steps=5")
        facts = job.wait_for_state("FAILED")
    finally:
        mount = ["mount", "--bind", str(cluster.shared), "/mnt/shared"]
        subprocess.run(cluster.on_machine("n1", mount), check=True)
    assert facts["ExitCode"] == "1:0"
    assert "node 1 (n1): fault: /mnt/shared: cannot be written" in job.text(".log")
    assert "node 0 (n0): stopped: node 1 reported a fault" in job.text(".log")
