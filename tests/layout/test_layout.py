"""Rules of the tree: tiers, and what may be imported or tracked where."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

# From the bottom up: a room may import from its tier, not in a circle, and from the tiers before it.
TIERS = (
    {"base", "config"},
    {"data", "calls"},
    {"models", "parallel", "checkpoint"},
    {"engines", "runs"},
    {"tasks", "training", "pages"},
    {"apps", "cli"},
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


def room_of(module: str) -> str | None:
    """Return a module's room, ``apps.<name>`` for one that stands alone; None for modules outside the library."""
    parts = module.split(".")
    if parts[0] != "fctune" or len(parts) == 1 or not any(parts[1] in tier for tier in TIERS):
        return None
    return ".".join(parts[1:3]) if parts[1] == "apps" and len(parts) > 2 else parts[1]


def tier_of(room: str) -> int:
    return next(index for index, tier in enumerate(TIERS) if room.split(".")[0] in tier)


@functools.cache
def imported_modules(file: Path) -> set[str]:
    """Return the modules that a file imports, anywhere in it; ``from package import module`` is ``package.module``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def find_forbidden_imports(root: Path) -> list[str]:
    """Imports of a higher tier, of another room of apps, or of packages on top of the library, one line each."""
    problems = []
    for file in sorted((root / "fctune").rglob("*.py")):
        own = room_of(".".join(file.relative_to(root).with_suffix("").parts))
        for module in sorted(imported_modules(file)):
            other = room_of(module)
            if module.split(".")[0] in ("recipes", "eval", "sky"):
                problems.append(f"{file.relative_to(root)} imports {module}")
            elif own is None or other is None or own == other:
                continue
            elif tier_of(other) > tier_of(own):
                problems.append(f"{file.relative_to(root)} imports {module}, which is in a higher tier")
            elif own.startswith("apps.") and tier_of(other) == tier_of(own):
                problems.append(f"{file.relative_to(root)} imports {module}, which is another app's")
    return problems


def find_circle(imports: dict[str, set[str]]) -> list[str]:
    """Return a circle of names that import each other; an empty list if there is none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        circle = next((found for other in sorted(imports.get(name, ())) if (found := visit(other, [*path, name]))), [])
        done.add(name)
        return circle

    return next((found for name in sorted(imports) if (found := visit(name, []))), [])


def test_imports_only_point_down() -> None:
    assert not find_forbidden_imports(ROOT)


def test_rooms_import_each_other_in_no_circle() -> None:
    imports: dict[str, set[str]] = {}
    for file in (ROOT / "fctune").rglob("*.py"):
        own = room_of(".".join(file.relative_to(ROOT).with_suffix("").parts))
        if own is not None:
            imports.setdefault(own, set()).update(
                room for module in imported_modules(file) if (room := room_of(module)) not in (None, own)
            )
    assert find_circle(imports) == []


def test_modules_of_a_room_import_each_other_in_no_circle() -> None:
    """Imports within functions and those for types count, too."""
    files = (ROOT / "fctune").rglob("*.py")
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    imports = {}
    for name, file in names.items():
        found = imported_modules(file)
        imports[name] = {one if one in names else one.rpartition(".")[0] for one in found}.intersection(names) - {name}
    assert find_circle(imports) == []


# Files that decide by the words of other projects' messages, which have no code; each says so in a comment.
_FOREIGN_WORDS = {
    "fctune/engines/policy_server.py",
    "fctune/engines/server.py",
    "fctune/training/out_of_memory.py",
    "fctune/training/peers.py",
}


def find_decisions_by_words(tree: ast.AST) -> list[str]:
    """Return the comparisons of a message, ``str(error)``, with words: ``in``, ``startswith`` and patterns."""
    found = []
    for node in ast.walk(tree):
        sides: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("startswith", "endswith"):
                sides = [node.func.value]
            elif node.func.attr in ("search", "match", "fullmatch"):
                sides = node.args
        if any(ast.unparse(one) in ("str(error)", "str(exc)", "str(e)") for one in sides):
            found.append(ast.unparse(node))
    return found


def test_code_decides_by_kinds_and_not_by_the_words_of_an_error() -> None:
    found = {
        str(file.relative_to(ROOT)): decisions
        for file in (ROOT / "fctune").rglob("*.py")
        if (decisions := find_decisions_by_words(ast.parse(file.read_text())))
    }
    assert found.keys() <= _FOREIGN_WORDS, found


@pytest.mark.parametrize(
    "code", ["'no space' in str(error)", "str(error).startswith('no')", "PATTERN.search(str(error))"]
)
def test_planted_decisions_by_words_are_found(code: str) -> None:
    assert find_decisions_by_words(ast.parse(f"if {code}: pass"))


def find_late_attributes(tree: ast.AST) -> list[str]:
    """Return the attributes that a method sets and the constructor of the class does not."""
    found = []
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        methods = {method.name: method for method in kind.body if isinstance(method, ast.FunctionDef)}
        own = list_set_attributes(methods.pop("__init__")) if "__init__" in methods else set()
        fields = {ast.unparse(field.target) for field in kind.body if isinstance(field, ast.AnnAssign)}
        late = {name for method in methods.values() for name in list_set_attributes(method)} - own - fields
        found += [f"{kind.name}.{name}" for name in sorted(late)]
    return found


def list_set_attributes(function: ast.FunctionDef) -> set[str]:
    nodes = (node for node in ast.walk(function) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return {node.attr for node in nodes if ast.unparse(node.value) == "self"}


def test_training_sets_every_attribute_when_an_object_is_made() -> None:
    found = {
        file.name: late
        for file in (ROOT / "fctune" / "training").rglob("*.py")
        if (late := find_late_attributes(ast.parse(file.read_text())))
    }
    assert not found, found
    planted = "class A:\n def __init__(self): self.x = 1\n def run(self): self.x, self.y = 2, 3"
    assert find_late_attributes(ast.parse(planted)) == ["A.y"]


def test_every_room_has_a_tier() -> None:
    modules = {path.stem for path in (ROOT / "fctune").glob("[a-z]*.py")}
    packages = {path.parent.name for path in (ROOT / "fctune").glob("*/__init__.py")}
    assert modules | packages == set.union(*TIERS)


def test_planted_imports_are_found(tmp_path: Path) -> None:
    for name, text in {
        "data/loader.py": "def f():\n    from fctune.training import loop\n",
        "apps/plan/table.py": "from fctune.apps.report import page\n",
    }.items():
        (tmp_path / "fctune" / name).parent.mkdir(parents=True)
        (tmp_path / "fctune" / name).write_text(text)
    assert find_forbidden_imports(tmp_path) == [
        "fctune/apps/plan/table.py imports fctune.apps.report.page, which is another app's",
        "fctune/data/loader.py imports fctune.training.loop, which is in a higher tier",
    ]
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]
    assert find_circle({"a": {"b", "c"}, "b": {"c"}}) == []


def test_only_a_benchmarks_own_folder_imports_it() -> None:
    folder = ROOT / "fctune" / "tasks" / "benchmarks"
    for benchmark in folder.glob("*/__init__.py"):
        package = f"fctune.tasks.benchmarks.{benchmark.parent.name}"
        outside = (f for f in (ROOT / "fctune").rglob("*.py") if not f.is_relative_to(benchmark.parent))
        named = [f for f in outside if any(f"{m}.".startswith(f"{package}.") for m in imported_modules(f))]
        assert not named, f"{package} is imported outside its folder: {named}"


def test_only_a_benchmarks_own_folder_names_it() -> None:
    """Texts of the code itself; docstrings may name a benchmark as an example, and a call format by its users."""
    folder = ROOT / "fctune" / "tasks" / "benchmarks"
    for name in (benchmark.parent.name for benchmark in folder.glob("*/__init__.py")):
        outside = (f for f in (ROOT / "fctune").rglob("*.py") if not f.is_relative_to(folder / name))
        for file in (f for f in outside if not f.is_relative_to(ROOT / "fctune" / "calls" / "formats")):
            if name not in (text := file.read_text()):
                continue
            tree = ast.parse(text)
            documented = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
            docstrings = {id(value) for value in documented if isinstance(value, ast.Constant)}
            texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
            named = [node.value for node in texts if id(node) not in docstrings and name in node.value]
            assert not named, f"{file} names {name}: {named}"


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
