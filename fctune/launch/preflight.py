"""Whether the nodes of a run are fit for it: each looks at itself, they compare, and all go on or none does."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune.errors import CheckpointError, ConfigError, DataError
from fctune.launch import checks
from fctune.launch.checks import Mounts
from fctune.launch.env_overrides import Launch, plan_launch
from fctune.launch.hub import fetch
from fctune.launch.problems import Fault
from fctune.launch.rendezvous import Meeting, MeetingError, Node

# Clocks may differ by so much; certificates, logs and the order of events stand it.
_CLOCK_S = 5.0

# A network file system may show another node's file this late.
_SHARED_S = 15.0

Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Request:
    """What a node is asked to be fit for, and what it has been given for it."""

    config: Path
    overrides: Sequence[str]
    num_gpus: int  # that each node must have; 0: none are asked for
    mounts: Mounts
    environment: Mapping[str, str]  # choices and tokens


def run_preflight(node: Node, request: Request, show: Show) -> tuple[int, Launch | None]:
    """Check this node and, with the others, all; then let the head fetch what the run needs of the hub.

    Every node of a run calls it. A fault of any stops all of them, within the node's patience.

    Args:
        node: this one among them.
        request: of the run; the same on all of them but for their own environments.
        show: takes a line.

    Returns:
        0 and what training is told; 1 where a node is not fit, 2 where what was asked for is wrong.
    """
    faults: list[Fault] = []
    try:
        meeting = Meeting(node)
        launch, faults = _look_at(node, request)
        nodes = meeting.gather("node", checks.describe_node())
        faults += _check_shared(meeting, request.mounts.shared)
        faults += _check_clock(meeting)
        if node.is_head:
            faults += compare(nodes)
        verdicts = meeting.gather("verdict", [fault.kind for fault in faults])
        code = _judge(node, faults, [other["host"] for other in nodes], verdicts, show)
        if code or launch is None:
            meeting.leave()
            return code, None
        launch = _fetch(meeting, launch, show)
        meeting.leave()
    except MeetingError as error:
        for fault in [*faults, Fault(str(error), "")]:
            show(f"node {node.rank}: {fault.kind}: {fault}")
        return 1, None
    return (0, launch) if launch is not None else (1, None)


def compare(nodes: Sequence[dict[str, Any]]) -> list[Fault]:
    """Faults of nodes that are not alike: each is compared with the head."""
    faults = []
    head = nodes[0]
    for rank, other in enumerate(nodes[1:], start=1):
        names = sorted(set(head["versions"]) | set(other["versions"]))
        differing = [
            f"{name} {other['versions'].get(name)} and on the head {head['versions'].get(name)}"
            for name in names
            if other["versions"].get(name) != head["versions"].get(name)
        ]
        if differing:
            what = f"node {rank} ({other['host']}) has {'; '.join(differing)}"
            faults.append(Fault(what, "Set both up again from one commit: sky launch, or sky/setup.sh on each"))
    return faults


def _look_at(node: Node, request: Request) -> tuple[Launch | None, list[Fault]]:
    mounts, environment = request.mounts, request.environment
    of_mounts = checks.check_mounts(mounts)
    faults = [
        *of_mounts,
        *checks.check_devices(request.num_gpus),
        *checks.check_network(node.count, request.num_gpus, environment),
    ]
    try:
        launch = plan_launch(request.config, environment, request.overrides, mounts.shared)
    except ConfigError as error:
        return None, [*faults, Fault(str(error), "", "usage")]
    if node.is_head and not of_mounts:  # of disks that are not there nothing can be said
        faults += checks.check_head(launch.config, mounts, environment)
    return launch, faults


def _check_shared(meeting: Meeting, shared: Path) -> list[Fault]:
    """Whether every node sees what the head writes, and the head what they write."""
    node = meeting.node
    if node.count == 1:
        return []
    if node.is_head:
        meeting.tell("probe", secrets.token_hex(4))
    name = meeting.hear("probe", node.wait_s)
    mine = shared / f".fctune-{name}-{node.rank}"
    with contextlib.suppress(OSError):  # said already
        mine.write_text(str(node.rank), encoding="utf-8")
    wrote = meeting.gather("wrote", mine.exists())
    others = range(1, node.count) if node.is_head else [0]
    looked_for = [rank for rank in others if wrote[rank] and wrote[node.rank]]
    patience_s = min(_SHARED_S, node.wait_s / 2)
    unseen = [rank for rank in looked_for if not _comes(shared / f".fctune-{name}-{rank}", patience_s)]
    meeting.gather("looked", True)
    mine.unlink(missing_ok=True)
    if not unseen:
        return []
    ranks = ", ".join(map(str, unseen))
    what = f"{shared}: not shared: what node {ranks} writes there is not seen on node {node.rank}"
    remedy = "Mount one ReadWriteMany volume on all nodes (sky volumes ls -v; mount | grep on each)"
    return [Fault(what, remedy)]


def _check_clock(meeting: Meeting) -> list[Fault]:
    node = meeting.node
    if node.count == 1:
        return []
    meeting.gather("clock", True)  # all wait, so that what the head says is heard at once
    if node.is_head:
        meeting.tell("time", checks.now())
    apart = checks.now() - float(meeting.hear("time", node.wait_s))
    if abs(apart) <= _CLOCK_S:
        return []
    what = f"the clock is {abs(apart):,.0f} s {'ahead of' if apart > 0 else 'behind'} the head's"
    return [Fault(what, "Start time synchronisation on this node: chronyc tracking, timedatectl")]


def _judge(
    node: Node, faults: Sequence[Fault], hosts: Sequence[str], verdicts: Sequence[Sequence[str]], show: Show
) -> int:
    own = f"node {node.rank} ({hosts[node.rank]})"
    for fault in faults:
        show(f"{own}: {'note' if fault.kind == 'note' else 'fault'}: {fault}")
    kinds = {kind for verdict in verdicts for kind in verdict}
    if not kinds & {"fault", "usage"}:
        if node.is_head:
            show(f"preflight: {len(hosts)} {'node is' if len(hosts) == 1 else 'nodes are'} fit ({', '.join(hosts)})")
        return 0
    if not any(fault.kind != "note" for fault in faults):
        unfit = [str(rank) for rank, verdict in enumerate(verdicts) if set(verdict) - {"note"}]
        show(f"{own}: stopped: node {', '.join(unfit)} found what keeps the run from starting")
    return 1 if "fault" in kinds else 2


def _fetch(meeting: Meeting, launch: Launch, show: Show) -> Launch | None:
    """The launch with what was fetched pinned in it; None where it could not be."""
    pinned: list[str] | None = None
    if meeting.node.is_head:
        start = time.monotonic()
        try:
            pinned = fetch(launch.config, launch.shared / "fetched")
        except (ConfigError, DataError, CheckpointError) as error:
            show(f"node 0: fault: {error}")
        if pinned:
            show(f"fetched in {time.monotonic() - start:.0f} s: {', '.join(pinned)}")
        meeting.tell("fetched", pinned)
    pinned = meeting.hear("fetched")
    return None if pinned is None else launch.with_arguments(pinned)


def _comes(path: Path, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True
