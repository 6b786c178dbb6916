"""The built documentation loads nothing from other hosts, and opens from disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from docs_hooks import find_foreign, on_post_build
from tests.conftest import ROOT

LOCAL = '<a href="https://example.org">x</a><link rel="canonical" href="https://example.org"><img src="images/a.svg">'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("index.html", '<script src="https://example.org/x.js"></script>'),
        ("index.html", '<link rel="stylesheet" href="//example.org/x.css">'),
        ("index.html", '<img src="http://example.org/x.png">'),
        ("index.html", "<style>body { background: url('https://example.org/x.png') }</style>"),
        ("assets/x.css", "@import 'https://example.org/font.css';"),
        ("index.html", '<div data-md-component="source"></div>'),
    ],
)
def test_a_site_that_calls_another_host_is_not_built(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "page.html").write_text(LOCAL)
    assert find_foreign(tmp_path) == []
    (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit, match=f"other hosts:\n{name}: "):
        on_post_build({"site_dir": str(tmp_path)})


def test_make_docs_builds_a_site_for_the_disk_and_checks_it() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    assert config["use_directory_urls"] is False
    assert "offline" in config["plugins"], "search needs its index as a script"
    assert config["hooks"] == ["docs_hooks.py"]
    assert all((ROOT / "docs" / script).is_file() for script in config["extra"]["polyfills"])
