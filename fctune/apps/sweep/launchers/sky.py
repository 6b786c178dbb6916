"""Runs as SkyPilot's managed jobs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from fctune.apps.sweep.launchers.remote import (
    COMMAND_LIMIT_S,
    SUBMIT_LIMIT_S,
    RemoteLauncher,
    find_last_line,
    require,
    require_file,
)
from fctune.apps.sweep.study import Study, SweepRun
from fctune.base.errors import ConfigError
from fctune.runs.directory import STOP_FILES

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
        return f"{self._study.path.name}-{run.name}-{len(run.attempts) + 1}"

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
