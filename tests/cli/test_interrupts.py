"""Ctrl-C ends a command with one line that says what was kept, and exit code 130."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cli.processes import INTERRUPTED, wait_until
from tests.conftest import ROOT

# Sends Ctrl-C to its own process as soon as a module of the command is imported, as at an unlucky moment.
INTERRUPT_AT_IMPORT = """
import os, runpy, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = {argv!r}
runpy.run_module("fctune.cli.__main__", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("fctune.apps.plan.plan", ["plan", "tiny_lora"]),
        ("fctune.data.prepared_set", ["data", "prepare", "tiny_lora"]),
        ("fctune.tasks.evaluation.run", ["eval", "--model", "fctune/assets/tiny_base", "--suite", "smoke"]),
        ("fctune.training.launcher", ["train", "tiny_lora"]),
    ],
)
def test_ctrl_c_during_imports_leaves_one_line(module: str, arguments: list[str], tmp_path: Path) -> None:
    if arguments[0] == "eval":
        arguments = [*arguments, "--out", str(tmp_path / "out.jsonl")]
    code = INTERRUPT_AT_IMPORT.format(module=module, argv=["fctune", *arguments])
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode in INTERRUPTED, done.stderr
    assert done.stderr.strip() == "interrupted"


@pytest.mark.thorough
def test_ctrl_c_during_an_evaluation_says_how_many_answers_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "fctune.cli", "eval", "--model", "fctune/assets/tiny_base"]
    command += ["--suite", "synthetic", "--batch-size", "1", "--out", str(out)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: out.exists() and out.read_text().count("\n") >= 2, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in INTERRUPTED, errors
    kept = out.read_text().count("\n")
    assert "Traceback" not in errors
    line = errors.strip().splitlines()[-1]
    assert line.startswith(f"interrupted: kept {kept} of ")
    assert line.endswith("run the same command to continue")


def test_ctrl_c_while_data_is_prepared_leaves_no_partial_set(tmp_path: Path) -> None:
    prepared = tmp_path / "prepared"
    command = [sys.executable, "-m", "fctune.cli", "data", "prepare", "tiny_lora", f"data.prepared_dir={prepared}"]
    command += ["data.sources.0.path=synthetic:train:200000:1"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: list(prepared.glob("**/tokens.bin")), process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in INTERRUPTED, errors
    assert "Traceback" not in errors
    line = errors.strip().splitlines()[-1]
    assert line == "interrupted: no prepared set was written; run the same command to start over"
    assert not list(prepared.glob("**/tokens.bin"))


def test_ctrl_c_before_training_ends_every_process_with_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fctune.cli", "train", "tiny_lora", "--nproc", "1", f"output_dir={tmp_path}/run"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    workers = wait_until(psutil.Process(process.pid).children, process)
    time.sleep(1)  # the worker imports torch, which takes several seconds
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors  # as documented for runs that are stopped
    assert errors.strip().splitlines()[-1] == "fctune train: stopped before training; nothing was saved"
    assert "Traceback" not in errors
    assert not any(worker.is_running() for worker in workers)
