"""HTML page builder: one self-contained file with its style, scripts and data, light and dark, down to phone width.

A page is a list of parts, plain values that ``assets/page.html.jinja`` turns into HTML; jinja escapes every text.
Charts are Chart.js (https://www.chartjs.org, MIT), 210 kB inlined; plotly's bundle is 4.7 MB.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from fctune.base.files import write_atomically
from fctune.config.intervals import choose_noun

Tone = Literal["good", "warn", "bad", ""]
Tile = tuple[str, str, Tone]  # figure, label, tone

NO_WRAP = "white-space:nowrap"


class Num(str):
    """Title of a column of numbers, which are aligned right."""

    __slots__ = ()


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
    """Chart with its numbers: horizontal ``bars``, a ``histogram`` of vertical bars, or ``lines`` over numbers."""

    kind: Literal["bars", "histogram", "lines"]
    labels: Sequence[str | float]
    series: Sequence[Series]
    name_label: str = ""
    value_label: str = ""
    marks: Sequence[Mark] = ()
    is_log: bool = False  # logarithmic value axis; all values must be positive
    is_log_labels: bool = False  # logarithmic name axis; all labels must be positive
    is_log_size: bool = False  # the labels are base-2 logarithms of sizes in MiB and are shown as sizes
    title: str = ""
    note: str = ""

    @property
    def height(self) -> int:
        """Height of the drawing in pixels; bars take a line for each label and series."""
        return 60 + len(self.labels) * (14 + 16 * len(self.series)) if self.kind == "bars" else 240

    def spec(self) -> dict[str, Any]:
        """Return what ``page.js`` draws."""
        return asdict(self)

    def numbers(self) -> Table:
        """Return the values as a table."""
        labels = [f"{2 ** float(label):.4g} MiB" for label in self.labels] if self.is_log_size else self.labels
        values = zip(*(series.values for series in self.series), strict=True)
        rows = [[label, *value] for label, value in zip(labels, values, strict=True)]
        return Table([self.name_label, *(Num(series.name) for series in self.series)], rows)


@dataclass(frozen=True, slots=True)
class Interval:
    """Drawing of a rate (dot) with its interval (bar) from 0 to 100 %, and another rate (ring) if there is one."""

    rate: float
    low: float
    high: float
    other: float | None
    label: str  # text alternative
    width_px: int = 200  # at most

    @staticmethod
    def place(rate: float) -> str:
        """Return the horizontal position of a rate."""
        return f"{6 + 188 * rate:.1f}"


@dataclass(frozen=True, slots=True)
class Cell:
    """Table cell with CSS classes or an inline style."""

    content: object
    classes: str = ""
    style: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Table; a column is its title, a ``Num`` if it holds numbers, a cell any value, an ``Interval`` or a ``Cell``.

    On a phone, a stacked table shows each row as a block of lines, its cells after their columns' titles.
    """

    columns: Sequence[str]
    rows: Iterable[Sequence[object]]
    is_stacked: bool = False

    @property
    def heads(self) -> list[tuple[str, bool]]:
        """Titles, and whether their columns hold numbers."""
        return [(title, isinstance(title, Num)) for title in self.columns]

    def cells(self) -> Iterator[list[tuple[str, str, str, str | Interval]]]:
        """Yield each row as title, classes, style and content of its cells."""
        heads = self.heads
        for row in self.rows:
            cells = []
            for (title, is_number), value in zip(heads, row, strict=True):
                cell = value if isinstance(value, Cell) else Cell(value)
                classes = " ".join(filter(None, ("num" * is_number, cell.classes)))
                content = cell.content if isinstance(cell.content, Interval) else format_cell(cell.content)
                cells.append((title, classes, cell.style, content))
            yield cells


@dataclass(frozen=True, slots=True)
class Text:
    """Paragraph with a tone, or ``muted``; plain paragraphs are strings."""

    text: str
    tone: str


@dataclass(frozen=True, slots=True)
class Heading:
    """Heading within a section, after a status if it has one."""

    text: str
    status: str = ""
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Link:
    """Link to a page that lies next to this one."""

    text: str
    href: str


@dataclass(frozen=True, slots=True)
class Pre:
    """Text whose lines stay as they are."""

    text: str


@dataclass(frozen=True, slots=True)
class Example:
    """Item that names a place: a file with its line, and a JSON pointer into it."""

    where: str
    pointer: str
    text: str


@dataclass(frozen=True, slots=True)
class Items:
    """A bulleted list, of sentences or of examples with their place."""

    items: Sequence[str | Example]


@dataclass(frozen=True, slots=True)
class Cases:
    """List of cases that can be filtered by facets and by a search word.

    Attributes:
        cases: Each with ``title``, ``tags`` (shown next to the title), ``facets`` (values to filter by) and
            ``parts`` as (heading, text, kind), where kind is ``text``, ``code``, ``list`` (one item per line) or
            ``folded`` (text behind its heading).
        facets: Key in each case's ``facets`` -> label of its filter.
    """

    cases: Sequence[Mapping[str, Any]]
    facets: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Box:
    """Box of a ``Grid``: a title and lines of text; its edge has the tone's colour."""

    title: str
    tone: str
    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Grid:
    """Boxes in rows that fill the width."""

    boxes: Sequence[Box]


@dataclass(frozen=True, slots=True)
class Group:
    """Parts laid out by classes of ``page.css``: ``pair`` (two columns), ``facts``, ``events`` or ``side``."""

    parts: Sequence[Part]
    classes: str = ""


@dataclass(frozen=True, slots=True)
class Fold:
    """Parts behind a summary, which may begin with a count and a word of code."""

    summary: str
    parts: Sequence[Part]
    is_open: bool = False
    count: int | None = None
    code: str = ""


Part = str | Text | Heading | Link | Pre | Items | Cases | Grid | Group | Fold | Chart | Table


@dataclass
class Page:
    """Page under construction; tiles and sections appear in the order in which they are added."""

    title: str
    verdict: str = ""
    tone: Tone = ""
    _body: list[dict[str, Any]] = field(default_factory=list, init=False)

    def add_tiles(self, tiles: Iterable[Tile]) -> None:
        """Add a row of headline figures as (figure, label, tone)."""
        self._body.append({"tiles": list(tiles)})

    def add_section(self, title: str, *parts: Part, lead: str = "", is_folded: bool = False) -> None:
        """Add a section with a heading, an introductory sentence, and its parts."""
        self._body.append({"title": title, "parts": parts, "lead": lead, "is_folded": is_folded})

    def render(self, footer: str = "") -> str:
        """Return the complete HTML document.

        Raises:
            ValueError: A chart has values that are not finite.
        """
        html = _load_template().render(
            title=self.title,
            verdict=self.verdict,
            tone=self.tone,
            body=self._body,
            footer=footer,
            scripts=_read_scripts(),
            new_name=map("chart-{}".format, itertools.count(1)).__next__,
        )
        # Half of a surrogate pair cannot be written as UTF-8; the page shows a question mark in its place.
        return html.lstrip().encode("utf-8", "replace").decode("utf-8")

    def write(self, path: str | os.PathLike[str], footer: str = "") -> None:
        """Write the page, creating its folder; an existing page is replaced in one step."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, self.render(footer))


def format_cell(value: object) -> str:
    """Format a table's value as text; numbers get thousands separators, None is empty."""
    if isinstance(value, bool | None):
        return "" if value is None else str(value).lower()
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def make_count_tile(number: int, noun: str, tone: Tone = "", more: str = "") -> Tile:
    """Return a tile of ``Page.add_tiles`` with a count, its noun and more words; zero has no tone."""
    return f"{number:,}", choose_noun(number, noun) + more, tone if number else ""


def make_facts(rows: Iterable[Sequence[object]]) -> Group:
    """Make a table of names and values, whose names do not break inside a word on a phone."""
    return Group([Table(["", "Value"], rows)], "facts")


def make_settings(name: str, values: Mapping[str, Any]) -> Table:
    """Make a table of named values; those that are neither text nor numbers are written as JSON."""
    rows = [
        [key, value if isinstance(value, str | int | float) else json.dumps(value)] for key, value in values.items()
    ]
    return Table([name, "Value"], rows)


def make_heat_row(counts: Sequence[int], rights: Sequence[bool] = ()) -> list[Cell]:
    """Return cells shaded by each count's share of all; those that are right in the colour of what is good."""
    total = sum(counts) or 1
    return [
        Cell(count or "", "heat right" if is_right else "heat", f"--heat: {count / total:.3f}")
        for count, is_right in itertools.zip_longest(counts, rights, fillvalue=False)
    ]


@cache
def _load_template() -> Template:
    environment = Environment(
        loader=PackageLoader("fctune.pages", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": True, "allow_nan": False}
    environment.filters["kind"] = lambda part: type(part).__name__
    return environment.get_template("page.html.jinja")


@cache
def _read_scripts() -> tuple[Markup, Markup]:
    """Return the library of charts, and the page's own scripts."""
    assets = Path(__file__).with_name("assets")
    library, cases, page = (
        (assets / name).read_text("utf-8") for name in ("chart-4.6.1.umd.min.js", "cases.js", "page.js")
    )
    # An end tag inside a script would end it; no asset contains one, and a new asset must not introduce one.
    assert "</script" not in library + cases + page
    return Markup(library), Markup(cases + page)
