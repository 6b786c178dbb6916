"""Terminal output of an acceptance run: progress, a line for each check, and the final table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fctune.base.terminal import print_full_width
from fctune.config.intervals import format_count

_COLORS = {"PASS": "green", "WARN": "yellow", "FAIL": "bold red", "SKIPPED": "dim", "INCOMPLETE": "yellow"}


class ProgressPrinter:
    """Prints each phase as it begins, its details, and each check once."""

    def __init__(self, console: Console, output_dir: str):
        self._console, self._output_dir = console, output_dir
        self._shown: set[str] = set()

    def show_phase(self, phase: str, seconds: float) -> None:
        """Show that a phase begins, ``seconds`` after the run did."""
        self._print(Text(f"{seconds:7.1f} s  ").append(f"{'...':<8}{phase}", "dim"))

    def show_detail(self, text: str) -> None:
        """Show a detail of the current phase."""
        self._print(Text(f"{'':19}{text}", "dim"))

    def show_checks(self, result: Mapping[str, Any]) -> None:
        """Show the checks that have been judged since the last call."""
        for check in result["checks"]:
            if check["status"] == "SKIPPED" or check["name"] in self._shown:
                continue
            self._shown.add(check["name"])
            text = Text(f"{result['seconds']:7.1f} s  ").append(f"{check['status']:<8}", _COLORS[check["status"]])
            self._print(text.append(f"{check['name']:<18}").append(_format_figures(check), "dim"))

    def show_result(self, result: Mapping[str, Any]) -> None:
        """Show the final table, the verdict and the result's path."""
        self._console.print()
        print_result(self._console, result)
        self._print(Text(f"{self._output_dir}/acceptance.json"))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)


def print_result(console: Console, result: Mapping[str, Any]) -> None:
    """Print the table of checks and the verdict."""
    print_full_width(console, make_table(result))
    console.print()
    console.print(format_verdict(result), soft_wrap=True, highlight=False)


def make_table(result: Mapping[str, Any]) -> Table:
    """Build the table of checks, with their figures and thresholds."""
    title = f"{result['profile']} profile, {format_count(result['world_size'], 'rank')}, {result['seconds']:.0f} s"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("check", "", "figure", "value", "expected"):
        table.add_column(name, justify="right" if name == "value" else "left")
    for check in result["checks"]:
        status = Text(check["status"], _COLORS[check["status"]])
        name = check["name"] + ("" if check["required"] else " (not required)")
        if not check["figures"]:
            table.add_row(name, status, check["reason"], "", "")
        for number, figure in enumerate(check["figures"]):
            value = Text(f"{figure['value']:.4g} {figure['unit']}".strip(), _COLORS[figure["status"]])
            first = ("", "") if number else (name, status)
            table.add_row(*first, figure["name"], value, format_threshold(figure))
    return table


def format_verdict(result: Mapping[str, Any]) -> Text:
    """Format the verdict, and each failure's culprits and next step."""
    text = Text().append(result["verdict"], _COLORS[result["verdict"]]).append(f": {result['reason']}\n")
    for fault in result["config"]["faults"]:
        text.append(f"  injected fault: {fault['kind']} on rank {fault['rank']}\n", "yellow")
    for check in result["checks"]:
        if check["status"] not in ("FAIL", "WARN"):
            continue
        text.append(f"\n{check['name']} {check['status']}", _COLORS[check["status"]]).append(f": {check['reason']}\n")
        for culprit in check["culprits"]:
            text.append(f"  {culprit['text']}\n")
        text.append(f"  next: {check['next_step']}\n")
    return text


def format_threshold(figure: Mapping[str, Any]) -> str:
    """Format a figure's threshold, as in ``>= 600 (warns: 650)``; empty if it has none."""
    threshold = figure["threshold"]
    if threshold is None:
        return ""
    sign = ">=" if figure["better"] == "higher" else "<="
    warn = "" if threshold["warn"] is None else f" (warns: {threshold['warn']:g})"
    return f"{sign} {threshold['fail']:g}{warn}"


def _format_figures(check: Mapping[str, Any]) -> str:
    shown = (f"{f['name'].removeprefix(check['name'] + '_')} {f['value']:.4g}" for f in check["figures"])
    return "  ".join(shown) or check["reason"]
