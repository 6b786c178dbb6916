"""What the README says of the tree, and what must never stand in it."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT


def tracked_files() -> list[str]:
    return subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")[
        :-1
    ]


def imports_of(path: Path) -> set[str]:
    """Modules that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_sky_holds_no_python() -> None:
    assert not [f for f in tracked_files() if f.startswith("sky/") and f.endswith(".py")], "it would shadow SkyPilot"


def test_git_keeps_no_tokens() -> None:
    done = subprocess.run(["git", "check-ignore", ".env"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == ".env"


def test_recipes_is_a_package_and_is_not_shipped() -> None:
    import tomllib

    assert (ROOT / "recipes" / "__init__.py").is_file()
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert setup["tool"]["setuptools"]["packages"]["find"]["include"] == ["fctune*"]


def test_torchtune_is_imported_in_named_places_only() -> None:
    for file in (ROOT / "fctune").rglob("*.py"):
        if any(module.split(".")[0] == "torchtune" for module in imports_of(file)):
            assert file.is_relative_to(ROOT / "fctune" / "modeling"), file


@pytest.mark.parametrize(
    ("room", "unknown"),
    [
        ("data", ("fctune.training", "fctune.modeling", "fctune.generation", "fctune.telemetry")),
        ("calls", ("fctune.training", "fctune.modeling", "fctune.generation", "fctune.telemetry")),
        ("modeling", ("fctune.training", "fctune.generation", "fctune.telemetry")),
        (".", ("recipes", "eval", "sky")),
    ],
)
def test_nothing_flows_back(room: str, unknown: tuple[str, ...]) -> None:
    for file in (ROOT / "fctune" / room).rglob("*.py"):
        for module in imports_of(file):
            assert not module.startswith(unknown), f"{file} imports {module}"


def test_the_environment_is_read_in_two_places() -> None:
    readers = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "fctune").rglob("*.py")
        if re.search(r"os\.environ|os\.getenv", file.read_text())
    }
    assert readers <= {"fctune/config.py", "fctune/training/distributed.py"}


def test_the_tree_in_the_readme_is_the_tree_on_disk() -> None:
    block = re.search(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block, "the README has no tree"
    said = set()
    parents: list[tuple[int, str]] = []
    for line in block[1].splitlines():
        name = line.split("#")[0].strip().split(" ")[0]
        indent = len(line) - len(line.lstrip())
        if not name:
            continue
        while parents and parents[-1][0] >= indent:
            parents.pop()
        path = "".join(parent for _, parent in parents) + name
        said.add(path)
        if name.endswith("/"):
            parents.append((indent, name))
    files = tracked_files()
    for path in said:
        assert any(f == path or (path.endswith("/") and f.startswith(path)) for f in files), f"{path}: not in the tree"
    top = {f.split("/")[0] + ("/" if "/" in f else "") for f in files}
    rooms = {"/".join(f.split("/")[:2]) + "/" for f in files if f.startswith("fctune/") and f.count("/") > 1}
    modules = {
        f
        for f in files
        if f.startswith("fctune/") and f.count("/") == 1 and not f.endswith(("__init__.py", "py.typed"))
    }
    missing = {name for name in top | rooms | modules if name not in said and not name.startswith(".git")}
    assert not missing, f"not in the README's tree: {sorted(missing)}"
