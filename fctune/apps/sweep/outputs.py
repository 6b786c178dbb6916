"""Outputs of a sweep: the comparison page, a table of its runs, and the best config."""

from __future__ import annotations

import csv
import io
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune.apps.sweep.driver import measure, read_record
from fctune.apps.sweep.sampling import describe_settings, short_names
from fctune.apps.sweep.study import Status, Study, SweepRun
from fctune.base.exit_codes import STOPPED
from fctune.base.files import write_atomically
from fctune.config.intervals import format_count
from fctune.pages.page import NO_WRAP, Cell, Chart, Group, Num, Page, Pre, Series, Table, Tile, Tone
from fctune.pages.run_charts import add_run_charts
from fctune.pages.run_text import format_figure, format_number, format_seconds, format_value
from fctune.runs.figures import Figures, describe_run
from fctune.runs.record import RunRecord

_NUM_DRAWN = 10  # runs in the charts over steps; more curves cannot be told apart
_ORDER: tuple[Status, ...] = ("completed", "stopped early", "running", "waiting", "failed")
_TONES: dict[Status, Tone] = {
    "completed": "good",
    "stopped early": "",
    "running": "warn",
    "waiting": "",
    "failed": "bad",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A run in the comparison."""

    run: SweepRun
    status: Status
    value: float | None  # of the metric, at the run's last step that has it
    record: RunRecord | None
    figures: Figures | None

    @property
    def reason(self) -> str:
        """First line of why its last attempt that failed did so; empty if none failed."""
        failed = [attempt for attempt in self.run.attempts if attempt.code not in (None, 0, STOPPED)]
        reasons = [attempt.reason for attempt in failed if attempt.reason]
        return reasons[-1].splitlines()[0] if reasons else ""


def compare_runs(study: Study) -> list[Row]:
    """Return the runs of a study, best first: completed ones, then stopped ones, then the others."""
    spec = study.sweep.spec
    rows = []
    for run in study.runs:
        record = read_record(study, run)
        value = measure(record.metrics, spec.metric) if record is not None else None
        rows.append(Row(run, study.status(run), value, record, describe_run(record) if record is not None else None))

    def rank(row: Row) -> tuple[Any, ...]:
        sign = -1 if spec.is_maximized else 1
        value = float("inf") if row.value is None else sign * row.value
        return _ORDER.index(row.status), value, row.run.number

    return sorted(rows, key=rank)


def find_best(rows: list[Row]) -> Row | None:
    """Return the best run that completed; None if none has the metric."""
    return next((row for row in rows if row.status == "completed" and row.value is not None), None)


def write_outputs(study: Study) -> list[Row]:
    """Write ``comparison.html``, ``results.csv`` and ``best.yaml``; returns the compared runs."""
    rows = compare_runs(study)
    write_atomically(study.path / "results.csv", render_csv(study, rows))
    if (best := find_best(rows)) is not None:
        write_atomically(study.path / "best.yaml", render_best(study, best, len(rows)))
    make_sweep_page(study, rows).write(
        study.path / "comparison.html", f"fctune sweep: {format_count(len(rows), 'run')}"
    )
    return rows


def render_csv(study: Study, rows: list[Row]) -> str:
    """Return the comparison as CSV, best first."""
    keys = list_keys(study)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", "status", study.sweep.spec.metric, *keys, "steps", "seconds", "attempts", "reason"])
    for row in rows:
        steps = row.figures.num_steps if row.figures else 0
        seconds = row.figures.time.elapsed_s if row.figures else None
        settings = [format_value(row.run.settings[key]) if key in row.run.settings else "" for key in keys]
        value = "" if row.value is None else repr(row.value)
        shown = "" if seconds is None else f"{seconds:.1f}"
        writer.writerow([row.run.name, row.status, value, *settings, steps, shown, len(row.run.attempts), row.reason])
    return text.getvalue()


def render_best(study: Study, best: Row, num_runs: int) -> str:
    """Return the config of the best run, ready to launch into a directory of its own."""
    spec = study.sweep.spec
    file = study.path / "best.yaml"
    extreme = "highest" if spec.is_maximized else "lowest"
    lines = [
        f"# The best of {format_count(num_runs, 'run')}: run {best.run.name}, "
        f"with the {extreme} {spec.metric}, {best.value:.6g}.",
        f"# {describe_settings(best.run.settings)}",
        "#",
        f"#   fctune train {file}",
        "#",
    ]
    if spec.overrides:
        lines += [
            "# Values from `sweep` were the same in all runs of the sweep. Change those that kept the runs short."
        ]
    body = study.render_config(best.run, Path("runs") / f"{study.path.name}-best")
    return "\n".join(lines) + "\n\n" + body


def make_sweep_page(study: Study, rows: list[Row]) -> Page:
    """Make the page that compares the runs of a study."""
    spec, best = study.sweep.spec, find_best(rows)
    num_over = sum(row.status in ("completed", "stopped early", "failed") for row in rows)
    num_failed = sum(row.status == "failed" for row in rows)
    is_done = num_over == len(rows)
    verdict = f"{num_over} of {format_count(len(rows), 'run has', 'runs have')} ended."
    if best is not None and is_done:
        verdict = f"Best: {describe_settings(best.run.settings) or 'run ' + best.run.name}"
    page = Page(f"Sweep: {study.path.name}", verdict, "bad" if num_failed else "good" if best and is_done else "warn")
    _add_tiles(page, study, rows, best)
    page.add_section("Runs", _make_table(study, rows), lead=_describe_order(study))
    if best is not None:
        page.add_section("Launch the best", Pre(f"fctune train {study.path / 'best.yaml'}"))
    charts = [chart for key in list_keys(study) if (chart := _draw_key(study, rows, key)) is not None]
    if charts:
        lead = (
            "Each point is the runs with that value: the best of them and their median, of stopped runs the last value."
        )
        page.add_section(f"{spec.metric} by setting", Group(charts, "pair"), lead=lead)
    drawn = [row for row in rows if row.record is not None and row.record.metrics.steps][:_NUM_DRAWN]
    if drawn:
        num_measured = sum(row.record is not None and bool(row.record.metrics.steps) for row in rows)
        if num_measured > len(drawn):
            num_runs = format_count(num_measured, "run")
            page.add_section("Curves", f"The charts below show the best {len(drawn)} of {num_runs}.")
        add_run_charts(page, [row.run.title for row in drawn], [row.record for row in drawn if row.record is not None])
    return page


def list_keys(study: Study) -> list[str]:
    """Return the swept keys in the order in which runs name them."""
    return list(dict.fromkeys(key for run in study.runs for key in run.settings))


def _add_tiles(page: Page, study: Study, rows: list[Row], best: Row | None) -> None:
    counts = {status: sum(row.status == status for row in rows) for status in _ORDER}
    tiles: list[Tile] = []
    if best is not None:
        tiles.append((f"{best.value:.5g}", f"{study.sweep.spec.metric} of the best run, {best.run.name}", "good"))
    tiles.append((f"{counts['completed']} of {len(rows)}", "runs completed", ""))
    tiles += [(str(counts[status]), status, _TONES[status]) for status in _ORDER[1:] if counts[status]]
    hours = [row.figures.time.gpu_hours for row in rows if row.figures and row.figures.time.gpu_hours is not None]
    if hours:
        tiles.append((format_number(sum(hours)), "GPU-hours, all runs", ""))
    page.add_tiles(tiles)


def _describe_order(study: Study) -> str:
    spec = study.sweep.spec
    order = "highest" if spec.is_maximized else "lowest"
    lead = f"By {spec.metric}, {order} first; completed runs before those that were stopped early."
    if spec.early_stop is not None:
        share = f"{1 / spec.early_stop.factor:.0%}"
        lead += f" From step {spec.early_stop.first_step} on, runs outside the best {share} were stopped."
    return lead


def _make_table(study: Study, rows: list[Row]) -> Table:
    keys = list_keys(study)
    columns = ["run", *map(Num, short_names(keys)), Num(study.sweep.spec.metric), "status"]
    columns += map(Num, ("steps", "tokens/s", "peak memory", "time"))
    has_reasons = any(row.reason for row in rows)
    columns += ["why"] if has_reasons else []
    body = []
    for row in rows:
        figures = row.figures
        status = row.status
        if status == "stopped early":
            status_text = f"stopped early at {row.run.stopped_at}"
        else:
            status_text = status + (f", attempt {len(row.run.attempts)}" if len(row.run.attempts) > 1 else "")
        cells: list[object] = [row.run.name]
        cells += [_format_setting(row.run.settings[key]) if key in row.run.settings else "" for key in keys]
        cells += [format_figure(row.value, ".5g"), Cell(status_text, _TONES[status], NO_WRAP)]
        cells += [
            f"{figures.num_steps:,}" if figures else "",
            format_figure(figures.tokens_per_s, ",.0f") if figures else "",
            format_figure(figures.peak_memory_gib, ".2f", " GiB") if figures else "",
            format_seconds(figures.time.elapsed_s) if figures else "",
        ]
        body.append([*cells, *([row.reason] if has_reasons else [])])
    return Table(columns, body, is_stacked=True)


def _draw_key(study: Study, rows: list[Row], key: str) -> Chart | None:
    """Return a chart of the metric over a key's values; None if fewer than two values were measured."""
    found: dict[Any, list[float]] = {}
    for row in rows:
        if row.value is not None and row.status in ("completed", "stopped early") and key in row.run.settings:
            value = row.run.settings[key]
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            found.setdefault(value if is_number else format_value(value), []).append(row.value)
    if len(found) < 2:
        return None
    best = max if study.sweep.spec.is_maximized else min
    is_line = all(isinstance(value, int | float) for value in found)
    labels = sorted(found) if is_line else list(found)
    series = [
        Series("best", [best(found[label]) for label in labels], is_sparse=True),
        Series("median", [statistics.median(found[label]) for label in labels], is_sparse=True),
    ]
    is_log = is_line and labels[0] > 0 and labels[-1] >= 10 * labels[0]
    metric = study.sweep.spec.metric
    series = series if any(len(values) > 1 for values in found.values()) else series[:1]
    kind: Any = "lines" if is_line else "bars"
    return Chart(kind, labels, series, key, metric, is_log_labels=is_log, title=key)


def _format_setting(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else format_value(value)
