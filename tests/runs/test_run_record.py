"""Reading run directories: running, killed, restarted, of older versions, and of something else."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from fctune.base.errors import DataError
from fctune.checkpoint.files import FileRecord
from fctune.checkpoint.store import CheckpointStore
from fctune.runs.alerts import Alert
from fctune.runs.directory import RunDirectory
from fctune.runs.figures import account_for_time
from fctune.runs.record import MetricsFile, read_run
from fctune.runs.sinks import AlertMonitor
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


def test_two_hundred_thousand_steps_are_read_and_reported_in_seconds(tmp_path: Path) -> None:
    from fctune.apps.report.run_page import make_run_page

    directory = make_run(tmp_path / "run", 1)
    template: dict[str, Any] = next(make_steps(2, 2))
    line = json.dumps(template).replace('"step": 2,', '"step": %d,')
    directory.metrics.write_text("".join(line % step + "\n" for step in range(1, 200_001)))
    started = time.process_time()  # not wall time: a loaded machine is no defect
    record = read_run(tmp_path / "run")
    page = make_run_page([record]).render()
    assert time.process_time() - started < 30  # about 3; a sum over each step's neighbours takes minutes
    assert len(record.metrics.steps) == 200_000
    assert len(page) < 2_000_000
