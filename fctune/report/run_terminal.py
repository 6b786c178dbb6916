"""A run as a terminal shows it: where it is, its figures, and what asks for attention."""

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

from fctune.report.run_text import describe_end, exit_reason, format_number, format_seconds
from fctune.runs.figures import (
    FINAL_STEPS,
    Figures,
    describe_run,
    mean,
    median,
    quantile,
)
from fctune.runs.metrics_file import Column
from fctune.runs.record import RunRecord
from fctune.runs.success import Criterion, format_criteria

RECENT = 100  # steps that "now" is over
_WIDTH = 44  # of a curve and of the bar, so that with what stands beside them a line is 80 at most
_BLOCKS = "▁▂▃▄▅▆▇█"
_NUM_ALERTS = 5
_STYLES = {"good": "green", "warn": "yellow", "bad": "red", "": "", "PASS": "green", "FAIL": "red"}
_SILENT_S = 120.0  # and twenty median steps: the run may be gone


def render_run(record: RunRecord, judged: Sequence[Criterion] = (), now: datetime | None = None) -> RenderableType:
    """What there is to see of a run.

    Args:
        record: the run, as it was read.
        judged: its verdicts, if any.
        now: the time that its age is counted to; None: this moment.
    """
    text, tone = describe_end(record)
    parts: list[RenderableType] = [Text.assemble((record.name, "bold"), "  ", (text, _STYLES[tone]))]
    parts += [Text(line, _STYLES[tone]) for line in exit_reason(record)[1:]]
    parts += _render_progress(record, now or datetime.now(UTC))
    if record.metrics.steps:
        parts += [Text(), _render_curves(record), Text(), _render_figures(record)]
    for alert in record.alerts[-_NUM_ALERTS:]:
        parts.append(Text(f"alert at step {alert['step']:,}: {alert['name']}: {alert.get('message', '')}", "yellow"))
    if len(record.alerts) > _NUM_ALERTS:
        parts.append(Text(f"and {len(record.alerts) - _NUM_ALERTS:,} alerts before", "dim"))
    parts += [Text(note, "yellow") for note in record.notes()]
    lines = zip(format_criteria(judged), judged, strict=True)
    parts += [Text(line, _STYLES.get(one.status, "dim")) for line, one in lines]
    return Group(*parts)


def draw_sparkline(values: Column, width: int = _WIDTH) -> str:
    """A line of blocks from the least (▁) to the greatest (█) of ``width`` stretches' means; gaps are spaces."""
    width = min(width, len(values))
    stretches = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    means = [_mean([value for value in stretch if value is not None]) for stretch in stretches]
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
    typical = median(metrics, "step_time_s", RECENT)
    if total:
        grid = Table.grid(padding=(0, 1))
        left = "" if typical is None or record.exit is not None else f"{format_seconds(typical * (total - step))} left"
        grid.add_row(ProgressBar(total, step, width=_WIDTH), f"{step:,}/{total:,}", f"{step / total:.0%}", left)
        parts.append(grid)
    written = record.ended_at
    if record.exit is None and written is not None:
        silent_s = max(0.0, (now - written).total_seconds())
        is_long = silent_s > max(_SILENT_S, 20 * (typical or 0.0))
        line = f"last written {format_seconds(silent_s)} ago" + ("; the run may be gone" if is_long else "")
        parts.append(Text(line, "yellow" if is_long else "dim"))
    return parts


def _render_curves(record: RunRecord) -> Table:
    grid = Table.grid(padding=(0, 2))
    curves = {"loss": "loss", "tokens/s": "tokens_per_s", "accuracy": "eval_accuracy"}
    for title, name in curves.items():
        values = [value for value in record.metrics.column(name) if value is not None]
        if len(values) > 1:
            scaled: Column = [math.log(v) for v in values] if name == "loss" and min(values) > 0 else [*values]
            grid.add_row(
                title,
                Text(draw_sparkline(scaled), "cyan"),
                f"{format_number(min(values))} to {format_number(max(values))}",
            )
    return grid


def _render_figures(record: RunRecord) -> Table:
    metrics, figures = record.metrics, describe_run(record)
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim")
    rows: list[tuple[str, str | None]] = [
        (f"loss, last {FINAL_STEPS} steps", _form(figures.final_loss, ".4f")),
        ("validation loss", _at(record, "validation_loss", ".4f")),
        ("tool-call accuracy", _at(record, "eval_accuracy", ".1%")),
        ("learning rate", _at(record, "lr", ".3g")),
        ("gradient norm", _at(record, "grad_norm", ".4g")),
        (f"tokens/s, last {RECENT} steps", _form(median(metrics, "tokens_per_s", RECENT), ",.0f")),
        ("tokens/s, all steps", _form(figures.tokens_per_s, ",.0f")),
        ("tokens so far", _form(figures.tokens_total, ",.0f")),
        ("step, median / p99", _step_times(record)),
        ("waiting for data", _form(_share_of(record, "data_time_s"), ".2%")),
        ("memory, most held", _form(figures.peak_memory_gib, ".2f", " GiB")),
        ("GPU utilisation, hottest, power", _device(record)),
        ("model FLOPs utilisation", _form(median(metrics, "mfu", RECENT), ".1%")),
        ("waiting for saves", _form(_share_of(record, "save_wait_s"), ".2%")),
        ("slowest rank", _slowest(record)),
        ("restarts", f"{len(record.segments) - 1:,}" if len(record.segments) > 1 else None),
        ("checkpoints", ", ".join(state.name for state in record.checkpoints[-3:]) or None),
        ("time, goodput", _time(figures.time.elapsed_s, figures.time.goodput)),
        ("GPU-hours", _spent(figures)),
    ]
    for name, shown in rows:
        if shown is not None:
            table.add_row(name, shown)
    return table


def _at(record: RunRecord, name: str, form: str) -> str | None:
    """The last value of a metric, with its step where that is not the last."""
    found = record.metrics.last(name)
    if found is None:
        return None
    step, value = found
    return f"{value:{form}}" + ("" if step == record.metrics.steps[-1] else f" (step {step:,})")


def _device(record: RunRecord) -> str | None:
    """What NVML said last, of all ranks."""
    forms = {"gpu_utilization": (".0%", ""), "gpu_temperature_c": (".0f", " degrees C"), "gpu_power_w": (",.0f", " W")}
    found = {name: record.metrics.last(name) for name in forms}
    shown = [f"{value[1]:{forms[name][0]}}{forms[name][1]}" for name, value in found.items() if value is not None]
    return ", ".join(shown) or None


def _spent(figures: Figures) -> str | None:
    if figures.time.gpu_hours is None:
        return None
    return format_number(figures.time.gpu_hours) + ("" if figures.cost is None else f", cost {figures.cost:,.2f}")


def _slowest(record: RunRecord) -> str | None:
    """The rank that was slowest most often of late, and by how much it was when it was; of one rank there is none."""
    ranks, skews = (record.metrics.column(name)[-RECENT:] for name in ("slowest_rank", "compute_skew"))
    known = [(int(r), skew) for r, skew in zip(ranks, skews, strict=True) if r is not None and skew is not None]
    if not known or record.run.get("world_size") == 1:
        return None
    (rank, times), hosts = Counter(rank for rank, _ in known).most_common(1)[0], record.run.get("hosts") or []
    where = f" ({hosts[rank]})" if rank < len(hosts) else ""
    by = statistics.fmean(skew for slowest, skew in known if slowest == rank) - 1
    return f"{rank}{where} in {times} of the last {len(known)} steps, by {by:.1%} over the median"


def _step_times(record: RunRecord) -> str | None:
    middle, slow = (quantile(record.metrics, "step_time_s", share, RECENT) for share in (0.5, 0.99))
    return None if middle is None or slow is None else f"{format_seconds(middle)} / {format_seconds(slow)}"


def _share_of(record: RunRecord, name: str) -> float | None:
    """Of the time of the last steps."""
    waited, took = mean(record.metrics, name, RECENT), mean(record.metrics, "step_time_s", RECENT)
    return None if waited is None or not took else waited / took


def _time(elapsed_s: float | None, goodput: float | None) -> str | None:
    return None if elapsed_s is None or goodput is None else f"{format_seconds(elapsed_s)}, {goodput:.1%}"


def _form(value: float | None, form: str, unit: str = "") -> str | None:
    return None if value is None else f"{value:{form}}{unit}"


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
