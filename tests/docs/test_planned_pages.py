"""Plans in the documentation: what a page shows is what the planner says now."""

from __future__ import annotations

import re

import pytest

from benchmarks import cluster_pages, configs
from tests.conftest import ROOT


def read_parts() -> dict[str, str]:
    """Return the text of each generated part, by name; each is on one page."""
    parts: dict[str, str] = {}
    for page in cluster_pages.PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        pattern = (
            re.escape(cluster_pages.BEGIN).replace(re.escape("{}"), "([^>]+)") + "\n\n(.*?)\n\n" + cluster_pages.END
        )
        for name, part in re.findall(pattern, text, re.DOTALL):
            assert name not in parts
            parts[name] = part
    return parts


def test_the_pages_have_every_part_once() -> None:
    assert read_parts().keys() == cluster_pages.PARTS.keys()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.thorough if name == "long rows" else ()) for name in cluster_pages.PARTS],
)
def test_a_page_shows_what_the_planner_says(name: str) -> None:
    assert read_parts()[name] == cluster_pages.PARTS[name](), "run python -m benchmarks.cluster_pages"


@pytest.mark.slow
def test_the_table_of_configs_shows_what_the_planner_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "configs" / "README.md").read_text(encoding="utf-8")
    (table,) = re.findall(f"{configs.BEGIN}\n\n(.*?)\n\n{configs.END}", page, re.DOTALL)
    assert table == configs.render(), "run python -m benchmarks.configs configs/README.md"
