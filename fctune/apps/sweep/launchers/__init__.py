"""Launchers, which start the runs of a sweep: processes of this machine, a Slurm array, or SkyPilot's managed jobs."""

from __future__ import annotations

from fctune.apps.sweep.launchers.base import Launcher
from fctune.apps.sweep.launchers.local import LocalLauncher, list_gpus
from fctune.apps.sweep.launchers.sky import SkyLauncher
from fctune.apps.sweep.launchers.slurm import SlurmLauncher
from fctune.apps.sweep.study import Study


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
