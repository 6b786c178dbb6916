"""Checks of links and collectives: bandwidth between ranks, and correctness of the received data."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fctune.apps.acceptance.judge import Check, Judge, Samples
from fctune.apps.acceptance.metrics import (
    SCOPES,
    compute_bandwidth,
    compute_slowdowns,
    isolate_slow_pairs,
    summarize_times,
)
from fctune.config.intervals import format_count

Ranks = Mapping[int, Any]

_MIN_MESSAGE_S = 2e-4  # faster messages count as equal: differences below it are scheduling noise


def judge_pairs(judge: Judge, samples: Ranks) -> None:
    """Compare every pair with the others of its kind, and blame a rank that is slow with all, or a single link."""
    check = judge.start("links")
    seconds: dict[tuple[int, int], float] = {}
    for rank, sample in samples.items():
        for other, mine in sample.get("seconds", {}).items():
            if rank < int(other):
                theirs = samples[int(other)]["seconds"].get(str(rank), [])
                if both := list(zip(mine, theirs, strict=False)):
                    seconds[rank, int(other)] = min(map(max, both))
    if not seconds:
        judge.skip("links", "only one rank, so no pairs")
        return
    num_bytes = next(iter(samples.values()))["bytes"]
    judge.add_figure("pair_gb_s", {None: num_bytes / max(seconds.values()) / 1e9})
    seconds = {pair: max(value, _MIN_MESSAGE_S) for pair, value in seconds.items()}
    local = {p: s for p, s in seconds.items() if p[0] // judge.ranks_per_node == p[1] // judge.ranks_per_node}
    remote = {p: s for p, s in seconds.items() if p not in local}
    slowdowns = compute_slowdowns(local) | compute_slowdowns(remote)
    worst = max(slowdowns.values())
    judge.add_figure("pair_spread", {None: worst})
    threshold = judge.config.thresholds.get("pair_spread")
    limits = [] if threshold is None else [threshold.fail, threshold.warn]
    limit = next((value for value in limits if value is not None and worst > value), None)
    if limit is None:
        return
    relative = {p: s / statistics.median_low(g.values()) for g in (local, remote) for p, s in g.items()}
    ranks, _ = isolate_slow_pairs(relative, limit)
    judge.blame(check, ranks, "slow with every partner")
    for kind, group in (("within nodes", local), ("across nodes", remote)):
        rest = {pair: value for pair, value in group.items() if not set(pair) & set(ranks)}
        slow, links = isolate_slow_pairs(rest, limit)
        judge.blame(check, slow, f"slow with every partner {kind}")
        for link in links:
            reason = f"{slowdowns[link]:.0%} slower than the median {kind}, although its ranks are fast otherwise"
            judge.add_culprit(check, "link", link, reason)


def list_bandwidths(
    samples: Samples, ranks_per_node: int, world_size: int, scopes: Sequence[str] = SCOPES
) -> list[dict[str, Any]]:
    """List bandwidths and times of every collective at every size, for each node and for all nodes together."""
    rows = []
    for scope in scopes:
        of_scope = samples.get(f"collectives_{scope}", {})
        if len(of_scope) < world_size or not all("results" in sample for sample in of_scope.values()):
            continue
        size = ranks_per_node if scope == "node" else world_size
        for first in range(0, world_size, size):
            for number, result in enumerate(of_scope[first]["results"]):
                members = [of_scope[rank]["results"][number] for rank in range(first, first + size)]
                times = summarize_times([second for member in members for second in member["seconds"]])
                algbw, busbw = compute_bandwidth(result["operation"], result["bytes"], size, times["mean_s"])
                rows.append(
                    {name: result[name] for name in ("operation", "requested_bytes", "bytes", "label")}
                    | {"scope": scope, "first_rank": first, "algbw_gb_s": algbw, "busbw_gb_s": busbw}
                    | times
                    | {"wrong_elements": sum(member["wrong_elements"] for member in members)}
                )
    return rows


def judge_collectives(judge: Judge, samples: Ranks, scope: str) -> None:
    """Judge the bandwidth of each operation at the judged size: of the slowest node, or of all nodes together."""
    judge.start(f"collectives_{scope}")
    config = judge.config.collectives
    judged = int(config.judged_mib * 2**20)
    rows = list_bandwidths({f"collectives_{scope}": samples}, judge.ranks_per_node, len(samples), [scope])
    for operation in config.operations:
        busbw = {
            row["first_rank"]: row["busbw_gb_s"]
            for row in rows
            if row["requested_bytes"] == judged and row["operation"] == operation
        }
        if len(busbw) > 1:
            nodes = {tuple(judge.nodes[first // judge.ranks_per_node]): value for first, value in busbw.items()}
            judge.add_figure(f"{operation}_{scope}_gb_s", nodes)
        elif busbw:  # of the only node or of all nodes: nobody to blame
            judge.add_figure(f"{operation}_{scope}_gb_s", {None: busbw[0]})
    if scope == "all":
        values = {f.name: f.value for s in SCOPES for f in judge.checks[f"collectives_{s}"].figures}
        if {"all_reduce_node_gb_s", "all_reduce_all_gb_s"} <= set(values):
            scaling = values["all_reduce_all_gb_s"] / values["all_reduce_node_gb_s"]
            judge.add_figure("all_reduce_scaling", {None: scaling})


def judge_data(judge: Judge, samples: Samples) -> None:
    """Judge the correctness of collectives and messages over all phases, and blame whoever explains most errors."""
    measured = {
        phase: samples[phase]
        for phase in ("pairs", "collectives_node", "collectives_all")
        if samples.get(phase) and len(samples[phase]) == len(judge.hosts)
    }
    if not measured or list(measured) == ["pairs"]:
        return
    check = judge.start("collective_data")
    edges: set[tuple[int, int]] = set()  # sender and receiver of wrong data
    receivers: set[int] = set()  # ranks with a wrong result
    wrong = 0
    for phase, by_rank in measured.items():
        for rank, sample in by_rank.items():
            if phase == "pairs":
                edges |= {(int(source), rank) for source, count in sample.get("wrong_elements", {}).items() if count}
                wrong += sum(sample.get("wrong_elements", {}).values())
                continue
            first = rank // judge.ranks_per_node * judge.ranks_per_node if phase == "collectives_node" else 0
            for result in sample.get("results", ()):
                wrong += result["wrong_elements"]
                edges |= {(first + int(source), rank) for source, count in result["sources"].items() if count}
                if result["wrong_elements"]:
                    receivers.add(rank)
    judge.add_figure("wrong_elements", {None: float(wrong)})
    for cut in {s["cut_short"] for by_rank in measured.values() for s in by_rank.values() if "cut_short" in s}:
        check.mark_partial(f"cut short: {cut}")
    if wrong:
        check.worsen("FAIL", f"{format_count(wrong, 'wrong element')}")
        _blame_data(judge, check, edges, receivers)


def _blame_data(judge: Judge, check: Check, edges: set[tuple[int, int]], receivers: set[int]) -> None:
    if not edges and len(receivers) == 1:
        judge.add_culprit(check, "rank", sorted(receivers), "only its own results are wrong")
    elif not edges:
        reason = "sums are wrong on several ranks, although every message was received correctly"
        judge.add_culprit(check, "unknown", sorted(receivers), reason)
    while edges:
        counts = {rank: sum(rank in edge for edge in edges) for rank in sorted({r for edge in edges for r in edge})}
        rank = max(counts, key=lambda r: counts[r])
        if counts[rank] > 1:
            reason = f"sender or receiver of {format_count(counts[rank], 'message with', 'messages with')} wrong data"
            judge.add_culprit(check, "rank", [rank], reason)
            edges = {edge for edge in edges if rank not in edge}
        else:
            edge = min(edges)
            kind: Any = "rank" if edge[0] == edge[1] else "link"
            judge.add_culprit(check, kind, sorted(set(edge)), f"wrong data received from rank {edge[0]}")
            edges = edges - {edge}
