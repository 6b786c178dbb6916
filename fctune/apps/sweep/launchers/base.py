"""The interface of launchers, which start and watch the runs of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fctune.apps.sweep.study import SweepRun


class Launcher(Protocol):
    """Starts runs and says which are still active."""

    poll_s: float
    is_remote: bool  # jobs continue when the sweep's process ends

    def count_free(self) -> int | None:
        """Return how many runs can be started now; None: any number, of which some may wait in a queue."""

    def name_job(self, run: SweepRun) -> str:
        """Return the name of a run's next job, which no other job has."""

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
