"""The table of shapes for readers of the results is that of the fixtures."""

from __future__ import annotations

from fctune.data.sources import ROW_FORMATS
from tests.conftest import ROOT
from tests.shape_table import SOURCES, make_table

OTHERS = {"openai", "sharegpt", "hermes", "toolace", "glaive", "xlam", "table"}  # tested row by row


def test_the_table_of_shapes_is_up_to_date_and_has_every_format() -> None:
    assert SOURCES.keys() | OTHERS == ROW_FORMATS.keys()
    assert (ROOT / "benchmarks" / "results" / "row_shapes.md").read_text("utf-8") == make_table(), (
        "run: python -m tests.shape_table benchmarks/results/row_shapes.md"
    )
