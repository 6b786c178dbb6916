"""Success criteria of a run: each is PASS, FAIL or not measured, with the figure that decided it."""

from __future__ import annotations

import itertools
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from fctune.base.errors import one_line
from fctune.base.exit_codes import DONE, STOPPED
from fctune.config.sections.success import SuccessConfig
from fctune.runs.figures import FINAL_STEPS, describe_run, flatten_config
from fctune.runs.record import RunRecord, find_files_of_run

CriterionStatus = Literal["PASS", "FAIL", "not measured"]

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
}
_THROUGHPUTS = ("*throughput*.json", "eval/*throughput*.json", "eval/*/*throughput*.json")
# Config keys that may differ between runs whose speeds are compared across world sizes.
_SCALING_KEYS = (
    "output_dir",
    "seed",
    "epochs",
    "max_steps",
    "global_batch_size",
    "parallel.",
    "success",
    "checkpoint.",
)
# In the reason of a run before exit.json recorded it.
_OUT_OF_MEMORY = re.compile(r"OutOfMemory|out of memory|can't allocate memory|MemoryError|ALLOC_FAILED", re.I)
_MIN_QUARTER = 5  # steps whose mean is compared
_DECREASE_TOLERANCE = 1.02  # noise between quarters of a loss that no longer falls
_NO_GPU = "not on a GPU"


@dataclass(frozen=True, slots=True)
class Criterion:
    """One success criterion and its outcome."""

    name: str
    threshold: str
    status: CriterionStatus
    value: float | None
    detail: str  # the value as text, or why it was not measured


@dataclass(frozen=True, slots=True)
class Throughput:
    """Generation speed of a model: new tokens per second over all prompts, ``width`` of which run at a time."""

    tokens_per_s: float
    width: int
    path: Path


def judge_run(
    record: RunRecord,
    thresholds: SuccessConfig | None = None,
    accuracies: Mapping[str, float] | None = None,
    peers: Sequence[RunRecord] = (),
) -> list[Criterion]:
    """Judge a run by each of its success criteria.

    Args:
        record: The run.
        thresholds: Criteria to apply; None takes those of the run's config, or the defaults.
        accuracies: Accuracy of the run's export by suite. Without any, the last evaluation while training is judged.
        peers: Runs that scaling is measured against.
    """
    thresholds = thresholds or read_thresholds(record)
    figures = describe_run(record)
    criteria: list[Criterion] = []

    def judge(name: str, sign: str, limit: float | None, value: float | None, spec: str, reason: str) -> None:
        if limit is None:
            return
        threshold = f"{sign} {limit:{spec}}"
        if value is None:
            criteria.append(Criterion(name, threshold, "not measured", None, reason))
        else:
            status: CriterionStatus = "PASS" if _COMPARISONS[sign](value, limit) else "FAIL"
            criteria.append(Criterion(name, threshold, status, value, f"{value:{spec}}"))

    accuracy, source = _find_accuracy(record, accuracies or {})
    reason = "run fctune eval on the exported model"
    judge(f"tool-call accuracy{source}", ">=", thresholds.min_accuracy, accuracy, ".1%", reason)
    name = f"loss, mean of the last {FINAL_STEPS} steps"
    judge(name, "<", thresholds.max_final_loss, figures.final_loss, ".4g", "no steps")
    reason = f"{_NO_GPU}, or nvidia-ml-py is missing"
    judge("GPU utilization", ">=", thresholds.min_gpu_utilization, figures.gpu_utilization, ".1%", reason)
    peak, capacity = figures.peak_memory_gib, record.run.get("device_memory_gib")
    share = peak / capacity if peak is not None and capacity else None
    judge("peak GPU memory", ">=", thresholds.min_memory_share, share, ".1%", _NO_GPU)
    judge("peak GPU memory", "<=", thresholds.max_memory_share, share, ".1%", _NO_GPU)
    speed, reason = (None, _NO_GPU) if record.is_cpu else (figures.tokens_per_s_per_rank, "no steps")
    judge("tokens/s per GPU, median", ">", thresholds.min_tokens_per_s_per_gpu, speed, ",.0f", reason)
    planned = record.run.get("planned_tokens_per_s_per_gpu")
    share = speed / planned if speed is not None and planned else None
    name = "tokens/s per GPU, of the planned" + (f" {planned:,.0f}" if planned else "")
    reason = reason if speed is None else "the plan knows no speed for this model and GPU"
    judge(name, ">=", thresholds.min_planned_speed, share, ".1%", reason)
    scaling, reason = _measure_scaling(record, peers), "needs a run of the same work on fewer ranks"
    judge("scaling", ">=", thresholds.min_scaling, scaling, ".1%", reason)
    if thresholds.no_out_of_memory:
        criteria.append(_judge_memory(record))
    if thresholds.trainable_parameters is not None:
        criteria.append(_judge_trainable(record, thresholds.trainable_parameters))
    judge("merged model, GB", "<=", thresholds.max_model_gb, _measure_export(record), ".2f", "nothing is exported yet")
    if thresholds.loss_decreases:
        criteria.append(_judge_decrease(record))
    if thresholds.final_checkpoint:
        criteria.append(_judge_final_checkpoint(record))
    found = find_throughput(record)
    width = "" if found is None else f", {found.width} prompts at a time"
    generated = None if found is None else found.tokens_per_s
    reason = "run fctune throughput --model RUN_DIR --json RUN_DIR/throughput.json"
    judge(f"inference tokens/s{width}", ">=", thresholds.min_inference_tokens_per_s, generated, ",.0f", reason)
    return criteria


def format_criteria(criteria: Sequence[Criterion]) -> list[str]:
    """Format criteria as the lines of an aligned table: status, name, threshold, detail."""
    rows = [(one.status, one.name, one.threshold, one.detail) for one in criteria]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]


def read_thresholds(record: RunRecord) -> SuccessConfig:
    """Return the success thresholds from a run's config, with defaults for those it does not set."""
    configured = record.config.get("success")
    known = {spec.name for spec in fields(SuccessConfig)}
    return SuccessConfig(**{key: value for key, value in (configured or {}).items() if key in known})


def is_success(criteria: Sequence[Criterion], is_strict: bool = False) -> bool:
    """Return True if no criterion failed; with ``is_strict``, only if all were measured and passed."""
    return all(one.status == "PASS" or (one.status == "not measured" and not is_strict) for one in criteria)


def _find_accuracy(record: RunRecord, accuracies: Mapping[str, float]) -> tuple[float | None, str]:
    """Return the lowest accuracy of the suites and a suffix that names where it comes from."""
    if accuracies:
        lowest, suite = min((rate, suite) for suite, rate in accuracies.items())
        return lowest, f", {suite}"
    found = record.metrics.latest("eval_accuracy")
    return (None, "") if found is None else (found[1], f" while training, step {found[0]:,}")


def _judge_trainable(record: RunRecord, expected: int) -> Criterion:
    counts = record.run.get("parameters")
    name, threshold = "trainable parameters", f"= {expected:,}"
    if counts is None:
        return Criterion(name, threshold, "not measured", None, "the run has not recorded them")
    found = counts["trained"] - counts["token_rows"]
    return Criterion(name, threshold, "PASS" if found == expected else "FAIL", found, f"{found:,}")


def _measure_export(record: RunRecord) -> float | None:
    """Return the size of the exported merged model in GB; None without one."""
    sizes = [file.stat().st_size for file in (record.files.export / "merged").glob("*") if file.is_file()]
    return sum(sizes) / 1e9 if sizes else None


def _judge_decrease(record: RunRecord) -> Criterion:
    """Compare the mean losses of the run's quarters."""
    name, losses = "steady decrease of the loss", record.metrics.values("loss")
    if len(losses) < 4 * _MIN_QUARTER:
        reason = f"needs {4 * _MIN_QUARTER} steps, has {len(losses)}"
        return Criterion(name, "", "not measured", None, reason)
    ends = [len(losses) * quarter // 4 for quarter in range(5)]
    means = [fmean(losses[start:end]) for start, end in itertools.pairwise(ends)]
    is_falling = all(later <= _DECREASE_TOLERANCE * earlier for earlier, later in itertools.pairwise(means))
    is_lower = is_falling and means[-1] < means[0]
    shown = ", ".join(f"{mean:.4g}" for mean in means)
    return Criterion(name, "", "PASS" if is_lower else "FAIL", means[-1] - means[0], f"quarters: {shown}")


def _judge_final_checkpoint(record: RunRecord) -> Criterion:
    name, last = "final checkpoint", record.num_steps
    if record.exit is None:
        return Criterion(name, "", "not measured", None, "the run has not ended")
    link = record.files.checkpoints / "final"
    saved = [one for one in record.checkpoints if one.name == link.resolve().name]
    if not saved:
        return Criterion(name, "", "FAIL", None, f"{link} is not a complete checkpoint")
    step = saved[0].step
    is_last = step == (record.metrics.steps[-1] if record.metrics.steps else last)
    return Criterion(name, "", "PASS" if is_last else "FAIL", step, f"{saved[0].name}")


def _judge_memory(record: RunRecord) -> Criterion:
    """Check how every segment of the run ended; ``run.json`` records that for the segments before a restart."""

    def criterion(status: CriterionStatus, detail: str) -> Criterion:
        return Criterion("no out-of-memory", "", status, None, detail)

    exits = [segment.exit for segment in record.segments[:-1]] + [record.exit]
    for exit_ in exits:
        found = exit_ or {}
        reason = one_line(found.get("reason", ""))
        if found.get("is_out_of_memory", _OUT_OF_MEMORY.search(reason) is not None):
            return criterion("FAIL", reason[:160])
    if exits[-1] is None:
        return criterion("not measured", "the run has not recorded how it ended")
    if None in exits:
        return criterion("not measured", "the reason for a restart was not recorded")
    is_complete = all(exit_ is not None and exit_.get("code") in (DONE, STOPPED) for exit_ in exits)
    return criterion("PASS", "none from start to end" if is_complete else "the run ended for another reason")


def _measure_scaling(record: RunRecord, peers: Sequence[RunRecord]) -> float | None:
    """Divide tokens/s per rank by those of the peer that did the same work on the fewest ranks; None without one."""
    size = record.run.get("world_size")
    smaller = [
        peer
        for peer in peers
        if peer is not record and size and 0 < (peer.run.get("world_size") or 0) < size and _work(peer) == _work(record)
    ]
    own = describe_run(record).tokens_per_s_per_rank
    if own is None or not smaller:
        return None
    reference = describe_run(min(smaller, key=lambda peer: peer.run["world_size"])).tokens_per_s_per_rank
    return own / reference if reference else None


def _work(record: RunRecord) -> dict[str, Any]:
    flat = flatten_config(record.config)
    return {key: value for key, value in flat.items() if not key.startswith(_SCALING_KEYS)}


def find_throughput(record: RunRecord) -> Throughput | None:
    """Find the highest throughput in the newest throughput file of the run; None without one.

    Searches the run's directory and its parent. Rows whose model is inside the run's directory count; files inside
    the run's directory may also contain rows of a server. Files older than the run belong to an earlier run in the
    same directory.
    """
    run = record.path.resolve()
    for path in reversed(find_files_of_run(run, _THROUGHPUTS)):
        if record.started_after(path):
            continue
        accepts_servers = path.resolve().is_relative_to(run)
        speeds = [
            Throughput(float(row["tokens_per_s"]), row["width"], path)
            for row in _read_throughput_rows(path)
            if _is_of_run(row["model"], run, accepts_servers)
        ]
        if speeds:
            return max(speeds, key=lambda speed: speed.tokens_per_s)
    return None


def _is_of_run(model: str, run: Path, accepts_servers: bool) -> bool:
    if model.startswith(("http://", "https://")):
        return accepts_servers
    return Path(model).resolve().is_relative_to(run)


def _read_throughput_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file of ``fctune throughput --json``; empty if it is something else."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    types = {"model": str, "width": int, "tokens_per_s": int | float}
    if not isinstance(rows, list):
        return []
    return [
        row
        for row in rows
        if isinstance(row, dict) and all(isinstance(row.get(key), type_) for key, type_ in types.items())
    ]
