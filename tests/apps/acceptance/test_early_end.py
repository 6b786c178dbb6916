"""Runs that end early or cannot start: the result states who and why within the limits, and no files remain."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fctune.apps.acceptance.result import read_schema
from recipes.cluster_acceptance import run_acceptance
from tests.apps.acceptance.harness import SHORT, Run, arguments, interrupt_in, left_behind, run
from tests.conftest import ROOT

LIMITS = ("limits.arrive_s=6", "limits.silence_s=5", "limits.step_s=5")
LIMIT_S = 45  # including the start of four processes on a busy machine


def get_failed_arrival(done: Run) -> dict[str, Any]:
    jsonschema.validate(done.result, read_schema())
    assert done.result is not None
    assert done.result["verdict"] == "FAIL"
    assert all(check["reason"] for check in done.checks.values() if check["status"] == "SKIPPED")
    return done.checks["arrival"]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_rank_that_dies_is_blamed_and_earlier_measurements_are_kept(rank: int, tmp_path: Path) -> None:
    fault = f"faults=[{{kind: die, rank: {rank}, at: storage}}]"
    done = run(tmp_path, *SHORT, *LIMITS, fault, limit_s=LIMIT_S)
    assert get_failed_arrival(done)["status"] == "FAIL"
    assert done.blamed == [rank]
    assert done.codes[rank] == -signal.SIGKILL
    assert {code for other, code in enumerate(done.codes) if other != rank} == {1}
    assert done.result is not None
    # The samples in rank 0's store die with it, except those it wrote to disk after each phase.
    assert done.checks["compute"]["status"] == "PASS"
    assert list(done.result["samples"]["collectives_node"]) == ["0", "1", "2", "3"]
    assert left_behind(tmp_path) == []


@pytest.mark.thorough
def test_a_rank_that_hangs_is_blamed_and_not_those_that_wait_for_it(tmp_path: Path) -> None:
    done = run(tmp_path, *SHORT, *LIMITS, "faults=[{kind: hang, rank: 1, at: collectives_node}]", limit_s=LIMIT_S)
    assert "hangs" in get_failed_arrival(done)["culprits"][0]["text"]
    assert done.blamed == [1]
    assert done.checks["links"]["status"] == "PASS"
    assert set(done.codes) == {1}


@pytest.mark.slow
def test_a_rank_that_hangs_in_its_own_work_is_blamed(tmp_path: Path) -> None:
    fault = "faults=[{kind: slow_disk, rank: 0, seconds: 600}]"
    done = run(tmp_path, *SHORT, *LIMITS, "limits.build_s=5", fault, limit_s=LIMIT_S)
    assert "node disk, one rank: write" in get_failed_arrival(done)["culprits"][0]["text"]
    assert done.blamed == [0]
    assert left_behind(tmp_path) == []


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_rank_that_never_starts_is_blamed(rank: int, tmp_path: Path) -> None:
    done = run(tmp_path, *SHORT, *LIMITS, absent=[rank], limit_s=LIMIT_S)
    assert "did not start" in get_failed_arrival(done)["culprits"][0]["text"]
    assert done.blamed == [rank]
    assert set(done.codes) == {1}


def test_a_rank_that_crashes_is_blamed_with_its_error(tmp_path: Path) -> None:
    done = run(tmp_path, *SHORT, *LIMITS, "faults=[{kind: crash, rank: 2, at: pairs}]", limit_s=LIMIT_S)
    assert "RuntimeError: injected crash (in: pairs)" in get_failed_arrival(done)["culprits"][0]["text"]
    assert done.blamed == [2]
    assert done.checks["compute"]["status"] == "PASS"
    assert set(done.codes) == {1}


@pytest.mark.slow
def test_a_rank_that_cannot_write_fails_its_disk_and_the_run_continues(tmp_path: Path) -> None:
    """Replace one rank's folder with a file, so that only this rank cannot write."""
    (tmp_path / "node").mkdir()

    def block(processes: list[Any]) -> None:
        wait = interrupt_in("storage", tmp_path, signal.SIGCONT, [0])
        wait(processes)
        for folder in (tmp_path / "node").iterdir():
            while not (folder / "rank-2").exists():
                time.sleep(0.001)
            shutil.rmtree(folder / "rank-2", ignore_errors=True)
            (folder / "rank-2").touch()

    done = run(tmp_path, *SHORT, *LIMITS, "storage.repetitions=12", meanwhile=block, limit_s=LIMIT_S)
    check = done.checks["storage_node"]
    assert check["status"] == "FAIL"
    assert "Not a directory" in check["reason"]
    assert done.blamed == [2]
    assert done.checks["storage_shared"]["status"] == "PASS"
    assert left_behind(tmp_path) == []


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], pytest.param([1], marks=pytest.mark.slow)])
def test_an_interrupted_run_cleans_up_and_writes_its_measurements(ranks: list[int], tmp_path: Path) -> None:
    act = interrupt_in("storage", tmp_path, signal.SIGINT, ranks)
    done = run(tmp_path, *SHORT, *LIMITS, "storage.repetitions=200", meanwhile=act, limit_s=LIMIT_S)
    assert done.result is not None
    assert done.result["verdict"] == "INCOMPLETE"
    assert done.checks["storage_node"]["reason"] == "interrupted (SIGINT)"
    assert done.checks["compute"]["status"] == "PASS"
    assert done.blamed == []
    assert set(done.codes) == {1}
    assert left_behind(tmp_path) == []


def test_a_run_out_of_time_skips_the_remaining_phases_and_is_incomplete(tmp_path: Path) -> None:
    done = run(tmp_path, *SHORT, "limits.total_s=0.05", "required=[arrival, storage_node]")
    assert done.result is not None
    assert done.result["verdict"] == "INCOMPLETE"
    assert "limits.total_s" in done.checks["storage_node"]["reason"]
    assert set(done.codes) == {1}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("override", "check"),
    [
        ("compute.sustain_s=600", "compute"),
        *(
            pytest.param(override, check, marks=pytest.mark.slow)
            for override, check in (
                ("pairs.repetitions=1000000", "links"),
                ("collectives={repetitions: 100000, max_s: 600}", "collectives_node"),
                ("storage.repetitions=1000000", "storage_node"),
                (
                    "training={config: configs/tiny_lora.yaml, overrides: [data.seq_len=32], steps: 9000}",
                    "training_node",
                ),
            )
        ),
    ],
)
def test_a_phase_running_when_time_runs_out_is_cut_short_on_all_ranks(
    override: str, check: str, tmp_path: Path
) -> None:
    shorts = [s for s in SHORT if not override.startswith("training") or s != "~training"]
    total_s = 4 if check == "compute" else 10
    done = run(tmp_path, *shorts, override, f"limits.total_s={total_s}", "limits.grace_s=30", limit_s=LIMIT_S)
    assert done.result is not None
    assert done.result["verdict"] == "INCOMPLETE"
    assert done.result["seconds"] < total_s + 10
    assert done.checks[check]["status"] == "SKIPPED"
    assert done.checks[check]["reason"] == f"cut short: out of time: limits.total_s={total_s} exceeded"
    phase = {"links": "pairs", "storage_node": "storage"}.get(check, check)
    assert all(len(sample) > 1 for sample in done.result["samples"][phase].values()), "measurements are kept"
    assert done.checks["checkpoint"]["status"] == "SKIPPED"
    assert done.blamed == []
    assert set(done.codes) == {1}
    assert left_behind(tmp_path) == []


@pytest.mark.thorough  # waits for its limits
@pytest.mark.parametrize(("ranks", "verdict"), [([0, 1, 2, 3], "INCOMPLETE"), ([2], "FAIL")])
def test_a_run_stuck_beyond_its_grace_period_is_ended_and_only_a_rank_that_holds_up_others_is_blamed(
    ranks: list[int], verdict: str, tmp_path: Path
) -> None:
    faults = ", ".join(f"{{kind: hang, rank: {rank}, at: pairs}}" for rank in ranks)
    limits = ("limits.total_s=10", "limits.grace_s=2", "limits.step_s=300", "limits.build_s=300")
    done = run(tmp_path, *SHORT, *limits, f"faults=[{faults}]", limit_s=LIMIT_S)
    assert done.result is not None
    assert done.result["verdict"] == verdict
    assert done.result["seconds"] < 19
    assert "limits.total_s=10 and limits.grace_s=2 exceeded" in done.checks["links"]["reason"]
    assert done.checks["compute"]["status"] == "PASS"
    assert done.blamed == (ranks if verdict == "FAIL" else [])
    assert set(done.codes) == {1}


def test_a_disk_without_enough_space_is_not_written_to(tmp_path: Path) -> None:
    done = run(tmp_path, *SHORT, "storage.mib=1000000", "storage.max_share_of_free=0.01", ranks=2)
    assert done.result is not None
    assert done.result["verdict"] == "INCOMPLETE"
    for disk in ("node", "shared"):
        assert done.checks[f"storage_{disk}"]["status"] == "SKIPPED"
        assert "lower storage.mib" in done.checks[f"storage_{disk}"]["reason"]
    assert left_behind(tmp_path) == []


def test_an_unwritable_output_dir_stops_the_run_before_any_measurement(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    done = run(tmp_path, *SHORT, ranks=2)
    assert done.codes == [2, 2]
    assert done.result is None
    assert left_behind(tmp_path) == []


def test_an_unusable_disk_is_skipped_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "node").write_text("a file")
    done = run(tmp_path, *SHORT, ranks=2)
    assert done.checks["storage_node"]["status"] == "SKIPPED"
    assert str(tmp_path / "node") in done.checks["storage_node"]["reason"]
    assert done.checks["storage_shared"]["status"] == "PASS"


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("nodes=2", "launched with nodes=1, expected 2"),
        ("ranks_per_node=8", "launched with ranks_per_node=2, expected 8"),
    ],
)
def test_an_unexpected_number_of_nodes_or_ranks_fails_before_any_measurement(
    override: str, reason: str, tmp_path: Path
) -> None:
    done = run(tmp_path, *SHORT, override, ranks=2)
    assert reason in get_failed_arrival(done)["reason"]
    assert done.result is not None
    assert list(done.result["samples"]) == ["hello"]


def test_a_machine_without_the_requested_gpus_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run(tmp_path, *SHORT, "device=cuda", ranks=2)
    assert "acceptance_cpu.yaml" in get_failed_arrival(done)["reason"]
    assert set(done.codes) == {1}


def test_a_missing_or_invalid_config_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    for argv, message in (
        (["--config", str(tmp_path / "none.yaml")], "no such config file"),
        (arguments(tmp_path, "compute.sizze=4"), "did you mean compute.size?"),
        (arguments(tmp_path, "training.overrides=[data.seq_len=1]"), "data.seq_len=1"),
        ([], "Usage:"),
    ):
        assert run_acceptance(argv) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_recipe_runs_under_tune(tmp_path: Path) -> None:
    tune = Path(sys.executable).with_name("tune")
    command = [str(tune), "run", "--nproc_per_node", "2", "recipes/cluster_acceptance", *arguments(tmp_path, *SHORT)]
    required = "required=[arrival, compute, links, collectives_node, collective_data]"
    done = subprocess.run([*command, required], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "PASS: all required checks passed" in done.stdout
    assert json.loads((tmp_path / "out" / "acceptance.json").read_text())["world_size"] == 2


@pytest.mark.slow
def test_a_rank_that_dies_under_torchrun_is_blamed_although_torchrun_ends_the_others(tmp_path: Path) -> None:
    tune = Path(sys.executable).with_name("tune")
    command = [str(tune), "run", "--nproc_per_node", "3", "recipes/cluster_acceptance", *arguments(tmp_path, *SHORT)]
    fault = "faults=[{kind: die, rank: 1, at: pairs}]"
    done = subprocess.run([*command, *LIMITS, fault], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    result = json.loads((tmp_path / "out" / "acceptance.json").read_text())
    assert result["verdict"] == "FAIL"
    assert [culprit["ranks"] for check in result["checks"] for culprit in check["culprits"]] == [[1]]
    assert list(result["samples"]["compute"]) == ["0", "1", "2"]


@pytest.mark.slow
def test_a_run_interrupted_while_it_waits_for_a_rank_writes_a_result(tmp_path: Path) -> None:
    def interrupt(processes: list[Any]) -> None:
        processes[0].join(6)
        for process in processes:
            os.kill(process.pid, signal.SIGTERM)

    done = run(tmp_path, *SHORT, "limits.arrive_s=60", absent=[0], ranks=3, meanwhile=interrupt, limit_s=LIMIT_S)
    assert done.result is None  # rank 0 hosts the store: without it, the signal kills the waiting ranks
    done = run(tmp_path, *SHORT, "limits.arrive_s=60", absent=[2], ranks=3, meanwhile=interrupt, limit_s=LIMIT_S)
    assert done.result is not None
    assert done.result["verdict"] == "INCOMPLETE"
    assert done.checks["compute"]["reason"] == "interrupted (SIGTERM)"
