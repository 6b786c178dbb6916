"""Nothing that a model wrote is ever run: no code under calls/ can run any."""

from __future__ import annotations

import ast

from tests.conftest import ROOT

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


def test_calls_are_never_evaluated() -> None:
    for file in (ROOT / "fctune" / "calls").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                function = node.func
                name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
                is_pattern = isinstance(function, ast.Attribute) and getattr(function.value, "id", "") == "re"
                assert name not in FORBIDDEN_CALLS or is_pattern, f"{file.name}:{node.lineno}: {name}"
            elif isinstance(node, ast.Import):
                assert not {alias.name.split(".")[0] for alias in node.names} & FORBIDDEN_MODULES, file
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in FORBIDDEN_MODULES, file


def test_attributes_are_looked_up_by_names_of_this_project_only() -> None:
    """``getattr`` and ``import_module`` with a name from a text would let a model choose what is called."""
    found = {
        (file.name, node.func.id if isinstance(node.func, ast.Name) else node.func.attr)
        for file in (ROOT / "fctune" / "calls").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, (ast.Name, ast.Attribute))
        and (node.func.id if isinstance(node.func, ast.Name) else node.func.attr) in ("getattr", "import_module")
    }
    assert found == {("bfcl_multi_turn.py", "getattr"), ("bfcl_multi_turn.py", "import_module")}
