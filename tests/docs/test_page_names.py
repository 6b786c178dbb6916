"""Code, messages and README files name only pages of the documentation that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

_PAGE = re.compile(r"(?<![\w/.-])docs/[\w/-]+\.(?:md|svg|png)")
_LINK = re.compile(r"\]\(([^)\s#]+)(?:#([\w-]+))?\)")
FOLDERS = ("fctune", "recipes", "eval", "sky", "configs", "infra", "benchmarks/*.py", "Makefile", ".env.example")
READMES = ("README.md", "configs/README.md", "infra/nebius/README.md", "sky/README.md")
ELSEWHERE = {"docs/tool_call_guidance.md"}  # in the repository of Kimi K2


def list_headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_pages_that_code_names_exist() -> None:
    files = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = {
        (file, page)
        for file in files.split("\n")[:-1]
        if not file.endswith((".json", ".safetensors"))
        for page in _PAGE.findall((ROOT / file).read_text("utf-8", "ignore"))
    }
    assert len(named) > 20
    missing = [f"{file}: {page}" for file, page in sorted(named) if not (ROOT / page).is_file()]
    assert not [line for line in missing if line.split(": ")[1] not in ELSEWHERE]


@pytest.mark.parametrize("readme", READMES)
def test_links_of_a_readme_lead_somewhere(readme: str) -> None:
    file = ROOT / readme
    links = [link for link in _LINK.findall(file.read_text("utf-8")) if not link[0].startswith("http")]
    targets = [((file.parent / path).resolve(), anchor) for path, anchor in links]
    assert not [path for path, anchor in targets if not path.exists() or (anchor and anchor not in list_headings(path))]
