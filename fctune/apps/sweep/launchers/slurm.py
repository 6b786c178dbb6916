"""Runs as the tasks of a Slurm array."""

from __future__ import annotations

from collections.abc import Sequence

from fctune.apps.sweep.launchers.remote import COMMAND_LIMIT_S, RemoteLauncher, find_last_line, require, require_file
from fctune.apps.sweep.study import Study, SweepRun
from fctune.base.errors import ConfigError


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
        return f"{self._study.path.name}-{serial}_{run.number}"

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
        return set(done.output.text.split()) if done.code == 0 else None
