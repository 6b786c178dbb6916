"""Every number that README and docs state as measured names the file that holds it, or the test that shows it.

A section with such numbers has a comment ``<!-- numbers: PATH, PATH -->``, a generated page one for all its sections,
``<!-- numbers of this page: PATH -->``: result files, tests, for limits and defaults the code or config that sets them,
and for facts about others their address. Where all sources are result files, each number of a table must be in one of
them, or follow from its values; in the README, also each quantity in the text.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import ROOT

GENERATED = [ROOT / "docs" / "reference" / f"{name}.md" for name in ("gpu-results", "parsers", "supported-models")]
GENERATED += [
    ROOT / "docs" / "reference" / f"{name}.md" for name in ("chat-templates", "kernels", "long-rows", "rollouts")
]
PAGES = [ROOT / "README.md", ROOT / "configs" / "README.md", *sorted((ROOT / "docs").glob("*.md")), *GENERATED]
_UNITS = (
    r"%|s|ms|min|h|hours?|minutes?|seconds?|[KMGT]i?B(?:/s)?|TFLOP/s|(?:\w+ )?tokens(?:/s)?|rows(?:/s)?|USD|verdicts"
    r"|answers|cases|outputs|texts|times|conversations|templates|round trips|architectures|steps|points|nats|kills"
    r"|prompts|questions|misses|pairs"
)
_QUANTITY = re.compile(rf"(?<![\w.@/-])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?[ -]?(?:{_UNITS})(?!\w)")
_CELL = re.compile(rf"[<>~+-]?\s*\d[\d,.e-]*\s*(?:{_UNITS})?(?:\s*\([^)]*\))?")
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?![\w.]*\d)")
_SOURCES = re.compile(r"<!-- numbers:\s+(.+?) -->", re.DOTALL)
_PAGE_SOURCES = re.compile(r"<!-- numbers of this page:\s+(.+?) -->", re.DOTALL)
_HOMES = ("benchmarks/results/", "tests/", "fctune/", "configs/", "sky/", "infra/", "Makefile")


class Section(NamedTuple):
    page: str
    title: str
    text: str  # without code
    page_sources: list[str]

    @property
    def sources(self) -> list[str]:
        return [*self.page_sources, *read_paths(_SOURCES, self.text)]

    @property
    def quantities(self) -> list[str]:
        """Return the numbers with a unit, and those that fill a table's cell."""
        prose = _SOURCES.sub("", self.text)
        return [*_QUANTITY.findall(prose), *read_cells(prose)]


def read_paths(comment: re.Pattern[str], text: str) -> list[str]:
    return [path for found in comment.findall(text) for path in re.split(r",\s*", found.strip())]


def read_cells(text: str) -> list[str]:
    """Return the numbers in the tables' cells that hold a number, its unit and no more than remarks in brackets."""
    rows = [line for line in text.splitlines() if line.startswith("|") and not set(line) <= set("|-: ")]
    cells = [cell.replace("*", "").strip() for row in rows for cell in row.strip("|").split("|")[1:]]
    return [number for cell in cells if _CELL.fullmatch(cell) for number in _NUMBER.findall(cell)]


def split_sections(page: Path) -> Iterator[Section]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE) if page.parent.name != "docs" else text
    text = re.sub(r"`[^`\n]*`", "`code`", text)
    for part in re.split(r"^(?=#{1,6} )", text, flags=re.MULTILINE):
        title, _, body = part.partition("\n") if part.startswith("#") else ("", "", part)
        yield Section(page.relative_to(ROOT).as_posix(), title.lstrip("# "), body, read_paths(_PAGE_SOURCES, text))


SECTIONS = [section for page in PAGES for section in split_sections(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_section_with_measured_numbers_names_their_source(page: Path) -> None:
    missing = {
        section.title: section.quantities[:8]
        for section in split_sections(page)
        if section.quantities and not section.sources
    }
    assert not missing, "add <!-- numbers: PATH --> (a result file or a test) to each of these sections"


def test_the_sources_of_numbers_exist() -> None:
    wrong = [
        (section.page, section.title, path)
        for section in SECTIONS
        for path in section.sources
        if not path.startswith("https://") and not (path.startswith(_HOMES) and (ROOT / path).exists())
    ]
    assert not wrong


def iter_leaves(value: Any) -> Iterator[float]:
    """Yield the numbers of a JSON value, those in its texts, and the length of each list."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield float(value)
    elif isinstance(value, str):
        yield from (float(found.replace(",", "")) for found in _NUMBER.findall(value))
    elif isinstance(value, dict):
        for inner in value.values():
            yield from iter_leaves(inner)
    elif isinstance(value, list):
        yield float(len(value))
        for inner in value:
            yield from iter_leaves(inner)


def iter_derived(value: Any) -> Iterator[float]:
    """Yield what a page computes from a JSON value: shares and differences of one object's numbers, lists' medians."""
    if isinstance(value, dict):
        numbers = [v for v in value.values() if isinstance(v, int | float) and not isinstance(v, bool)]
        yield from (a / b for a in numbers for b in numbers if 0 <= a <= b and b)
        yield from (a - b for a in numbers for b in numbers)
        for inner in value.values():
            yield from iter_derived(inner)
    elif isinstance(value, list):
        keys = value[0] if value and all(isinstance(item, dict) for item in value) else ()
        for column in (value, *([item.get(key) for item in value] for key in keys)):
            numbers = [v for v in column if isinstance(v, int | float) and not isinstance(v, bool)]
            yield from (statistics.median(numbers), statistics.fmean(numbers), sum(numbers)) if numbers else ()
        for inner in value:
            yield from iter_derived(inner)


def read_leaves(section: Section) -> set[float]:
    """Return the numbers that a section's result files hold, and what follows from them."""
    values = [
        json.loads((ROOT / path).read_text(encoding="utf-8")) for path in section.sources if path.endswith(".json")
    ]
    return {leaf for value in values for leaf in (*iter_leaves(value), *iter_derived(value))}


def find_unknown(numbers: list[str], leaves: set[float]) -> list[str]:
    """Return the numbers that no leaf rounds to at their number of digits, nor as a percentage or in minutes."""
    unknown = []
    found: dict[str, set[str]] = {}
    for text in numbers:
        mantissa, _, exponent = text.replace(",", "").partition("e")
        form = f".{len(mantissa.partition('.')[2])}{'e' if exponent else 'f'}"
        if form not in found:
            found[form] = {f"{abs(scale * leaf):{form}}" for leaf in leaves for scale in (1, 100, 1 / 60)}
        if f"{float(text.replace(',', '')):{form}}" not in found[form]:
            unknown.append(text)
    return unknown


MEASURED = [
    section
    for section in SECTIONS
    if section.sources and all(path.startswith("benchmarks/results/") for path in section.sources)
]


def test_the_numbers_in_tables_are_in_the_result_files_that_they_name() -> None:
    assert len(MEASURED) >= 20
    wrong = {
        f"{section.page}: {section.title}": unknown
        for section in MEASURED
        if (unknown := find_unknown(read_cells(section.text), read_leaves(section)))
    }
    assert not wrong


def test_the_quantities_in_the_readme_are_in_its_result_files() -> None:
    for section in split_sections(ROOT / "README.md"):
        numbers = [number for quantity in section.quantities for number in _NUMBER.findall(quantity)]
        assert not find_unknown(numbers, read_leaves(section)), f"{section.title}: not in {', '.join(section.sources)}"


def test_a_number_that_no_file_has_is_found() -> None:
    table = "| | cases | after |\n|---|---|---|\n| one call | 100 | **55 %** (45 - 64) |\n| rank 16 | 3 | `code` |"
    cells = read_cells(table)
    assert cells == ["100", "55", "45", "64", "3"]
    assert find_unknown(cells, {100.0, 0.553, 45.2, 64.4, 2.6}) == []
    assert find_unknown(cells, {100.0, 0.56, 45.2, 64.4}) == ["55", "3"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("agreed on 580,000 verdicts", ["580,000 verdicts"]),
        ("took 97 minutes, 0.02 USD, at 15,903 tokens/s", ["97 minutes", "0.02 USD", "15,903 tokens/s"]),
        ("Python 3.11 or 3.12 on 2 x 8 GPUs, see `limit 60 s`", []),
    ],
)
def test_quantities_are_told_from_other_numbers(text: str, expected: list[str]) -> None:
    section = Section("", "", re.sub(r"`[^`]*`", "", text), [])
    assert section.quantities == expected
