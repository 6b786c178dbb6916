"""Children end with their parent, and with them everything that they started; commands keep to their limits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fctune.base.processes import Child, Output, count_srun_tasks, lead_group, run_command

BACKGROUND = "sleep 300 & echo $! > {pids}; echo $$ >> {pids}; "


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def wait_for_end(pids: Path, num_lines: int = 2) -> None:
    """Wait until the processes whose ids a file lists have ended."""
    deadline = time.monotonic() + 20
    numbers = [int(line) for line in pids.read_text().split()]
    assert len(numbers) == num_lines
    while any(psutil.pid_exists(n) and psutil.Process(n).status() != psutil.STATUS_ZOMBIE for n in numbers):
        assert time.monotonic() < deadline, "still running"
        time.sleep(0.05)


def test_a_command_gets_its_input_and_returns_both_outputs_and_its_code() -> None:
    code = "import sys; n = len(sys.stdin.read()); print('n', n); print('e', file=sys.stderr); sys.exit(3)"
    done = run_command(python(code), b"x" * 3_000_000)  # more than a pipe holds
    assert (done.code, done.output.text, done.errors.last_line) == (3, "n 3000000\n", "e")
    assert run_command(["sh", "-c", "kill -9 $$"]).code == -signal.SIGKILL
    assert run_command(["true"], b"x" * 3_000_000).code == 0, "a command need not read its input"
    with pytest.raises(FileNotFoundError):
        run_command(["no-such-program"])


def test_of_too_much_output_the_first_or_the_last_bytes_are_kept() -> None:
    code = "import sys; print('a' * 10**6 + 'b'); print('a' * 10**6 + 'b', file=sys.stderr)"
    done = run_command(python(code), max_bytes=100)
    assert (done.output.text, done.output.num_bytes) == ("a" * 100, 10**6 + 2)
    assert (done.errors.text, done.errors.num_bytes) == ("a" * 98 + "b\n", 10**6 + 2)
    assert run_command(python(code)).output.text == "a" * 10**6 + "b\n"
    output = Output(None, keeps_end=True)
    output.add(b" first \n\xff last \n\n")
    assert output.last_line == "\ufffd last"
    output.add('\r{"why": "one\u2028two\x85three"}\r\n'.encode())
    assert output.last_line == '{"why": "one\u2028two\x85three"}', "JSON may hold these"
    output.add(b"10 %\r 90 %")
    assert output.last_line == "90 %", "as a terminal shows it"


@pytest.mark.parametrize("ending", ["exit 0", "sleep 300"])
def test_what_a_command_started_neither_goes_on_nor_keeps_the_result_back(ending: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    started = time.monotonic()
    done = run_command(["sh", "-c", BACKGROUND.format(pids=pids) + f"echo done; {ending}"], limit_s=2.0)
    assert time.monotonic() - started < 15
    assert (done.code, done.output.text) == (0 if ending == "exit 0" else None, "done\n")
    wait_for_end(pids)


@pytest.mark.parametrize("listens", [True, False])
def test_a_child_is_asked_to_end_and_then_killed_with_its_group(listens: bool, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    handler = f"echo asked > {tmp_path / 'asked'}; exit 7"
    trap = f"trap '{handler if listens else 'true'}' TERM; "
    child = Child(["sh", "-c", trap + BACKGROUND.format(pids=pids) + "echo ready; while true; do sleep 0.1; done"],
                  stdout=subprocess.PIPE)  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
    assert (child.code, child.has_ended(), child.wait(0.1)) == (None, False, None)
    child.end(grace_s=10.0 if listens else 0.5)
    assert child.code == (7 if listens else -signal.SIGKILL)
    assert child.has_ended()
    assert (tmp_path / "asked").exists() == listens
    wait_for_end(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_a_child_is_asked_to_end_when_its_parent_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import sys, time; from fctune.base.processes import Child\n"
        f"child = Child(['sh', '-c', 'echo $$ > {pids}; exec sleep 300'])\n"
        "time.sleep(300)"
    )
    parent = subprocess.Popen(python(code))
    deadline = time.monotonic() + 20
    while not (pids.exists() and pids.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    wait_for_end(pids, num_lines=1)


@pytest.mark.parametrize(
    ("variables", "tasks"),
    [
        ({}, 1),
        ({"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "3"}, 16),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, 1),  # the script of a batch job
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PTY_PORT": "40001"}, 1),  # srun --ntasks=8 --pty bash
        ({"SLURM_STEP_NUM_TASKS": ""}, 1),
    ],
)
def test_the_tasks_of_a_step_are_counted(
    variables: dict[str, str], tasks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert count_srun_tasks() == tasks


def test_a_led_group_ends_with_a_parent_that_is_killed_and_keeps_its_code(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    shell = f"{BACKGROUND.format(pids=pids)} touch {tmp_path / 'ready'}; wait"
    code = f"from fctune.base.processes import *; run_command(lead_group(['sh', '-c', {shell!r}]))"
    with subprocess.Popen(python(code)) as parent:
        deadline = time.monotonic() + 60
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        parent.kill()
    wait_for_end(pids)
    assert run_command(lead_group(["sh", "-c", "cat; exit 3"]), b"in").output.text == "in"
    assert [run_command(lead_group(["sh", "-c", end])).code for end in ("exit 3", "kill -9 $$")] == [3, 137]
    done = run_command(lead_group(["no-such-program"]))
    assert done.code == 1
    assert done.errors.last_line.startswith("no-such-program: cannot be started (No such file")


def test_a_command_is_stopped_on_request_and_its_last_output_kept(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def is_stopped() -> bool:
        return pids.exists() and len(pids.read_text().split()) == 2

    done = run_command(["sh", "-c", f"{BACKGROUND.format(pids=pids)} wait"], is_stopped=is_stopped)
    assert done.code is None
    wait_for_end(pids)
    long = python("print('a' * 10**6 + 'b')")
    assert run_command(long, max_bytes=100, keeps_end=True).output.text == "a" * 98 + "b\n"
