"""``fctune watch``: show a run in the terminal while it trains, or after it ended."""

from __future__ import annotations

import argparse
import time
from typing import Any

from fctune.base.errors import ConfigError
from fctune.base.terminal import Terminal


def add_commands(commands: Any) -> None:
    """Add ``fctune watch`` to the command line."""
    watch = commands.add_parser("watch", help="show a run's progress, figures and alerts in the terminal")
    watch.add_argument("run_dir", metavar="RUN_DIR", help="output_dir of a running or finished run, or a tune's --out")
    watch.add_argument(
        "--once", action="store_true", help="print the current state and exit; default if the output is not a terminal"
    )
    watch.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="default: %(default)s")
    watch.set_defaults(run=_watch)


def _watch(arguments: argparse.Namespace) -> int:
    from rich.live import Live

    from fctune.apps.report.run_terminal import render_run
    from fctune.runs.record import read_run
    from fctune.runs.success import judge_run
    from fctune.tasks.evaluation.accuracy import find_accuracies, list_totals

    if not arguments.interval > 0:
        raise ConfigError(f"--interval {arguments.interval}: expected more than 0.")
    record = read_run(arguments.run_dir)

    def render() -> Any:
        is_judged = record.exit is not None and record.config.get("success") is not None
        return render_run(
            record, judge_run(record, accuracies=list_totals(find_accuracies(record))) if is_judged else ()
        )

    console = Terminal(highlight=False)
    if arguments.once or not console.is_terminal:
        console.print(render(), soft_wrap=True)
    else:
        with Live(render(), console=console, auto_refresh=False) as live:
            try:
                while record.exit is None:
                    time.sleep(arguments.interval)
                    record.update()
                    live.update(render(), refresh=True)
            except KeyboardInterrupt:
                pass
    return 0 if record.exit is None or record.exit.get("code") == 0 else 1
