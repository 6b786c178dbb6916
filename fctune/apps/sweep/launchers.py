"""Launchers, which start the runs of a sweep: processes of this machine, a Slurm array, or SkyPilot's managed jobs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from fctune.apps.sweep.study import Study, SweepRun
from fctune.base.errors import ConfigError
from fctune.base.processes import Child, Finished, run_command
from fctune.config.loading import read_environment
from fctune.runs.directory import STOP_FILES, RunFiles
from fctune.training.env_overrides import ENV_OVERRIDES, MODEL_SIZE


class Launcher(Protocol):
    """Starts runs and says which are still active."""

    poll_s: float
    is_remote: bool  # jobs continue when the sweep's process ends

    def count_free(self) -> int | None:
        """Return how many runs can be started now; None: any number, of which some may wait in a queue."""

    def name_job(self, run: SweepRun) -> str:
        """Return the name of a run's next job, which no other job has, of this study or another."""

    def submit(self, runs: Sequence[SweepRun]) -> None:
        """Start runs whose new attempts name their jobs.

        Raises:
            ConfigError: The command that starts them failed.
        """

    def list_active(self) -> set[str] | None:
        """Return the jobs that are waiting or running; None if that is not known at the moment."""

    def exit_code(self, run: SweepRun) -> int | None:
        """Return the exit code of a run's process; None if it is not a child of this process."""

    def pull(self, runs: Sequence[SweepRun]) -> None:
        """Fetch the files of runs from the jobs' disk, if this machine does not see it."""

    def request_stop(self, run: SweepRun) -> None:
        """Ask a run to save and end, for good."""

    def stop_all(self) -> None:
        """Ask all runs that would die with this process to save and end, and wait until they have."""


class LocalLauncher:
    """Processes of this machine; its GPUs are divided evenly among the runs at once.

    A run's process saves and ends when the sweep's process dies. Until it has, it holds its directory's lock, and the
    same sweep started again waits for it.

    Args:
        study: The runs.
        gpus: Names of the GPUs to divide, as in ``CUDA_VISIBLE_DEVICES``; empty: train on CPUs.
    """

    poll_s: float = 1.0
    is_remote = False
    command = (sys.executable, "-P", "-m", "fctune.cli", "train")

    def __init__(self, study: Study, gpus: Sequence[str]) -> None:
        spec = study.sweep.spec
        self._study, self._at_once = study, spec.at_once
        if gpus and spec.at_once > len(gpus):
            raise ConfigError(
                f"at_once={spec.at_once}: this machine has {len(gpus)} GPU{'s' * (len(gpus) > 1)}, and runs do not "
                f"share GPUs; use at most {len(gpus)}."
            )
        share = len(gpus) // spec.at_once
        self._nproc = spec.launcher.nproc or share or 1
        if gpus and self._nproc > share:
            raise ConfigError(
                f"launcher.nproc={self._nproc}: with at_once={spec.at_once}, a run has {share} of {len(gpus)} GPUs; "
                f"use at most {share}, or fewer runs at once."
            )
        self._slots = [",".join(gpus[slot * share : slot * share + self._nproc]) for slot in range(spec.at_once)]
        self._children: dict[str, tuple[Child, int]] = {}

    def count_free(self) -> int:
        """Return how many runs can be started now."""
        return self._at_once - len(self.list_active())

    def name_job(self, run: SweepRun) -> str:
        """Return the name of an attempt; processes have no name of their own."""
        return f"{run.name}-{len(run.attempts) + 1}"

    def submit(self, runs: Sequence[SweepRun]) -> None:
        """Start a process for each run, with its share of the GPUs and cores."""
        for run in runs:
            taken = {slot for child, slot in self._children.values() if child.code is None}
            slot = next(number for number in range(self._at_once) if number not in taken)
            threads = max(1, (os.cpu_count() or 1) // (self._at_once * self._nproc))
            environment = {"OMP_NUM_THREADS": str(threads)} | read_environment()
            if self._slots[slot]:
                environment["CUDA_VISIBLE_DEVICES"] = self._slots[slot]
            options = ["--config", str(self._study.config_path(run)), "--nproc", str(self._nproc)]
            with open(self._study.log_path(run), "ab") as log:
                # In a session of its own: Ctrl-C reaches this process alone, which passes it on once.
                child = Child([*self.command, *options], environment, stdout=log, stderr=subprocess.STDOUT)
            self._children[run.attempts[-1].job] = child, slot

    def list_active(self) -> set[str]:
        """Return the running attempts, among them those that an earlier start of this sweep left."""
        active = {job for job, (child, _) in self._children.items() if child.code is None}
        for run in self._study.list_with("running"):
            job = run.attempts[-1].job
            if job not in self._children and RunFiles(self._study.run_dir(run)).is_locked():
                active.add(job)
        return active

    def exit_code(self, run: SweepRun) -> int | None:
        """Return the exit code of a run's process; None if an earlier start of this sweep began it."""
        child = self._children.get(run.attempts[-1].job)
        return None if child is None else child[0].code

    def pull(self, runs: Sequence[SweepRun]) -> None:
        """Do nothing: the runs write to this machine."""

    def request_stop(self, run: SweepRun) -> None:
        """Create the run's stop file."""
        RunFiles(self._study.run_dir(run)).request_stop(is_for_good=True)

    def stop_all(self) -> None:
        """Ask every process to save and end, and wait; interrupted once more, kill them."""
        running = [child for child, _ in self._children.values() if child.code is None]
        try:
            for child in running:
                child.ask_to_end()
            for child in running:
                child.wait()
        except KeyboardInterrupt:
            for child in running:
                child.kill_group()
            raise


def list_gpus() -> list[str]:
    """Return the GPUs of this machine as ``CUDA_VISIBLE_DEVICES`` names them."""
    from fctune.training.launcher import count_gpus

    visible = [name for name in read_environment().get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    num_gpus = count_gpus()
    return visible[:num_gpus] if visible else [str(number) for number in range(num_gpus)]


COMMAND_LIMIT_S, SUBMIT_LIMIT_S = 60, 600
# Would change every run of an array.
_CLEARED = {"CONFIG", MODEL_SIZE, "OVERRIDES", *ENV_OVERRIDES} - {"WANDB_PROJECT"}


class RemoteLauncher:
    """Base of the Slurm and SkyPilot launchers: runs their commands, and fetches files from disks of other machines."""

    is_remote = True

    def __init__(self, study: Study) -> None:
        spec = study.sweep.spec
        self._study, self._spec, self._launcher = study, spec, spec.launcher
        self._environment = {name: value for name, value in read_environment().items() if name not in _CLEARED}

    def exit_code(self, run: SweepRun) -> int | None:
        """Return None: a job is not a child of this process."""
        return None

    def pull(self, runs: Sequence[SweepRun]) -> None:
        """Do nothing: jobs and this machine share a disk."""

    def request_stop(self, run: SweepRun) -> None:
        """Create the run's stop files."""
        RunFiles(self._study.run_dir(run)).request_stop(is_for_good=True)

    def stop_all(self) -> None:
        """Do nothing: jobs continue without this process."""

    def _run(self, command: Sequence[str], timeout_s: float, **more: str) -> Finished:
        """Run a command to its end; one that takes too long is killed, and its last line says so."""
        done = run_command(command, limit_s=timeout_s, environment=self._environment | more)
        if done.code is None:
            done.errors.add(f"\nno answer within {timeout_s:g} s\n".encode())
        return done


def require(command: str, key: str, remedy: str) -> None:
    """Raise ConfigError if a command that a key of the sweep needs is not installed."""
    if shutil.which(command) is None:
        raise ConfigError(f"{key}: {command} is not installed here; {remedy}.")


def require_file(path: str, key: str) -> None:
    """Raise ConfigError if the file that a key of the sweep names does not exist."""
    if not Path(path).is_file():
        raise ConfigError(
            f"{key}={path}: no such file; start the sweep in the root of a clone, or choose another file."
        )


def find_last_line(done: Finished) -> str:
    """Return the last line that a failed command printed, else its exit code."""
    return done.errors.last_line or done.output.last_line or f"exit code {done.code}"


class SlurmLauncher(RemoteLauncher):
    """Tasks of a Slurm array, of which ``at_once`` run at a time; a stopped or preempted one is requeued by its script.

    Must run where ``sbatch`` does and where the study's directory is on the nodes' shared disk.
    """

    poll_s: float = 15.0

    def __init__(self, study: Study) -> None:
        super().__init__(study)
        require("sbatch", "launcher.kind=slurm", "run the sweep on a login node of the cluster")
        require_file(self._launcher.script, "launcher.script")

    def count_free(self) -> None:
        """Return None: Slurm limits how many tasks of an array run."""

    def name_job(self, run: SweepRun) -> str:
        """Return the array's name and the task's number; runs that are submitted together share an array."""
        serial = sum(len(one.attempts) for one in self._study.runs)
        return f"{self._study.job_prefix}-{serial}_{run.number}"

    def submit(self, runs: Sequence[SweepRun]) -> None:
        """Submit the runs as one Slurm array for each name of their jobs."""
        arrays: dict[str, list[SweepRun]] = {}
        for run in runs:
            arrays.setdefault(run.attempts[-1].job.rpartition("_")[0], []).append(run)
        for name, tasks in arrays.items():
            numbers = ",".join(str(run.number) for run in tasks)
            logs = self._study.path / "logs"
            command = [
                "sbatch",
                "--parsable",
                f"--job-name={name}",
                f"--array={numbers}%{self._spec.at_once}",
                f"--output={logs}/%3a.log",
                f"--error={logs}/%3a.log",
                *self._launcher.options,
                self._launcher.script,
            ]
            done = self._run(command, COMMAND_LIMIT_S, FCTUNE_SWEEP=str(self._study.path))
            if done.code != 0:
                raise ConfigError(f"sbatch failed: {find_last_line(done)}")

    def list_active(self) -> set[str] | None:
        """Return the tasks in the queue as ``NAME_TASK``."""
        done = self._run(["squeue", "--me", "--array", "--noheader", "--format=%j_%K"], COMMAND_LIMIT_S)
        return {line.strip() for line in done.output.text.splitlines()} if done.code == 0 else None


_COPIED = ("run.json", "metrics.jsonl", "exit.json", "alerts.jsonl")


class SkyLauncher(RemoteLauncher):
    """SkyPilot's managed jobs, of which ``at_once`` run at a time; SkyPilot recovers preempted ones."""

    poll_s: float = 30.0

    def __init__(self, study: Study) -> None:
        super().__init__(study)
        require("sky", "launcher.kind=sky", "install SkyPilot (docs/clusters.md)")
        require_file(self._launcher.task, "launcher.task")
        self._host = self._launcher.host
        if self._host is not None:
            for command in ("ssh", "rsync"):
                require(command, f"launcher.host={self._host}", f"install {command}")

    def count_free(self) -> int:
        """Return how many runs can be started now."""
        return self._spec.at_once - len(self._study.list_with("running"))

    def name_job(self, run: SweepRun) -> str:
        """Return the name of the managed job."""
        return f"{self._study.job_prefix}-{run.name}-{len(run.attempts) + 1}"

    def submit(self, runs: Sequence[SweepRun]) -> None:
        """Launch a managed job for each run."""
        for run in runs:
            config = self._study.run_root / "configs" / f"{run.name}.yaml"
            if self._host is not None:
                self._rsync(["--mkpath", "--", str(self._study.config_path(run)), f"{self._host}:{config}"])
            command = ["sky", "jobs", "launch", "--yes", "--detach-run", "--name", run.attempts[-1].job]
            command += [self._launcher.task, "--env", f"CONFIG={config}", *self._launcher.options]
            done = self._run(command, SUBMIT_LIMIT_S)
            with open(self._study.log_path(run), "a", encoding="utf-8") as log:
                log.write(done.output.text + done.errors.text)
            if done.code != 0:
                raise ConfigError(
                    f"sky jobs launch failed: {find_last_line(done)} (full output: {self._study.log_path(run)})"
                )

    def list_active(self) -> set[str] | None:
        """Return the names of the jobs that have not ended."""
        done = self._run(["sky", "jobs", "queue", "--skip-finished", "--all", "--output", "json"], SUBMIT_LIMIT_S)
        shown = done.output.text
        try:
            jobs = json.loads(shown[shown.index("[") :]) if done.code == 0 else None
            return None if jobs is None else {str(job["job_name"]) for job in jobs}
        except (ValueError, KeyError, TypeError):
            return None

    def pull(self, runs: Sequence[SweepRun]) -> None:
        """Copy what the page and early stopping read from the jobs' disk."""
        if self._host is None or not runs:
            return
        filters = [f"--include=/{self._study.output_dir(run).name}/" for run in runs] + [
            f"--include=/*/{name}" for name in _COPIED
        ]
        remote = f"{self._host}:{self._study.run_root}/runs/"
        self._rsync([*filters, "--exclude=*", "--delete", "--", remote, f"{self._study.path}/runs/"], is_needed=False)

    def request_stop(self, run: SweepRun) -> None:
        """Create the run's stop files on the jobs' disk."""
        if self._host is None:
            super().request_stop(run)
            return
        folder = self._study.output_dir(run)
        self._run(["ssh", "--", self._host, "touch", *(f"{folder}/{name}" for name in STOP_FILES)], COMMAND_LIMIT_S)

    def _rsync(self, words: Sequence[str], is_needed: bool = True) -> None:
        done = self._run(["rsync", "--archive", *words], SUBMIT_LIMIT_S)
        if done.code != 0 and is_needed:
            raise ConfigError(f"launcher.host={self._host}: rsync failed: {find_last_line(done)}")


def make_launcher(study: Study) -> Launcher:
    """Make the launcher that a sweep names.

    Raises:
        ConfigError: It cannot run here, or not as many runs at once.
    """
    kind = study.sweep.spec.launcher.kind
    if kind == "slurm":
        return SlurmLauncher(study)
    if kind == "sky":
        return SkyLauncher(study)
    return LocalLauncher(study, list_gpus())
