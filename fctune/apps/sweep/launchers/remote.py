"""Base of the launchers whose runs are jobs on other machines."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from fctune.apps.sweep.study import Study, SweepRun
from fctune.base.errors import ConfigError
from fctune.base.processes import Finished, run_command
from fctune.config.loading import read_environment
from fctune.runs.directory import RunFiles
from fctune.training.env_overrides import ENV_OVERRIDES

COMMAND_LIMIT_S, SUBMIT_LIMIT_S = 60, 600
_CLEARED = {"CONFIG", "OVERRIDES", *ENV_OVERRIDES} - {"WANDB_PROJECT"}  # would change every run of an array


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
