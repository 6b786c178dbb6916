"""Sample run directories, written by the project's own writers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fctune.calls.formats.registry import FORMATS
from fctune.config.schema import RunConfig
from fctune.config.sections.adapter import AdapterConfig
from fctune.config.sections.data import DataConfig, SourceConfig
from fctune.config.sections.model import ModelConfig
from fctune.engines.engine import Answer
from fctune.runs.directory import RunDirectory
from fctune.runs.sinks import JsonlSink
from fctune.tasks.evaluation.results import ResultsFile
from fctune.tasks.evaluation.summary import summarise_run
from fctune.tasks.judge import judge_answer
from fctune.tasks.suite import Suite


def make_config(path: Path, **changes: Any) -> RunConfig:
    given: dict[str, Any] = {
        "model": ModelConfig(path="models/base"),
        "data": DataConfig(sources=[SourceConfig(path="synthetic:train:100:1")]),
        "adapter": AdapterConfig(rank=8, alpha=16.0),
        **changes,
    }
    return RunConfig(output_dir=str(path), **given)


def make_steps(first: int, last: int, scale: float = 1.0) -> Iterator[dict[str, Any]]:
    """Yield metrics as the training loop passes them to sinks; most numbers differ from step to step."""
    for step in range(first, last + 1):
        seconds = 0.5 + 0.1 * math.sin(step)
        yield {
            "step": step,
            "epoch": 0,
            "loss": scale * (0.2 + 6.0 * math.exp(-step / 30) + 0.05 * math.sin(7 * step)),
            "lr": 1e-3 * (1 - step / 1000),
            "grad_norm": 1 + 0.5 * math.cos(step),
            "tokens_total": 1000 + step,
            "tokens_supervised": 250,
            "tokens_padding": 24,
            "tokens_per_s": (1000 + step) / seconds,
            "step_time_s": seconds,
            "data_time_s": 0.01,
            "peak_memory_gib": 1 + 0.001 * step,
            "data_digest": f"{step:016x}",
            "compute_skew": 1.02,
            "slowest_rank": step % 2,
            "save_wait_s": 0.004 if step % 50 == 1 else 0.0,
            "tflops_per_device": 380 + 10 * math.sin(step),
            "mfu": (380 + 10 * math.sin(step)) / 989,
            **({"validation_loss": scale * (0.3 + 1 / step)} if step % 20 == 0 else {}),
            **(make_interval_metrics(step) if step % 10 == 0 else {}),
        }


def make_interval_metrics(step: int) -> dict[str, Any]:
    """Return the metrics of all ranks that are logged every few steps."""
    return {
        "gpu_utilization": 0.91 + 0.03 * math.sin(step / 7),
        "gpu_utilization_min": 0.82 + 0.05 * math.sin(step / 9),
        "gpu_temperature_c": 60 + 8 * (1 - math.exp(-step / 100)),
        "gpu_power_w": 1250 + 60 * math.sin(step / 5),
        "peak_memory_max_gib": 1.01 + 0.001 * step,
        "memory_active_gib": 0.8 + 0.05 * math.sin(step),
        "memory_reserved_gib": 1.3,
        "gpu_hours": step / 3600,
    }


def write_steps(directory: RunDirectory, first: int, last: int, scale: float = 1.0, **more: Any) -> None:
    sink = JsonlSink(directory.metrics)
    for metrics in make_steps(first, last, scale):
        sink.write(metrics | more)
    sink.close()


def make_run(path: Path, num_steps: int = 60, scale: float = 1.0, code: int | None = 0, **changes: Any) -> RunDirectory:
    """Write a run of ``num_steps`` that ended with exit code ``code``, or that has not ended."""
    directory = RunDirectory(path)
    directory.start(make_config(path, **changes), world_size=2)
    directory.describe(num_steps=num_steps)
    write_steps(directory, 1, num_steps, scale)
    if code is not None:
        directory.finish(code, "completed" if code == 0 else "rank 0: ValueError: no", num_steps)
    return directory


def tear(directory: RunDirectory) -> None:
    """Append an incomplete line, as a kill leaves it."""
    with open(directory.metrics, "a", encoding="utf-8") as file:
        file.write('{"step": 9999, "loss": 0.1')


def change_run(directory: RunDirectory, **changes: Any) -> None:
    path = directory.path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_results(path: Path, suite: Suite, texts: list[str], model: str) -> list[dict[str, Any]]:
    """Write results as an evaluation does."""
    settings = {"suite": suite.name, "cases_digest": suite.digest(), "max_new_tokens": 256}
    file = ResultsFile(path)
    file.start(settings)
    rows = []
    for case, text in zip(suite.cases, texts, strict=True):
        rows.append(judge_answer(case, Answer(0, text), FORMATS["hermes"]).to_row())
        file.append(rows[-1])
    file.finish([case.id for case in suite.cases])
    file.write_summary({"model": model, "adapter": None, **summarise_run(suite, rows, settings)})
    return rows


def render_correct(suite: Suite) -> list[str]:
    return [FORMATS["hermes"].render(case.expected) or "You are welcome." for case in suite.cases]
