"""Page of ``fctune report``: one run, or a comparison of several."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Sequence

from fctune.apps.report.run_sections import (
    GateResult,
    add_accuracy,
    add_data,
    add_events,
    add_gate,
    add_published,
    add_rollouts,
    add_setup,
    add_success,
    add_time,
)
from fctune.config.intervals import format_count
from fctune.pages.page import Fold, Group, Items, Page, Part, Pre, Table, Tile, make_count_tile
from fctune.pages.run_charts import add_run_charts
from fctune.pages.run_text import (
    ABSENT,
    describe_outcome,
    exit_reason,
    find_differences,
    format_figure,
    format_number,
    format_seconds,
    format_value,
)
from fctune.runs.figures import FINAL_STEPS, Figures, Pricing, describe_run, flatten_config
from fctune.runs.record import RunRecord
from fctune.runs.success import Criterion
from fctune.tasks.evaluation.accuracy import Accuracy
from fctune.tasks.evaluation.published import Published

_FINAL_LOSS = f"loss, mean of the last {FINAL_STEPS} steps"
_MAX_OUTCOME = 400
_TILES = {
    _FINAL_LOSS,
    "validation loss, latest",
    "accuracy while training, latest",
    "tokens/s, median",
    "peak memory",
    "GPU utilization, mean",
    "time, including restarts",
    "goodput",
    "GPU-hours",
    "cost",
}


def write_run_html(
    records: Sequence[RunRecord],
    path: str | os.PathLike[str],
    accuracies: Sequence[Sequence[Accuracy]] = (),
    criteria: Sequence[Sequence[Criterion]] = (),
    pricing: Pricing | None = None,
    published: Sequence[Published] = (),
    gate: GateResult | None = None,
) -> None:
    """Write the page of one or more runs.

    Args:
        records: The runs.
        path: File to write.
        accuracies: Evaluation results of each run.
        criteria: Judged success criteria of each run.
        pricing: Prices of its cost; None takes each run's config, and list prices.
        published: Results of other packages' benchmarks.
        gate: What a gate said of the only run; it then comes first.
    """
    names, figures = name_runs(records), [describe_run(record, pricing) for record in records]
    accuracies, criteria = accuracies or [()] * len(records), criteria or [()] * len(records)
    if len(records) == 1:
        outcome, tone = describe_outcome(records[0])
        if gate is None:
            page = Page(f"Run: {names[0]}", outcome, tone)
        else:
            page = Page(f"Run: {names[0]}", f"{gate.describe()} {outcome}", gate.tone)
            add_gate(page, gate)
        mixed = gate.suites if gate is not None else ()
        _add_tiles(page, figures[0], [accuracy for accuracy in accuracies[0] if accuracy.suite not in mixed])
        if len(reason := exit_reason(records[0])) > 1:
            page.add_section("Why it ended", Pre("\n".join(reason)))
    else:
        page = Page(f"{len(records)} runs: {', '.join(names)}")
        _add_comparison(page, names, records, figures, accuracies)
    if notes := [f"{n}: {note}" for n, r in zip(names, records, strict=True) for note in r.notes()]:
        page.add_section("Problems with the files", Items(notes))
    add_run_charts(page, names, records)
    for name, record, figure, evaluated, judged in zip(names, records, figures, accuracies, criteria, strict=True):
        suffix = "" if len(records) == 1 else f": {name}"
        if judged:
            add_success(page, judged, suffix, is_over=record.exit is not None)
        add_setup(page, record, suffix)
        add_events(page, record, suffix)
        add_time(page, figure, suffix)
        add_rollouts(page, record, suffix)
        for accuracy in evaluated:
            if suffix:
                page.add_section(f"Evaluation{suffix}", str(accuracy.after.path))
            add_accuracy(page, accuracy)
        add_data(page, record, suffix)
    if published:
        add_published(page, published)
    if len(records) == 1 and records[0].config:
        rows = [[key, format_value(value)] for key, value in flatten_config(records[0].config).items()]
        page.add_section("Config", Fold(format_count(len(rows), "key"), [Table(["Key", "Value"], rows)]))
    num_steps = sum(len(record.metrics.steps) for record in records)
    page.write(path, f"fctune report: {format_count(num_steps, 'step')}")


def name_runs(records: Sequence[RunRecord]) -> list[str]:
    """Return a distinct name for each run: its directory's, or the full path if several have that name."""
    names = [record.name for record in records]
    return [str(r.path) if names.count(n) > 1 else n for r, n in zip(records, names, strict=True)]


def _add_tiles(page: Page, figures: Figures, accuracies: Sequence[Accuracy]) -> None:
    """Add the headline figures: accuracy first, before and after training if the base was evaluated, too."""
    tiles: list[Tile] = []
    for accuracy in accuracies:
        if (total := accuracy.total()) is not None:
            compared = next((f"{row.num_right_before / row.n:.1%} \u2192 " for row in accuracy.compare()[-1:]), "")
            note = f"correct of {format_count(total['n'], 'case')}, {accuracy.suite}"
            note += ", before and after training" * bool(compared)
            tiles.append((f"{compared}{total['rate']:.1%}", note, ""))
    tiles.append(make_count_tile(figures.num_steps, "step"))
    tiles += [(text, name, "") for name, text in _format_figures(figures).items() if text and name in _TILES]
    page.add_tiles(tiles)


def _format_figures(figures: Figures) -> dict[str, str]:
    """Format the figures by name; empty text where one was not measured."""
    time, accuracy = figures.time, figures.accuracy
    return {
        "steps": f"{figures.num_steps:,}",
        _FINAL_LOSS: format_figure(figures.final_loss, ".4f"),
        "validation loss, latest": format_figure(figures.validation_loss, ".4f"),
        "accuracy while training, latest": "{:.1%} ({:.1%} - {:.1%})".format(*accuracy) if accuracy else "",
        "tokens, without padding": format_figure(figures.tokens_total, ",.0f"),
        "supervised tokens": format_figure(figures.supervised_share, ".1%"),
        "padding": format_figure(figures.padding_share, ".1%"),
        "tokens/s, median": format_figure(figures.tokens_per_s, ",.0f"),
        "tokens/s per rank": format_figure(figures.tokens_per_s_per_rank, ",.0f"),
        "model TFLOP/s per rank, median": format_number(figures.tflops_per_device),
        "hardware TFLOP/s per rank, median": format_number(figures.hardware_tflops_per_device),
        "MFU, median": format_figure(figures.mfu, ".1%"),
        "GPU utilization, mean": format_figure(figures.gpu_utilization, ".1%"),
        "hottest GPU": format_figure(figures.gpu_temperature_c, ".0f", " degrees C"),
        "power of all GPUs, mean": format_figure(figures.gpu_power_w, ",.0f", " W"),
        "step time, median": format_seconds(figures.step_time_p50_s),
        "step time, 99th percentile": format_seconds(figures.step_time_p99_s),
        "step time waiting for data": format_figure(figures.data_share, ".2%"),
        "peak memory": format_figure(figures.peak_memory_gib, ".2f", " GiB"),
        "time, including restarts": format_seconds(time.elapsed_s),
        "goodput": format_figure(time.goodput, ".1%"),
        "GPU-hours": format_number(time.gpu_hours),
        "cost": format_figure(figures.cost, ",.2f", f" {figures.currency}"),
    }


def _describe_end(record: RunRecord) -> str:
    """Describe the outcome with every line of its reason; a long one ends in dots."""
    text, reason = describe_outcome(record)[0], exit_reason(record)
    return textwrap.shorten(" ".join([text, *reason[1:]]), _MAX_OUTCOME, placeholder=" ...")


def _add_comparison(
    page: Page,
    names: Sequence[str],
    records: Sequence[RunRecord],
    figures: Sequence[Figures],
    accuracies: Sequence[Sequence[Accuracy]],
) -> None:
    formatted = [_format_figures(figure) for figure in figures]
    rows: list[list[object]] = [["outcome", *map(_describe_end, records)]]
    rows += [[key, *(one[key] for one in formatted)] for key in formatted[0] if any(one[key] for one in formatted)]
    for suite in sorted({accuracy.suite for found in accuracies for accuracy in found if accuracy.has_total}):
        cells = []
        for found in accuracies:
            total = next((a.total() for a in found if a.suite == suite), None)
            cells.append(f"{total['rate']:.1%} ({total['low']:.1%} - {total['high']:.1%})" if total else "")
        rows.append([f"tool-call accuracy, {suite}", *cells])
    page.add_section("Comparison", Group([Table(["", *names], rows, is_stacked=len(records) > 2)], "side"))
    differences = find_differences([record.config for record in records])
    partial = {key for key, values in differences.items() if ABSENT in values}
    changed = [key for key in differences if key != "output_dir" and key not in partial]

    def list_values(keys: Iterable[str], is_stacked: bool = False) -> Table:
        rows = [[key, *map(format_value, differences[key])] for key in keys]
        return Table(["Key", *names], rows, is_stacked)

    parts: list[Part] = [list_values(changed, is_stacked=True) if changed else "Only output_dir differs."]
    if partial:
        lacking = f"{format_count(len(partial), 'key')} that some configs lack"
        parts.append(Fold(lacking, [list_values(key for key in differences if key in partial)]))
    page.add_section("Config differences", Group(parts, "side"))
