"""A disk that is full or hangs loses no step that was said to be safe, and ends the run with a code of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fctune.checkpoint.store import CheckpointStore, verify
from tests.conftest import ROOT
from tests.faults.groups import Ended, Fault, run_group
from tests.faults.harness import arguments_for, differences, final_weights, read_metrics
from tests.warm_interpreter import warm_python

pytestmark = pytest.mark.timeout(600)

Start = Callable[..., Ended]


@pytest.fixture(scope="module")
def reference(inputs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an uninterrupted run."""
    run = tmp_path_factory.mktemp("reference") / "run"
    assert run_group(arguments_for(run, *inputs), 1).codes == (0,)
    return run


@pytest.fixture
def start(inputs: tuple[Path, Path], tmp_path: Path) -> Start:
    """Start or restart a run: ``start(*overrides, ranks=1, fault=None)``."""

    def start_(*overrides: str, ranks: int = 1, fault: Fault | None = None) -> Ended:
        return run_group(arguments_for(tmp_path / "run", *inputs, *overrides), ranks, fault)

    return start_


def fill_own_disk(run: Path, from_step: int = 1) -> None:
    """Put a link in the way of each checkpoint of a run's own disk."""
    (run / "checkpoints").mkdir(parents=True)
    for step in range(from_step, 13):
        (run / "checkpoints" / f".checkpoint-{step}.partial").symlink_to(run / "nowhere" / "x")


def read_exit(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "exit.json").read_text())
    return found


@pytest.mark.thorough
def test_a_save_that_fails_once_is_made_up_for(start: Start, reference: Path, tmp_path: Path) -> None:
    ended = start(ranks=2, fault=Fault("enospc", "write", 1, 2))
    assert ended.codes == (0, 0)
    assert "checkpoint of step 4 FAILED (1 of at most 3 in a row): No space left on device. Step 2 is safe" in (
        ended.output
    )
    assert not differences(tmp_path / "run", reference, 1e-9)


def test_saves_that_keep_failing_stop_all_ranks_and_the_last_good_step_is_intact(
    start: Start, reference: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = start("checkpoint.elastic_every=0", ranks=2, fault=Fault("full", "write", 1, 2))
    assert ended.codes == (74, 74), ended.output
    why = read_exit(run)
    assert why["code"] == 74
    assert why["step"] in (8, 9, 10), "after the saves of steps 4, 6 and 8"
    assert "3 saves in a row failed: No space left on device" in why["reason"]
    assert f"Step 2 is safe in {run / 'checkpoints' / 'checkpoint-2'}." in why["reason"]
    assert why["checkpoint"] == str(run / "checkpoints" / "checkpoint-2")
    assert [entry.name for entry in (run / "checkpoints").iterdir()] == ["checkpoint-2"]
    verify(CheckpointStore(run / "checkpoints").list_complete()[0])
    assert start(ranks=2).codes == (0, 0)
    assert not differences(run, reference, 1e-9)


def test_the_last_state_goes_to_the_other_disk_and_a_re_run_finds_it(
    start: Start, reference: Path, tmp_path: Path
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    fill_own_disk(run)
    ended = start("checkpoint.elastic_every=0", f"checkpoint.fallback_dir={other}", "checkpoint.max_failed_saves=1")
    assert ended.codes == (74,), ended.output
    why = read_exit(run)
    saved = Path(why["checkpoint"])
    assert saved.parent == other / "run" / "checkpoints"
    assert f"stopped after step {why['step']}, because a save failed: " in why["reason"]
    assert f"Step {why['step']} is safe in {saved}." in why["reason"]
    assert start(f"checkpoint.fallback_dir={other}").codes == (0,)
    assert json.loads((run / "run.json").read_text())["resumed"][0]["step"] == why["step"]
    assert not differences(run, reference, 1e-9)


@pytest.mark.thorough
def test_a_re_run_that_does_not_see_the_other_disk_resumes_from_the_runs_own(
    start: Start, reference: Path, tmp_path: Path
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    fallback = f"checkpoint.fallback_dir={other}"
    fill_own_disk(run, from_step=3)
    ended = start("checkpoint.elastic_every=0", "checkpoint.max_failed_saves=1", fallback)
    assert ended.codes == (74,), ended.output
    assert Path(read_exit(run)["checkpoint"]).parent == other / "run" / "checkpoints"
    shutil.rmtree(other)  # as on another node, or with a new pod
    assert start(fallback).codes == (0,)
    assert json.loads((run / "run.json").read_text())["resumed"][0]["step"] == 2
    assert not differences(run, reference, 1e-9)


@pytest.mark.thorough
def test_a_slow_disk_delays_neither_steps_nor_the_end_by_more_than_its_saves(
    start: Start, reference: Path, tmp_path: Path
) -> None:
    started = time.monotonic()
    ended = start("checkpoint.every=4", "checkpoint.elastic_every=0", ranks=2, fault=Fault("slow", "write", 1))
    assert ended.codes == (0, 0), ended.output
    num_saves = ended.output.count("checkpoint: ")
    assert num_saves == 3
    assert time.monotonic() - started > num_saves
    assert sum(metrics["save_wait_s"] for metrics in read_metrics(tmp_path / "run")) < 0.5
    assert not differences(tmp_path / "run", reference, 1e-9)


def test_a_stop_request_that_cannot_save_does_not_say_saved(start: Start, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = start("checkpoint.elastic_every=0", fault=Fault("full_and_term", "write", 0, 2))
    assert ended.codes == (74,), ended.output
    why = read_exit(run)
    step = why["step"]
    assert f"stopped by SIGTERM after step {step}, but the state of step {step} could not be saved: " in why["reason"]
    assert f"Step 2 is safe in {run / 'checkpoints' / 'checkpoint-2'}." in why["reason"]


def test_an_export_without_space_says_what_is_safe_and_a_re_run_writes_only_it(
    start: Start, reference: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "export").write_text("in the way")
    started = time.monotonic()
    ended = start("checkpoint.max_wait_s=3")
    assert ended.codes == (74,), ended.output
    assert time.monotonic() - started >= 3
    assert "trying again for up to 3 s" in ended.output
    reason = read_exit(run)["reason"]
    assert "training is complete, but not exported: " in reason
    assert f"Step 12 is safe in {run / 'checkpoints' / 'elastic-checkpoint-12'}." in reason
    metrics = (run / "metrics.jsonl").read_bytes()

    other = tmp_path / "other"
    assert start("checkpoint.max_wait_s=0", f"checkpoint.fallback_dir={other}").codes == (0,)
    assert sorted(path.name for path in (other / "run" / "export").iterdir()) == ["adapter", "merged"]

    (run / "export").unlink()
    for export in (other / "run" / "export").iterdir():
        export.rename(tmp_path / export.name)
    assert start().codes == (0,)
    assert (run / "metrics.jsonl").read_bytes() == metrics
    assert not differences(run, reference, 1e-9)


def test_a_disk_without_room_for_the_plan_is_refused_with_numbers(
    start: Start, tmp_path: Path, tmpfs: Callable[[str], Path]
) -> None:
    small = tmpfs("128k")
    ended = start(f"output_dir={small / 'run'}")
    assert ended.codes == (2,)
    shown = rf"output_dir={small / 'run'}: 0\.\d MiB free, but the run needs at least \d"
    assert re.search(shown, ended.output), ended.output
    assert not (small / "run" / "run.json").exists()


@pytest.mark.parametrize("is_async", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_save_that_hangs_ends_the_run_within_its_limit(is_async: bool, start: Start, tmp_path: Path) -> None:
    run = tmp_path / "run"
    seconds = "checkpoint.save_timeout_s=3", f"checkpoint.async_save={is_async}".lower()
    started = time.monotonic()
    ended = start(*seconds, fault=Fault("hang", "write", 0, 2))
    assert time.monotonic() - started < 60
    assert ended.codes == (74,), ended.output
    why = read_exit(run)
    assert why["code"] == 74
    assert (
        f"saving {run / 'checkpoints' / 'checkpoint-4'} took longer than 3 s; its disk does not answer"
        in (why["reason"])
    )
    assert why["checkpoint"] == str(run / "checkpoints" / "checkpoint-2")
    assert "groups.py" in (run / "stacks" / "rank-0.txt").read_text()
    assert start().codes == (0,)


@pytest.mark.thorough
def test_a_report_that_hangs_does_not_keep_the_process(start: Start, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "stacks").mkdir(parents=True)
    os.mkfifo(run / "stacks" / "rank-0.txt")  # opening it waits for a reader forever
    started = time.monotonic()
    ended = start("step_timeout_s=3", fault=Fault("hang", "step", 0, 3))
    assert time.monotonic() - started < 60
    assert ended.codes == (76,), ended.output
    assert "a step took longer than 3 s" in ended.output
    assert read_exit(run)["reason"] == "rank 0: a step took longer than 3 s"


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount small file systems in memory: ``tmpfs("10m")``."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        folder = tmp_path / f"tmpfs-{size}"
        folder.mkdir()
        run_as_root("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


def run_as_root(*command: str) -> None:
    """Run a command that needs root, or skip the test."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is not installed")
    if done.returncode:
        pytest.skip(f"{command[0]} needs root on Linux: {done.stderr.strip()}")


def make_image(folder: Path) -> tuple[Path, Path]:
    """Create the image of a file system, and the folder to mount it at."""
    image, disk = folder / "image", folder / "disk"
    disk.mkdir()
    with open(image, "wb") as file:
        file.truncate(64 * 2**20)
    run_as_root("mkfs.ext4", "-q", "-F", str(image))
    return image, disk


def train(run: Path, inputs: tuple[Path, Path], *overrides: str, python: str | None = None) -> subprocess.Popen[str]:
    """Start ``fctune train``; its output is what the user sees."""
    config, *settings = arguments_for(run, *inputs, *overrides)[1:]
    command = [python or warm_python(), "-m", "fctune.cli", "train", config, *settings, "--nproc", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def when_saved(run: Path, name: str, do: Callable[[], object]) -> threading.Thread:
    """Call ``do`` as soon as a checkpoint is complete."""

    def wait() -> None:
        while not (run / "checkpoints" / name / "_SUCCESS").is_file():
            time.sleep(0.02)
        do()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def fill(folder: Path) -> None:
    """Fill a file system to its last byte."""
    with open(folder / "ballast", "wb", buffering=0) as file:
        try:
            while file.write(bytes(65536)):
                pass
        except OSError:
            pass


@pytest.mark.thorough
def test_a_run_on_a_file_system_that_fills_up_keeps_its_last_good_step(
    inputs: tuple[Path, Path], reference: Path, tmpfs: Callable[[str], Path]
) -> None:
    disk = tmpfs("16m")
    run = disk / "run"
    process = train(run, inputs, "checkpoint.elastic_every=0")
    when_saved(run, "checkpoint-4", lambda: fill(disk))
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 74, output
    why = read_exit(run)
    assert why["code"] == 74
    safe = Path(why["checkpoint"])
    assert f"is safe in {safe}." in why["reason"]
    assert why["reason"] in output
    for checkpoint in CheckpointStore(run / "checkpoints").list_complete():
        verify(checkpoint)
    (disk / "ballast").unlink()
    process = train(run, inputs)
    assert process.communicate(timeout=300)[0] is not None
    assert process.returncode == 0
    assert not differences(run, reference, 1e-9)
    assert [metrics["step"] for metrics in read_metrics(run)] == list(range(1, 13))


@pytest.mark.parametrize("has_other_disk", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_run_whose_disk_becomes_read_only_says_what_is_safe_and_resumes_once_it_is_writable(
    has_other_disk: bool, start: Start, reference: Path, tmp_path: Path
) -> None:
    image, disk = make_image(tmp_path)
    run, other = disk / "run", tmp_path / "other"
    overrides = [f"output_dir={run}", "checkpoint.elastic_every=0", "checkpoint.max_failed_saves=1"]
    overrides += [f"checkpoint.fallback_dir={other}"] * has_other_disk
    mount = ("mount", "-o", "loop", str(image), str(disk))
    run_as_root(*mount)
    try:
        ended = start(*overrides, fault=Fault("read_only", "write", 0, 3, disk=str(disk)))
        assert ended.codes == (74,), ended.output
        assert "Read-only file system" in ended.output
        safe = f"{other}/run/checkpoints/elastic-checkpoint-" if has_other_disk else "/checkpoint-4."
        assert safe in ended.output.rpartition(" is safe in ")[2], ended.output
        subprocess.run(["umount", str(disk)], check=True)
        subprocess.run(["e2fsck", "-y", str(image)], check=False, capture_output=True)
        run_as_root(*mount)
        assert start(*overrides).codes == (0,)
        assert json.loads((run / "run.json").read_text())["resumed"][0]["step"] == 4  # no link could be made
        assert not differences(run, reference, 1e-9)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=False, capture_output=True)


@pytest.mark.thorough
def test_the_end_of_a_run_on_a_full_file_system_goes_to_the_other_disk(
    inputs: tuple[Path, Path], reference: Path, tmpfs: Callable[[str], Path], tmp_path: Path
) -> None:
    disk = tmpfs("16m")
    run, other = disk / "run", tmp_path / "other"
    process = train(
        *(run, inputs, "checkpoint.every=0", "checkpoint.elastic_every=0", "checkpoint.max_wait_s=2"),
        f"checkpoint.fallback_dir={other}",
    )
    while process.poll() is None and not (run / "metrics.jsonl").is_file():
        time.sleep(0.02)
    fill(disk)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert "trying again for up to 2 s" in output
    assert f"step 12 is saved in {other / 'run' / 'checkpoints' / 'elastic-checkpoint-12'}" in output
    assert (other / "run" / "export" / "merged" / "model.safetensors").is_file()
    weights, expected = final_weights(run), final_weights(reference)  # through the link in the run's directory
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


@pytest.mark.thorough  # waits for its limits
def test_a_disk_that_hangs_ends_the_command_within_a_minute_of_its_limit(
    inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    image, disk = make_image(tmp_path)
    run_as_root("mount", "-o", "loop", str(image), str(disk))
    run, frozen_at = disk / "run", list[float]()

    def freeze() -> None:
        if subprocess.run(["fsfreeze", "--freeze", str(disk)], check=False).returncode == 0:
            frozen_at.append(time.monotonic())

    try:
        # A thread that writes to a frozen file system cannot even be killed, but keeps no pipe open.
        process = train(run, inputs, "checkpoint.save_timeout_s=5", python=sys.executable)
        when_saved(run, "checkpoint-2", freeze)
        output = process.communicate(timeout=300)[0]
        assert frozen_at, output
        assert time.monotonic() - frozen_at[0] < 5 + 60
        assert process.returncode == 74, output
        assert "took longer than 5 s; its disk does not answer" in output
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(disk)], check=False, capture_output=True)
        time.sleep(1)
        subprocess.run(["umount", "--lazy", str(disk)], check=False)
