"""The ``fctune acceptance`` command: show and compare results of acceptance runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.table import Table

from fctune.base.terminal import Terminal, print_full_width
from fctune.cli.files import write_file
from fctune.config.intervals import format_count


def add_commands(commands: Any) -> None:
    """Add ``fctune acceptance`` to the command-line parser."""
    acceptance = commands.add_parser(
        "acceptance", help="show or compare results of recipes/cluster_acceptance"
    ).add_subparsers(required=True, metavar="COMMAND")
    report = acceptance.add_parser("report", help="show a result as a table; exit code 0 for PASS, else 1")
    report.add_argument("result", metavar="PATH", help="acceptance.json, or the output_dir that contains it")
    report.add_argument("--html", type=Path, metavar="FILE", help="also write a self-contained HTML page")
    report.set_defaults(run=_report)
    compare = acceptance.add_parser("compare", help="list what has become slower; exit code 1 if anything has")
    compare.add_argument("old", metavar="OLD", help="acceptance.json of the earlier run, or its output_dir")
    compare.add_argument("new", metavar="NEW", help="that of the later run")
    compare.add_argument(
        "--tolerance", type=float, default=0.05, help="relative degradation to ignore; default: %(default)s"
    )
    compare.set_defaults(run=_compare)


def _report(arguments: argparse.Namespace) -> int:
    from fctune.apps.acceptance.result import read_result
    from fctune.apps.acceptance.table import print_result

    result = read_result(arguments.result)
    print_result(Terminal(), result)
    if arguments.html is not None:
        from fctune.apps.acceptance.page import write_acceptance_html

        write_file(arguments.html, "--html", lambda: write_acceptance_html(result, arguments.html))
    return 0 if result["verdict"] == "PASS" else 1


def _compare(arguments: argparse.Namespace) -> int:
    from fctune.apps.acceptance.result import compare_results, read_result

    comparison = compare_results(read_result(arguments.old), read_result(arguments.new), arguments.tolerance)
    console = Terminal(soft_wrap=True, highlight=False)
    for line in comparison.setup:
        console.print(f"different: {line}", style="yellow")
    for line in comparison.checks:
        console.print(line, style="red")
    if comparison.missing:
        console.print(f"only measured before: {', '.join(comparison.missing)}", style="yellow")
    if comparison.slower:
        table = Table(box=None, pad_edge=False)
        for name in ("slower", "before", "now", "by"):
            table.add_column(name, justify="left" if name == "slower" else "right")
        for change in comparison.slower:
            old, new = (f"{value:.4g} {change.unit}".strip() for value in (change.old, change.new))
            table.add_row(change.name, old, new, f"{change.worse:.1%}")
        print_full_width(console, table)
    else:
        console.print(
            f"none of {format_count(len(comparison.changes), 'figure')} is worse by more than {arguments.tolerance:.1%}"
        )
    return 1 if comparison.slower or comparison.checks else 0
