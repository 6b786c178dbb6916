"""The steps of docs/contributing.md, followed to the letter in a copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import ROOT
from tests.warm_interpreter import warm_python

PAGE = (ROOT / "docs" / "contributing.md").read_text()


class Block(NamedTuple):
    language: str
    title: str
    text: str


def read_sections() -> dict[str, list[Block]]:
    """Return the titled code blocks of each section that has any."""
    sections = {}
    for section in re.split(r"^## ", PAGE, flags=re.M)[1:]:
        blocks = re.findall(r'^```(\w+) title="([^"]+)"\n(.*?)^```$', section, re.M | re.S)
        if blocks:
            sections[section.splitlines()[0]] = [Block(*block) for block in blocks]
    return sections


SECTIONS = read_sections()


def apply_diff(file: Path, diff: str) -> None:
    """Replace the context and removed lines of a diff, which must occur once in the file, by context and added ones."""
    lines = diff.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] in " -")
    new = "".join(line[1:] for line in lines if line[0] in " +")
    text = file.read_text()
    assert text.count(old) == 1, f"{file}: the page's lines occur {text.count(old)} times:\n{old}"
    file.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the files that the steps touch or use."""
    copy = tmp_path_factory.mktemp("contributing")
    for name in ("fctune", "recipes", "configs", "eval"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def test_the_page_has_a_recipe_for_each_extension() -> None:
    assert list(SECTIONS) == [
        "Add a call format",
        "Add a row format",
        "Add a benchmark",
        "Add a metric",
        "Add a config key",
        "Add a command",
        "Add a model family",
    ]


@pytest.mark.parametrize(
    "section",
    [
        pytest.param(name, marks=pytest.mark.thorough if name in ("Add a metric", "Add a benchmark") else ())
        for name in SECTIONS
    ],
)
def test_following_the_page_works(section: str, repository: Path) -> None:
    checks = 0
    for block in SECTIONS[section]:
        file = repository / block.title
        if block.title == "check":
            environment = os.environ | {"PYTHONPATH": str(repository), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
            environment["WARM_PYTHON_FRESH"] = "fctune recipes eval"  # which the copy has, too
            command = [warm_python(), "-c", block.text]
            done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"code {done.returncode}\n{done.stdout}\n{done.stderr}"
            checks += 1
        elif block.language == "diff":
            apply_diff(file, block.text)
        else:
            assert not file.exists(), f"{block.title} exists already"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
    assert checks == 1
