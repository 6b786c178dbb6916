"""Nothing that a model or a data row says is ever run: the code that reads it contains nothing that could run it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

READING = (
    "calls/**/*.py",
    "base/*_reader.py",
    "base/*_calls.py",
    "base/*_search.py",
    "data/sources/**/*.py",
    "tasks/benchmarks/**/*.py",
)
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "literal_eval", "system", "popen", "run", "Popen"}
FORBIDDEN_MODULES = {
    "pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "subprocess",
    "ast",
    "code",
    "runpy",
    "ctypes",
}


def iter_nodes() -> Iterator[tuple[Path, ast.AST]]:
    for pattern in READING:
        for file in sorted((ROOT / "fctune").glob(pattern)):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                yield file.relative_to(ROOT / "fctune"), node


def name_of(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def test_no_code_that_evaluates_text_is_called() -> None:
    for file, node in iter_nodes():
        if isinstance(node, ast.Call):
            is_regex = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "re"
            assert name_of(node.func) not in FORBIDDEN_CALLS or is_regex, f"{file}:{node.lineno}"


def test_no_module_that_evaluates_text_is_imported() -> None:
    """Python's parser, which runs nothing, is allowed where the leaderboard's own reading depends on it."""
    for file, node in iter_nodes():
        if (
            str(file) == "tasks/benchmarks/bfcl/prompt_answers.py"
            and isinstance(node, ast.Import)
            and node.names[0].name == "ast"
        ):
            continue
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & FORBIDDEN_MODULES, file
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in FORBIDDEN_MODULES, file


def test_attributes_and_modules_are_looked_up_in_named_places_only() -> None:
    """With a name taken from a text, ``getattr`` and ``import_module`` would let a model choose what is called."""
    found = {
        (str(file), name_of(node.func))
        for file, node in iter_nodes()
        if isinstance(node, ast.Call) and name_of(node.func) in ("getattr", "import_module")
    }
    assert found == {
        # The plug-ins in this folder, and the wheel's modules by names written there.
        ("tasks/benchmarks/__init__.py", "import_module"),
        ("tasks/benchmarks/bfcl/multi_turn_cases.py", "import_module"),
        ("tasks/benchmarks/bfcl/single_turn.py", "import_module"),
        ("tasks/benchmarks/bfcl/multi_turn.py", "getattr"),
        ("tasks/benchmarks/bfcl/multi_turn.py", "import_module"),
        ("calls/discovery.py", "import_module"),
        ("data/sources/row_formats/registry.py", "import_module"),
        # Names written there, and nowhere else.
        ("calls/response_template.py", "getattr"),
        ("tasks/benchmarks/ifeval/checkers.py", "import_module"),
    }
