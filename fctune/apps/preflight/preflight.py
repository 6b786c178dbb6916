"""Preflight of a run: every node checks itself, the nodes compare, and training starts on all of them or on none."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fctune.apps.preflight import checks, links
from fctune.apps.preflight.all_reduce import Measured, measure_all_reduce
from fctune.apps.preflight.checks import Mounts, Problem
from fctune.apps.preflight.downloads import download
from fctune.apps.preflight.preparation import check_prepared, find_pinned_config
from fctune.apps.preflight.rendezvous import ListenError, Node, Rendezvous, RendezvousError
from fctune.base.errors import CheckpointError, ConfigError, DataError
from fctune.base.exit_codes import DONE, FAILED, INVALID, NODE_FAULT
from fctune.config.intervals import format_count
from fctune.runs.device import are_linked
from fctune.training.env_overrides import LaunchSpec, resolve_launch

_MAX_CLOCK_OFFSET_S = 5.0  # tolerated by certificates and by the order of log lines
_SHARED_VISIBLE_S = 15.0  # a network file system may show another node's file this late

ShowLine = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Request:
    """The run to check for, and this node's resources for it."""

    config: Path
    overrides: Sequence[str]
    num_gpus: int  # required of each node; 0: none
    mounts: Mounts
    environment: Mapping[str, str]  # config overrides and tokens
    clock: Callable[[], float] = time.time


def run_preflight(node: Node, request: Request, show: ShowLine) -> tuple[int, LaunchSpec | None, list[int]]:
    """Check this node and compare it with the others, then let the head download what the run needs.

    Every node of the run calls this at the same time. A problem on any node stops all of them, within ``node.wait_s``.

    Args:
        node: Position of this node.
        request: Request, equal on all nodes except for their environments.
        show: Receives each output line.

    Returns:
        The exit code, the launch specification if that is 0, and the ranks of the nodes whose GPUs or links failed.
        The code is NODE_FAULT for these, for nodes that do not answer, and for an all_reduce over all nodes that fails.
        Other faults are FAILED, because they may be those of the cluster, and a wrong request is INVALID.
    """
    problems: list[Problem] = []
    unfit: list[int] = []
    try:
        rendezvous = Rendezvous(node)
        device_problems = checks.check_devices(request.num_gpus)
        launch, problems = _check_node(node, request, device_problems)
        ports = links.describe_ports(request.environment) if request.num_gpus else {}
        nodes = rendezvous.gather("node", checks.describe_node() | {"ports": ports})
        port_problems = links.compare_ports(node.rank, [other["ports"] for other in nodes], request.environment)
        problems += port_problems
        problems += _check_shared(rendezvous, request.mounts.shared)
        problems += _check_clock(rendezvous, request.clock)
        if node.is_head:
            problems += compare_nodes(nodes)
        severities = rendezvous.gather("severities", [problem.severity for problem in problems])
        hosts = [other["host"] for other in nodes]
        code = _report(node, problems, hosts, severities, show)
        hardware_problems = [*device_problems, *port_problems]
        has_bad_hardware = rendezvous.gather("hardware", any(one.severity == "fault" for one in hardware_problems))
        if unfit := find_faulty_nodes(severities, has_bad_hardware):
            code = NODE_FAULT
        bandwidths = ""
        if code == 0 and request.num_gpus * node.count > 1 and links.read_min_bandwidth(request.environment) > 0:
            code, unfit, bandwidths = _check_all_reduce(rendezvous, request, nodes, show)
        if code == 0 and node.is_head:
            fit = f"preflight: {format_count(node.count, 'node is', 'nodes are')} fit ({', '.join(hosts)})"
            show(f"{fit}; {bandwidths}" if bandwidths else fit)
        if code == 0 and launch is not None:
            launch = _download_and_pin(rendezvous, launch, show)
        rendezvous.close()
    except RendezvousError as error:
        for problem in [*problems, Problem(str(error), "")]:
            show(f"node {node.rank}: {problem.severity}: {problem}")
        # A node that is late or lost may answer at the next start, but this node's own faults would stop that one, too.
        is_own = isinstance(error, ListenError) or any(problem.severity != "note" for problem in problems)
        return FAILED if is_own else NODE_FAULT, None, []
    if code or launch is None:
        return code or FAILED, None, unfit
    return DONE, launch, []


def compare_nodes(nodes: Sequence[dict[str, Any]]) -> list[Problem]:
    """Compare the software of each node with the head's, from ``describe_node`` of each."""
    problems = []
    head = nodes[0]
    for rank, other in enumerate(nodes[1:], start=1):
        differing = [
            f"{name} {other['versions'].get(name)} where the head has {head['versions'].get(name)}"
            for name in sorted(head["versions"].keys() | other["versions"].keys())
            if other["versions"].get(name) != head["versions"].get(name)
        ]
        if differing:
            message = f"node {rank} ({other['host']}) has {'; '.join(differing)}"
            remedy = "Set up both from the same commit: sky launch, or sky/setup.sh on each node"
            problems.append(Problem(message, remedy))
    return problems


def find_faulty_nodes(severities: Sequence[Sequence[str]], has_bad_hardware: Sequence[bool]) -> list[int]:
    """Return the nodes to exclude from the next start: those whose hardware failed, if nothing else stops the launch.

    Empty if all nodes have the same trouble, such as a wrong driver, since then other nodes would have it too.
    """
    stopped = [rank for rank, of_node in enumerate(severities) if set(of_node) - {"note"}]
    faulty = [rank for rank, is_bad in enumerate(has_bad_hardware) if is_bad]
    return faulty if faulty == stopped and len(faulty) < len(severities) else []


def _check_node(
    node: Node, request: Request, device_problems: Sequence[Problem]
) -> tuple[LaunchSpec | None, list[Problem]]:
    mounts, environment = request.mounts, request.environment
    mount_problems = checks.check_mounts(mounts)
    problems = [
        *mount_problems,
        *device_problems,
        *links.check_network(node.count, request.num_gpus, environment),
        *checks.check_interface(node.count, node.address),
    ]
    try:
        launch = resolve_launch(request.config, environment, request.overrides, mounts.shared)
    except ConfigError as error:
        return None, [*problems, Problem(str(error), "", "usage")]
    if node.is_head and not mount_problems:  # free space is only known of mounted disks
        problems += checks.check_head(find_pinned_config(launch) or launch.config, mounts, environment)
        if request.num_gpus:
            problems += check_prepared(launch, node.count * request.num_gpus, environment)
    return launch, problems


def _check_all_reduce(
    rendezvous: Rendezvous, request: Request, described: Sequence[dict[str, Any]], show: ShowLine
) -> tuple[int, list[int], str]:
    """Let the GPUs of all nodes run an all_reduce; return the exit code, the nodes to exclude, and the bandwidths."""
    node, count = rendezvous.node, request.num_gpus
    hosts, ports = [other["host"] for other in described], [other["ports"] for other in described]
    measured = measure_all_reduce(node, count)
    nodes = [Measured(**one) for one in rendezvous.gather("all_reduce", asdict(measured))]
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    devices = links.Devices(count, gpu, are_linked=bool(gpu) and are_linked(count))
    problems = links.judge_all_reduce(node.rank, nodes, devices, ports, request.environment)
    severities = rendezvous.gather("all_reduce judged", [problem.severity for problem in problems])
    code = _report(node, problems, hosts, severities, show)
    unfit = find_faulty_nodes(severities, ["fault" in of_node for of_node in severities])
    # A network that fails may answer at the next start, and so may a node that was only late, which is not excluded.
    if unfit or any(one.failed == "all" for one in nodes):
        code = NODE_FAULT
    unfit = [rank for rank in unfit if not nodes[rank].is_late]
    return code, unfit, links.describe_all_reduce(nodes)


def _check_shared(rendezvous: Rendezvous, shared: Path) -> list[Problem]:
    """Check that every node sees a file that the head writes, and the head one of every node."""
    node = rendezvous.node
    if node.count == 1:
        return []
    if node.is_head:
        rendezvous.publish("probe", secrets.token_hex(4))
    name = rendezvous.wait_for("probe", node.wait_s)
    mine = shared / f".fctune-{name}-{node.rank}"
    with contextlib.suppress(OSError):  # reported by check_mounts
        mine.write_text(str(node.rank), encoding="utf-8")
    wrote = rendezvous.gather("wrote", mine.exists())
    others = range(1, node.count) if node.is_head else [0]
    expected = [rank for rank in others if wrote[rank] and wrote[node.rank]]
    timeout_s = min(_SHARED_VISIBLE_S, node.wait_s / 2)
    unseen = [rank for rank in expected if not _wait_for_file(shared / f".fctune-{name}-{rank}", timeout_s)]
    rendezvous.gather("looked", True)
    mine.unlink(missing_ok=True)
    if not unseen:
        return []
    message = f"{shared}: not shared: node {node.rank} does not see files of node {', '.join(map(str, unseen))}"
    return [Problem(message, "Mount one ReadWriteMany volume on all nodes (sky volumes ls -v; mount | grep on each)")]


def _check_clock(rendezvous: Rendezvous, clock: Callable[[], float]) -> list[Problem]:
    node = rendezvous.node
    if node.count == 1:
        return []
    rendezvous.gather("clock", True)  # all nodes wait here, so that they read the head's time as soon as it is there
    if node.is_head:
        rendezvous.publish("time", clock())
    offset = clock() - float(rendezvous.wait_for("time", node.wait_s))
    if abs(offset) <= _MAX_CLOCK_OFFSET_S:
        return []
    message = f"the clock is {abs(offset):,.0f} s {'ahead of' if offset > 0 else 'behind'} the head's"
    return [Problem(message, "Start time synchronization on this node: chronyc tracking, timedatectl")]


def _report(
    node: Node, problems: Sequence[Problem], hosts: Sequence[str], severities: Sequence[Sequence[str]], show: ShowLine
) -> int:
    """Show this node's problems and return the exit code that all nodes share."""
    own = f"node {node.rank} ({hosts[node.rank]})"
    for problem in problems:
        show(f"{own}: {'note' if problem.severity == 'note' else 'fault'}: {problem}")
    unfit = [rank for rank, of_node in enumerate(severities) if set(of_node) - {"note"}]
    if not unfit:
        return DONE
    if node.rank not in unfit:
        show(f"{own}: stopped: node {', '.join(map(str, unfit))} reported a fault")
    return FAILED if any("fault" in of_node for of_node in severities) else INVALID


def _download_and_pin(rendezvous: Rendezvous, launch: LaunchSpec, show: ShowLine) -> LaunchSpec | None:
    """Download on the head and pin the commits on all nodes; None if the download failed."""
    pinned: list[str] | None = None
    if rendezvous.node.is_head:
        start = time.monotonic()
        try:
            pinned = download(launch.config, launch.shared / "downloads")
        except (ConfigError, DataError, CheckpointError) as error:
            show(f"node 0: fault: {error}")
        if pinned:
            show(f"downloaded in {time.monotonic() - start:.0f} s: {', '.join(pinned)}")
        rendezvous.publish("downloaded", pinned)
    pinned = rendezvous.wait_for("downloaded")
    return None if pinned is None else launch.with_arguments(pinned)


def _wait_for_file(path: Path, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True
