"""Files of the working directory, such as a cloned data set's, are not executed by any process that fctune starts."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from fctune.apps.sweep.launchers import LocalLauncher
from fctune.base.launcher_watch import protect_imports, user_environment
from fctune.training.launcher import launch_recipe
from tests.conftest import ROOT

PLANTED = ("argparse", "ctypes", "datasets", "logging", "psutil", "selectors", "yaml")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose files are named like modules, and leave a trace when they are executed."""
    planted = tmp_path / "cloned"
    planted.mkdir()
    for name in PLANTED:
        (planted / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write({name!r} + ' ')\n")
    monkeypatch.chdir(planted)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return planted


def run(*command: str | Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120, env=environment)


def assert_nothing_executed(tmp_path: Path) -> None:
    trace = tmp_path / "executed"
    assert not trace.exists(), trace.read_text()


def test_ranks_import_nothing_from_it(tmp_path: Path, folder: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "import importlib.util, logging, pathlib, psutil, subprocess, sys, yaml\n"
        "pathlib.Path(sys.argv[1]).write_text(importlib.util.find_spec('datasets').origin)\n"
        "sys.exit(subprocess.run([sys.executable, '-c', 'import selectors']).returncode)\n"
    )
    assert launch_recipe(recipe, [str(tmp_path / "found")], 1, tmp_path / "run", print) == 0
    assert "site-packages" in (tmp_path / "found").read_text()
    assert_nothing_executed(tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "-m", "fctune.cli", "train", "no.yaml"],
        [*LocalLauncher.command, "--config", "no.yaml"],
    ],
    ids=["command", "run of a sweep"],
)
def test_commands_import_nothing_from_it(command: list[str], tmp_path: Path) -> None:
    done = run(*command)
    assert done.returncode == 2, done.stderr
    assert "no.yaml: no such config file" in done.stderr
    assert_nothing_executed(tmp_path)


def test_recipes_of_tune_run_import_nothing_from_it(tmp_path: Path) -> None:
    """With torchrun's options, ranks are started by `python -m`; without, `tune` appends the working directory."""
    assert "'recipes' is a package" in run(sys.executable, "-m", "recipes").stderr
    bare = "import os, sys; sys.path.append(os.getcwd()); sys.argv = ['recipes.lora_fc_distributed']; import recipes"
    done = run(sys.executable, "-P", "-c", f"{bare}; print(os.getcwd() in sys.path, os.environ['PYTHONSAFEPATH'])")
    assert done.stdout == "False 1\n", done.stderr
    assert_nothing_executed(tmp_path)


def test_workers_of_protected_processes_import_nothing_from_it(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "from fctune.base.launcher_watch import protect_imports\n"
        "if __name__ == '__main__':\n"
        "    protect_imports()\n"
        "    worker = multiprocessing.get_context('forkserver').Process(target=print, args=('done',))\n"
        "    worker.start()\n"
        "    worker.join()\n"
    )
    done = run(sys.executable, script)
    assert done.stdout == "done\n", done.stderr
    assert_nothing_executed(tmp_path)


def test_a_users_own_command_keeps_the_environment_that_fctune_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict(os.environ)
    monkeypatch.setenv("PYTHONSAFEPATH", "")  # restored after the test
    protect_imports()
    assert os.environ["PYTHONSAFEPATH"] == "1"
    assert {name: user_environment().get(name) for name in given} == given
    assert "PYTHONSAFEPATH" not in user_environment()


def test_setting_up_a_clone_puts_its_recipes_first_and_nothing_else(tmp_path: Path, folder: Path) -> None:
    """Neither another folder's recipes nor the clone's other files are found, from wherever Python is started."""
    made_in = tmp_path / "venv"
    venv.create(made_in, symlinks=True)
    made = run("make", "--no-print-directory", "-C", ROOT, "link-recipes", f"VENV={made_in}")
    assert made.returncode == 0, made.stderr
    (folder / "recipes").mkdir()
    for name in ("__init__.py", "lora_fc_distributed.py"):
        (folder / "recipes" / name).write_text("raise SystemExit('executed')\n")
    find = "import importlib.util as u; print([u.find_spec(name) is not None for name in ('eval', 'tests', 'setup')])"
    where = "import os; print(os.path.realpath(u.find_spec('recipes').origin))"
    bare = {"PATH": os.environ["PATH"], "PYTHONSAFEPATH": "1"}
    done = run(made_in / "bin" / "python", "-c", f"{find}; {where}", environment=bare)
    assert done.stdout.splitlines() == ["[False, False, False]", str(ROOT / "recipes" / "__init__.py")], done.stderr
