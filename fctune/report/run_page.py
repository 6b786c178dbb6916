"""The page of ``fctune report``: one run, or several over each other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fctune.report.page import Chart, Page, Series, Tone, escape, make_table
from fctune.report.run_charts import find_marks, make_lines
from fctune.report.run_sections import add_accuracy, add_data, add_subject, add_success, format_value
from fctune.report.run_text import ABSENT, describe_end, exit_reason, find_differences, format_number, format_seconds
from fctune.runs.figures import (
    FINAL_STEPS,
    Figures,
    describe_run,
    flatten,
)
from fctune.runs.metrics_file import Column
from fctune.runs.record import RunRecord
from fctune.runs.results import Accuracy
from fctune.runs.success import Criterion
from fctune.runs.time_use import MEANINGS

# What is drawn: (title, unit, whether the axis is logarithmic, metrics with what each is called). Of several runs over
# each other, the first metric of each.
_CURVES: tuple[tuple[str, str, bool, dict[str, str]], ...] = (
    ("Loss", "nats/token", True, {"loss": "training", "validation_loss": "validation"}),
    (
        "Tool-call accuracy while training",
        "share",
        False,
        {"eval_accuracy": "accuracy", "eval_accuracy_low": "lower end, 95 %", "eval_accuracy_high": "upper end, 95 %"},
    ),
    ("Tokens a second", "tokens/s", False, {"tokens_per_s": "all ranks"}),
    (
        "Time of a step",
        "s",
        False,
        {"step_time_s": "step", "data_time_s": "of it waiting for data", "save_wait_s": "of it waiting for saves"},
    ),
    (
        "Memory",
        "GiB",
        False,
        {
            "peak_memory_gib": "most held, rank 0",
            "peak_memory_max_gib": "most held, any rank",
            "memory_reserved_gib": "reserved now",
            "memory_active_gib": "in use now",
        },
    ),
    ("GPU utilisation", "share", False, {"gpu_utilization": "mean of ranks", "gpu_utilization_min": "least"}),
    ("Model FLOPs utilisation", "share of dense bf16", False, {"mfu": "MFU"}),
    ("Hottest GPU", "degrees C", False, {"gpu_temperature_c": "temperature"}),
    ("Power of all GPUs", "W", False, {"gpu_power_w": "power"}),
    ("Gradient norm", "", True, {"grad_norm": "before clipping"}),
    ("Learning rate", "", False, {"lr": "learning rate"}),
    ("Slowest rank", "times the median", False, {"compute_skew": "compute time"}),
)
_VALIDATION = ("Validation loss", "nats/token", True, {"validation_loss": "validation"})
_MAX_EVENTS = 500
_FINAL = f"loss, mean of the last {FINAL_STEPS} steps"
_TILES = {_FINAL, "validation loss, last", "accuracy while training, last", "tokens/s, median", "memory, most held"}
_TILES |= {"GPU utilisation, mean", "time, over restarts", "goodput", "GPU-hours", "cost"}
_MARKS_NOTE = "Marks: dashed line, a restart; triangle at the top, an alert; at the bottom, a checkpoint still there."


def write_run_html(
    records: Sequence[RunRecord],
    path: str | os.PathLike[str],
    accuracies: Sequence[Sequence[Accuracy]] = (),
    verdicts: Sequence[Sequence[Criterion]] = (),
    price: float | None = None,
) -> None:
    """Writes the page of one run or more.

    Args:
        records: the runs.
        path: of the page.
        accuracies: what came of each run, by suite.
        verdicts: on each run.
        price: of a GPU-hour; None: that of each run's config.
    """
    num_steps = sum(len(record.metrics.steps) for record in records)
    make_run_page(records, accuracies, verdicts, price).write(path, f"fctune report: {num_steps:,} steps")


def make_run_page(
    records: Sequence[RunRecord],
    accuracies: Sequence[Sequence[Accuracy]] = (),
    verdicts: Sequence[Sequence[Criterion]] = (),
    price: float | None = None,
) -> Page:
    """The page: what was trained, how it went, what came of it, and what it took."""
    names, figures = name_runs(records), [describe_run(record, price) for record in records]
    accuracies, verdicts = accuracies or [()] * len(records), verdicts or [()] * len(records)
    if len(records) == 1:
        page = Page(f"Run: {names[0]}", *describe_end(records[0]))
        _add_tiles(page, figures[0], accuracies[0])
        if len(reason := exit_reason(records[0])) > 1:
            page.add_section("Why it ended", f'<div class="case"><pre>{escape(chr(10).join(reason))}</pre></div>')
    else:
        page = Page(f"{len(records)} runs: {', '.join(names)}")
        _add_comparison(page, names, records, figures, accuracies)
    notes = [f"<li>{escape(f'{n}: {note}')}</li>" for n, r in zip(names, records, strict=True) for note in r.notes()]
    if notes:
        page.add_section("Of these files", f'<ul class="examples">{"".join(notes)}</ul>')
    _add_curves(page, names, records)
    for name, record, figure, found, judged in zip(names, records, figures, accuracies, verdicts, strict=True):
        suffix = "" if len(records) == 1 else f": {name}"
        if judged:
            add_success(page, judged, suffix, is_over=record.exit is not None)
        add_subject(page, record, suffix)
        _add_events(page, record, suffix)
        _add_time(page, figure, suffix)
        for accuracy in found:
            if suffix:
                page.add_section(f"Evaluation{suffix}", f"<p>{escape(str(accuracy.after.path))}</p>")
            add_accuracy(page, accuracy)
        add_data(page, record, suffix)
    if len(records) == 1 and records[0].config:
        rows = [[key, format_value(value)] for key, value in flatten(records[0].config).items()]
        table = make_table([("Key", False), ("Value", False)], rows)
        page.add_section("Config", f"<details><summary>{len(rows)} keys</summary>{table}</details>")
    return page


def name_runs(records: Sequence[RunRecord]) -> list[str]:
    """A name for each run, told apart by as much of its path as that takes."""
    names = [record.name for record in records]
    return [str(r.path) if names.count(n) > 1 else n for r, n in zip(records, names, strict=True)]


def _add_tiles(page: Page, figures: Figures, accuracies: Sequence[Accuracy]) -> None:
    tiles: list[tuple[str, str, Tone]] = [(f"{figures.num_steps:,}", "steps", "")]
    for name, text in _tell(figures).items():
        if text and name in _TILES:
            tiles.append((text, name, ""))
    for accuracy in accuracies:
        if accuracy.has_total:
            name, after = accuracy.rates()[-1]
            tiles.append((f"{after['rate']:.1%}", f"right of {after['n']:,} cases, {accuracy.suite}", ""))
    page.add_tiles(tiles)


def _tell(figures: Figures) -> dict[str, str]:
    """The figures as text, by what they are; empty where one was not measured."""
    time, accuracy = figures.time, figures.accuracy
    return {
        "steps": f"{figures.num_steps:,}",
        _FINAL: _number(figures.final_loss, ".4f"),
        "validation loss, last": _number(figures.validation_loss, ".4f"),
        "accuracy while training, last": "{:.1%} ({:.1%} - {:.1%})".format(*accuracy) if accuracy else "",
        "tokens, without padding": _number(figures.tokens_total, ",.0f"),
        "of them supervised": _number(figures.supervised_share, ".1%"),
        "padding, of all slots": _number(figures.padding_share, ".1%"),
        "tokens/s, median": _number(figures.tokens_per_s, ",.0f"),
        "tokens/s a rank": _number(figures.tokens_per_s_per_rank, ",.0f"),
        "TFLOP/s a rank of model work, median": format_number(figures.tflops_per_device),
        "TFLOP/s a rank computed, median": format_number(figures.hardware_tflops_per_device),
        "MFU, median": _number(figures.mfu, ".1%"),
        "GPU utilisation, mean": _number(figures.gpu_utilization, ".1%"),
        "hottest GPU": _number(figures.gpu_temperature_c, ".0f", " degrees C"),
        "power of all GPUs, mean": _number(figures.gpu_power_w, ",.0f", " W"),
        "step, median": format_seconds(figures.step_time_p50_s),
        "step, 99th percentile": format_seconds(figures.step_time_p99_s),
        "waiting for data, of step time": _number(figures.data_share, ".2%"),
        "memory, most held": _number(figures.peak_memory_gib, ".2f", " GiB"),
        "time, over restarts": format_seconds(time.elapsed_s),
        "goodput": _number(time.goodput, ".1%"),
        "GPU-hours": format_number(time.gpu_hours),
        "cost": _number(figures.cost, ",.2f"),
    }


def _add_comparison(
    page: Page,
    names: Sequence[str],
    records: Sequence[RunRecord],
    figures: Sequence[Figures],
    accuracies: Sequence[Sequence[Accuracy]],
) -> None:
    told = [_tell(figure) for figure in figures]
    rows: list[list[object]] = [["ended", *(describe_end(record)[0] for record in records)]]
    rows += [[key, *(one[key] for one in told)] for key in told[0] if any(one[key] for one in told)]
    for suite in sorted({accuracy.suite for found in accuracies for accuracy in found if accuracy.has_total}):
        cells = []
        for found in accuracies:
            rates = [a.rates()[-1][1] for a in found if a.suite == suite and a.has_total]
            cells.append(f"{rates[0]['rate']:.1%} ({rates[0]['low']:.1%} - {rates[0]['high']:.1%})" if rates else "")
        rows.append([f"tool calls right, {suite}", *cells])
    columns = [("", False), *((name, False) for name in names)]
    page.add_section("Side by side", f'<div class="side">{make_table(columns, rows)}</div>')
    differ = find_differences([record.config for record in records])
    columns = [("Key", False), *((name, False) for name in names)]
    lacking = {key for key, values in differ.items() if ABSENT in values}
    changed = [[key, *map(format_value, differ[key])] for key in differ if key != "output_dir" and key not in lacking]
    parts = [make_table(columns, changed) if changed else "<p>Nothing but output_dir.</p>"]
    if lacking:
        only = make_table(columns, [[key, *map(format_value, differ[key])] for key in differ if key in lacking])
        parts.append(f"<details><summary>{len(lacking)} keys that not all of them have</summary>{only}</details>")
    page.add_section("What differs in their configs", f'<div class="side">{"".join(parts)}</div>')


def _add_curves(page: Page, names: Sequence[str], records: Sequence[RunRecord]) -> None:
    charts = []
    is_alone = len(records) == 1
    for title, unit, is_log, metrics in _CURVES if is_alone else (_CURVES[0], _VALIDATION, *_CURVES[1:]):
        curves: list[tuple[str, Sequence[int], Column]] = []
        for name, record in zip(names, records, strict=True):
            for metric, called in metrics.items() if is_alone else list(metrics.items())[:1]:
                if record.metrics.has(metric):
                    label = called if is_alone else name
                    curves.append((label, record.metrics.steps, record.metrics.column(metric)))
        if curves:
            marks = find_marks(records[0]) if is_alone else ()
            named = title if is_alone or len(curves) > 1 else f"{title} ({curves[0][0]} alone)"
            charts.append(page.make_chart(make_lines(curves, unit, marks, is_log), named))
    if charts:
        lead = "Long runs are thinned out: of each stretch of steps its least and its greatest value are drawn."
        lead += f" {_MARKS_NOTE}" if is_alone else ""
        page.add_section("Over the steps", f'<div class="pair">{"".join(charts)}</div>', lead=lead)


def _add_events(page: Page, record: RunRecord, suffix: str) -> None:
    events: list[tuple[int, str, str]] = []
    for part in record.segments[1:]:
        ranks = f", {part.world_size} rank{'s' * (part.world_size > 1)}" if part.world_size else ""
        at = f" at {part.at:%Y-%m-%d %H:%M:%SZ}" if part.at else ""
        events.append((part.after_step, "restart", f"from {Path(part.checkpoint or '').name}{ranks}{at}"))
    events += [(alert["step"], "alert", f"{alert['name']}: {alert.get('message', '')}") for alert in record.alerts]
    events += [(state.step, "checkpoint", f"{state.kind}, {state.name}") for state in record.checkpoints]
    for metric, what in (("is_skipped", "update left out: not finite"), ("is_spike", "loss stands out")):
        flags = record.metrics.column(metric)
        losses = record.metrics.column("loss")
        for step, flag, loss in zip(record.metrics.steps, flags, losses, strict=True):
            if flag:
                events.append((step, "step", f"{what}{'' if loss is None else f', loss {loss:.4f}'}"))
    if events:
        kept = events if len(events) <= _MAX_EVENTS else [e for e in events if e[1] != "step"][:_MAX_EVENTS]
        rows = [list(event) for event in sorted(kept, key=lambda event: event[0])]
        table = f'<div class="events">{make_table([("Step", False), ("What", False), ("", False)], rows)}</div>'
        if len(events) > 30:
            rest = "" if kept is events else f", {len(rows):,} shown"
            table = f"<details><summary>{len(events):,} events{rest}</summary>{table}</details>"
        page.add_section(f"Restarts, checkpoints and alerts{suffix}", table)


def _add_time(page: Page, figures: Figures, suffix: str) -> None:
    time = figures.time
    parts = {name: seconds for name, seconds in time.parts.items() if seconds > 0}
    if not parts:
        return
    whole = time.elapsed_s or sum(parts.values())
    rows = [[MEANINGS[name], format_seconds(seconds), f"{seconds / whole:.1%}"] for name, seconds in parts.items()]
    table = make_table([("What it went to", False), ("Time", True), ("Share", True)], rows)
    shares = [round(100 * seconds / whole, 2) for seconds in parts.values()]
    chart = Chart("bars", list(parts), [Series("share of the time, %", shares)])
    if time.elapsed_s is None or time.goodput is None:
        lead = "Of the time in steps; when the run began and ended is not on record."
    else:
        lead = f"{format_seconds(time.elapsed_s)} from the first start to the end, goodput {time.goodput:.1%}"
        if time.gpu_hours is not None:
            lead += f", {format_number(time.gpu_hours)} GPU-hours"
            lead += "" if figures.cost is None else f" at {figures.price:g}: {figures.cost:,.2f}"
        lead += ". A rank counts as a GPU; goodput is the share of the time that computed steps which count."
    page.add_section(f"Time and cost{suffix}", page.make_chart(chart), table, lead=lead)


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"
