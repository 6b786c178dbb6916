"""Preflight checks of the links between GPUs: InfiniBand ports, and an all_reduce in each node and over all nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fctune.apps.preflight.all_reduce import NUM_BYTES, Measured
from fctune.apps.preflight.checks import Problem
from fctune.base.errors import ConfigError
from fctune.base.gpus import GPUS
from fctune.runs.device import find_gpu_kind

_INFINIBAND = Path("/sys/class/infiniband")

# Links that are known to be there reach at least half of their rate; less than a tenth shows that a fallback is in use:
# TCP instead of InfiniBand, or host memory instead of NVLink.
_MIN_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Devices:
    """GPUs of a node, of which all are of one kind."""

    count: int
    name: str  # as the driver reports it; of an unknown kind, bandwidth is not judged
    are_linked: bool  # NVLink connects each pair


@dataclass(frozen=True, slots=True)
class Port:
    """A port of an InfiniBand or RoCE adapter, from sysfs."""

    name: str  # adapter:port, as in NCCL_IB_HCA
    is_active: bool
    gb_s: float  # one-way rate; that of a port that is not active says nothing


def read_ports() -> list[Port]:
    """Read the ports of this node's adapters; empty without any."""
    ports = []
    for folder in sorted(_INFINIBAND.glob("*/ports/*")):
        state, rate = _read_line(folder / "state"), _read_line(folder / "rate")  # "4: ACTIVE", "400 Gb/sec (4X NDR)"
        gbit = rate.split(" ")[0]
        gb_s = float(gbit) / 8 if gbit.replace(".", "", 1).isdecimal() else 0.0
        ports.append(Port(f"{folder.parents[1].name}:{folder.name}", state.startswith("4:"), gb_s))
    return ports


def _read_line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:  # of an adapter that is being reset
        return ""


def select_ports(ports: Sequence[Port], names: str) -> list[Port]:
    """Return the ports that NCCL takes by ``NCCL_IB_HCA``: prefixes, or with ``=`` whole names; ``^`` excludes them.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-ib-hca
    """
    is_excluding = names.startswith("^")
    names = names.removeprefix("^")
    is_exact, wanted = names.startswith("="), [name for name in names.removeprefix("=").split(",") if name]

    def matches(port: Port, name: str) -> bool:
        adapter, _, number = name.partition(":")
        own, own_number = port.name.split(":")
        return (own == adapter if is_exact else own.startswith(adapter)) and number in ("", own_number)

    return [port for port in ports if not wanted or any(matches(port, name) for name in wanted) != is_excluding]


def expects_infiniband(environment: Mapping[str, str]) -> bool:
    """Return True if nodes that communicate over TCP are a fault."""
    expected = environment.get("EXPECT_INFINIBAND")
    return expected != "0" if expected else bool(environment.get("NCCL_IB_HCA"))


def check_network(num_nodes: int, num_gpus: int, environment: Mapping[str, str]) -> list[Problem]:
    """Check that NCCL will use InfiniBand, and the state of its ports.

    Without InfiniBand, training works, slowly: a fault if it is expected, and otherwise a note.
    """
    if num_nodes == 1 or num_gpus == 0:
        return []
    severity: Literal["fault", "note"] = "fault" if expects_infiniband(environment) else "note"
    without = "set EXPECT_INFINIBAND=0 if the nodes have none"
    if environment.get("NCCL_IB_DISABLE") == "1":
        remedy = f"Unset it if the nodes have InfiniBand; otherwise {without}"
        return [Problem("NCCL_IB_DISABLE=1 disables InfiniBand, so nodes communicate over TCP", remedy, severity)]
    names = environment.get("NCCL_IB_HCA") or ""
    ports = read_ports()
    selected = select_ports(ports, names)
    if not ports:
        message = "this node has no InfiniBand adapter, so nodes communicate over TCP"
        message = f"NCCL_IB_HCA={names}, but {message}" if names else message
        remedy = "Check ibv_devinfo and, in a pod, /dev/infiniband and the rdma/ resource; with SkyPilot, request "
        return [Problem(message, f"{remedy}network_tier: best on nodes with the cloud's labels; {without}", severity)]
    active = [port for port in selected if port.is_active]
    if not active:
        listed = ", ".join(port.name for port in ports)
        message = f"no InfiniBand port is active{f' of NCCL_IB_HCA={names}' if names else ''} (this node has {listed})"
        return [Problem(message, f"Check cables, the subnet manager and ibstat; {without}", severity)]
    problems = []
    down = ", ".join(port.name for port in selected if not port.is_active)
    if down:  # often ports that nothing is connected to; ``compare_ports`` finds those that other nodes use
        is_named = names.startswith("=")
        message = f"InfiniBand port {down} is not active"
        problems.append(Problem(message, "Check its cable: ibstat", "fault" if is_named else "note"))
    if not names:
        message = f"NCCL_IB_HCA is not set; NCCL will choose among {', '.join(port.name for port in active)}"
        problems.append(Problem(message, "Set NCCL_DEBUG=INFO to see its choice", "note"))
    return problems


def describe_ports(environment: Mapping[str, str]) -> dict[str, float]:
    """Return the GB/s of each active port that NCCL may use, by name; empty where InfiniBand is not used."""
    if environment.get("NCCL_IB_DISABLE") == "1" or environment.get("EXPECT_INFINIBAND") == "0":
        return {}
    selected = select_ports(read_ports(), environment.get("NCCL_IB_HCA") or "")
    return {port.name: port.gb_s for port in selected if port.is_active}


def compare_ports(rank: int, nodes: Sequence[Mapping[str, float]], environment: Mapping[str, str]) -> list[Problem]:
    """Compare this node's active ports with those of the node that has the most bandwidth.

    Less is a fault of this node if ``NCCL_IB_HCA`` names the ports, and otherwise a note: NCCL may not use all of them,
    such as one for management.

    Args:
        rank: This node's.
        nodes: ``describe_ports`` of each node.
        environment: ``NCCL_IB_HCA``.
    """
    totals = [sum(ports.values()) for ports in nodes]
    best, own = totals.index(max(totals)), nodes[rank]
    if totals[rank] >= totals[best]:
        return []
    worse = [name for name, gb_s in nodes[best].items() if own.get(name, 0.0) < gb_s]
    message = (
        f"its active InfiniBand ports have {8 * totals[rank]:,.0f} Gb/s together, where node {best} has "
        f"{8 * totals[best]:,.0f}; compare {', '.join(worse) or 'the ports'} with ibstat"
    )
    severity: Literal["fault", "note"] = "fault" if environment.get("NCCL_IB_HCA") else "note"
    remedy = "Drain the node, or set NCCL_IB_HCA on all nodes to ports that each of them has"
    return [Problem(message, remedy, severity)]


def read_min_bandwidth(environment: Mapping[str, str]) -> float:
    """Return the share of the bandwidth of a GPU's usual machine that an all_reduce must reach; 0: any will do.

    Raises:
        ConfigError: ``PREFLIGHT_MIN_BANDWIDTH`` is not a share.
    """
    given = environment.get("PREFLIGHT_MIN_BANDWIDTH") or str(_MIN_SHARE)
    try:
        share = float(given)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"PREFLIGHT_MIN_BANDWIDTH={given}: expected a share from 0 to 1.")
    return share


def judge_all_reduce(
    rank: int,
    nodes: Sequence[Measured],
    devices: Devices,
    ports: Sequence[Mapping[str, float]],
    environment: Mapping[str, str],
) -> list[Problem]:
    """Judge the all_reduce of this node, knowing those of all: a node that fails alone is not laid to the others.

    A low bandwidth is a fault where the links are known, since machines with the same GPU differ in them: by NVML in a
    node, and by the ports of all nodes between them. Elsewhere it is a note.

    Args:
        rank: This node's.
        nodes: The measurement of each node.
        devices: This node's GPUs.
        ports: ``describe_ports`` of each node.
        environment: ``PREFLIGHT_MIN_BANDWIDTH`` and the variables of ``expects_infiniband``.
    """
    own = nodes[rank]
    is_node_bad = [one.failed == "node" for one in nodes]
    what = {"node": "an all_reduce among the GPUs of this node", "all": "an all_reduce over all nodes"}
    remedies = {
        "node": "Set NCCL_DEBUG=INFO; nvidia-smi topo -m, nvidia-smi nvlink -s and dmesg",
        "all": "Set NCCL_DEBUG=INFO; ibstat, the firewall between the nodes and NCCL_SOCKET_IFNAME",
    }
    if own.failed is not None and (own.failed == "node" or not any(is_node_bad)):
        remedy = f"{remedies[own.failed]}. PREFLIGHT_MIN_BANDWIDTH=0 leaves this check out"
        remedy += "; a larger PREFLIGHT_WAIT_S gives it more time" if own.is_late else ""
        return [Problem(f"{what[own.failed]} failed ({own.error})", remedy)]
    kind = find_gpu_kind(devices.name)
    share = read_min_bandwidth(environment)
    problems = []
    for scope, gb_s in own.gb_s.items():
        if kind is None:
            continue
        if scope == "node":
            expected, is_known = GPUS[kind].link_gb_s, devices.are_linked
        else:
            inside = (one.gb_s["node"] for one in nodes if "node" in one.gb_s)  # as fast as the slowest node at most
            totals = (sum(one.values()) for one in ports if one)
            expected = min([GPUS[kind].nic_gb_s * devices.count, *inside, *totals])
            is_known = all(ports) and expects_infiniband(environment)
        if gb_s >= share * expected:
            continue
        message = f"{what[scope]} reached {gb_s:.3g} GB/s, less than {share:.0%} of the {expected:.3g} of "
        message += ("its links" if scope == "node" else "the ports") if is_known else "its usual machine"
        remedy = f"{remedies[scope]}. PREFLIGHT_MIN_BANDWIDTH=0 accepts it"
        problems.append(Problem(message, remedy, "fault" if is_known else "note"))
    return problems


def describe_all_reduce(nodes: Sequence[Measured]) -> str:
    """Describe the bandwidths of all nodes in one line; empty if nothing was measured."""
    inside = [one.gb_s["node"] for one in nodes if "node" in one.gb_s]
    across = [one.gb_s["all"] for one in nodes if "all" in one.gb_s]
    parts = [f"{min(inside):.3g} GB/s inside a node"] if inside else []
    parts += [f"{min(across):.3g} GB/s over all nodes"] if across else []
    return f"all_reduce of {NUM_BYTES // 2**20} MiB: {', '.join(parts)}" if parts else ""
