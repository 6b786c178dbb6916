"""A rank ends within seconds of its launcher's death, whatever it is doing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.ranks import find_port

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'fctune.base.launcher_watch', *sys.argv[1:]])"

RECIPES = {
    "imports": "ready.touch(); time.sleep(60)",
    "imports that hold the interpreter": "ready.touch(); sum(range(10**11))",
    "rendezvous": "ready.touch(); from fctune.base.distributed import init_distributed; init_distributed()",
    "a recorded phase": (
        "from fctune.base.launcher_watch import watch_launcher\n"
        "watch_launcher(lambda: (folder / 'end').write_text('its launcher died'))\n"
        "ready.touch(); time.sleep(60)"
    ),
    "a disk that hangs while the end is recorded": (
        "from fctune.base.launcher_watch import watch_launcher\n"
        "watch_launcher(lambda: time.sleep(60))\n"
        "ready.touch(); time.sleep(60)"
    ),
}


def wait_for(condition: object, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


@pytest.mark.sample(1)
@pytest.mark.parametrize("phase", RECIPES)
def test_a_rank_ends_soon_after_its_launcher_is_killed(phase: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    prefix = f"import time\nfrom pathlib import Path\nfolder = Path({str(tmp_path)!r})\nready = folder / 'ready'\n"
    recipe.write_text(prefix + RECIPES[phase])
    address = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_port())}
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(recipe)],
        cwd=ROOT,
        env=ENVIRONMENT | address | {"TORCHELASTIC_RUN_ID": "one"},
    )
    assert wait_for((tmp_path / "ready").exists, 60)
    (rank,) = psutil.Process(launcher.pid).children()
    try:
        launcher.kill()
        launcher.wait()
        limit_s = 15 if "hangs" in phase else 5
        assert wait_for(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE, limit_s), phase
    finally:
        if rank.is_running():
            rank.kill()
    assert (tmp_path / "end").exists() == (phase == "a recorded phase")


def test_the_reader_of_a_released_pipe_sees_its_end_while_the_process_lives() -> None:
    code = "import time; from fctune.base.launcher_watch import release_output"
    command = [
        sys.executable,
        "-c",
        f"{code}; print('last', flush=True); release_output(); print('lost'); time.sleep(60)",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)
    try:
        assert process.stdout is not None
        assert process.stdout.read() == "last\n"
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_process_without_a_launcher_outlives_its_parent(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(f"import time\nfrom pathlib import Path\ntime.sleep(1)\nPath({str(tmp_path / 'done')!r}).touch()")
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(recipe)], cwd=ROOT, env=ENVIRONMENT)
    assert wait_for(lambda: psutil.Process(launcher.pid).children(), 30)
    launcher.kill()
    launcher.wait()
    assert wait_for((tmp_path / "done").exists, 30)


@pytest.mark.thorough  # a real run, where the others are small scripts
def test_a_training_run_ends_with_its_launcher_and_says_so(tmp_path: Path) -> None:
    words = ["train", "--config", "lora_tiny", "--nproc", "2", "output_dir=run", "data.seq_len=512"]
    words += ["data.sources.0.path=synthetic:train:300:1", "data.overlong=drop", "validation.every=0"]
    launcher = subprocess.Popen([sys.executable, "-m", "fctune.cli", *words], cwd=tmp_path, env=ENVIRONMENT)
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, 240)
    ranks = psutil.Process(launcher.pid).children(recursive=True)
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    _, alive = psutil.wait_procs(ranks, timeout=10)
    for rank in alive:
        rank.kill()
    assert not alive
    ended = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert ended["code"] == 1
    assert "its launcher died" in ended["reason"]
    assert ended["step"] >= 1
    json.loads((tmp_path / "run" / "run.json").read_text())
