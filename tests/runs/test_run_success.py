"""Success criteria are judged by the figures of a run and by the speed that was measured of its own model."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fctune.apps.report.run_sections import add_success
from fctune.config.sections.adapter import AdapterConfig
from fctune.config.sections.success import SuccessConfig
from fctune.pages.page import Page
from fctune.runs.figures import describe_run
from fctune.runs.record import MetricsFile, RunRecord, read_run
from fctune.runs.success import Criterion, find_throughput, is_success, judge_run
from tests.runs.sample_runs import change_run, make_run, make_steps, write_steps


def judge(path: Path, thresholds: SuccessConfig | None = None, **more: Any) -> dict[str, Criterion]:
    return {f"{one.name} {one.threshold}".strip(): one for one in judge_run(read_run(path), thresholds, **more)}


def test_figures_are_compared_with_the_thresholds(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 100, code=None)
    write_steps(directory, 101, 101, eval_accuracy=0.86, eval_accuracy_low=0.8, eval_accuracy_high=0.9)
    directory.finish(0, "completed", 101)
    judged = judge(tmp_path / "run", SuccessConfig(max_final_loss=1.5, min_tokens_per_s_per_gpu=2000))
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


def test_the_final_loss_is_judged_only_against_a_given_threshold(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 90, scale=1.5)
    assert not [name for name in judge(tmp_path / "run") if name.startswith("loss, mean")]
    make_run(tmp_path / "given", 90, scale=1.5, success=SuccessConfig(max_final_loss=0.5))
    assert judge(tmp_path / "given")["loss, mean of the last 20 steps < 0.5"].status == "FAIL"


def test_the_speed_is_judged_by_that_of_the_plan(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 50)
    criterion = judge(tmp_path / "run")["tokens/s per GPU, of the planned >= 70.0%"]
    assert (criterion.status, criterion.detail) == ("not measured", "the plan knows no speed for this model and GPU")
    speed = describe_run(read_run(tmp_path / "run")).tokens_per_s_per_rank
    assert speed is not None
    for planned, status in ((speed / 0.69, "FAIL"), (speed / 0.71, "PASS")):
        change_run(directory, planned_tokens_per_s_per_gpu=planned)
        assert judge(tmp_path / "run")[f"tokens/s per GPU, of the planned {planned:,.0f} >= 70.0%"].status == status


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


@pytest.mark.parametrize("ran_out", [True, False])
def test_a_crash_says_whether_memory_ran_out_and_its_words_do_not(ran_out: bool, tmp_path: Path) -> None:
    reason = "rank 3: RuntimeError: x" if ran_out else "rank 3: ValueError: 'out of memory' is no column"
    make_run(tmp_path / "run", 10, code=None).finish(1, reason, 10, is_crash=True, is_out_of_memory=ran_out)
    assert judge(tmp_path / "run")["no out-of-memory"].status == ("FAIL" if ran_out else "PASS")


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


@pytest.mark.parametrize("num_steps", [1, 3, 99, 100, 101, 700])
def test_the_99th_percentile_is_the_nearest_rank(num_steps: int, tmp_path: Path) -> None:
    times = [float(n) for n in range(num_steps)]
    random.Random(0).shuffle(times)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": n, "step_time_s": t}) + "\n" for n, t in enumerate(times, 1)))
    metrics = MetricsFile(path)
    metrics.update()
    assert metrics.quantile("step_time_s", 0.99) == np.percentile(times, 99, method="inverted_cdf")


def make_shrinking_run(path: Path, **metrics: float) -> RunRecord:
    """Write 200 steps of 8 ranks at 8,000 tokens/s, then 50 of 2 ranks at 2,000: 1,000 per rank throughout."""
    directory = make_run(path, 1)
    speeds: list[dict[str, Any]] = [{"step": step, "tokens_per_s": 8000.0, **metrics} for step in range(1, 201)]
    speeds += [{"step": step, "tokens_per_s": 2000.0, **metrics} for step in range(201, 251)]
    directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in speeds))
    before = {"world_size": 8, "until": "2026-01-01T00:00:40Z", "exit": None}
    change_run(directory, resumed=[{"step": 200, "world_size": 2, "before": before}], world_size=2)
    return read_run(path)


def test_the_speed_per_rank_uses_the_number_of_ranks_of_each_step(tmp_path: Path) -> None:
    record = make_shrinking_run(tmp_path / "run", tokens_per_s_per_device=1000.0)
    assert describe_run(record).tokens_per_s_per_rank == 1000
    judged = {one.name: one for one in judge_run(record, SuccessConfig(min_tokens_per_s_per_gpu=2000))}
    assert judged["tokens/s per GPU, median"].status == "FAIL"


def test_the_speed_per_rank_is_unknown_if_it_was_not_recorded_and_the_ranks_changed(tmp_path: Path) -> None:
    record = make_shrinking_run(tmp_path / "older")
    assert describe_run(record).tokens_per_s == 8000
    assert describe_run(record).tokens_per_s_per_rank is None


def write(path: Path, *rows: tuple[str, int, float], age_s: float = 0.0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    found = [{"model": model, "width": width, "tokens_per_s": speed, "num_tokens": 1} for model, width, speed in rows]
    path.write_text(json.dumps(found))
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age_s))


def find_best(run: Path) -> tuple[float, int] | None:
    found = find_throughput(read_run(run))
    return None if found is None else (found.tokens_per_s, found.width)


def test_the_fastest_width_of_the_runs_own_model_is_used(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 3)
    assert find_best(tmp_path / "run") is None
    own, base = str(tmp_path / "run"), "models/base"
    write(tmp_path / "throughput.json", (base, 32, 900.0), (own, 1, 40.0), (own, 8, 150.0))
    assert find_best(tmp_path / "run") == (150.0, 8)


def test_the_newest_file_is_used_and_a_servers_only_inside_the_run(tmp_path: Path) -> None:
    change_run(make_run(tmp_path / "run", 3), started_at="2020-01-01T00:00:00Z")
    write(tmp_path / "eval" / "throughput.json", (str(tmp_path / "run" / "export"), 8, 10.0), age_s=100)
    write(tmp_path / "run" / "server-throughput.json", ("http://127.0.0.1:8000", 16, 700.0), age_s=50)
    write(tmp_path / "throughput.json", ("http://127.0.0.1:9000", 16, 9000.0))  # of an unknown model
    assert find_best(tmp_path / "run") == (700.0, 16)


def test_results_older_than_the_run_are_ignored(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 3)
    write(tmp_path / "throughput.json", (str(tmp_path / "run"), 8, 150.0), age_s=100)
    assert find_best(tmp_path / "run") is None


ROW = '[{"model": "RUN", "width": %s, "tokens_per_s": %s}]'


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "[1]", '{"model": 1}', '[{"model": "x", "width": 1}]', ROW % ("null", 1), ROW % (1, '"x"')],
)
def test_files_with_other_contents_are_ignored(content: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run", 3)
    (tmp_path / "run" / "throughput.json").write_text(content.replace("RUN", str(tmp_path / "run")))
    assert find_best(tmp_path / "run") is None


def test_the_commands_output_is_readable(tmp_path: Path, tiny_base: Path) -> None:
    from eval import throughput

    make_run(tmp_path / "run", 3)
    merged, out = tmp_path / "run" / "export" / "merged", tmp_path / "run" / "throughput.json"
    shutil.copytree(tiny_base, merged)
    small = ["--widths", "1,2", "--rounds", "1", "--new-tokens", "4", "--suite", "smoke"]
    assert throughput.main(["--model", str(merged), *small, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    found = find_best(tmp_path / "run")
    assert found is not None
    assert found[0] == max(row["tokens_per_s"] for row in rows)
    judged = {one.name: one for one in judge_run(read_run(tmp_path / "run"))}
    criterion = judged[f"inference tokens/s, {found[1]} prompts at a time"]
    assert (criterion.value, criterion.status) == (found[0], "PASS" if found[0] >= 100 else "FAIL")
