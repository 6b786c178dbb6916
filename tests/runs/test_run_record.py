"""Records of runs are read back completely, also after kills and restarts, and account for all of a run's time."""

from __future__ import annotations

import json
import re
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from fctune.apps.report.run_page import write_run_html
from fctune.base.errors import ConfigError, DataError
from fctune.checkpoint.files import FileRecord
from fctune.checkpoint.store import CheckpointStore
from fctune.cli import main
from fctune.config.loading import load_config
from fctune.config.sections.success import SuccessConfig
from fctune.runs.alerts import Alert
from fctune.runs.directory import RunDirectory
from fctune.runs.figures import PART_DESCRIPTIONS, account_for_time
from fctune.runs.record import MetricsFile, RunRecord, read_run
from fctune.runs.sinks import AlertMonitor
from tests.conftest import ROOT
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import arguments_for, run_on_rank
from tests.runs.sample_runs import change_run, make_config, make_run, make_steps, tear, write_steps


def test_every_number_of_the_file_is_read(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 40)
    record = read_run(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert record.metrics.steps == [line["step"] for line in lines] == list(range(1, 41))
    assert set(record.metrics.columns) == set().union(*lines) - {"data_digest"}
    for name, column in record.metrics.columns.items():
        assert column == [line.get(name) for line in lines]
    assert record.notes() == []
    assert record.num_steps == 40
    assert record.exit is not None
    assert record.exit["code"] == 0


def test_an_incomplete_last_line_is_ignored_with_a_note(tmp_path: Path) -> None:
    tear(make_run(tmp_path / "run", 10, code=None))
    record = read_run(tmp_path / "run")
    assert record.metrics.steps == list(range(1, 11))
    assert [note for note in record.notes() if "the last line is incomplete" in note]


def test_a_complete_line_without_newline_counts(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 10)
    directory.metrics.write_text(directory.metrics.read_text().removesuffix("\n"))
    record = read_run(tmp_path / "run")
    assert record.metrics.steps == list(range(1, 11))
    assert not record.metrics.is_torn
    write_steps(directory, 11, 12)  # as a resumed writer would append
    text = directory.metrics.read_text().replace('}{"loss"', '}\n{"loss"')
    directory.metrics.write_text(text)
    record.update()
    assert record.metrics.steps == list(range(1, 13))


@pytest.mark.parametrize("num_bytes", [1, 5, 60, 300])
def test_a_file_truncated_anywhere_is_readable(num_bytes: int, tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 10, code=None)
    directory.metrics.write_bytes(directory.metrics.read_bytes()[:-num_bytes])
    record = read_run(tmp_path / "run")
    assert record.metrics.steps == list(range(1, 11 if num_bytes == 1 else 10))
    assert record.metrics.is_torn is (num_bytes != 1)


def test_an_update_reads_new_lines_once_they_are_complete(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 10, code=None)
    metrics = MetricsFile(directory.metrics)
    assert metrics.update()
    assert not metrics.update()
    line = json.dumps(next(make_steps(11, 11)))
    with open(directory.metrics, "a") as file:
        file.write(line[:40])
        file.flush()
        metrics.update()
        assert (metrics.steps[-1], metrics.is_torn) == (10, True)
        file.write(line[40:] + "\n")
    metrics.update()
    assert (metrics.steps, metrics.is_torn, metrics.num_unreadable) == (list(range(1, 12)), False, 0)
    write_steps(directory, 12, 15)
    metrics.update()
    assert metrics.steps == list(range(1, 16))


def test_a_restart_leaves_no_gap_and_no_repeat(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 15, code=None)
    watching = read_run(tmp_path / "run")
    tear(directory)
    again = RunDirectory(tmp_path / "run")
    again.resume(make_config(tmp_path / "run"), 3, 12, tmp_path / "run/checkpoints/checkpoint-12", [])
    write_steps(again, 13, 30, scale=2.0)
    for record in (watching, read_run(tmp_path / "run")):
        record.update()
        assert record.metrics.steps == list(range(1, 31))
        losses = [*(m["loss"] for m in make_steps(1, 12)), *(m["loss"] for m in make_steps(13, 30, 2.0))]
        assert record.metrics.column("loss") == losses
        assert [(part.after_step, part.world_size) for part in record.segments] == [(0, 2), (12, 3)]
        assert record.notes() == []


def test_repeated_steps_count_once_with_their_last_values(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 15, code=None)
    write_steps(directory, 11, 20, scale=2.0)
    record = read_run(tmp_path / "run")
    assert record.metrics.steps == list(range(1, 21))
    assert record.metrics.column("loss")[10] == next(make_steps(11, 11, 2.0))["loss"]
    assert record.notes() == ["metrics.jsonl: 5 steps appear twice; the later lines are used."]


def test_gaps_and_lines_that_are_not_steps_are_reported(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 10)
    with open(directory.metrics, "a") as file:
        file.write('[1]\n{"loss": 1.0}\n{"step": "x"}\n\n')
    write_steps(directory, 14, 16)
    notes = read_run(tmp_path / "run").notes()
    assert notes == [
        "metrics.jsonl: ignored 3 lines that are not a training step.",
        "metrics.jsonl: steps 11-13 are missing.",
    ]


def test_non_finite_numbers_are_gaps(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 3)
    with open(directory.metrics, "a") as file:
        file.write('{"step": 4, "loss": NaN, "is_skipped": true}\n{"step": 5, "loss": null, "lr": Infinity}\n')
    metrics = read_run(tmp_path / "run").metrics
    assert metrics.column("loss")[3:] == [None, None]
    assert metrics.column("lr")[3:] == [None, None]
    assert metrics.column("is_skipped") == [None, None, None, 1.0, None]


def test_metrics_of_an_older_version_only_lack_columns(tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.mkdir()
    (path / "metrics.jsonl").write_text("".join(f'{{"step": {i}, "loss": {5 - i / 10}}}\n' for i in range(1, 11)))
    record = read_run(path)
    assert not record.metrics.has("peak_memory_gib")
    assert record.metrics.column("peak_memory_gib") == [None] * 10
    assert record.notes() == ["run.json: missing, so the model, data and config of this run are unknown."]


def write(path: Path, files: dict[str, str]) -> Path:
    path.mkdir()
    for name, text in files.items():
        (path / name).write_text(text)
    return path


@pytest.mark.parametrize(
    ("files", "due"),
    [
        ({}, "it has neither run.json nor metrics.jsonl"),
        ({"notes.txt": "x"}, "it has neither run.json nor metrics.jsonl"),
        ({"run.json": "{"}, "run.json: cannot be read as JSON"),
        ({"run.json": "[]"}, r"run.json: \$: \[\] is not of type 'object'"),
        ({"run.json": '{"config": {"model": "x"}}'}, r"run.json: \$.config.model: 'x' is not of type 'object'"),
        ({"run.json": '{"config": {"model": {"path": 1}}}'}, r"\$.config.model.path: 1 is not of type 'string'"),
        ({"run.json": '{"config": {"success": {"min_accuracy": "x"}}}'}, r"min_accuracy: 'x' is not of type 'number'"),
        (
            {"run.json": '{"closing": {"save_s": Infinity}}'},
            r"run.json: cannot be read as JSON \(Infinity is not valid JSON",
        ),
        ({"run.json": '{"hosts": 8}'}, r"run.json: \$.hosts: 8 is not of type 'array'"),
        ({"run.json": '{"data": {"inputs": []}}'}, r"\$.data.inputs: \[\] is not of type 'object'"),
        ({"run.json": '{"resumed": [{}]}'}, "'step' is a required property"),
        ({"run.json": "{}", "exit.json": "{}"}, "exit.json: .*'code' is a required property"),
        ({"metrics.jsonl": '{"iteration": 1}\n{"iteration": 2}\n'}, "none of its 2 lines is a training step"),
    ],
)
def test_a_directory_that_is_not_a_run_is_a_one_line_error(files: dict[str, str], due: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=due) as caught:
        read_run(write(tmp_path / "other", files))
    assert "\n" not in str(caught.value)


def test_a_missing_directory_and_a_directory_of_runs_are_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such directory"):
        read_run(tmp_path / "nowhere")
    make_run(tmp_path / "mine", 1)
    with pytest.raises(DataError, match=f"Runs inside it: {tmp_path / 'mine'}"):
        read_run(tmp_path)


def test_a_run_without_steps_is_readable(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "run").start(make_config(tmp_path / "run"), 1)
    assert read_run(tmp_path / "run").notes() == ["metrics.jsonl: contains no steps."]


def test_checkpoints_are_the_complete_ones_of_the_store(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 10)
    store = CheckpointStore(directory.checkpoints)
    for kind, step in (("sharded", 4), ("elastic", 8), ("sharded", 8)):
        store.start(kind, step)  # type: ignore[arg-type]
        (store.partial_path(kind, step) / "x").write_text("x")  # type: ignore[arg-type]
        store.publish(kind, step, [FileRecord("x", 1, "")])  # type: ignore[arg-type]
    (store.root / "checkpoint-9").mkdir()  # without its completion marker
    store.start("sharded", 10)
    found = {(state.step, state.kind, state.name) for state in read_run(tmp_path / "run").checkpoints}
    assert found == {(c.step, c.kind, c.path.name) for c in store.list_complete()}
    assert len(found) == 3


def test_alerts_are_read_back(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 10)
    monitor = AlertMonitor(directory.path)
    monitor.alert(Alert("disk", 7, 0.01, 0.05, "nearly full"))
    with open(directory.path / "alerts.jsonl", "a") as file:
        file.write('{"name": "torn", "st')
    alerts = read_run(tmp_path / "run").alerts
    assert [(alert["name"], alert["step"], alert["message"]) for alert in alerts] == [("disk", 7, "nearly full")]


def test_the_recorded_end_time_takes_precedence_over_file_times(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 3)
    change_run(directory, finished_at="2020-01-02T03:04:05Z")
    ended = read_run(tmp_path / "run").ended_at
    assert ended is not None
    assert ended.isoformat() == "2020-01-02T03:04:05+00:00"
    (tmp_path / "run" / "exit.json").unlink()  # as after a restart
    ended = read_run(tmp_path / "run").ended_at
    assert ended is not None
    assert abs(ended.timestamp() - time.time()) < 60


def test_a_time_without_a_zone_is_utc(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 3)
    change_run(directory, started_at="2026-01-01T00:00:00", finished_at="2026-01-01T00:01:00Z")
    assert account_for_time(read_run(tmp_path / "run")).elapsed_s == 60


def test_a_record_is_cleared_when_a_new_run_replaces_the_directory(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 15, code=None)
    watching = read_run(tmp_path / "run")
    again = RunDirectory(tmp_path / "run")
    again.start(make_config(tmp_path / "run"), 2)
    assert watching.update()
    assert (watching.metrics.steps, watching.notes()) == ([], ["metrics.jsonl: contains no steps."])
    assert not watching.update()
    write_steps(again, 1, 3)
    assert watching.update()
    assert watching.metrics.steps == [1, 2, 3]


@pytest.mark.thorough
def test_two_hundred_thousand_steps_are_read_and_reported_in_seconds(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 1)
    template: dict[str, Any] = next(make_steps(2, 2))
    line = json.dumps(template).replace('"step": 2,', '"step": %d,')
    directory.metrics.write_text("".join(line % step + "\n" for step in range(1, 200_001)))
    started = time.process_time()  # not wall time: a loaded machine is no defect
    record = read_run(tmp_path / "run")
    write_run_html([record], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert time.process_time() - started < 30  # about 3; a sum over each step's neighbours takes minutes
    assert len(record.metrics.steps) == 200_000
    assert len(page) < 2_000_000


START = "2026-01-01T00:00:00Z"


def make(path: Path, steps: list[dict[str, Any]], **run: Any) -> RunRecord:
    path.mkdir()
    (path / "metrics.jsonl").write_text("".join(json.dumps({"step": i} | s) + "\n" for i, s in enumerate(steps, 1)))
    (path / "run.json").write_text(json.dumps({"started_at": START, "world_size": 4} | run))
    (path / "exit.json").write_text('{"code": 0, "reason": "completed"}')
    return read_run(path)


def test_every_second_belongs_to_one_part(tmp_path: Path) -> None:
    steps: list[dict[str, Any]] = [{"step_time_s": 2.0, "data_time_s": 0.5} for _ in range(20)]
    steps[0] = {"step_time_s": 12.0, "data_time_s": 0.5}  # compiles
    steps[7] = {"step_time_s": 9.0, "data_time_s": 0.5}  # stalls for 7 s
    steps[8] = {"step_time_s": 2.0, "data_time_s": 0.5, "is_skipped": True}
    steps[9] = {"step_time_s": 2.0, "data_time_s": 0.5, "eval_time_s": 6.0}
    steps[11] = {"step_time_s": 2.0, "data_time_s": 0.5, "validation_time_s": 4.0}
    steps[10] = {"step_time_s": 2.25, "data_time_s": 0.5, "save_wait_s": 0.25, "save_time_s": 3.0}
    time = account_for_time(
        make(tmp_path / "run", steps, finished_at="2026-01-01T00:02:00Z", closing={"save_s": 2.0, "export_s": 5.0})
    )
    assert time.elapsed_s == 120
    due = {"training": 19 * 1.5, "data": 10.0, "stalls": 7.0, "first steps": 10.0, "skipped steps": 1.5}
    due |= {"saves": 5.25, "validation": 4.0, "evaluation": 6.0, "export": 5.0, "restarts": 0.0, "other": 42.75}
    assert time.parts == pytest.approx(due)
    assert sum(time.parts.values()) == pytest.approx(120)
    assert time.goodput == pytest.approx(28.5 / 120)
    assert time.gpu_hours == pytest.approx(4 * 120 / 3600)
    assert time.parts.keys() == PART_DESCRIPTIONS.keys()


def test_a_restart_costs_all_time_but_the_kept_steps(tmp_path: Path) -> None:
    steps = [{"step_time_s": 2.0, "data_time_s": 0.0}] * 30
    resumed = [
        {"step": 10, "at": "2026-01-01T00:01:00Z", "world_size": 2},  # 20 of 60 s kept
        {"step": 10, "at": "2026-01-01T00:01:30Z", "world_size": 2},  # none of 30 s kept
    ]
    time = account_for_time(make(tmp_path / "run", steps, resumed=resumed, finished_at="2026-01-01T00:02:30Z"))
    assert time.elapsed_s == 150
    assert time.parts["restarts"] == pytest.approx(40 + 30)
    assert time.parts["training"] == pytest.approx(60)
    assert time.parts["other"] == pytest.approx(20)
    assert time.gpu_hours == pytest.approx(2 * 150 / 3600)  # the first segment's ranks are taken from the next


def test_a_slow_first_step_after_a_restart_is_not_a_stall(tmp_path: Path) -> None:
    steps = [{"step_time_s": 2.0 if i != 10 else 30.0, "data_time_s": 0.0} for i in range(30)]
    resumed = [{"step": 10, "at": "2026-01-01T00:00:20Z", "world_size": 4}]
    time = account_for_time(make(tmp_path / "run", steps, resumed=resumed, finished_at="2026-01-01T00:02:30Z"))
    assert (time.parts["stalls"], time.parts["first steps"]) == (0.0, 28.0)


def test_slower_steps_on_fewer_ranks_are_not_stalls(tmp_path: Path) -> None:
    steps = [{"step_time_s": 1.0 if i < 30 else 4.0, "data_time_s": 0.0} for i in range(50)]
    steps[40] = {"step_time_s": 14.0, "data_time_s": 0.0}  # stalls for 10 s
    before = {"world_size": 8, "until": "2026-01-01T00:00:30Z", "exit": None}
    resumed = [{"step": 30, "at": "2026-01-01T00:00:30Z", "world_size": 2, "before": before}]
    record = make(tmp_path / "run", steps, world_size=2, resumed=resumed, finished_at="2026-01-01T00:02:00Z")
    time = account_for_time(record)
    assert (time.parts["stalls"], time.parts["training"]) == (10.0, 30 * 1.0 + 20 * 4.0)
    assert time.goodput == pytest.approx(110 / 120)


def test_steps_discarded_by_a_later_restart_count_for_no_earlier_segment(tmp_path: Path) -> None:
    steps = [{"step_time_s": 2.0, "data_time_s": 0.0}] * 30
    resumed = [
        {"step": 20, "at": "2026-01-01T00:01:00Z", "world_size": 4},
        {"step": 5, "at": "2026-01-01T00:01:10Z", "world_size": 4},  # from an older checkpoint: 15 steps again
    ]
    record = make(tmp_path / "run", steps, resumed=resumed, finished_at="2026-01-01T00:02:10Z")
    assert record.segment_indices() == [0] * 5 + [2] * 25
    time = account_for_time(record)
    assert time.parts["restarts"] == pytest.approx((60 - 5 * 2) + 10)
    assert time.parts["other"] == pytest.approx(130 - 60 - 60)


def test_unrecorded_time_is_unknown(tmp_path: Path) -> None:
    time = account_for_time(make(tmp_path / "run", [{"step_time_s": 2.0}] * 5, started_at="yesterday"))
    assert (time.elapsed_s, time.goodput, time.gpu_hours) == (None, None, None)
    assert time.parts["training"] == pytest.approx(10)
    assert "other" not in time.parts
    older = account_for_time(make(tmp_path / "older", [{"loss": 1.0}] * 5))
    assert not any(seconds for name, seconds in older.parts.items() if name != "other")


def test_downtime_before_a_restart_is_not_counted_as_gpu_hours(tmp_path: Path) -> None:
    before = {"world_size": 8, "until": "2026-01-01T00:00:40Z", "exit": {"code": 75, "reason": "stopped"}}
    resumed = [{"step": 10, "at": "2026-01-01T02:00:00Z", "world_size": 2, "before": before}]
    steps = [{"step_time_s": 2.0, "data_time_s": 0.0}] * 30
    record = make(tmp_path / "run", steps, resumed=resumed, finished_at="2026-01-01T02:00:50Z")
    assert account_for_time(record).gpu_hours == pytest.approx((8 * 40 + 2 * 50) / 3600)


CONFIG = str(ROOT / "configs" / "tiny_lora.yaml")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run two steps with a threshold that they miss."""
    root = tmp_path_factory.mktemp("ended")
    overrides = ["success.max_final_loss=0.001", "success.min_tokens_per_s_per_gpu=1e9"]
    result: dict[str, Any] = run_ranks(run_on_rank, 1, arguments_for(root, *overrides))[0]
    return {**result, "path": root / "run"}


def test_a_run_that_misses_its_thresholds_completes_and_reports_them(
    ended: dict[str, Any],
) -> None:
    assert ended["code"] == 0  # a non-zero code would make launchers restart the run
    described = json.loads((ended["path"] / "run.json").read_text())
    statuses = {one["name"]: one["status"] for one in described["success"]}
    assert statuses["loss, mean of the last 20 steps"] == "FAIL"
    assert statuses["tokens/s per GPU, median"] == "not measured"  # on a CPU
    assert statuses["final checkpoint"] == "PASS"
    assert statuses["tool-call accuracy"] == "not measured"
    assert re.search(r"success: FAIL +loss, mean of the last 20 steps +< 0\.001 +\d", ended["out"])
    assert main(["report", str(ended["path"]), "--out", str(ended["path"].parent / "page.html")]) == 1


def test_the_command_and_the_device_are_recorded_and_on_the_page(ended: dict[str, Any], tmp_path: Path) -> None:
    record = read_run(ended["path"])
    assert record.run["command"][1:] == arguments_for(ended["path"].parent, *record.run["command"][-2:])
    assert record.run["device"].startswith("cpu, ")
    assert record.run["device_memory_gib"] is None
    write_run_html([record], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert f"--config {CONFIG}" in text
    assert record.notes() == []


def test_the_times_of_a_real_run_add_up(ended: dict[str, Any]) -> None:
    from fctune.runs.figures import account_for_time

    record = read_run(ended["path"])
    time = account_for_time(record)
    begun = datetime.fromisoformat(record.run["started_at"])
    assert time.elapsed_s == max(1.0, (datetime.fromisoformat(record.run["finished_at"]) - begun).total_seconds())
    steps = sum(value or 0.0 for value in record.metrics.column("step_time_s"))
    waited = sum(value or 0.0 for value in record.metrics.column("save_wait_s"))
    named = sum(time.parts[name] for name in ("training", "data", "stalls", "first steps"))
    assert named + waited == pytest.approx(steps)
    closing = record.run["closing"]
    between = sum(value or 0.0 for value in record.metrics.column("save_time_s"))
    assert time.parts["saves"] == pytest.approx(waited + between + closing["save_s"])
    assert time.parts["export"] == closing["export_s"] > 0
    assert time.parts["validation"] == record.metrics.column("validation_time_s")[-1]
    assert sum(time.parts.values()) <= time.elapsed_s + 1  # recorded times have a resolution of one second


def test_a_config_without_thresholds_is_not_judged(tmp_path: Path) -> None:
    assert load_config(CONFIG, ["output_dir=x", "success=null"]).success is None
    assert load_config(CONFIG, ["success={}"]).success == SuccessConfig()
    assert load_config(CONFIG, ["success.min_accuracy=null"]).success == SuccessConfig(min_accuracy=None)


@pytest.mark.parametrize(
    ("override", "due"),
    [
        ("success.min_accuracy=85", "success.min_accuracy=85.0: expected 0 or more and at most 1"),
        ("success.min_acuracy=0.9", "unknown key; did you mean success.min_accuracy"),
    ],
)
def test_an_invalid_threshold_is_an_error(override: str, due: str) -> None:
    with pytest.raises(ConfigError, match=due):
        load_config(CONFIG, [override])
