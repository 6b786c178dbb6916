"""Preflight nodes as local processes, each with its own disks, environment, clock and software."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import ROOT
from tests.ranks import context, find_port

TINY = ROOT / "configs" / "tiny_lora.yaml"
OVERRIDES = (f"model.path={ROOT / 'fctune' / 'assets' / 'tiny_base'}", "data.sources.0.path=synthetic:train:100:1")


@dataclass
class NodeSpec:
    """Properties of one node; its disks are folders in ``folder``."""

    folder: Path
    shared: str = "shared"  # inside folder and created, unless absolute
    network: str = "network"
    config: Path = TINY
    overrides: tuple[str, ...] = OVERRIDES
    num_gpus: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    clock_s: float = 0.0  # seconds ahead of the others
    versions: dict[str, str] = field(default_factory=dict)  # packages whose version differs from the other nodes
    wait_s: float = 20.0


class Outcome(NamedTuple):
    """Result of a node's preflight: exit code, output lines and the launch as shell assignments."""

    code: int
    lines: list[str]
    shell: str | None
    seconds: float
    faulty: list[int]


def run_nodes(folder: Path, *specs: NodeSpec, count: int | None = None, port: int | None = None) -> list[Outcome]:
    """Run the preflight on all nodes; those beyond ``specs``, up to ``count``, never start."""
    port = port or find_port()
    count = count or len(specs)
    processes = [
        context.Process(target=_run, args=(spec, rank, count, port, folder / f"outcome-{rank}.json"))
        for rank, spec in enumerate(specs)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert not process.is_alive(), process.kill()
    return [Outcome(**json.loads((folder / f"outcome-{rank}.json").read_text())) for rank in range(len(specs))]


def _run(spec: NodeSpec, rank: int, count: int, port: int, out: Path) -> None:
    from fctune.apps.preflight.checks import Mounts
    from fctune.apps.preflight.preflight import Request, run_preflight
    from fctune.apps.preflight.rendezvous import Node

    for name, version in spec.versions.items():  # the first match on the path counts as installed
        packages = spec.folder / "packages"
        (packages / f"{name}-{version}.dist-info").mkdir(parents=True)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (packages / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)
        sys.path.insert(0, str(packages))
    mounts = Mounts(_disk(spec, spec.shared), _disk(spec, spec.network))
    node = Node(rank, count, "127.0.0.1", port, spec.wait_s)
    lines: list[str] = []
    start = time.monotonic()
    clock = lambda: time.time() + spec.clock_s  # noqa: E731
    request = Request(spec.config, spec.overrides, spec.num_gpus, mounts, spec.environment, clock)
    code, launch, faulty = run_preflight(node, request, lines.append)
    seconds = time.monotonic() - start
    shell = None if launch is None else launch.to_shell(rank)
    result: dict[str, Any] = {"code": code, "lines": lines, "shell": shell, "seconds": seconds, "faulty": faulty}
    out.write_text(json.dumps(result))


def _disk(spec: NodeSpec, name: str) -> Path:
    path = spec.folder / name
    if not Path(name).is_absolute() and not name.startswith("missing"):
        path.mkdir(parents=True, exist_ok=True)
    return path
