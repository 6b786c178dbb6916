"""The shell of every HTML page: one file with its style, its script and its data, light and dark, down to phone width.

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

from fctune.files import write_atomically

_ASSETS = files("fctune.report") / "assets"
_CHART_JS = "chart-4.6.1.umd.min.js"
# No address is allowed at all: a page that reaches for the network fails in the browser, not only in the test.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'"


Tone = Literal["good", "warn", "bad", ""]


@dataclass(frozen=True, slots=True)
class Series:
    """One row of bars or one line of a chart; None leaves a gap, which the line of a sparse series runs over."""

    name: str
    values: Sequence[float | None]
    is_sparse: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A place on the axis of a chart of lines where something happened."""

    at: float
    kind: Literal["restart", "checkpoint", "alert"]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: ``bars`` lie one below the other, a ``histogram`` stands, ``lines`` go over numbers as labels."""

    kind: Literal["bars", "histogram", "lines"]
    labels: Sequence[str | float]
    series: Sequence[Series]
    name_label: str = ""
    value_label: str = ""
    marks: Sequence[Mark] = ()
    is_log: bool = False  # the axis of values, whose series are then over 0


class Page:
    """A page under construction: tiles and sections, in the order in which they are added."""

    def __init__(self, title: str, verdict: str = "", tone: Tone = "") -> None:
        self._title = title
        self._verdict = f'<p class="verdict {tone}">{escape(verdict)}</p>' if verdict else ""
        self._parts: list[str] = []
        self._scripts: list[str] = []
        self._num_charts = 0

    def add_tiles(self, tiles: Iterable[tuple[str, str, Tone]]) -> None:
        """Adds the figures to be seen first: (figure, what it counts, tone)."""
        made = (f'<div class="tile"><b class="{t}">{escape(n)}</b><span>{escape(s)}</span></div>' for n, s, t in tiles)
        self._parts.append(f'<div class="tiles">{"".join(made)}</div>')

    def add_section(self, title: str, *parts: str, lead: str = "") -> None:
        """Adds a section of parts that are HTML already."""
        intro = f'<p class="muted">{escape(lead)}</p>' if lead else ""
        self._parts.append(f"<section><h2>{escape(title)}</h2>{intro}{''.join(parts)}</section>")

    def make_chart(self, chart: Chart, title: str = "", note: str = "") -> str:
        """HTML of a chart with its numbers below, folded."""
        self._num_charts += 1
        name = f"chart-{self._num_charts}"
        height = 60 + len(chart.labels) * (14 + 16 * len(chart.series)) if chart.kind == "bars" else 240
        head = f"<h3>{escape(title)}</h3>" if title else ""
        head += f'<p class="muted">{escape(note)}</p>' if note else ""
        columns = [(chart.name_label or "", False), *((series.name, True) for series in chart.series)]
        values = zip(*(series.values for series in chart.series), strict=True)
        rows = [[label, *value] for label, value in zip(chart.labels, values, strict=True)]
        return (
            f'<div>{head}<div class="chart" style="height:{height}px">'
            f'<canvas id="{name}" role="img" aria-label="{escape(title or self._title)}"></canvas></div>'
            f'<script type="application/json" data-chart="{name}">{_to_script(asdict(chart))}</script>'
            f'<details><summary class="muted">Numbers</summary>{make_table(columns, rows)}</details></div>'
        )

    def make_cases(self, cases: Sequence[Mapping[str, Any]], facets: Mapping[str, str]) -> str:
        """HTML of a list that the reader narrows down by what stands in each case, and by a word in it.

        Args:
            cases: each with ``title``, ``tags`` (shown beside it), ``facets`` (what it is narrowed by) and ``parts``
                as (heading, text, kind), where a kind is ``text``, ``code`` or ``list`` (a line an item).
            facets: keys of the cases' own ``facets``, and what each is called.
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
        """The whole page."""
        css, chart_js, page_js = (_ASSETS.joinpath(n).read_text("utf-8") for n in ("page.css", _CHART_JS, "page.js"))
        scripts = "".join(_ASSETS.joinpath(name).read_text("utf-8") for name in self._scripts) + page_js
        # An end tag inside a script would end it; no asset has one, and a new one must not bring it in unseen.
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
        """Writes the page in one step, so that a reader never sees half of it."""
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, self.render(footer))


def escape(value: object) -> str:
    """The value as text in HTML; numbers with thousands separators."""
    if isinstance(value, bool | None):
        return "" if value is None else str(value).lower()
    text = str(value)
    if isinstance(value, int | float):
        text = f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    # A half surrogate pair cannot be written as UTF-8; the page shows that something stood there.
    return html.escape(text.encode("utf-8", "replace").decode("utf-8"))


def make_table(columns: Sequence[tuple[str, bool]], rows: Iterable[Sequence[object]]) -> str:
    """HTML of a table; a column is (title, whether it holds numbers)."""
    marks = [' class="num"' if is_number else "" for _, is_number in columns]
    head = "".join(f"<th{mark}>{escape(title)}</th>" for (title, _), mark in zip(columns, marks, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{mark}>{escape(cell)}</td>" for cell, mark in zip(row, marks, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _to_script(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
