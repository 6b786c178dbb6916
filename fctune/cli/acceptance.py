"""``fctune acceptance``: results of acceptance runs, looked at and compared."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.table import Table

from fctune.cli.files import write_file
from fctune.terminal import Terminal, print_whole


def add_commands(commands: Any) -> None:
    """Add ``fctune acceptance`` to the command."""
    acceptance = commands.add_parser(
        "acceptance", help="results of recipes/cluster_acceptance: show one, compare two"
    ).add_subparsers(required=True, metavar="COMMAND")
    report = acceptance.add_parser("report", help="the result as a table; exit 0 where the verdict is PASS, else 1")
    report.add_argument("result", metavar="PATH", help="acceptance.json, or the output_dir that holds it")
    report.add_argument("--html", type=Path, metavar="FILE", help="write it as one self-contained page")
    report.set_defaults(run=_report)
    compare = acceptance.add_parser("compare", help="what has become slower; exit 1 where something has")
    compare.add_argument("old", metavar="OLD", help="acceptance.json of the earlier run, or its output_dir")
    compare.add_argument("new", metavar="NEW")
    compare.add_argument(
        "--tolerance", type=float, default=0.05, help="share by which a figure may be worse; default: %(default)s"
    )
    compare.set_defaults(run=_compare)


def _report(arguments: argparse.Namespace) -> int:
    from fctune.acceptance.result import read_document
    from fctune.acceptance.table import print_result

    document = read_document(arguments.result)
    print_result(Terminal(), document)
    if arguments.html is not None:
        from fctune.report.acceptance_page import write_acceptance_html

        write_file(arguments.html, "--html", lambda: write_acceptance_html(document, arguments.html))
    return 0 if document["verdict"] == "PASS" else 1


def _compare(arguments: argparse.Namespace) -> int:
    from fctune.acceptance.compare import compare
    from fctune.acceptance.result import read_document

    comparison = compare(read_document(arguments.old), read_document(arguments.new), arguments.tolerance)
    console = Terminal(soft_wrap=True, highlight=False)
    for line in comparison.different:
        console.print(f"not the same: {line}", style="yellow")
    for line in comparison.checks:
        console.print(line, style="red")
    if comparison.lost:
        console.print(f"measured then and not now: {', '.join(comparison.lost)}", style="yellow")
    if comparison.slower:
        table = Table(box=None, pad_edge=False)
        for name in ("worse than before", "then", "now", "by"):
            table.add_column(name, justify="left" if name == "worse than before" else "right")
        for change in comparison.slower:
            old, new = (f"{value:.4g} {change.unit}".strip() for value in (change.old, change.new))
            table.add_row(change.name, old, new, f"{change.worse:.1%}")
        print_whole(console, table)
    else:
        shown = f"{len(comparison.changes)} figures"
        console.print(f"nothing of {shown} is worse by more than {arguments.tolerance:.1%}")
    return 1 if comparison.slower or comparison.checks else 0
