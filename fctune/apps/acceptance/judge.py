"""From samples to a status: compare metrics with thresholds, blame ranks, hosts or links, and suggest the next step.

Pure functions of the config and the samples, which are plain JSON: ``samples[phase][rank]``.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fctune.apps.acceptance.config import AcceptanceConfig, ThresholdConfig
from fctune.apps.acceptance.metrics import (
    CHECKS,
    METRICS,
    SCOPES,
    compute_bandwidth,
    compute_slowdowns,
    isolate_slow_pairs,
    summarize_times,
)
from fctune.config.intervals import format_count

CheckStatus = Literal["PASS", "WARN", "FAIL", "SKIPPED"]
AcceptanceStatus = Literal["PASS", "FAIL", "INCOMPLETE"]
CulpritKind = Literal["rank", "host", "link", "unknown"]
Samples = Mapping[str, Mapping[int, Any]]

_SEVERITY: dict[CheckStatus, int] = {"PASS": 0, "SKIPPED": 1, "WARN": 2, "FAIL": 3}

_NEXT_STEPS = {
    "arrival": "Read the log of the rank and check the state of its pod and node; run again without that node.",
    "identity": "Give every node the same image, driver and GPU model, or exclude the ones listed.",
    "clocks": "Start NTP (chrony) on the host.",
    "compute": "Compare the GPU's clocks, power limit and temperature with its neighbors' (nvidia-smi -q -d "
    "CLOCK,POWER,TEMPERATURE); if they agree and it is still slow, drain the node.",
    "corruption": "Take the GPU out of service: it computes wrong results without reporting errors. dcgmi diag -r 3 "
    "may confirm it.",
    "memory": "Check for remapped rows and ECC errors (nvidia-smi -q -d ROW_REMAPPER,ECC); if there are any, drain the "
    "node.",
    "transfer": "Check the width and generation of the PCIe link (nvidia-smi -q -d PCI), and NUMA pinning.",
    "health": "Check the node's cooling and power supply; if there are uncorrected ECC errors or Xids, drain it.",
    "links": "Within a node: nvidia-smi nvlink -s and nvidia-smi topo -m. Across nodes: ibstat and the error counters "
    "of the rank's adapter; then run again without that node.",
    "collectives_node": "Set NCCL_DEBUG=INFO to see whether NVLink and NVLS are used; nvidia-smi nvlink -s lists "
    "links that are down.",
    "collectives_all": "NCCL_DEBUG=INFO must show NET/IB with GPUDirect, not NET/Socket; check NCCL_IB_HCA and that "
    "the pods may lock memory (IPC_LOCK).",
    "collective_data": "Take the rank out of service. If none is listed, run again with NCCL_NVLS_ENABLE=0 and "
    "NCCL_ALGO=Ring: if the errors disappear, the reduction in the NVLink switch is faulty.",
    "storage_node": "Check the host's disk (dmesg, smartctl) and what else writes to it.",
    "storage_network": "Check the volume's class and size, which set its rate, and what else uses it.",
    "storage_shared": "Check the shared disk's mount options and quota, and what else uses it.",
    "training_node": "If compute and collectives pass, profile a step; otherwise fix those first.",
    "training_all": "If collectives_all passes, compare with parallel.mode=hsdp; otherwise fix that first.",
    "checkpoint": "Compare with storage_shared; if that is fast, check the number of ranks that write.",
}


@dataclass(frozen=True, slots=True)
class Culprit:
    """A rank, host or link (two ranks) to blame for a failure."""

    kind: CulpritKind
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        hosts = ", ".join(self.hosts)
        name = {
            "rank": f"rank {ranks} ({hosts})",
            "host": f"{hosts} (ranks {ranks})",
            "link": f"link between ranks {' and '.join(map(str, self.ranks))} ({hosts})",
            "unknown": "no single rank",
        }[self.kind]
        return f"{name}: {self.reason}" if self.reason else name


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric's measured value, compared with its threshold if it has one."""

    name: str
    value: float
    status: CheckStatus
    threshold: ThresholdConfig | None


@dataclass(slots=True)
class Check:
    """The result of one check."""

    name: str
    required: bool
    status: CheckStatus = "PASS"
    reason: str = ""
    figures: list[Figure] = field(default_factory=list)
    culprits: list[Culprit] = field(default_factory=list)

    @property
    def next_step(self) -> str:
        """Remedy for a failure or warning; empty otherwise."""
        return _NEXT_STEPS[self.name] if self.status in ("FAIL", "WARN") else ""

    def mark_partial(self, reason: str) -> None:
        """Mark the check as partly measured: it can no longer pass, but can still fail."""
        if self.status != "FAIL":
            self.status = "SKIPPED"
        self.reason = f"{self.reason}; {reason}" if self.reason else reason

    def worsen(self, status: CheckStatus, reason: str) -> None:
        """Append a reason, and take its status if that is worse."""
        if _SEVERITY[status] > _SEVERITY[self.status]:
            self.status = status
        self.reason = f"{self.reason}; {reason}" if self.reason else reason


class Judge:
    """Builds the checks of one run."""

    def __init__(self, config: AcceptanceConfig, hosts: Mapping[int, str], ranks_per_node: int):
        self.config, self.hosts, self.ranks_per_node = config, hosts, ranks_per_node
        self.checks = {name: Check(name, name in config.required, "SKIPPED", "not measured") for name in CHECKS}

    @property
    def nodes(self) -> dict[int, list[int]]:
        """Ranks of each node, by node number."""
        nodes: dict[int, list[int]] = {}
        for rank in sorted(self.hosts):
            nodes.setdefault(rank // self.ranks_per_node, []).append(rank)
        return nodes

    def start(self, name: str) -> Check:
        """Start a check that has samples; it passes unless something worsens it."""
        self.checks[name] = Check(name, name in self.config.required)
        return self.checks[name]

    def skip(self, name: str, reason: str) -> None:
        """Mark a check as skipped."""
        self.checks[name].status, self.checks[name].reason = "SKIPPED", reason

    def add_figure(self, name: str, values: Mapping[Any, float]) -> None:
        """Add a metric's worst value to its check, which must be started, and blame everyone beyond its threshold.

        Args:
            name: A key of ``METRICS``.
            values: Values by rank, by a tuple of ranks, or by None for a value of the entire cluster.
        """
        metric, threshold = METRICS[name], self.config.thresholds.get(name)
        if not values:
            return
        check = self.checks[metric.check]
        is_better = metric.better == "higher"
        worst = min(values.values()) if is_better else max(values.values())
        status: CheckStatus = "PASS"
        if threshold is not None:
            if threshold.warn is not None and _is_beyond(worst, threshold.warn, is_better):
                status = "WARN"
            if _is_beyond(worst, threshold.fail, is_better):
                status = "FAIL"
        check.figures.append(Figure(name, worst, status, threshold))
        if status == "PASS":
            return
        assert threshold is not None
        limit = threshold.fail if status == "FAIL" else threshold.warn
        assert limit is not None
        check.worsen(status, f"{name} is {worst:.4g}, expected {'at least' if is_better else 'at most'} {limit:g}")
        beyond = {key: value for key, value in values.items() if _is_beyond(value, limit, is_better)}
        by_rank = {key: value for key, value in beyond.items() if isinstance(key, int)}
        self.blame(check, list(by_rank), _format_values(name, by_rank.values()))
        for key, value in beyond.items():
            if isinstance(key, tuple):
                kind: CulpritKind = "link" if len(key) == 2 and metric.check == "links" else "host"
                self.add_culprit(check, kind, key, _format_values(name, [value]))

    def blame(self, check: Check, ranks: Sequence[int], reason: str) -> None:
        """Blame the ranks, their host if all of its ranks are affected, or nobody if every rank is."""
        remaining = set(ranks)
        if remaining == set(self.hosts) and len(remaining) > 1:
            self.add_culprit(check, "unknown", sorted(remaining), f"all {len(remaining)} ranks alike: {reason}")
            return
        for members in self.nodes.values():
            if len(members) > 1 and remaining >= set(members) and len(self.nodes) > 1:
                self.add_culprit(check, "host", members, reason)
                remaining -= set(members)
        for rank in sorted(remaining):
            self.add_culprit(check, "rank", [rank], reason)

    def add_culprit(self, check: Check, kind: CulpritKind, ranks: Sequence[int], reason: str) -> None:
        """Add a culprit, or a further reason to one that is already listed."""
        hosts = tuple(dict.fromkeys(self.hosts.get(rank, "host unknown") for rank in ranks))
        for number, known in enumerate(check.culprits):
            if known.kind == kind and known.ranks == tuple(ranks):
                check.culprits[number] = replace(known, reason=f"{known.reason}; {reason}")
                return
        check.culprits.append(Culprit(kind, tuple(ranks), hosts, reason))


def decide(checks: Sequence[Check]) -> tuple[AcceptanceStatus, str]:
    """Return the run's status with a one-line reason; PASS requires every required check to have run and passed."""
    failed = [check for check in checks if check.status == "FAIL"]
    if failed:
        names = dict.fromkeys(str(c).partition(":")[0] for check in failed for c in check.culprits)
        culprits = f" because of {'; '.join(names)}" if names else ""
        return "FAIL", f"{', '.join(check.name for check in failed)} failed{culprits}"
    missing = [check for check in checks if check.required and check.status == "SKIPPED"]
    if missing:
        return "INCOMPLETE", f"required but not run: {', '.join(c.name for c in missing)} ({missing[0].reason})"
    warned = [check.name for check in checks if check.status == "WARN"]
    return "PASS", "all required checks passed" + (f", with warnings in {', '.join(warned)}" if warned else "")


def _is_beyond(value: float, limit: float, is_better: bool) -> bool:
    return value < limit if is_better else value > limit


def _format_values(name: str, values: Collection[float]) -> str:
    if not values:
        return ""
    is_spread = name.endswith("_spread")
    low, high = (f"{value + is_spread:.4g}" for value in (min(values), max(values)))
    shown = low if low == high else f"{low} to {high}"
    return f"{name}: {shown} times the median of the others" if is_spread else f"{name} {shown}"


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
