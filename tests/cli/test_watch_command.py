"""``fctune watch`` as a user types it, while a run writes."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fctune.cli import main
from fctune.config.sections.success import SuccessConfig
from tests.cli.processes import read_until
from tests.conftest import ROOT
from tests.runs.sample_runs import make_run, write_steps


@pytest.mark.parametrize(("end", "code"), [(None, 0), (0, 0), (1, 1)])
def test_once_prints_the_run_as_it_is(
    end: int | None, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", 12, code=end)
    assert main(["watch", str(tmp_path / "run"), "--once"]) == code
    assert "12/12 100%" in capsys.readouterr().out


def test_a_run_that_is_asked_something_is_judged_at_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run", 12, success=SuccessConfig())
    main(["watch", str(tmp_path / "run")])  # no terminal: as once
    printed = capsys.readouterr().out
    assert re.search(r"PASS +GPU utilization +>= 85", printed)
    assert re.search(r"FAIL +final checkpoint", printed)


def test_wrong_input_is_one_line_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path)]) == 2
    assert "it has neither run.json nor metrics.jsonl" in capsys.readouterr().err
    make_run(tmp_path / "run", 1)
    assert main(["watch", str(tmp_path / "run"), "--interval", "0"]) == 2
    assert capsys.readouterr().err == "--interval 0.0: expected more than 0.\n"


def test_a_terminal_follows_the_run_to_its_end(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 10, code=None)
    directory.describe(num_steps=30)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "fctune.cli", "watch", str(tmp_path / "run"), "--interval", "0.1"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "50"}
    watch = subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs, stdin=theirs, env=environment)
    os.close(theirs)
    seen = ""
    try:
        for done, due in ((20, "10/30"), (30, "20/30")):
            seen += read_until(ours, due)
            write_steps(directory, done - 9, done)
        seen += read_until(ours, "30/30")
        directory.finish(0, "completed", 30)
        seen += read_until(ours, "Completed after step 30 of 30.")
        assert watch.wait(timeout=30) == 0
    finally:
        watch.kill()
        watch.wait()
        os.close(ours)
