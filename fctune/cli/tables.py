"""The tables that evaluation prints."""

from __future__ import annotations

import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fctune.calls.metrics import wilson_interval

_WIDTH_OF_A_PIPE = 140


def make_console() -> Console:
    """A console that does not fold tables where nobody's screen ends."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE)


def make_table(title: str, *columns: str, num_text: int = 1) -> Table:
    """A table whose first ``num_text`` columns are text and whose others are numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place < num_text else "right")
    return table


def format_rate(successes: int, n: int) -> str:
    """A share with its 95 % interval."""
    if n == 0:
        return "-"
    low, high = wilson_interval(successes, n)
    return f"{successes / n:.1%} ({low:.1%} - {high:.1%})"


def make_score_table(model: str, summary: dict[str, Any]) -> Table:
    """Accuracy by category in both readings, and what went wrong in the strict one."""
    is_bfcl = "official" in summary
    columns = ["category", "n", "accuracy", "95 % interval", "lenient", *(["BFCL", "typed"] if is_bfcl else [])]
    table = make_table(f"tool-call accuracy of {model} on {summary['suite']}", *columns)
    table.add_column("what went wrong")
    for category, scores in summary["scores"].items():
        rate = scores["rates"]["accuracy"]
        lenient = summary["lenient"][category]["rates"]["accuracy"]
        wrong = {v: n for v, n in scores["verdicts"].items() if n and v != "correct"}
        table.add_row(
            category,
            f"{scores['n']:,}",
            f"{rate['rate']:.1%}",
            f"{rate['low']:.1%} - {rate['high']:.1%}",
            f"{lenient['rate']:.1%}",
            *([f"{summary[name][category]['rate']:.1%}" for name in ("official", "typed")] if is_bfcl else []),
            ", ".join(f"{n} {v}" for v, n in wrong.items()),
            style="bold" if category == "all" else "",
        )
    return table
