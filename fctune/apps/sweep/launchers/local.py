"""Runs as processes of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from fctune.apps.sweep.study import Study, SweepRun
from fctune.base.errors import ConfigError
from fctune.base.processes import Child
from fctune.config.loading import read_environment
from fctune.runs.directory import RunFiles


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
