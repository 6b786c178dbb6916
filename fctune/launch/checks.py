"""What one node can say of itself: its disks, its GPUs, its network, its software."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fctune.config.schema import RunConfig
from fctune.errors import ConfigError
from fctune.launch.hub import check_hub, is_downloaded, named_on_hub
from fctune.launch.problems import Fault
from fctune.launch.space import GIB, count_space, tell_bytes
from fctune.telemetry.device import read_device
from fctune.training.run_directory import versions

# What may be in use of a GPU that nobody uses: the driver's own, and other processes' contexts of this very check.
_IDLE_BYTES = 2 * GIB
_IDLE_SHARE = 0.05

# Compiled kernels, Triton's and Inductor's caches of a run; the least that NCCL and workers want of shared memory.
_CACHE_BYTES = 5 * GIB
_SHM_BYTES = 1 * GIB

_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class Mounts:
    """Where a cluster's disks are."""

    shared: Path  # all nodes see it
    network: Path  # a disk of each node


def check_mounts(mounts: Mounts) -> list[Fault]:
    """Whether both are there and can be written."""
    faults = []
    for name, path, what in (
        ("FCTUNE_SHARED", mounts.shared, "the volume that all nodes share: sky volumes apply sky/volumes/shared.yaml"),
        ("FCTUNE_NETWORK", mounts.network, "a disk of this node"),
    ):
        if not path.is_dir():
            faults.append(Fault(f"{path}: not there", f"Mount {what}; or set {name} to where it is"))
            continue
        probe = path / f".fctune-probe-{secrets.token_hex(4)}"
        try:
            probe.write_text("probe")
            probe.unlink()
        except OSError as error:
            user = os.getuid()
            remedy = f"Make it writable for user {user} (sudo chown {user} {path}); a full or read-only disk cannot be"
            faults.append(Fault(f"{path}: cannot be written ({error.strerror})", remedy))
    return faults


def check_space(config: RunConfig, mounts: Mounts) -> list[Fault]:
    """Whether there is room for the model, the checkpoints and the export, and for caches."""
    faults = []
    models = [(name, revision) for kind, name, revision, _ in named_on_hub(config) if kind == "model"]
    try:
        need = count_space(config, all(is_downloaded("model", *model) for model in models))
    except ConfigError:
        need = None  # of a model that the hub does not give: said by check_hub
    if need is not None:
        free = _free(mounts.shared)
        there = _size(Path(config.output_dir))  # of a run that goes on
        if need.total > free + there:
            remedy = "Free some, take a larger volume, or keep fewer: checkpoint.keep_last"
            faults.append(Fault(f"{mounts.shared}: {tell_bytes(free)} free, and the run needs {need}", remedy))
    free = _free(mounts.network)
    if config.compile and free < _CACHE_BYTES:
        remedy = f"Free some, or set FCTUNE_NETWORK to a disk with {tell_bytes(_CACHE_BYTES)}"
        faults.append(Fault(f"{mounts.network}: {tell_bytes(free)} free, too little for compiled kernels", remedy))
    return faults


def check_devices(num_gpus: int) -> list[Fault]:
    """Whether the GPUs are all there and idle; nothing to say where none are asked for."""
    if num_gpus == 0:
        return []
    found = torch.cuda.device_count()
    if found < num_gpus:
        remedy = "Run nvidia-smi on this node: the driver, a GPU that fell off the bus, or CUDA_VISIBLE_DEVICES"
        return [Fault(f"{found} of {num_gpus} GPUs are there", remedy)]
    faults: list[Fault] = []
    for index in range(num_gpus):
        reading = read_device(index)
        if reading is None:
            what = f"GPU {index}: not asked whether it is idle: no NVML"
            return [*faults, Fault(what, "Install nvidia-ml-py to have it checked", "note")]
        used, share = reading.memory_used_bytes or 0, reading.utilization or 0.0
        if used > _IDLE_BYTES or share > _IDLE_SHARE:
            what = f"GPU {index}: in use: {used / GIB:.1f} GiB of its memory, {share:.0%} of its time"
            faults.append(Fault(what, f"End what runs on it: nvidia-smi -i {index}"))
        if reading.ecc_errors:
            what = f"GPU {index}: {reading.ecc_errors} uncorrected memory errors since its driver was loaded"
            faults.append(Fault(what, f"Have the node drained and the GPU reset: nvidia-smi -q -d ECC -i {index}"))
    shm = shutil.disk_usage("/dev/shm")
    if shm.total < _SHM_BYTES:
        what = f"/dev/shm: {shm.total / 2**20:.0f} MiB, and NCCL wants {_SHM_BYTES / GIB:.0f} GiB"
        faults.append(Fault(what, "Mount a memory-backed emptyDir there; docker run --shm-size=16g"))
    return faults


def check_network(num_nodes: int, num_gpus: int, environment: Mapping[str, str]) -> list[Fault]:
    """Whether the nodes' fast network will be used; said, not a fault: training runs without it, slowly."""
    if num_nodes == 1 or num_gpus == 0:
        return []
    if environment.get("NCCL_IB_DISABLE") == "1":
        return [Fault("NCCL_IB_DISABLE=1: InfiniBand is not used", "Unset it where the nodes have one", "note")]
    adapters = sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
    if environment.get("NCCL_IB_HCA"):
        if adapters:
            return []
        what = f"NCCL_IB_HCA={environment['NCCL_IB_HCA']}, and this node has no InfiniBand adapter"
        return [Fault(what, "The pod has no /dev/infiniband, or the node none: ibv_devinfo")]
    if adapters:
        what = f"NCCL_IB_HCA is not set; NCCL will choose among {', '.join(adapters)}"
        return [Fault(what, "NCCL_DEBUG=INFO shows its choice", "note")]
    remedy = "network_tier: best asks for one; nodes of Kubernetes must carry the cloud's labels"
    return [Fault("NCCL_IB_HCA is not set and this node has no InfiniBand: nodes talk over TCP", remedy, "note")]


def check_tokens(config: RunConfig, environment: Mapping[str, str]) -> list[Fault]:
    """Whether the services that a config names can be used."""
    wandb = config.telemetry.wandb if config.telemetry is not None else None
    if wandb is None or wandb.mode != "online" or environment.get("WANDB_API_KEY"):
        return []
    netrc = Path(environment.get("NETRC") or Path(environment.get("HOME", "/")) / ".netrc")
    if netrc.is_file() and "api.wandb.ai" in netrc.read_text(encoding="utf-8", errors="replace"):
        return []
    remedy = "Export it and launch with --secret WANDB_API_KEY, or pass telemetry.wandb.mode=offline"
    return [Fault("telemetry.wandb: WANDB_API_KEY is empty", remedy)]


def check_head(config: RunConfig, mounts: Mounts, environment: Mapping[str, str]) -> list[Fault]:
    """What one node finds out for all: room on the shared volume, tokens, the hub."""
    return [*check_space(config, mounts), *check_tokens(config, environment), *check_hub(config, environment)]


def describe_node() -> dict[str, Any]:
    """What must be the same on all nodes, and what to call this one by."""
    return {"host": socket.gethostname(), "versions": versions() | {"source of fctune": _digest_source()}}


def now() -> float:
    """Seconds by this node's clock."""
    return time.time()


def _digest_source() -> str:
    """Of the library's code: nodes that were set up at different times may run different ones of one version."""
    digest = hashlib.blake2b(digest_size=6)
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _free(path: Path) -> int:
    return shutil.disk_usage(path).free if path.is_dir() else 0


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
