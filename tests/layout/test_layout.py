"""Rules of the tree: layers, and what may be imported or tracked where."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

from tests.conftest import ROOT

# From the bottom up: a package may import itself and the packages before it.
LAYERS = (
    "errors",
    "files",
    "signals",
    "terminal",
    "gpus",
    "launcher_watch",
    "network",
    "config",
    "distributed",
    "parsing",
    "data",
    "calls",
    "environments",
    "models",
    "parallel",
    "checkpoint",
    "telemetry",
    "generation",
    "planner",
    "evaluation",
    "sampling",
    "runs",
    "training",
    "acceptance",
    "launch",
    "report",
    "sweep",
    "assets",
    "cli",
)


def tracked_files() -> list[str]:
    return subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")[
        :-1
    ]


def test_sky_holds_no_python() -> None:
    assert not [f for f in tracked_files() if f.startswith("sky/") and f.endswith(".py")], "it would shadow SkyPilot"


def test_git_keeps_no_tokens() -> None:
    done = subprocess.run(["git", "check-ignore", ".env"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == ".env"


def test_recipes_is_a_package_and_is_not_packaged_at_the_top_level() -> None:
    import tomllib

    assert (ROOT / "recipes" / "__init__.py").is_file()
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert setup["tool"]["setuptools"]["packages"]["find"]["include"] == ["fctune*"]


def test_torchtune_is_imported_in_named_places_only() -> None:
    for file in (ROOT / "fctune").rglob("*.py"):
        if any(module.split(".")[0] == "torchtune" for module in imported_modules(file)):
            assert file.is_relative_to(ROOT / "fctune" / "models" / "torchtune"), file


def layer_of(module: str) -> int | None:
    """Position in ``LAYERS`` of a module's package; None for modules outside the library."""
    parts = module.split(".")
    if parts[0] != "fctune" or len(parts) == 1:
        return None
    return LAYERS.index(parts[1]) if parts[1] in LAYERS else None


def imported_modules(file: Path) -> set[str]:
    """Return the modules that a file imports, anywhere in it; ``from package import module`` is ``package.module``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def find_upward_imports(root: Path) -> list[str]:
    """Imports of a higher layer, or of top-level packages that sit on top of the library, one line each."""
    problems = []
    for file in sorted((root / "fctune").rglob("*.py")):
        own = layer_of(".".join(file.relative_to(root).with_suffix("").parts))
        for module in sorted(imported_modules(file)):
            if module.split(".")[0] in ("recipes", "eval", "sky"):
                problems.append(f"{file.relative_to(root)} imports {module}")
                continue
            other = layer_of(module)
            if own is not None and other is not None and other > own:
                problems.append(f"{file.relative_to(root)} imports {module}, which is in a higher layer")
    return problems


def test_imports_only_point_down() -> None:
    assert not find_upward_imports(ROOT)


def test_every_package_has_a_layer() -> None:
    modules = {path.stem for path in (ROOT / "fctune").glob("[a-z]*.py")}
    packages = {path.parent.name for path in (ROOT / "fctune").glob("*/__init__.py")}
    assert modules | packages == set(LAYERS)


def test_a_planted_upward_import_is_found(tmp_path: Path) -> None:
    (tmp_path / "fctune" / "data").mkdir(parents=True)
    (tmp_path / "fctune" / "data" / "loader.py").write_text("def f():\n    from fctune.training import loop\n")
    assert find_upward_imports(tmp_path) == [
        "fctune/data/loader.py imports fctune.training.loop, which is in a higher layer"
    ]


def test_only_a_benchmarks_own_folder_imports_it() -> None:
    folder = ROOT / "fctune" / "evaluation" / "benchmarks"
    for benchmark in folder.glob("*/__init__.py"):
        package = f"fctune.evaluation.benchmarks.{benchmark.parent.name}"
        outside = (f for f in (ROOT / "fctune").rglob("*.py") if not f.is_relative_to(benchmark.parent))
        named = [f for f in outside if any(f"{m}.".startswith(f"{package}.") for m in imported_modules(f))]
        assert not named, f"{package} is imported outside its folder: {named}"


def test_actions_and_base_images_are_pinned_by_content() -> None:
    """A tag can be moved to other code; a commit and a digest cannot."""
    actions = [
        line.split("uses:")[1].split("#")[0].strip()
        for file in (ROOT / ".github" / "workflows").glob("*.yaml")
        for line in file.read_text().splitlines()
        if "uses:" in line
    ]
    assert actions
    assert [action for action in actions if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)] == []
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    images = [line.split()[1] for line in lines if line.startswith("FROM ") and "/" in line]
    assert images
    assert [image for image in images if not re.fullmatch(r"[\w./:-]+@sha256:[0-9a-f]{64}", image)] == []
