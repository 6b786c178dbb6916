"""What the checks of links and collectives ask of their samples: how fast, and whether what came is what was sent."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fctune.acceptance.judge import Jury, Samples
from fctune.acceptance.metrics import SCOPES
from fctune.acceptance.statistics import bandwidth, describe, excess, isolate_pairs

Ranks = Mapping[int, Any]

_LEAST_S = 2e-4  # pairs that are quicker count as even: below it is what a scheduler makes of a message


def judge_pairs(jury: Jury, found: Ranks) -> None:
    """Every pair against those of its kind: a rank that is slow with all, or a link by itself."""
    check = jury.open("links")
    seconds: dict[tuple[int, int], float] = {}
    for rank, sample in found.items():
        for other, mine in sample.get("seconds", {}).items():
            if rank < int(other):
                theirs = found[int(other)]["seconds"].get(str(rank), [])
                if both := list(zip(mine, theirs, strict=False)):
                    seconds[rank, int(other)] = min(map(max, both))
    if not seconds:
        jury.skip("links", "one rank has no pairs")
        return
    num_bytes = next(iter(found.values()))["bytes"]
    jury.add("pair_gb_s", {None: num_bytes / max(seconds.values()) / 1e9})
    seconds = {pair: max(value, _LEAST_S) for pair, value in seconds.items()}
    threshold = jury.config.thresholds.get("pair_spread")
    local = {p: s for p, s in seconds.items() if p[0] // jury.ranks_per_node == p[1] // jury.ranks_per_node}
    remote = {p: s for p, s in seconds.items() if p not in local}
    over = excess(local) | excess(remote)
    jury.add("pair_spread", {None: max(over.values())})
    limits = [] if threshold is None else [t for t in (threshold.fail, threshold.warn) if t is not None]
    limit = next((t for t in limits if max(over.values()) > t), None)
    if limit is None:
        return
    shares = {p: s / statistics.median_low(g.values()) for g in (local, remote) for p, s in g.items()}
    ranks, _ = isolate_pairs(shares, limit)
    jury.blame(check, ranks, "slow with every partner")
    for kind, group in (("within nodes", local), ("across nodes", remote)):
        left = {pair: value for pair, value in group.items() if not set(pair) & set(ranks)}
        slow, links = isolate_pairs(left, limit)
        jury.blame(check, slow, f"slow with every partner {kind}")
        for link in links:
            jury.accuse(check, "link", link, f"{over[link]:.0%} slower than the median {kind}, its ranks not otherwise")


def list_bandwidths(
    samples: Samples, ranks_per_node: int, world_size: int, scopes: Sequence[str] = SCOPES
) -> list[dict[str, Any]]:
    """Every collective at every size: rates and times over the repetitions of all ranks, of each node and of all."""
    rows = []
    for scope in scopes:
        found = samples.get(f"collectives_{scope}", {})
        if len(found) < world_size or not all("results" in sample for sample in found.values()):
            continue
        size = ranks_per_node if scope == "node" else world_size
        for first in range(0, world_size, size):
            for number, result in enumerate(found[first]["results"]):
                members = [found[rank]["results"][number] for rank in range(first, first + size)]
                times = describe([second for member in members for second in member["seconds"]])
                algbw, busbw = bandwidth(result["operation"], result["bytes"], size, times["mean_s"])
                rows.append(
                    {name: result[name] for name in ("operation", "asked", "bytes", "label")}
                    | {"scope": scope, "first_rank": first, "algbw_gb_s": algbw, "busbw_gb_s": busbw}
                    | times
                    | {"wrong": sum(member["wrong"] for member in members)}
                )
    return rows


def judge_collectives(scope: str) -> Callable[[Jury, Ranks], None]:
    """Asks for the bandwidth of each operation at the judged size, of the slowest node or of all."""

    def judge_scope(jury: Jury, found: Ranks) -> None:
        jury.open(f"collectives_{scope}")
        config = jury.config.collectives
        judged = int(config.judged_mib * 2**20)
        rows = list_bandwidths({f"collectives_{scope}": found}, jury.ranks_per_node, len(found), [scope])
        for operation in config.operations:
            at = [row for row in rows if row["asked"] == judged and row["operation"] == operation]
            of = {row["first_rank"]: row["busbw_gb_s"] for row in at}
            if len(of) > 1:
                nodes = {tuple(jury.nodes[first // jury.ranks_per_node]): value for first, value in of.items()}
                jury.add(f"{operation}_{scope}_gb_s", nodes)
            elif of:  # of the only node, or of all: laid to no one
                jury.add(f"{operation}_{scope}_gb_s", {None: of[0]})
        if scope == "all":
            _judge_kept(jury)

    return judge_scope


def _judge_kept(jury: Jury) -> None:
    """What two nodes keep of one's all_reduce."""
    figures = {f.name: f.value for name in ("node", "all") for f in jury.checks[f"collectives_{name}"].figures}
    if "all_reduce_node_gb_s" in figures and "all_reduce_all_gb_s" in figures:
        jury.add("all_reduce_kept", {None: figures["all_reduce_all_gb_s"] / figures["all_reduce_node_gb_s"]})


def judge_data(jury: Jury, samples: Samples) -> None:
    """Wrong results of collectives and of messages, over all phases, laid to whoever explains most of them."""
    measured = {
        phase: samples[phase]
        for phase in ("pairs", "collectives_node", "collectives_all")
        if samples.get(phase) and len(samples[phase]) == len(jury.hosts)
    }
    if not measured or list(measured) == ["pairs"]:
        return
    check = jury.open("collective_data")
    edges: set[tuple[int, int]] = set()
    receivers: set[int] = set()
    wrong = 0
    for phase, by_rank in measured.items():
        for rank, sample in by_rank.items():
            if phase == "pairs":
                edges |= {(int(source), rank) for source, count in sample.get("wrong", {}).items() if count}
                wrong += sum(sample.get("wrong", {}).values())
                continue
            first = rank // jury.ranks_per_node * jury.ranks_per_node if phase == "collectives_node" else 0
            for result in sample.get("results", ()):
                wrong += result["wrong"]
                edges |= {(first + int(source), rank) for source, count in result["sources"].items() if count}
                if result["wrong"]:
                    receivers.add(rank)
    jury.add("wrong_elements", {None: float(wrong)})
    for cut in {sample["cut"] for by_rank in measured.values() for sample in by_rank.values() if "cut" in sample}:
        check.omit(f"cut short: {cut}")
    if not wrong:
        return
    check.worsen("FAIL", f"{wrong} wrong elements")
    named = False
    while edges:
        counts = {rank: sum(rank in edge for edge in edges) for rank in sorted({r for edge in edges for r in edge})}
        rank = max(counts, key=lambda r: counts[r])
        if counts[rank] < 2:
            edge = min(edges)
            self_made = edge[0] == edge[1]
            jury.accuse(check, "rank" if self_made else "link", sorted(set(edge)), f"data of rank {edge[0]} came wrong")
            edges.remove(edge)
        else:
            jury.accuse(
                check, "rank", [rank], f"in {counts[rank]} of the messages that came wrong, as sender or receiver"
            )
            edges = {edge for edge in edges if rank not in edge}
        named = True
    if not named and len(receivers) == 1:
        jury.accuse(check, "rank", sorted(receivers), "its own results are wrong, the others' are not")
    elif not named:
        jury.accuse(
            check, "unknown", sorted(receivers), "sums are wrong on several ranks, and every message came right"
        )
