"""Success criteria of a run, judged from its files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fctune.apps.report.run_sections import add_success
from fctune.config.sections.adapter import AdapterConfig
from fctune.config.sections.success import SuccessConfig
from fctune.pages.page import Page
from fctune.runs.record import read_run
from fctune.runs.success import Criterion, is_success, judge_run
from tests.runs.sample_runs import change_run, make_run, make_steps, write_steps


def judge(path: Path, thresholds: SuccessConfig | None = None, **more: Any) -> dict[str, Criterion]:
    return {f"{one.name} {one.threshold}".strip(): one for one in judge_run(read_run(path), thresholds, **more)}


def test_figures_are_compared_with_the_thresholds(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 100, code=None)
    write_steps(directory, 101, 101, eval_accuracy=0.86, eval_accuracy_low=0.8, eval_accuracy_high=0.9)
    directory.finish(0, "completed", 101)
    judged = judge(tmp_path / "run")
    accuracy = judged["tool-call accuracy while training, step 101 >= 85.0%"]
    assert (accuracy.status, accuracy.value, accuracy.detail) == ("PASS", 0.86, "86.0%")
    assert judged["loss, mean of the last 20 steps < 1.5"].status == "PASS"
    speed = judged["tokens/s per GPU, median > 2,000"]
    assert speed.value is not None
    assert (speed.status, 900 < speed.value < 1200) == ("FAIL", True)
    assert judged["no out-of-memory"].status == "PASS"
    busy = [one["gpu_utilization"] for one in make_steps(1, 100) if "gpu_utilization" in one]
    utilization = judged["GPU utilization >= 85.0%"]
    assert (utilization.status, utilization.value) == ("PASS", pytest.approx(sum(busy) / len(busy)))
    for name in ("scaling >= 90.0%", "inference tokens/s >= 100"):
        assert (judged[name].status, judged[name].value) == ("not measured", None)


def test_trainable_parameters_are_counted_without_token_rows(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 60, success=SuccessConfig(trainable_parameters=161_480_704))
    name = "trainable parameters = 161,480,704"
    assert judge(tmp_path / "run")[name].status == "not measured"
    for extra, status in ((0, "PASS"), (1, "FAIL")):
        directory.describe(parameters={"total": 9, "trained": 161_480_704 + 64 + extra, "token_rows": 64})
        assert judge(tmp_path / "run")[name].status == status


def test_the_loss_falls_steadily_if_no_quarter_is_above_the_one_before(tmp_path: Path) -> None:
    name = "steady decrease of the loss"
    for index, (quarters, status) in enumerate(
        [((4, 3, 2, 1), "PASS"), ((4, 3, 3.05, 3), "PASS"), ((4, 2, 3, 1), "FAIL"), ((4, 4.05, 4.1, 4.15), "FAIL")]
    ):
        directory = make_run(tmp_path / f"{index}", 0)
        for number, loss in enumerate(quarters):
            write_steps(directory, 10 * number + 1, 10 * number + 10, loss=loss)
        assert judge(tmp_path / f"{index}")[name].status == status, quarters
    assert judge_short(tmp_path) == "not measured"


def judge_short(folder: Path) -> str:
    make_run(folder / "short", 19)
    return judge(folder / "short")["steady decrease of the loss"].status


def test_the_final_checkpoint_is_that_of_the_last_step_and_complete(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run, 50)
    assert judge(run)["final checkpoint"].status == "FAIL"
    for step, status in ((40, "FAIL"), (50, "PASS")):
        folder = run / "checkpoints" / f"elastic-checkpoint-{step}"
        folder.mkdir(parents=True)
        (run / "checkpoints" / "final").unlink(missing_ok=True)
        (run / "checkpoints" / "final").symlink_to(folder.name)
        assert judge(run)["final checkpoint"].status == "FAIL"  # not marked as complete
        (folder / "_ELASTIC_SUCCESS").touch()
        assert judge(run)["final checkpoint"].status == status


def test_the_size_of_the_exported_model_is_limited(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 50, success=SuccessConfig(max_model_gb=0.001))
    name = "merged model, GB <= 0.00"
    assert judge(tmp_path / "run")[name].status == "not measured"
    merged = tmp_path / "run" / "export" / "merged"
    merged.mkdir(parents=True)
    for size, status in ((900_000, "PASS"), (1_100_000, "FAIL")):
        (merged / "model.safetensors").write_bytes(bytes(size))
        assert judge(tmp_path / "run")[name].status == status


def test_the_loss_threshold_is_lower_for_full_training(tmp_path: Path) -> None:
    for name, adapter in (("lora", AdapterConfig()), ("full", None)):
        make_run(tmp_path / name, 90, scale=1.5, adapter=adapter)
    assert judge(tmp_path / "lora")["loss, mean of the last 20 steps < 1.5"].status == "PASS"
    assert judge(tmp_path / "full")["loss, mean of the last 20 steps < 0.5"].status == "FAIL"


def test_thresholds_come_from_the_config_and_null_disables_one(tmp_path: Path) -> None:
    thresholds = SuccessConfig(
        min_tokens_per_s_per_gpu=500, min_memory_share=None, max_memory_share=None, min_scaling=None
    )
    make_run(tmp_path / "run", 50, success=thresholds)
    judged = judge(tmp_path / "run")
    assert judged["tokens/s per GPU, median > 500"].status == "PASS"
    assert not [name for name in judged if "peak memory" in name or "scaling" in name]


@pytest.mark.parametrize(
    ("code", "reason", "due"),
    [
        (0, "completed", "PASS"),
        (75, "stopped after step 9", "PASS"),
        (1, "rank 3: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "FAIL"),
        (1, "rank 3: RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", "FAIL"),
        (1, "rank 3: ValueError: x", "PASS"),
        (None, "", "not measured"),
    ],
)
def test_out_of_memory_is_detected_in_the_exit_reason(code: int | None, reason: str, due: str, tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 10, code=None)
    if code is not None:
        directory.finish(code, reason, 10)
    assert judge(tmp_path / "run")["no out-of-memory"].status == due


def test_peak_memory_must_be_within_a_range_of_the_gpus_memory(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 100)  # 1.1 GiB at most on rank 0, 1.11 on another
    for device_gib, low, high in ((1.5, "PASS", "PASS"), (2.0, "FAIL", "PASS"), (1.2, "PASS", "FAIL")):
        change_run(directory, device_memory_gib=device_gib)
        judged = judge(tmp_path / "run")
        found = [judged[f"peak GPU memory {wanted}"] for wanted in (">= 70.0%", "<= 80.0%")]
        assert [one.status for one in found] == [low, high]
        assert found[0].value == pytest.approx(1.11 / device_gib)


def test_out_of_memory_is_not_measured_if_a_restart_has_no_recorded_reason(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 10)
    change_run(directory, resumed=[{"step": 5, "at": "2026-01-01T00:00:00Z", "world_size": 2}])
    assert judge(tmp_path / "run")["no out-of-memory"].status == "not measured"


def test_scaling_is_measured_against_the_same_work_on_fewer_ranks(tmp_path: Path) -> None:
    for name, ranks in (("two", 2), ("eight", 8)):
        change_run(make_run(tmp_path / name, 30), world_size=ranks)
    change_run(make_run(tmp_path / "other", 30, adapter=AdapterConfig(rank=99)), world_size=1)
    peers = [read_run(tmp_path / name) for name in ("two", "eight", "other")]
    judged = {one.name: one for one in judge_run(peers[1], peers=peers)}
    assert judged["scaling"].value == pytest.approx(2 / 8)  # the same tokens/s, on four times the ranks
    assert judged["scaling"].status == "FAIL"
    assert {one.name: one for one in judge_run(peers[0], peers=peers)}["scaling"].status == "not measured"


def test_an_unmeasured_criterion_fails_only_in_strict_mode() -> None:
    passed, unknown, failed = (
        Criterion("x", ">= 1", verdict, None, "")  # type: ignore[arg-type]
        for verdict in ("PASS", "not measured", "FAIL")
    )
    assert is_success([passed], is_strict=True)
    assert is_success([passed, unknown])
    assert not is_success([passed, unknown], is_strict=True)
    assert not is_success([passed, failed])


def test_the_table_shows_status_threshold_and_result(tmp_path: Path) -> None:
    page = Page("x")
    add_success(page, [Criterion("loss", "< 1.5", "FAIL", 2.0, "2")])
    text = page.render()
    assert re.search(r'<td class="bad"[^>]*>FAIL</td><td[^>]*>loss</td>', text)
    assert re.search(r"<td[^>]*>&lt; 1.5</td><td[^>]*>2</td>", text)
