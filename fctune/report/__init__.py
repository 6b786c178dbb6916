"""HTML pages: one shell, and the pages on it. Each page is one file that needs no network."""

from fctune.report.data_page import write_html
from fctune.report.page import Chart, Page, Series, Tone, escape, make_table

__all__ = ["Chart", "Page", "Series", "Tone", "escape", "make_table", "write_html"]
