"""``fctune report``: write the page of one or more runs."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError
from fctune.base.terminal import Terminal
from fctune.cli.files import write_file
from fctune.config.intervals import format_count

_STYLES = {"PASS": "green", "FAIL": "red"}


def add_commands(commands: Any) -> None:
    """Add ``fctune report`` to the command line."""
    report = commands.add_parser("report", help="write an HTML page of one run, or a comparison of several")
    report.add_argument(
        "runs", nargs="+", metavar="RUN_DIR", help="output_dir of a run, or a tune's --out; several runs are compared"
    )
    report.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="default: %(default)s")
    report.add_argument(
        "--after",
        metavar="FILE",
        help="evaluation results of the trained model; default: search for results of the run's exports",
    )
    report.add_argument("--before", metavar="FILE", help="evaluation results of the base model on the same cases")
    report.add_argument(
        "--published",
        action="append",
        default=[],
        metavar="PATH",
        help="results of tau2-bench or ACEBench to show: a .json file or a directory; repeatable",
    )
    report.add_argument(
        "--price",
        type=float,
        metavar="X",
        help="price of a GPU-hour, in the config's currency; default: the run's config, else the list price",
    )
    report.add_argument(
        "--prices", type=Path, metavar="FILE", help="YAML with prices in place of those of fctune/runs/prices.yaml"
    )
    report.add_argument(
        "--network-gib",
        type=float,
        default=2000.0,
        metavar="X",
        help="network disk of a node, 0 without one; default: %(default)s",
    )
    report.add_argument(
        "--strict", action="store_true", help="judge all runs and fail if a success criterion was not measured"
    )
    report.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> int:
    from fctune.apps.report.run_page import write_run_html
    from fctune.runs.figures import Pricing
    from fctune.runs.record import read_run
    from fctune.runs.success import format_criteria, is_success, judge_run
    from fctune.tasks.evaluation.accuracy import find_accuracies, list_totals, pair_results
    from fctune.tasks.evaluation.published import read_published

    if (arguments.after or arguments.before) and len(arguments.runs) > 1:
        raise ConfigError("--after, --before: only for a single run; the results of several are found automatically.")
    if arguments.before and not arguments.after:
        raise ConfigError("--before: needs --after, the results to compare it with.")
    for option, number in (("--price", arguments.price or 0.0), ("--network-gib", arguments.network_gib)):
        if not 0 <= number < math.inf:
            raise ConfigError(f"{option} {number}: expected 0 or more.")
    pricing = Pricing(arguments.price, arguments.prices, arguments.network_gib)
    published = [read_published(path) for path in arguments.published]
    records = [read_run(path) for path in arguments.runs]
    if arguments.after:
        accuracies = [[pair_results(arguments.after, arguments.before)]]
    else:
        accuracies = [find_accuracies(record) for record in records]
    criteria = [
        judge_run(record, None, list_totals(found), records)
        if arguments.strict or record.config.get("success") is not None
        else []
        for record, found in zip(records, accuracies, strict=True)
    ]
    write_file(
        arguments.out, "--out", lambda: write_run_html(records, arguments.out, accuracies, criteria, pricing, published)
    )
    console = Terminal(soft_wrap=True, highlight=False)
    for record, judged in zip(records, criteria, strict=True):
        for note in record.notes():
            console.print(f"{record.path}: {note}", style="yellow")
        for line, criterion in zip(format_criteria(judged), judged, strict=True):
            console.print(f"{record.path}: {line}", style=_STYLES.get(criterion.status))
    num_steps = sum(len(record.metrics.steps) for record in records)
    console.print(
        f"{arguments.out}: {len(records)} {'run' if len(records) == 1 else 'runs'}, {format_count(num_steps, 'step')}"
    )
    return 0 if all(is_success(judged, arguments.strict) for judged in criteria) else 1
