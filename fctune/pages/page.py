"""HTML page builder: one self-contained file with its style, scripts and data, light and dark, down to phone width.

Charts are Chart.js (https://www.chartjs.org, MIT), 210 kB inlined; plotly's bundle is 4.7 MB. Every chart comes with
its numbers as a table, for readers without a canvas.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from fctune.base.files import write_atomically
from fctune.config.intervals import choose_noun

_ASSETS = files("fctune.pages") / "assets"
_CHART_JS = "chart-4.6.1.umd.min.js"
# No address is allowed: a page that tries to reach the network fails in the browser, not only in the test.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'"

Tone = Literal["good", "warn", "bad", ""]


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one line or one set of bars; None is a gap, which the line of a sparse series spans."""

    name: str
    values: Sequence[float | None]
    is_sparse: bool = False
    is_faint: bool = False  # drawn behind the others, in the colour of the series before it


@dataclass(frozen=True, slots=True)
class Mark:
    """Event marked on the horizontal axis of a line chart."""

    at: float
    kind: Literal["restart", "checkpoint", "alert"]


@dataclass(frozen=True, slots=True)
class Chart:
    """Chart data: horizontal ``bars``, a ``histogram`` of vertical bars, or ``lines`` over numeric labels."""

    kind: Literal["bars", "histogram", "lines"]
    labels: Sequence[str | float]
    series: Sequence[Series]
    name_label: str = ""
    value_label: str = ""
    marks: Sequence[Mark] = ()
    is_log: bool = False  # logarithmic value axis; all values must be positive
    is_log_labels: bool = False  # logarithmic name axis; all labels must be positive
    is_log_size: bool = False  # the labels are base-2 logarithms of sizes in MiB and are shown as sizes


@dataclass(frozen=True, slots=True)
class Cell:
    """Table cell with markup, CSS classes or an inline style."""

    content: object
    classes: str = ""
    style: str = ""
    is_html: bool = False  # ``content`` is markup and is not escaped


class Page:
    """Page under construction; tiles and sections appear in the order in which they are added."""

    def __init__(self, title: str, verdict: str = "", tone: Tone = "") -> None:
        self._title = title
        self._verdict = f'<p class="verdict {tone}">{escape(verdict)}</p>' if verdict else ""
        self._parts: list[str] = []
        self._scripts: list[str] = []
        self._num_charts = 0

    def add_tiles(self, tiles: Iterable[tuple[str, str, Tone]]) -> None:
        """Add a row of headline figures as (figure, label, tone)."""
        made = (f'<div class="tile"><b class="{t}">{escape(n)}</b><span>{escape(s)}</span></div>' for n, s, t in tiles)
        self._parts.append(f'<div class="tiles">{"".join(made)}</div>')

    def add_section(self, title: str, *parts: str, lead: str = "", is_folded: bool = False) -> None:
        """Add a section with a heading, an introductory sentence, and parts that are HTML already."""
        intro = f'<p class="muted">{escape(lead)}</p>' if lead else ""
        head, body = f"<h2>{escape(title)}</h2>", f"{intro}{''.join(parts)}"
        if is_folded:
            head, body = "", f"<details><summary>{head}</summary>{body}</details>"
        self._parts.append(f"<section>{head}{body}</section>")

    def make_chart(self, chart: Chart, title: str = "", note: str = "") -> str:
        """Return the HTML of a chart, followed by its numbers as a folded table."""
        self._num_charts += 1
        name = f"chart-{self._num_charts}"
        height = 60 + len(chart.labels) * (14 + 16 * len(chart.series)) if chart.kind == "bars" else 240
        head = f"<h3>{escape(title)}</h3>" if title else ""
        head += f'<p class="muted">{escape(note)}</p>' if note else ""
        columns = [(chart.name_label or "", False), *((series.name, True) for series in chart.series)]
        values = zip(*(series.values for series in chart.series), strict=True)
        labels = [f"{2 ** float(label):.4g} MiB" for label in chart.labels] if chart.is_log_size else chart.labels
        rows = [[label, *value] for label, value in zip(labels, values, strict=True)]
        return (
            f'<div>{head}<div class="chart" style="height:{height}px">'
            f'<canvas id="{name}" role="img" aria-label="{escape(title or self._title)}"></canvas></div>'
            f'<script type="application/json" data-chart="{name}">{_to_script(asdict(chart))}</script>'
            f'<details><summary class="muted">Numbers</summary>{make_table(columns, rows)}</details></div>'
        )

    def make_cases(self, cases: Sequence[Mapping[str, Any]], facets: Mapping[str, str]) -> str:
        """Return the HTML of a list of cases that can be filtered by facets and by a search word.

        Args:
            cases: Each with ``title``, ``tags`` (shown next to the title), ``facets`` (values to filter by) and
                ``parts`` as (heading, text, kind), where kind is ``text``, ``code``, ``list`` (one item per line) or
                ``folded`` (text behind its heading).
            facets: Key in each case's ``facets`` -> label of its filter.
        """
        if "cases.js" not in self._scripts:
            self._scripts.append("cases.js")
        selects = "".join(
            f'<label>{escape(name)} <select data-facet="{escape(key)}"></select></label>'
            for key, name in facets.items()
        )
        return (
            f'<div class="cases"><div class="filters">{selects}<label>Text <input type="search"></label>'
            '<output class="muted"></output></div><div class="list"></div>'
            '<button class="more" type="button" hidden>Show more</button>'
            f'<script type="application/json" data-cases>{_to_script(list(cases))}</script></div>'
        )

    def render(self, footer: str = "") -> str:
        """Return the complete HTML document."""
        css, chart_js, page_js = (_ASSETS.joinpath(n).read_text("utf-8") for n in ("page.css", _CHART_JS, "page.js"))
        scripts = "".join(_ASSETS.joinpath(name).read_text("utf-8") for name in self._scripts) + page_js
        # An end tag inside a script would end it; no asset contains one, and a new asset must not introduce one.
        assert "</script" not in chart_js + scripts
        return (
            '<!doctype html>\n<html lang="en" data-theme="light">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<title>{escape(self._title)}</title>\n<link rel="icon" href="data:,">\n<style>\n{css}</style>\n</head>\n'
            f"<body>\n<header><div><h1>{escape(self._title)}</h1>{self._verdict}</div>"
            '<button class="theme" type="button" hidden>Dark</button></header>\n'
            f"<main>\n{chr(10).join(self._parts)}\n</main>\n<footer>{escape(footer)}</footer>\n"
            f"<script>\n{chart_js}\n</script>\n<script>\n{scripts}</script>\n</body>\n</html>\n"
        )

    def write(self, path: str | os.PathLike[str], footer: str = "") -> None:
        """Write the page, creating its folder; an existing page is replaced in one step."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, self.render(footer))


def escape(value: object) -> str:
    """Format a value as HTML text; numbers get thousands separators, None is empty."""
    if isinstance(value, bool | None):
        return "" if value is None else str(value).lower()
    text = str(value)
    if isinstance(value, int | float):
        text = f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    # Half of a surrogate pair cannot be written as UTF-8; the page shows a question mark in its place.
    return html.escape(text.encode("utf-8", "replace").decode("utf-8"))


def make_table(columns: Sequence[tuple[str, bool]], rows: Iterable[Sequence[object]], is_stacked: bool = False) -> str:
    """Return the HTML of a table; a column is (title, whether it holds numbers), a cell any value or a ``Cell``.

    On a phone, a stacked table shows each row as a block of lines, its cells after their columns' titles.
    """
    head = "".join(f"<th{_attributes('num' * is_number, '')}>{escape(title)}</th>" for title, is_number in columns)
    body = "".join(
        f"<tr>{''.join(_make_cell(cell, *column) for cell, column in zip(row, columns, strict=True))}</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table{_attributes("stacked" * is_stacked, "")}><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def make_count_tile(number: int, noun: str, tone: Tone = "", more: str = "") -> tuple[str, str, Tone]:
    """Return a tile of ``Page.add_tiles`` with a count, its noun and more words; no good tone for zero."""
    return f"{number:,}", choose_noun(number, noun) + more, tone if number or tone != "good" else ""


def draw_interval(rate: Mapping[str, Any], other: float | None, label: str, width_px: int = 200) -> str:
    """Return an SVG of a rate (dot) with its interval (bar) from 0 to 100 %, and another rate (ring) if there is one.

    Args:
        rate: A rate with its interval, as ``fctune.calls.metrics.rate`` returns it.
        other: Rate to compare with, drawn as a ring.
        label: Text alternative.
        width_px: Largest width on the page.
    """
    low, high, middle = (f"{6 + 188 * rate[key]:.1f}" for key in ("low", "high", "rate"))
    ring = "" if other is None else f'<circle class="other" cx="{6 + 188 * other:.1f}" cy="8" r="5"/>'
    return (
        f'<svg class="interval" style="max-width:{width_px}px" viewBox="0 0 200 16" role="img" '
        f'aria-label="{escape(label)}">'
        '<line class="track" x1="6" x2="194" y1="8" y2="8"/>'
        f'<line class="range" x1="{low}" x2="{high}" y1="8" y2="8"/>{ring}'
        f'<circle class="point" cx="{middle}" cy="8" r="3"/></svg>'
    )


def _make_cell(cell: object, title: str, is_number: bool) -> str:
    if not isinstance(cell, Cell):
        cell = Cell(cell)
    classes = " ".join(filter(None, ("num" * is_number, cell.classes)))
    content = str(cell.content) if cell.is_html else escape(cell.content)
    named = f' data-title="{escape(title)}"' if title else ""
    return f"<td{_attributes(classes, cell.style)}{named}>{content}</td>"


def _attributes(classes: str, style: str) -> str:
    return (f' class="{classes}"' if classes else "") + (f' style="{style}"' if style else "")


def _to_script(value: Any) -> str:
    """Encode a value as JSON that cannot end the script element around it."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
