"""Page of an acceptance run: verdict, devices, bandwidth curves, pairwise bandwidths and all checks."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping
from typing import Any

from fctune.apps.acceptance.table import format_threshold
from fctune.pages.page import (
    NO_WRAP,
    Box,
    Cell,
    Chart,
    Fold,
    Grid,
    Group,
    Heading,
    Items,
    Num,
    Page,
    Part,
    Series,
    Table,
    Text,
    Tone,
    make_count_tile,
    make_settings,
)

_TONES: dict[str, Tone] = {"PASS": "good", "WARN": "warn", "FAIL": "bad", "SKIPPED": "", "INCOMPLETE": "warn"}
_POINT_TO_POINT = "point_to_point"
_SCOPES = {"node": "within each node", "all": "all nodes"}

Document = Mapping[str, Any]


def write_acceptance_html(document: Document, path: str | os.PathLike[str]) -> None:
    """Write the page of an acceptance result."""
    page = Page("Cluster acceptance", f"{document['verdict']}: {document['reason']}", _TONES[document["verdict"]])
    _add_tiles(page, document)
    _add_failures(page, document)
    _add_devices(page, document)
    _add_curves(page, document)
    _add_pairs(page, document)
    _add_checks(page, document)
    if first := document["samples"].get("identity", {}).get("0", {}):
        page.add_section("Rank 0", make_settings("Property", first))
    page.write(path, f"fctune acceptance, {document['started_at']}, {document['seconds']:.0f} s")


def _add_tiles(page: Page, document: Document) -> None:
    counts = dict.fromkeys(("PASS", "WARN", "FAIL", "SKIPPED"), 0)
    for check in document["checks"]:
        counts[check["status"]] += 1
    missing = sum(check["required"] and check["status"] == "SKIPPED" for check in document["checks"])
    page.add_tiles(
        [
            make_count_tile(document["world_size"], "rank"),
            make_count_tile(document["world_size"] // document["ranks_per_node"], "node"),
            make_count_tile(counts["PASS"], "check", "good", " passed"),
            make_count_tile(counts["FAIL"], "check", "bad", " failed"),
            make_count_tile(counts["WARN"], "check", "warn", " with a warning"),
            make_count_tile(missing, "required check", "warn", " not run"),
        ]
    )


def _add_failures(page: Page, document: Document) -> None:
    parts: list[Part] = [
        Text(f"Injected fault: {fault['kind']} on rank {fault['rank']}", "warn")
        for fault in document["config"]["faults"]
    ]
    for check in document["checks"]:
        if check["status"] not in ("FAIL", "WARN"):
            continue
        parts += [Heading(check["name"], check["status"], _TONES[check["status"]]), check["reason"]]
        if check["culprits"]:
            parts.append(Items([culprit["text"] for culprit in check["culprits"]]))
        parts.append(Text(f"Next: {check['next_step']}", "muted"))
    if parts:
        page.add_section("Problems", *parts)


def _add_devices(page: Page, document: Document) -> None:
    """Add a cell for each rank, in rows of nodes; red if a failure is attributed to it."""
    blamed: dict[int, str] = {}
    for check in document["checks"]:
        for culprit in check["culprits"]:
            if culprit["kind"] != "unknown" and check["status"] in ("FAIL", "WARN"):
                for rank in culprit["ranks"]:
                    blamed[rank] = "bad" if check["status"] == "FAIL" else blamed.get(rank, "warn")
    hellos = document["samples"].get("hello", {})
    rows: list[Part] = []
    for first in range(0, document["world_size"], document["ranks_per_node"]):
        ranks = range(first, first + document["ranks_per_node"])
        host = next((hellos[str(rank)]["host"] for rank in ranks if str(rank) in hellos), "absent")
        boxes = [_describe_device(document, rank, blamed.get(rank, "good")) for rank in ranks]
        rows += [Heading(host), Grid(boxes)]
    lead = "One cell per rank: matrix product rate in TFLOP/s by dtype, and peak temperature; red ranks are to blame."
    page.add_section("Devices", *rows, lead=lead)


def _describe_device(document: Document, rank: int, tone: str) -> Box:
    products = document["samples"].get("compute", {}).get(str(rank), {}).get("products", {})
    lines = [f"{dtype} {made['tflops']:.4g}" for dtype, made in products.items() if "tflops" in made]
    readings = [reading for made in products.values() for reading in made.get("readings", ())]
    hottest = max((r["temperature_c"] for r in readings if r["temperature_c"] is not None), default=None)
    if hottest is not None:
        lines.append(f"{hottest:.0f} °C")
    if str(rank) not in document["samples"].get("hello", {}):
        tone, lines = "bad", ["absent"]
    return Box(str(rank), tone, lines or ["not measured"])


def _add_checks(page: Page, document: Document) -> None:
    rows: list[list[object]] = []
    for check in document["checks"]:
        status = Cell(check["status"], classes=_TONES[check["status"]] or "muted", style=NO_WRAP)
        names: list[object] = [Cell(check["name"], style=NO_WRAP), status]
        for figure in check["figures"] or [None]:
            if figure is None:
                required = "" if check["required"] else " (not required)"
                rows.append([*names, f"{check['reason']}{required}", "", "", ""])
            else:
                value = f"{figure['value']:.4g} {figure['unit']}".strip()
                threshold = Cell(format_threshold(figure), style=NO_WRAP)
                source = (figure["threshold"] or {}).get("source", "")
                rows.append([*names, f"{figure['name']}: {figure['description']}", value, threshold, source])
            names = ["", ""]
    columns = ["Check", "Status", "Figure", Num("Value"), "Threshold", "Source"]
    page.add_section("Checks", Table(columns, rows, is_stacked=True))


def _add_curves(page: Page, document: Document) -> None:
    """Add a chart of collectives for each scope and one of point-to-point messages; more lines would share colours."""
    curves: dict[tuple[str, str], dict[float, float]] = {}  # by scope and operation
    for row in document["bandwidths"]:
        curve = curves.setdefault((row["scope"], row["operation"]), {})
        power = round(math.log2(row["bytes"] / 2**20), 2)
        curve[power] = min(row["busbw_gb_s"], curve.get(power, row["busbw_gb_s"]))
    note = "Bus bandwidth of the slowest node as defined by nccl-tests, mean over repetitions and ranks."
    charts = []
    for scope, where in _SCOPES.items():
        lines = {name: curve for (of, name), curve in curves.items() if of == scope and name != _POINT_TO_POINT}
        if lines:
            chart = _draw_lines(lines, f"Collectives {where}", note)
            charts.append(Group([chart, _list_bandwidths(document, scope)]))
    messages = {_SCOPES[scope]: curve for (scope, name), curve in curves.items() if name == _POINT_TO_POINT}
    if messages:
        text = "All ranks send to the next rank at the same time, within a node and across nodes."
        charts.append(Group([_draw_lines(messages, "Point to point", text)]))
    if charts:
        page.add_section("Bandwidth by size", Group(charts, "pair"))


def _draw_lines(curves: Mapping[str, Mapping[float, float]], title: str, note: str) -> Chart:
    sizes = sorted({size for curve in curves.values() for size in curve})
    # Sparse: a size that was measured for some operations only is no reason to end the others' lines.
    series = [Series(name, [curve.get(size) for size in sizes], is_sparse=True) for name, curve in curves.items()]
    return Chart("lines", sizes, series, "message size", "busbw, GB/s", is_log_size=True, title=title, note=note)


def _list_bandwidths(document: Document, scope: str) -> Fold:
    """Return a folded table of all sizes with their percentiles."""
    rows: list[list[object]] = []
    for row in (row for row in document["bandwidths"] if row["scope"] == scope):
        size = f"{row['bytes'] / 2**20:g}" + (f" ({row['label']})" if row["label"] else "")
        node = [row["first_rank"] // document["ranks_per_node"]] if scope == "node" else []
        times = (1e6 * row[name] for name in ("p50_s", "p99_s"))
        rows.append([row["operation"], *node, size, row["busbw_gb_s"], row["algbw_gb_s"], *times])
    heads = ["Collective", *(["Node"] if scope == "node" else []), "MiB"]
    heads += map(Num, ("busbw, GB/s", "algbw, GB/s", "p50, us", "p99, us"))
    return Fold("All sizes, with percentiles", [Table(heads, rows)])


def _add_pairs(page: Page, document: Document) -> None:
    samples = document["samples"].get("pairs", {})
    if not samples or any("skipped" in sample for sample in samples.values()):
        return
    ranks = sorted(map(int, samples))
    rates: dict[tuple[int, int], float] = {}
    for rank in ranks:
        for other, seconds in samples[str(rank)]["seconds"].items():
            rates[rank, int(other)] = samples[str(rank)]["bytes"] / min(seconds) / 1e9
    if not rates:
        return
    size = document["ranks_per_node"]
    limit = _find_pair_limit(document)
    usual: dict[bool, float] = {}
    for kind in (True, False):
        of_kind = [rate for (a, b), rate in rates.items() if (a // size == b // size) == kind]
        usual[kind] = statistics.median(of_kind) if of_kind else 0.0
    rows: list[list[object]] = []
    for a in ranks:
        cells: list[object] = []
        for b in ranks:
            if (rate := rates.get((a, b))) is None:
                cells.append("")
            else:
                lost = 1 - rate / usual[a // size == b // size]
                is_slow = lost > 0 and lost / (1 - lost) > limit
                cells.append(Cell(f"{rate:.3g}", "heat", f"--heat: {lost:.3f}") if is_slow else f"{rate:.3g}")
        rows.append([a, *cells])
    lead = "GB/s in each direction between two ranks, both at once, best repetition."
    lead += "" if math.isinf(limit) else f" Red is over {limit:.0%} slower than the median of its kind of link."
    page.add_section("Pairs", Table(["Rank", *(Num(rank) for rank in ranks)], rows), lead=lead)


def _find_pair_limit(document: Document) -> float:
    """Return the slowdown from which the check of links warns or fails; infinite if it does neither."""
    for check in document["checks"]:
        for figure in check["figures"]:
            if figure["name"] == "pair_spread" and figure["status"] in ("WARN", "FAIL"):
                limits = (figure["threshold"] or {}).get("warn"), (figure["threshold"] or {}).get("fail")
                return min((limit for limit in limits if limit is not None), default=math.inf)
    return math.inf
