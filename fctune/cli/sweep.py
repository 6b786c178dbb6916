"""``fctune sweep``: many runs of one config with different settings."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from fctune.base.errors import Interrupted
from fctune.base.terminal import Terminal, print_full_width
from fctune.cli.parser import add_allow_component_argument
from fctune.config.intervals import format_count

if TYPE_CHECKING:
    from fctune.apps.sweep.outputs import Row
    from fctune.apps.sweep.study import Study


def add_commands(commands: Any) -> None:
    """Add ``fctune sweep`` to the command."""
    sweep = commands.add_parser(
        "sweep",
        help="compare runs of a config with different settings",
        description="Run a config with different settings, on this machine, under Slurm or through SkyPilot, and "
        "compare the runs. The same command resumes a sweep that was interrupted or killed.",
        epilog="Exit codes: 0 all runs completed or were stopped early, 1 a run failed or none can be compared, 2 "
        "wrong usage or config, 130 interrupted.",
    )
    sweep.add_argument("sweep", metavar="SWEEP", type=Path, help="YAML file of the sweep")
    sweep.add_argument("--dry-run", action="store_true", help="check the sweep and list its runs; start nothing")
    sweep.add_argument("--retry-failed", action="store_true", help="give runs that failed their attempts once more")
    add_allow_component_argument(sweep)
    sweep.set_defaults(run=_sweep)


def _sweep(arguments: argparse.Namespace) -> int:
    from fctune.apps.sweep.driver import SweepDriver, check_before_start, plan
    from fctune.apps.sweep.launchers import make_launcher
    from fctune.apps.sweep.outputs import find_best, write_outputs
    from fctune.apps.sweep.spec import load_sweep
    from fctune.apps.sweep.study import Study

    sweep = load_sweep(arguments.sweep)
    study = Study(sweep, sweep.spec.launcher.remote_dir)
    study.read()
    plan(study)
    check_before_start(study)
    if arguments.dry_run:
        _print_plan(study)
        return 0
    launcher = make_launcher(study)
    lock = study.lock()
    try:
        if arguments.retry_failed:
            study.forgive_failures()
        study.save()
        SweepDriver(study, launcher, _show, lambda: write_outputs(study)).run()
    except KeyboardInterrupt:
        what = "jobs continue" if launcher.is_remote else "runs have saved and ended"
        raise Interrupted(f"{what}; the same command resumes the sweep") from None
    finally:
        lock.release()
    rows = write_outputs(study)
    _print_rows(study, rows)
    num_failed = sum(row.status == "failed" for row in rows)
    best = find_best(rows)
    if best is None:
        print("no run completed with the metric, so there is no best.yaml", file=sys.stderr)
    else:
        print(f"best: fctune train {study.path / 'best.yaml'}")
    print(f"page: {study.path / 'comparison.html'}   table: {study.path / 'results.csv'}")
    return 1 if num_failed or best is None else 0


def _show(line: str) -> None:
    print(f"fctune sweep: {line}", file=sys.stderr, flush=True)


def _print_plan(study: Study) -> None:
    from fctune.apps.sweep.sampling import describe_settings

    spec = study.sweep.spec
    num_runs = spec.num_runs or len(study.runs)
    print(f"{format_count(num_runs, 'run')} of {study.sweep.config}, {spec.at_once} at once, in {study.path}")
    for run in study.runs:
        print(f"  {run.name}  {describe_settings(run.settings)}")
    if spec.sampler == "optuna":
        print(f"  {num_runs - len(study.runs)} more that Optuna proposes when earlier ones have ended")


def _print_rows(study: Study, rows: list[Row]) -> None:
    from fctune.apps.sweep.outputs import list_keys
    from fctune.apps.sweep.sampling import short_names
    from fctune.pages.run_text import format_seconds

    table = Table(box=None, pad_edge=False)
    keys = list_keys(study)
    for name in ("run", *short_names(keys), study.sweep.spec.metric, "status", "steps", "time"):
        table.add_column(name, justify="left" if name in ("run", "status") else "right", no_wrap=True)
    for row in rows:
        settings = [f"{row.run.settings.get(key, '')}" for key in keys]
        value = "" if row.value is None else f"{row.value:.5g}"
        figures = row.figures
        steps, seconds = (figures.num_steps, figures.time.elapsed_s) if figures else (0, None)
        table.add_row(row.run.name, *settings, value, row.status, f"{steps:,}", format_seconds(seconds))
    print_full_width(Terminal(highlight=False), table)
