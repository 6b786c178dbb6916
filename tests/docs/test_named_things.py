"""Pages, commands, options and config keys that code and documentation name exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from fctune.config import key_hints
from tests.conftest import ROOT

_PAGE = re.compile(r"(?<![\w/.-])docs/[\w/-]+\.(?:md|svg|png)")
_LINK = re.compile(r"\]\(([^)\s#]+)(?:#([\w-]+))?\)")
FOLDERS = ("fctune", "recipes", "eval", "sky", "configs", "infra", "benchmarks/*.py", "Makefile", ".env.example")
READMES = ("README.md", "configs/README.md", "infra/nebius/README.md", "sky/README.md")
PAGES = [ROOT / name for name in READMES] + sorted((ROOT / "docs").glob("*.md"))
_COMMAND = re.compile(r"(?:^\$ |`)fctune ((?:(?:data|config|acceptance|score) )?[a-z][a-z-]*)([^\n`]*)", re.M)
_KEY = re.compile(r"(?<![\w/.])([a-z_]+(?:\.[a-z_0-9]+)+)(?![\w(/])")
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


def test_commands_and_options_on_the_pages_exist() -> None:
    reference = (ROOT / "docs" / "reference" / "commands.md").read_text("utf-8")
    sections = {part.split("`")[1]: part for part in re.split(r"^## ", reference, flags=re.M)[1:]}
    found, unknown = 0, []
    for page in PAGES:
        for name, rest in _COMMAND.findall(page.read_text("utf-8")):
            if name == "size":  # of a recipe in contributing.md
                continue
            own = [text for title, text in sections.items() if f"{title} ".startswith(f"fctune {name} ")]
            options = re.findall(r"(?<![\w\"=])--[a-z][a-z-]+", rest.partition("#")[0])
            unknown += [f"{page.name}: {name}"] * (not own)
            unknown += [f"{page.name}: {name} {option}" for option in options if option not in "".join(own)]
            found += 1
    assert found > 100
    assert not unknown


def test_config_keys_on_the_pages_exist() -> None:
    keys = set(key_hints.list_keys())
    sections = {key.partition(".")[0] for key in keys if "." in key}
    found, unknown = 0, []
    for page in PAGES:
        text = page.read_text("utf-8")
        for code in re.findall(r"`([^`\n]+)`|^(\$ .*)$", text, re.M):
            for key in _KEY.findall("".join(code)):
                section, _, rest = key.partition(".")
                if section in sections and rest not in ("yaml", "html", "tool_calls"):  # files and a module
                    unknown += [f"{page.name}: {key}"] * (re.sub(r"\.\d+\.", ".", key) not in keys)
                    found += 1
    assert found > 80
    assert not unknown
