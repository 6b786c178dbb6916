"""Tables of the evaluation commands."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fctune.base.terminal import Terminal
from fctune.calls.metrics import wilson_interval

_PIPE_WIDTH = 160
_UNLIMITED = 1000


class FittingTable(Table):
    """A table that becomes one block of lines for each row where the console is too narrow for its numbers."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render as a table if no number has to be broken, else as blocks."""
        for column in self.columns:
            if column.no_wrap:
                column.min_width = max(map(cell_len, map(str, (column.header, *column.cells))))
        if Measurement.get(console, options.update(width=_UNLIMITED), self).minimum <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        names = [str(column.header) for column in self.columns]
        columns = [list(column.cells) for column in self.columns]
        yield Text(str(self.title), "italic")
        for row, cells in zip(self.rows, zip(*columns, strict=True), strict=True):
            style = row.style or ""
            yield Text(f"\n{cells[0]}", f"bold {style}")
            width = max(map(len, names[1:]), default=0)
            for name, cell in zip(names[1:], cells[1:], strict=True):
                line = Table.grid(padding=(0, 2, 0, 2))
                line.add_column(width=width)
                line.add_column(overflow="fold")
                line.add_row(name, cell, style=style)
                if str(cell):
                    yield line
        yield Text("")


def make_console() -> Console:
    """Create a console that does not wrap tables in files and pipes, and survives a closed pipe."""
    return Terminal(width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def make_table(title: str, *columns: str, num_text: int = 1) -> Table:
    """Create a table whose first ``num_text`` columns hold text and whose others hold numbers, never broken."""
    table = FittingTable(title=Text(title, "table.title"), title_justify="left", box=box.SIMPLE_HEAD)
    for index, name in enumerate(columns):
        is_text = index < num_text
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text)
    return table


def format_rate(successes: int, n: int) -> str:
    """Format a proportion with its 95 % interval."""
    if n == 0:
        return "-"
    low, high = wilson_interval(successes, n)
    return f"{successes / n:.1%} ({low:.1%} - {high:.1%})"


def make_score_table(title: str, summary: Mapping[str, Any]) -> Table:
    """Make a table of a summary: accuracy by category in both readings, and the errors of the strict one."""
    typed = summary.get("typed", {})
    columns = ["category", "n", "accuracy", "95 % interval", "lenient", *(["typed"] if typed else [])]
    table = make_table(title, *columns)
    table.add_column("errors")
    for category, scores in summary["scores"].items():
        rate = scores["rates"]["accuracy"]
        lenient = summary["lenient"][category]["rates"]["accuracy"]
        errors = {verdict: n for verdict, n in scores["verdicts"].items() if n and verdict != "correct"}
        table.add_row(
            category,
            f"{scores['n']:,}",
            f"{rate['rate']:.1%}",
            f"{rate['low']:.1%} - {rate['high']:.1%}",
            f"{lenient['rate']:.1%}",
            *([f"{typed[category]['rate']:.1%}"] if typed else []),
            ", ".join(f"{n} {verdict}" for verdict, n in errors.items()),
            style="bold" if category == "all" else "",
        )
    return table


def make_reasoning_table(title: str, by_category: Mapping[str, Mapping[str, Any]]) -> Table:
    """Make a table of the use of reasoning, as ``summarise_reasoning`` returns it."""
    table = make_table(title, "category", "answers", "that reason", "mean tokens", "never closed", "of them cut off")
    for category, use in by_category.items():
        mean, reasoned, unclosed = use["mean_tokens"], use["reasoned"], use["unclosed"]
        table.add_row(
            category,
            f"{reasoned['n']:,}",
            f"{reasoned['rate']:.1%}",
            "-" if mean is None else f"{mean:,.1f}",
            f"{unclosed['rate']:.1%}",
            f"{use['cut']['rate']:.1%}",
            style="bold" if category == "all" else "",
        )
    return table


def print_defects(console: Console, by_category: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the counts of ``summarise_defects``, one line if there are none."""
    if not by_category:
        return
    names = [name.replace("_", " ") for name in next(iter(by_category.values()))]
    if not any(found["successes"] for rates in by_category.values() for found in rates.values()):
        console.print(f"answers with defects: none ({', '.join(names)})", soft_wrap=True, highlight=False)
        return
    table = make_table("answers with defects", "category", "answers", *names)
    for category, rates in by_category.items():
        counts = [f"{found['successes']:,}" for found in rates.values()]
        answers = next(iter(rates.values()))["n"]
        table.add_row(category, f"{answers:,}", *counts, style="bold" if category == "all" else "")
    console.print(table)


def print_figures(console: Console, figures: Mapping[str, Any] | None) -> None:
    """Print further figures; see ``fctune.tasks.suite.Measure``."""
    if figures is None:
        return
    table = make_table("further figures", "figure", "value", "95 % interval", "n")
    for name, found in figures.get("rates", {}).items():
        if found["n"]:
            table.add_row(
                name.replace("_", " "),
                f"{found['rate']:.1%}",
                f"{found['low']:.1%} - {found['high']:.1%}",
                f"{found['n']:,}",
            )
    for name, value in figures.get("values", {}).items():
        table.add_row(name.replace("_", " "), f"{value:.3f}", "", "")
    console.print(table)
    if counts := figures.get("table"):
        columns = next(iter(counts.values()))
        table = make_table("answers", "", *columns)
        for name, row in counts.items():
            table.add_row(name, *(f"{row[column]:,}" for column in columns))
        console.print(table)
    for note in figures.get("notes", ()):
        console.print(note, soft_wrap=True, highlight=False)


def print_not_run(console: Console, not_run: Mapping[str, str]) -> None:
    """Print the categories that were not run, grouped by reason."""
    for reason in dict.fromkeys(not_run.values()):
        names = [category for category, why in not_run.items() if why == reason]
        console.print(f"not run: {', '.join(names)} ({reason})", soft_wrap=True, highlight=False)


def print_leaderboard(console: Console, summary: Mapping[str, Any]) -> None:
    """Print the overall number of a summary of the leaderboard's cases, its parts, and what counts as 0 in it."""
    if (found := summary.get("leaderboard")) is None:
        return
    parts = ", ".join(
        f"{name.replace('_', ' ')} {share:.1%} (weight {found['weights'][name]} %)"
        for name, share in found["parts"].items()
    )
    lines = [
        f"overall as the leaderboard weighs it: {found['overall']:.2%} of "
        f"{summary['benchmark']} ({summary['release'] or 'version unknown'}): {parts}"
    ]
    for line in [*lines, *format_gaps(found)]:
        console.print(line, soft_wrap=True, highlight=False)


def format_gaps(weighed: Mapping[str, Any]) -> list[str]:
    """Return lines that name the categories that ``weigh`` counted as 0, and those measured on only some cases."""
    lines = []
    if missing := weighed["not_measured"]:
        lines.append(f"not measured, counted as 0 in it: {', '.join(missing)}")
    if incomplete := weighed["incomplete"]:
        lines.append(f"measured on fewer cases than the leaderboard's: {', '.join(incomplete)}")
    return lines
