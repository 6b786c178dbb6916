"""From samples to a status: compare metrics with thresholds, blame ranks, hosts or links, and suggest the next step.

Pure functions of the config and the samples, which are plain JSON: ``samples[phase][rank]``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fctune.apps.acceptance.config import AcceptanceConfig, ThresholdConfig
from fctune.apps.acceptance.metrics import CHECKS, METRICS

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
    """Builds the checks of one run.

    Args:
        config: Thresholds and required checks.
        hosts: Host name of each rank.
        ranks_per_node: As launched.
    """

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
