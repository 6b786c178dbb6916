"""Terminal view of a run: progress, curves, figures, alerts and success criteria."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fctune.config.intervals import format_count
from fctune.pages.run_text import describe_outcome, exit_reason, format_figure, format_number, format_seconds
from fctune.runs.figures import FINAL_STEPS, Figures, describe_run
from fctune.runs.record import Column, RunRecord
from fctune.runs.success import Criterion, format_criteria

RECENT = 100  # steps that current figures are computed over

_WIDTH = 44  # of a curve and of the progress bar; with their labels a line takes at most 80 columns
_BLOCKS = "▁▂▃▄▅▆▇█"
_NUM_ALERTS = 5
_STYLES = {"good": "green", "warn": "yellow", "bad": "red", "": "", "PASS": "green", "FAIL": "red"}
_SILENT_S = 120.0  # and twenty median steps without a write: the run may have died


def render_run(record: RunRecord, criteria: Sequence[Criterion] = (), now: datetime | None = None) -> RenderableType:
    """Render the current state of a run.

    Args:
        record: The run.
        criteria: Its judged success criteria, if any.
        now: Current time, to compute how long ago the run last wrote; None takes the clock's.
    """
    text, tone = describe_outcome(record)
    parts: list[RenderableType] = [Text.assemble((record.name, "bold"), "  ", (text, _STYLES[tone]))]
    parts += [Text(line, _STYLES[tone]) for line in exit_reason(record)[1:]]
    parts += _render_progress(record, now or datetime.now(UTC))
    if record.metrics.steps:
        parts += [Text(), _render_curves(record), Text(), _render_figures(record)]
    for alert in record.alerts[-_NUM_ALERTS:]:
        parts.append(Text(f"alert at step {alert['step']:,}: {alert['name']}: {alert.get('message', '')}", "yellow"))
    if len(record.alerts) > _NUM_ALERTS:
        parts.append(Text(f"and {format_count(len(record.alerts) - _NUM_ALERTS, 'earlier alert')}", "dim"))
    parts += [Text(note, "yellow") for note in record.notes()]
    lines = zip(format_criteria(criteria), criteria, strict=True)
    parts += [Text(line, _STYLES.get(one.status, "dim")) for line, one in lines]
    return Group(*parts)


def draw_sparkline(values: Column, width: int = _WIDTH) -> str:
    """Draw values as blocks from the lowest (▁) to the highest (█), averaged into at most ``width`` columns.

    Columns without a value are spaces.
    """
    width = min(width, len(values))
    ranges = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    known_by_range = [[value for value in part if value is not None] for part in ranges]
    means = [statistics.fmean(known) if known else None for known in known_by_range]
    known = [value for value in means if value is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    steps = len(_BLOCKS) - 1
    return "".join(
        " " if value is None else _BLOCKS[round(steps * (value - low) / span) if span else 0] for value in means
    )


def _render_progress(record: RunRecord, now: datetime) -> list[RenderableType]:
    metrics, total = record.metrics, record.num_steps
    if not metrics.steps:
        return []
    step = metrics.steps[-1]
    parts: list[RenderableType] = []
    median_s = metrics.median("step_time_s", RECENT)
    if total:
        grid = Table.grid(padding=(0, 1))
        is_over = median_s is None or record.exit is not None
        left = "" if is_over else f"{format_seconds((median_s or 0.0) * (total - step))} left"
        grid.add_row(ProgressBar(total, step, width=_WIDTH), f"{step:,}/{total:,}", f"{step / total:.0%}", left)
        parts.append(grid)
    written = record.ended_at
    if record.exit is None and written is not None:
        silent_s = max(0.0, (now - written).total_seconds())
        is_long = silent_s > max(_SILENT_S, 20 * (median_s or 0.0))
        line = f"last write {format_seconds(silent_s)} ago" + ("; the run may have died" if is_long else "")
        parts.append(Text(line, "yellow" if is_long else "dim"))
    return parts


def _render_curves(record: RunRecord) -> Table:
    grid = Table.grid(padding=(0, 2))
    curves = {"loss": "loss", "tokens/s": "tokens_per_s", "accuracy": "eval_accuracy"}
    for title, name in curves.items():
        values = record.metrics.values(name)
        if len(values) > 1:
            scaled: Column = [math.log(v) for v in values] if name == "loss" and min(values) > 0 else [*values]
            ends = f"{format_number(min(values))} to {format_number(max(values))}"
            grid.add_row(title, Text(draw_sparkline(scaled), "cyan"), ends)
    return grid


def _render_figures(record: RunRecord) -> Table:
    metrics, figures = record.metrics, describe_run(record)
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim")
    rows: dict[str, str] = {
        f"loss, last {FINAL_STEPS} steps": format_figure(figures.final_loss, ".4f"),
        "validation loss": _latest(record, "validation_loss", ".4f"),
        "tool-call accuracy": _latest(record, "eval_accuracy", ".1%"),
        "learning rate": _latest(record, "lr", ".3g"),
        "gradient norm": _latest(record, "grad_norm", ".4g"),
        f"tokens/s, last {RECENT} steps": format_figure(metrics.median("tokens_per_s", RECENT), ",.0f"),
        "tokens/s, all steps": format_figure(figures.tokens_per_s, ",.0f"),
        "tokens so far": format_figure(figures.tokens_total, ",.0f"),
        "step time, median / p99": _step_times(record),
        "waiting for data": format_figure(_share_of_steps(record, "data_time_s"), ".2%"),
        "peak memory": format_figure(figures.peak_memory_gib, ".2f", " GiB"),
        "GPU utilization, hottest, power": _latest_gpu_readings(record),
        "model FLOPs utilization": format_figure(metrics.median("mfu", RECENT), ".1%"),
        "waiting for saves": format_figure(_share_of_steps(record, "save_wait_s"), ".2%"),
        "slowest rank": _slowest_rank(record),
        "restarts": f"{len(record.segments) - 1:,}" if len(record.segments) > 1 else "",
        "checkpoints": ", ".join(checkpoint.name for checkpoint in record.checkpoints[-3:]),
        "time, goodput": _time_and_goodput(figures),
        "GPU-hours": format_number(figures.time.gpu_hours)
        + ("" if figures.cost is None else f", cost {figures.cost:,.2f} {figures.currency}"),
    }
    for name, shown in rows.items():
        if shown:
            table.add_row(name, shown)
    return table


def _latest(record: RunRecord, name: str, spec: str) -> str:
    """Format the latest value of a metric, with its step if that is not the last one."""
    found = record.metrics.latest(name)
    if found is None:
        return ""
    step, value = found
    return f"{value:{spec}}" + ("" if step == record.metrics.steps[-1] else f" (step {step:,})")


def _latest_gpu_readings(record: RunRecord) -> str:
    specs = {"gpu_utilization": (".0%", ""), "gpu_temperature_c": (".0f", " degrees C"), "gpu_power_w": (",.0f", " W")}
    found = {name: record.metrics.latest(name) for name in specs}
    return ", ".join(format_figure(value[1], *specs[name]) for name, value in found.items() if value is not None)


def _slowest_rank(record: RunRecord) -> str:
    """Describe the rank that was most often the slowest recently, and by how much; empty for a single rank."""
    ranks, skews = (record.metrics.column(name)[-RECENT:] for name in ("slowest_rank", "compute_skew"))
    known = [(int(r), skew) for r, skew in zip(ranks, skews, strict=True) if r is not None and skew is not None]
    if not known or record.run.get("world_size") == 1:
        return ""
    (rank, times), hosts = Counter(rank for rank, _ in known).most_common(1)[0], record.run.get("hosts") or []
    where = f" ({hosts[rank]})" if rank < len(hosts) else ""
    excess = statistics.fmean(skew for slowest, skew in known if slowest == rank) - 1
    return f"{rank}{where} in {times} of the last {len(known)} steps, by {excess:.1%} over the median"


def _step_times(record: RunRecord) -> str:
    median = record.metrics.median("step_time_s", RECENT)
    slow = record.metrics.quantile("step_time_s", 0.99, RECENT)
    return "" if median is None else f"{format_seconds(median)} / {format_seconds(slow)}"


def _share_of_steps(record: RunRecord, name: str) -> float | None:
    waited, took = record.metrics.mean(name, RECENT), record.metrics.mean("step_time_s", RECENT)
    return None if waited is None or not took else waited / took


def _time_and_goodput(figures: Figures) -> str:
    time = figures.time
    return "" if time.goodput is None else f"{format_seconds(time.elapsed_s)}, {time.goodput:.1%}"
