"""Line charts over the steps of one or several runs, with long runs thinned out without losing extremes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from fctune.pages.page import Chart, Group, Mark, Page, Series
from fctune.runs.record import Column, RunRecord

NUM_POINTS = 400
_MAX_MARKS = 60  # per kind; more would cover the curves
_SMOOTH = 40
_UNEQUAL = 4  # times as many steps as the shortest run, from which on the axis of steps is logarithmic
_MAX_FAMILY = 6  # curves of one family of metrics; more would cover each other


class _Curves(NamedTuple):
    """A chart: metric -> name. A metric with * is a family; that part names its members."""

    title: str
    metrics: dict[str, str]
    unit: str = ""
    is_log: bool = False


# Comparisons of runs draw the first metric of each.
_CURVES = (
    _Curves("Loss", {"loss": "training, smoothed", "validation_loss": "validation"}, "nats/token", is_log=True),
    _Curves(
        "Preference accuracy",
        {"reward_accuracy": "training", "validation_reward_accuracy": "validation"},
        "share of pairs",
    ),
    _Curves("Reward margin", {"reward_margin": "training", "validation_reward_margin": "validation"}),
    _Curves("Reward", {"reward_mean": "mean of the answers"}),
    _Curves("Answers that are right", {"pass_rate": "all", "pass_rate/*": "*"}, "share"),
    _Curves("Groups to learn from", {"groups/*": "*", "groups_dropped": "dropped"}, "groups"),
    _Curves("Length of answers", {"answer_tokens_mean": "mean"}, "tokens"),
    _Curves("Entropy", {"entropy": "estimate"}, "nats/token"),
    _Curves("Probability in training over generation", {"ratio_mean": "mean", "ratio_max": "largest"}, "ratio"),
    _Curves("Clipped tokens", {"clip_share": "by the loss", "ratio_capped_share": "weight at the cap"}, "share"),
    _Curves("Staleness", {"staleness": "oldest answer"}, "updates"),
    _Curves(
        "Answers of a batch",
        {
            "answers": "asked",
            "answers_trained": "trained",
            "answers_masked": "cut off",
            "answers_failed": "failed",
            "answers_rejected": "unusable, asked again",
        },
    ),
    _Curves("Log-probability of answers", {"logps_chosen": "chosen", "logps_rejected": "rejected"}, "nats"),
    _Curves(
        "Tool-call accuracy while training",
        {
            "eval_accuracy": "accuracy",
            "eval_accuracy_low": "lower bound, 95 %",
            "eval_accuracy_high": "upper bound, 95 %",
        },
        "share",
    ),
    _Curves("Throughput", {"tokens_per_s": "all ranks"}, "tokens/s"),
    _Curves(
        "Step time",
        {
            "step_time_s": "step",
            "data_time_s": "waiting for data",
            "save_wait_s": "waiting for saves",
            "generation_time_s": "generating and judging",
        },
        "s",
    ),
    _Curves(
        "Memory",
        {
            "peak_memory_gib": "peak, rank 0",
            "peak_memory_max_gib": "peak, any rank",
            "memory_reserved_gib": "reserved",
            "memory_active_gib": "in use",
        },
        "GiB",
    ),
    _Curves("GPU utilization", {"gpu_utilization": "mean over ranks", "gpu_utilization_min": "lowest rank"}, "share"),
    _Curves("Model FLOPs utilization", {"mfu": "MFU"}, "share of dense bf16"),
    _Curves("Hottest GPU", {"gpu_temperature_c": "temperature"}, "degrees C"),
    _Curves("Power of all GPUs", {"gpu_power_w": "power"}, "W"),
    _Curves("Gradient norm", {"grad_norm": "before clipping"}, is_log=True),
    _Curves("Learning rate", {"lr": "learning rate"}),
    _Curves("Slowest rank", {"compute_skew": "compute time"}, "times the median"),
)
_VALIDATION = _Curves("Validation loss", {"validation_loss": "validation"}, "nats/token", is_log=True)
# Chart that each alert is marked on; the others, such as a full disk, are only listed.
_ALERT_CHARTS = {
    "loss_spike": "Loss",
    "throughput": "Throughput",
    "data_wait": "Step time",
    "no_progress": "Step time",
    "straggler": "Slowest rank",
}
_LEAD = "Long runs are thinned out: the lowest and the highest value of each range of steps are drawn."
_MARKS_LEGEND = (
    "A dashed line is a restart, a triangle at the top an alert about what the chart shows, one at the bottom a "
    "checkpoint that still exists."
)


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over steps; a faint one is drawn behind the others, in the colour of the curve before it."""

    name: str
    steps: Sequence[int]
    values: Column
    is_faint: bool = False


def find_metrics(record: RunRecord, metrics: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the metrics with their names, families replaced by the members that the run recorded."""
    found: list[tuple[str, str]] = []
    for metric, label in metrics.items():
        if metric.endswith("/*"):
            prefix = metric.removesuffix("*")
            members = sorted(name for name in record.metrics.columns if name.startswith(prefix))
            found += [(name, name.removeprefix(prefix)) for name in members[:_MAX_FAMILY]]
        else:
            found.append((metric, label))
    return found


def add_run_charts(page: Page, names: Sequence[str], records: Sequence[RunRecord]) -> None:
    """Add the charts of one run, or charts that compare several runs."""
    charts = []
    is_single = len(records) == 1
    lengths = [record.metrics.steps[-1] for record in records if record.metrics.steps]
    is_log_steps = not is_single and max(lengths, default=0) >= _UNEQUAL * min(lengths, default=0)
    for title, metrics, unit, is_log in _CURVES if is_single else (_CURVES[0], _VALIDATION, *_CURVES[1:]):
        curves: list[Curve] = []
        for name, record in zip(names, records, strict=True):
            for metric, label in find_metrics(record, metrics if is_single else dict([next(iter(metrics.items()))])):
                if record.metrics.has(metric):
                    column, steps = record.metrics.column(metric), record.metrics.steps
                    smoothed = smooth(column) if metric == "loss" else column
                    curves.append(Curve(label if is_single else name, steps, smoothed))
                    if is_single and smoothed != column:
                        curves.append(Curve("training, each step", steps, column, is_faint=True))
        if curves:
            marks = find_marks(records[0], title) if is_single else ()
            shown = title if is_single or len(curves) > 1 else f"{title} ({curves[0].name} only)"
            note = "Smoothed." if title == "Loss" and not is_single else ""
            chart = make_line_chart(curves, unit, marks, is_log, is_log_steps)
            charts.append(replace(chart, title=shown, note=note))
    if charts:
        lead = f"{_LEAD} {_MARKS_LEGEND}" if is_single else _LEAD
        lead += " The axis of steps is logarithmic, so that the short run is not squeezed." if is_log_steps else ""
        page.add_section("Charts", Group(charts, "pair"), lead=lead)


def thin(values: Sequence[float | None], num_points: int = NUM_POINTS) -> list[int]:
    """Return the indices of at most ``num_points`` values that draw the same line.

    Keeps the first and the last value and the lowest and the highest of each range, like the min-max decimation of
    plotting libraries. Gaps are left out.
    """
    indices = [index for index, value in enumerate(values) if value is not None]
    if len(indices) <= num_points:
        return indices
    num_ranges = num_points // 2 - 1
    kept = {indices[0], indices[-1]}
    for number in range(num_ranges):
        part = indices[number * len(indices) // num_ranges : (number + 1) * len(indices) // num_ranges]
        kept.add(min(part, key=lambda index: values[index] or 0.0))
        kept.add(max(part, key=lambda index: values[index] or 0.0))
    return sorted(kept)


def smooth(values: Column) -> Column:
    """Average each value with its neighbours, a fortieth of the run together; fewer near the ends and around gaps.

    As many before as after, so that a steep start is neither delayed nor flattened. Values that are not finite
    stay, and count in no average.
    """
    half = len(values) // (2 * _SMOOTH)
    if not half:
        return list(values)
    finite = [value if value is not None and math.isfinite(value) else None for value in values]
    sums = list(accumulate((value or 0.0 for value in finite), initial=0.0))
    counts = list(accumulate((value is not None for value in finite), initial=0))
    smoothed: Column = []
    for index, value in enumerate(values):
        if finite[index] is None:
            smoothed.append(value)
            continue
        reach = min(half, index, len(values) - 1 - index)
        first, end = index - reach, index + reach + 1
        smoothed.append((sums[end] - sums[first]) / (counts[end] - counts[first]))
    return smoothed


def make_line_chart(
    curves: Sequence[Curve],
    value_label: str,
    marks: Sequence[Mark] = (),
    is_log: bool = False,
    is_log_steps: bool = False,
) -> Chart:
    """Make a chart of curves.

    ``is_log`` takes effect if all values are positive and span a decade: over less, a logarithmic axis has hardly a
    round number to label.
    """
    num_points = max(100, min(NUM_POINTS, 3 * NUM_POINTS // len(curves)))
    drawn: list[dict[int, float | None]] = []
    for curve in curves:
        drawn.append({curve.steps[index]: curve.values[index] for index in thin(curve.values, num_points)})
    labels = sorted(set().union(*drawn))
    series = []
    for curve, points in zip(curves, drawn, strict=True):
        # Where another curve has a point, this one shows its value too, so that both can be read off at one step.
        own = dict(zip(curve.steps, curve.values, strict=True)) if len(labels) > len(points) else points
        row = [own.get(label) for label in labels]
        series.append(Series(curve.name, row, _is_sparse(row), curve.is_faint))
    known = [value for one in series for value in one.values if value is not None]
    spans_decade = bool(known) and 0 < 10 * min(known) <= max(known)
    return Chart("lines", labels, series, "step", value_label, marks, is_log and spans_decade, is_log_steps)


def find_marks(record: RunRecord, title: str) -> list[Mark]:
    """Return the marks of one chart of a run, thinned out to ``_MAX_MARKS`` a kind.

    Every chart has the restarts and the existing checkpoints, and the alerts about what it shows.
    """
    restarts = [Mark(segment.after_step, "restart") for segment in record.segments[1:]]
    saves = [Mark(step, "checkpoint") for step in sorted({checkpoint.step for checkpoint in record.checkpoints})]
    alerts = [
        Mark(step, "alert")
        for step in sorted({a["step"] for a in record.alerts if _ALERT_CHARTS.get(a["name"]) == title})
    ]
    return [mark for kind in (restarts, saves, alerts) for mark in _thin_marks(kind)]


def _is_sparse(row: Column) -> bool:
    """Return True for a row with a gap inside, or with a single value, which no line leads to."""
    indices = [index for index, value in enumerate(row) if value is not None]
    return len(indices) == 1 or (bool(indices) and indices[-1] - indices[0] >= len(indices))


def _thin_marks(marks: list[Mark]) -> list[Mark]:
    if len(marks) <= _MAX_MARKS:
        return marks
    return [marks[number * (len(marks) - 1) // (_MAX_MARKS - 1)] for number in range(_MAX_MARKS)]
