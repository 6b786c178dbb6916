"""From samples to a verdict: what is wrong, which rank, host or link it is laid to, and what to try next.

Pure functions of the config and the samples, which are plain JSON: ``samples[phase][rank]``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fctune.acceptance.config import AcceptanceConfig, ThresholdConfig
from fctune.acceptance.metrics import CHECKS, METRICS

Status = Literal["PASS", "WARN", "FAIL", "SKIPPED"]
Verdict = Literal["PASS", "FAIL", "INCOMPLETE"]
Samples = Mapping[str, Mapping[int, Any]]

_ORDER: dict[Status, int] = {"PASS": 0, "SKIPPED": 1, "WARN": 2, "FAIL": 3}

_NEXT = {
    "arrival": "Read the log of the rank that is named and the state of its pod and node; start again without it.",
    "identity": "Give every node the same image, driver and kind of GPU, or leave out those that are named.",
    "clocks": "Start NTP (chrony) on the host that is named.",
    "compute": "Compare the GPU's clocks, power limit and temperature with its neighbours' (nvidia-smi -q -d "
    "CLOCK,POWER,TEMPERATURE); if they agree and it is still slow, drain the node.",
    "corruption": "Take the GPU out of service: it computes wrongly without an error. dcgmi diag -r 3 may confirm it.",
    "memory": "Look for remapped rows and ECC errors (nvidia-smi -q -d ROW_REMAPPER,ECC); with any, drain the node.",
    "transfer": "Look at the PCIe link's width and generation (nvidia-smi -q -d PCI) and at NUMA pinning.",
    "health": "Look at cooling and power of the node; with uncorrected ECC errors or Xids, drain it.",
    "links": "Within a node: nvidia-smi nvlink -s and nvidia-smi topo -m. Across: ibstat and the error counters of the "
    "adapter that the rank uses; then this run again without that node.",
    "collectives_node": "NCCL_DEBUG=INFO shows whether NVLink and NVLS are used, nvidia-smi nvlink -s links down.",
    "collectives_all": "NCCL_DEBUG=INFO must say NET/IB with GPUDirect, not NET/Socket; check NCCL_IB_HCA and that the "
    "pods may lock memory (IPC_LOCK).",
    "collective_data": "Take the rank that is named out. Where none is, run again with NCCL_NVLS_ENABLE=0 and "
    "NCCL_ALGO=Ring: a fault that goes away is in the switch's reduction.",
    "storage_node": "Look at the disk of the host that is named (dmesg, smartctl), and at who else writes to it.",
    "storage_shared": "Look at the mount options and the quota of the shared disk, and at who else uses it.",
    "training_node": "If compute and collectives pass, profile a step; else fix those first.",
    "training_all": "If collectives_all passes, compare the layout with parallel.mode=hsdp; else fix that first.",
    "checkpoint": "Compare with storage_shared; where that is fast, look at the number of ranks that write.",
}


@dataclass(frozen=True, slots=True)
class Culprit:
    """What a failure is laid to; a link has two ranks."""

    kind: Literal["rank", "host", "link", "unknown"]
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    says: str

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        where = ", ".join(self.hosts)
        name = {
            "rank": f"rank {ranks} ({where})",
            "host": f"{where} (ranks {ranks})",
            "link": f"link of ranks {' and '.join(map(str, self.ranks))} ({where})",
            "unknown": "no one rank",
        }[self.kind]
        return f"{name}: {self.says}" if self.says else name


@dataclass(frozen=True, slots=True)
class Figure:
    """One number, and how it stands to its threshold where it has one."""

    name: str
    value: float
    status: Status
    threshold: ThresholdConfig | None


@dataclass(slots=True)
class Check:
    """One question and its answer."""

    name: str
    required: bool
    status: Status = "PASS"
    reason: str = ""
    figures: list[Figure] = field(default_factory=list)
    culprits: list[Culprit] = field(default_factory=list)

    @property
    def next_step(self) -> str:
        """What to try, where something is wrong."""
        return _NEXT[self.name] if self.status in ("FAIL", "WARN") else ""

    def omit(self, reason: str) -> None:
        """A part of it was not measured: what was can still fail it, and no more."""
        if self.status != "FAIL":
            self.status = "SKIPPED"
        self.reason = f"{self.reason}; {reason}" if self.reason else reason

    def worsen(self, status: Status, reason: str = "") -> None:
        """Take a status that is worse, and its reason."""
        if _ORDER[status] > _ORDER[self.status]:
            self.status = status
        if reason:
            self.reason = f"{self.reason}; {reason}" if self.reason else reason


class Jury:
    """Builds checks of one run.

    Args:
        config: thresholds and what is required.
        hosts: the host of each rank.
        ranks_per_node: as launched.
    """

    def __init__(self, config: AcceptanceConfig, hosts: Mapping[int, str], ranks_per_node: int):
        self.config, self.hosts, self.ranks_per_node = config, hosts, ranks_per_node
        self.checks = {name: Check(name, name in config.required, "SKIPPED", "not measured") for name in CHECKS}

    @property
    def nodes(self) -> dict[int, list[int]]:
        """The ranks of each node, by its number."""
        found: dict[int, list[int]] = {}
        for rank in sorted(self.hosts):
            found.setdefault(rank // self.ranks_per_node, []).append(rank)
        return found

    def open(self, name: str) -> Check:
        """Begin a check whose samples are there."""
        self.checks[name] = Check(name, name in self.config.required)
        return self.checks[name]

    def skip(self, name: str, reason: str) -> None:
        """Say why a check has no answer."""
        self.checks[name].status, self.checks[name].reason = "SKIPPED", reason

    def add(self, name: str, values: Mapping[Any, float]) -> None:
        """Judge a figure by its worst value; the ones beyond the threshold are laid to their keys.

        Args:
            name: in ``METRICS``, whose check must be open.
            values: by rank, by a tuple of ranks, or by None for one of all.
        """
        metric, threshold = METRICS[name], self.config.thresholds.get(name)
        if not values:
            return
        check = self.checks[metric.check]
        is_better = metric.better == "higher"
        worst = min(values.values()) if is_better else max(values.values())
        status: Status = "PASS"
        if threshold is not None:
            for level in ("warn", "fail"):
                limit = getattr(threshold, level)
                if limit is not None and _is_beyond(worst, limit, is_better):
                    status = "FAIL" if level == "fail" else "WARN"
        check.figures.append(Figure(name, worst, status, threshold))
        if status == "PASS":
            return
        assert threshold is not None
        limit = threshold.fail if status == "FAIL" else threshold.warn
        assert limit is not None
        check.worsen(status, f"{name} {worst:.4g}, {'at least' if is_better else 'at most'} {limit:g} wanted")
        beyond = {key: value for key, value in values.items() if _is_beyond(value, limit, is_better)}
        by_rank = {key: value for key, value in beyond.items() if isinstance(key, int)}
        if by_rank:
            self.blame(check, list(by_rank), _tell(name, by_rank.values()))
        for key, value in beyond.items():
            if isinstance(key, tuple):
                kind: Any = "link" if len(key) == 2 and metric.check == "links" else "host"
                self.accuse(check, kind, key, _tell(name, [value]))

    def blame(self, check: Check, ranks: Sequence[int], says: str) -> None:
        """Lay something to ranks; to a host where they are all of its, and to none where they are all there are."""
        left = set(ranks)
        if not left:
            return
        if left == set(self.hosts) and len(left) > 1:
            self.accuse(check, "unknown", sorted(left), f"all {len(left)} ranks alike: {says}")
            return
        for members in self.nodes.values():
            if len(members) > 1 and left >= set(members) and len(self.nodes) > 1:
                self.accuse(check, "host", members, says)
                left -= set(members)
        for rank in sorted(left):
            self.accuse(check, "rank", [rank], says)

    def accuse(
        self, check: Check, kind: Literal["rank", "host", "link", "unknown"], ranks: Sequence[int], says: str
    ) -> None:
        """Name a culprit, once, with all that is said of it."""
        hosts = tuple(dict.fromkeys(self.hosts.get(rank, "host unknown") for rank in ranks))
        for number, known in enumerate(check.culprits):
            if known.kind == kind and known.ranks == tuple(ranks):
                check.culprits[number] = replace(known, says=f"{known.says}; {says}")
                return
        check.culprits.append(Culprit(kind, tuple(ranks), hosts, says))


def decide(checks: Sequence[Check]) -> tuple[Verdict, str]:
    """PASS only where every required check ran and passed; the reason in a line."""
    failed = [check for check in checks if check.status == "FAIL"]
    if failed:
        names = dict.fromkeys(str(c).partition(":")[0] for check in failed for c in check.culprits)
        laid = f", laid to {'; '.join(names)}" if names else ""
        return "FAIL", f"{', '.join(check.name for check in failed)} failed{laid}"
    missing = [check for check in checks if check.required and check.status == "SKIPPED"]
    if missing:
        return "INCOMPLETE", f"required and not run: {', '.join(c.name for c in missing)} ({missing[0].reason})"
    warned = [check.name for check in checks if check.status == "WARN"]
    return "PASS", "all required checks passed" + (f"; look at {', '.join(warned)}" if warned else "")


def _is_beyond(value: float, limit: float, is_better: bool) -> bool:
    return value < limit if is_better else value > limit


def _tell(name: str, values: Collection[float]) -> str:
    """Values of a figure in words."""
    is_spread = name.endswith("_spread")
    low, high = (f"{value + is_spread:.4g}" for value in (min(values), max(values)))
    shown = low if low == high else f"{low} to {high}"
    return f"{name}: {shown} times the median of the others" if is_spread else f"{name} {shown}"
