"""The profiler records the configured steps and ranks and does not change training."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fctune.base.distributed import World
from fctune.config.schema import RunConfig
from fctune.config.sections.telemetry import ProfileConfig
from fctune.data.prepared_set import open_prepared, prepare
from fctune.runs.profiler import StepProfiler
from fctune.runs.sinks import SinkGroup
from fctune.training.loop import build_loader, train
from fctune.training.setup import build_base, shard_and_load_, start_state
from tests.ranks import run_ranks
from tests.training.training_runs import Recorder, make_config

NUM_STEPS = 5


def run_training(world: World, config: RunConfig, prepared_path: Path) -> list[dict[str, Any]]:
    loader = build_loader(config, open_prepared(prepared_path))
    model = build_base(config, Path(config.model.path), world)
    gradient_sync = shard_and_load_(model, config, Path(config.model.path), world)
    recorder = Recorder()
    train(config, start_state(model, config, NUM_STEPS, gradient_sync), loader, NUM_STEPS, world, SinkGroup(recorder))
    return recorder.metrics


@pytest.fixture(scope="module")
def recorded(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run two ranks with a profile of steps 2 and 3 on the second, and the same run without a profile."""
    root, model = tmp_path_factory.mktemp("profiled"), make_model()
    changes: dict[str, Any] = {"adapter": None, "max_steps": NUM_STEPS}
    profiled = make_config(model, root, profile={"first_step": 2, "last_step": 3, "ranks": [1]}, **changes)
    plain = make_config(model, root, output_dir=str(root / "plain"), **changes)
    path = prepare(plain.data, model, root / "prepared").path
    first, second = (run_ranks(run_training, 2, config, path)[0] for config in (profiled, plain))
    return {"folder": root / "run" / "profile", "metrics": first, "plain": second}


def test_a_trace_is_in_trace_event_format_and_contains_only_the_recorded_steps(recorded: dict[str, Any]) -> None:
    """https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (trace event format)."""
    (file,) = recorded["folder"].glob("*.trace.json.gz")
    assert file.name == "rank-1.steps-2-3.trace.json.gz"
    trace = json.loads(gzip.decompress(file.read_bytes()))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all({"name", "ts", "dur", "pid", "tid"} <= event.keys() for event in events)
    names = {event["name"] for event in events}
    assert {name for name in names if re.fullmatch(r"step \d+", name)} == {"step 2", "step 3"}
    assert {"aten::mm", "FusedAdamW"} & names or any("Optimizer.step" in name for name in names)
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] in ("step 2", "step 3"))
    assert spans[0][1] <= spans[1][0]
    products = [event for event in events if event["name"] == "aten::mm"]
    assert len(products) >= 2 * 2 * 7  # at least two steps of two blocks of seven linears
    assert all(any(a <= event["ts"] <= b for a, b in spans) for event in products)


def test_the_operator_table_is_sorted_by_time(recorded: dict[str, Any]) -> None:
    (file,) = recorded["folder"].glob("*.operators.txt")
    text = file.read_text(encoding="utf-8")
    assert "Self CPU %" in text
    shares = [float(share) for share in re.findall(r"^ *aten::\S+ +([\d.]+)%", text, re.MULTILINE)]
    assert len(shares) >= 5
    assert shares == sorted(shares, reverse=True)
    assert "aten::mm" in text


def test_profiling_does_not_change_the_metrics(recorded: dict[str, Any]) -> None:
    for key in ("loss", "grad_norm", "validation_loss"):
        assert [m.get(key) for m in recorded["metrics"]] == [m.get(key) for m in recorded["plain"]]


def take_steps(profiler: StepProfiler, steps: range) -> None:
    x = torch.ones(8, 8)
    for step in steps:
        with profiler.step(step):
            x @ x


@pytest.mark.parametrize(
    ("steps", "named"),
    [
        (range(1, 8), "3-5"),
        (range(3, 8), "3-5"),  # from the first step on, without a warm-up step
        (range(5, 8), "5-5"),  # resumed in the middle
        (range(1, 5), "3-4"),  # stopped in the middle
        (range(6, 8), None),  # after the last
        (range(1, 3), None),  # before the first
    ],
)
def test_the_configured_steps_that_a_run_takes_are_recorded(steps: range, named: str | None, tmp_path: Path) -> None:
    profiler = StepProfiler(ProfileConfig(first_step=3, last_step=5), tmp_path, 0, torch.device("cpu"))
    take_steps(profiler, steps)
    profiler.close()
    found = sorted(path.name for path in tmp_path.rglob("*.json.gz"))
    assert found == ([] if named is None else [f"rank-0.steps-{named}.trace.json.gz"])
    if named is not None:
        first, last = map(int, named.split("-"))
        events = json.loads(gzip.decompress(next(tmp_path.rglob("*.gz")).read_bytes()))["traceEvents"]
        steps_seen = {e["name"] for e in events if re.fullmatch(r"step \d+", e.get("name", "")) and e["ph"] == "X"}
        assert steps_seen == {f"step {number}" for number in range(first, last + 1)}


def test_a_profile_that_cannot_be_written_is_reported_once_and_training_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    monkeypatch.setattr(logging.getLogger("fctune"), "propagate", True)
    (tmp_path / "profile").write_text("a file where a folder should be")
    profiler = StepProfiler(ProfileConfig(first_step=1, last_step=2), tmp_path, 0, torch.device("cpu"))
    with contextlib.redirect_stderr(io.StringIO()):
        take_steps(profiler, range(1, 6))
    profiler.close()
    messages = [record.message for record in caplog.records if record.name == "fctune"]
    assert len(messages) == 1
    assert messages[0].startswith("profile: FileExistsError")
    assert "training continues without it" in messages[0]


def test_a_failing_step_raises_its_own_error(tmp_path: Path) -> None:
    profiler = StepProfiler(ProfileConfig(first_step=1, last_step=3), tmp_path, 0, torch.device("cpu"))
    take_steps(profiler, range(1, 2))
    with pytest.raises(ZeroDivisionError), profiler.step(2):
        _ = 1 / 0
    profiler.close()
    again = StepProfiler(ProfileConfig(first_step=1, last_step=1), tmp_path / "again", 0, torch.device("cpu"))
    take_steps(again, range(1, 2))  # the process's profiler was released
    assert list((tmp_path / "again" / "profile").glob("*.json.gz"))
