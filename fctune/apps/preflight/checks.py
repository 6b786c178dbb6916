"""Preflight checks of a single node: its disks, GPUs, network, tokens and software, and access to the hub."""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from fctune.base.errors import ConfigError, DataError, one_line
from fctune.base.files import format_bytes
from fctune.base.network import find_interface
from fctune.base.processes import run_command
from fctune.config.run_length import find_length_warnings
from fctune.config.schema import RunConfig
from fctune.config.sections.rollouts import RECORDED
from fctune.data.data_size import find_run_length
from fctune.models.planned_model import find_architecture, shape_model
from fctune.parallel.memory import MemoryModel
from fctune.parallel.storage import KERNEL_CACHE_BYTES, plan_storage
from fctune.runs.device import DeviceHealth, read_device, read_health
from fctune.runs.directory import installed_versions
from fctune.runs.leftovers import count_bytes

_GIB = 2**30

# GPU usage up to which a device counts as idle: the driver, and the CUDA contexts of this check's own processes.
_IDLE_BYTES = 2 * _GIB
_IDLE_SHARE = 0.05

# First driver for each major version of CUDA (https://docs.nvidia.com/deploy/cuda-compatibility/).
_MIN_DRIVERS = {12: 525, 13: 580}

_SHM_BYTES = 1 * _GIB  # minimum shared memory for NCCL and data workers

_PROBE_S = 45.0  # limit for kernels on all GPUs; other nodes wait a minute for this one
# Runs kernels of torch and of cuBLAS on one GPU after the other; prints "ok", or what failed, for each.
_PROBE = """
import sys, torch
for index in range(int(sys.argv[1])):
    try:
        x = torch.ones(64, 64, dtype=torch.bfloat16, device=f"cuda:{index}")
        print("ok" if (x @ x).sum().item() == 64**3 else "wrong result of a matrix product", flush=True)
    except Exception as error:
        print((str(error) or repr(error)).splitlines()[0], flush=True)
"""


RepoKind = Literal["model", "dataset"]

# Files downloaded of each kind of repository: nothing executable.
ALLOW_PATTERNS = {
    "model": ["*.safetensors", "*.json"],
    "dataset": [f"*.{s}" for s in ("json", "jsonl", "jsonl.gz", "json.gz", "ndjson", "parquet", "arrow", "csv", "md")],
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A finding and its remedy, printed on one line.

    A ``fault`` is a defect of the cluster and a ``usage`` problem one of the request; both stop the launch.
    A ``note`` is only printed.
    """

    message: str
    remedy: str
    severity: Literal["fault", "usage", "note"] = "fault"

    def __str__(self) -> str:
        return f"{self.message}. {self.remedy}" if self.remedy else self.message


@dataclass(frozen=True, slots=True)
class Mounts:
    """Mount points of a cluster's disks."""

    shared: Path  # visible to all nodes
    network: Path  # a disk private to each node


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """Bytes that a run writes to the shared volume."""

    model: int  # base weights that are not downloaded yet
    checkpoints: int  # every checkpoint kept, plus those being written
    export: int

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return self.model + self.checkpoints + self.export

    def __str__(self) -> str:
        parts = {"model": self.model, "checkpoints": self.checkpoints, "export": self.export}
        named = ", ".join(f"{name} {format_bytes(value)}" for name, value in parts.items() if value)
        return f"{format_bytes(self.total)} ({named})"


def estimate_disk_usage(config: RunConfig, is_downloaded: bool) -> DiskUsage:
    """Estimate a run's peak disk usage from its model's shape.

    Raises:
        ConfigError: The model's architecture cannot be determined.
    """
    architecture, _, _ = find_architecture(config.model.path, model_source=config.model.source)
    if not isinstance(config.data.seq_len, int):  # no file depends on it
        config = replace(config, data=replace(config.data, seq_len=8))
    memory = MemoryModel(shape_model(config, architecture), config, device_bytes=1)
    storage = plan_storage(memory, config, world_size=1, rows=None, disk_gb_s=1.0, failures_per_gpu_day=0.0)
    base = 0 if is_downloaded else storage.base_bytes
    return DiskUsage(model=base, checkpoints=storage.checkpoints_bytes, export=storage.export_bytes)


def check_mounts(mounts: Mounts) -> list[Problem]:
    """Check that both disks are mounted and writable."""
    problems = []
    for name, path, disk in (
        ("FCTUNE_SHARED", mounts.shared, "the volume shared by all nodes (sky volumes apply sky/volumes/shared.yaml)"),
        ("FCTUNE_NETWORK", mounts.network, "a disk of this node"),
    ):
        if not path.is_dir():
            problems.append(Problem(f"{path}: does not exist", f"Mount {disk} there, or set {name} to its mount point"))
            continue
        probe = path / f".fctune-probe-{secrets.token_hex(4)}"
        try:
            probe.write_text("probe")
            probe.unlink()
        except OSError as error:
            user = os.getuid()
            remedy = f"Make it writable for user {user} (sudo chown {user} {path}); it may also be full or read-only"
            problems.append(Problem(f"{path}: cannot be written ({error.strerror})", remedy))
    return problems


def check_space(config: RunConfig, mounts: Mounts) -> list[Problem]:
    """Check that the disks have room for the model, checkpoints, export and kernel caches."""
    problems = []
    models = [(name, revision) for kind, name, revision, _ in list_hub_repositories(config) if kind == "model"]
    try:
        usage = estimate_disk_usage(config, all(is_downloaded("model", *model) for model in models))
    except ConfigError:
        usage = None  # the model is not available on the hub, which check_hub reports
    if usage is not None:
        free = _free_bytes(mounts.shared)
        reused = count_bytes(Path(config.output_dir))  # a resumed run overwrites its own files
        reused += sum(count_partial_download("model", name) for name, _ in models) if usage.model else 0
        if usage.total > free + reused:
            remedy = "Free some space, use a larger volume, or lower checkpoint.keep_last"
            message = f"{mounts.shared}: {format_bytes(free)} free, but the run needs {usage}"
            problems.append(Problem(message, remedy))
    free = _free_bytes(mounts.network)
    if config.compile and free < KERNEL_CACHE_BYTES:
        remedy = f"Free some space, or set FCTUNE_NETWORK to a disk with {format_bytes(KERNEL_CACHE_BYTES)} free"
        message = f"{mounts.network}: {format_bytes(free)} free, too little for compiled kernels"
        problems.append(Problem(message, remedy))
    return problems


def check_devices(num_gpus: int) -> list[Problem]:
    """Check that all GPUs are visible, compute, are idle and free of memory errors; nothing is checked for 0 GPUs."""
    if num_gpus == 0:
        return []
    problems = _check_driver()
    if problems:
        return problems
    visible = torch.cuda.device_count()
    if visible < num_gpus:
        remedy = "Run nvidia-smi on this node: check the driver, lost GPUs and CUDA_VISIBLE_DEVICES"
        return [Problem(f"only {visible} of {num_gpus} GPUs are visible", remedy)]
    problems = _check_readings(num_gpus)
    shm = shutil.disk_usage("/dev/shm")
    if shm.total < _SHM_BYTES:
        message = f"/dev/shm: {shm.total / 2**20:.0f} MiB, but NCCL needs {_SHM_BYTES / _GIB:.0f} GiB"
        problems.append(Problem(message, "Mount a memory-backed emptyDir there, or use docker run --shm-size=16g"))
    return [*problems, *_check_kernels(num_gpus)]  # last: its kernels would make the GPUs look busy


def _check_readings(num_gpus: int) -> list[Problem]:
    """Check what NVML reports of each GPU: its load, its memory errors and its NVLinks."""
    problems = []
    links: dict[int, DeviceHealth] = {}
    for index in range(num_gpus):
        reading = read_device(index)
        if reading is None:
            message = f"GPU {index}: cannot check that it is idle without NVML"
            problems.append(Problem(message, "Install nvidia-ml-py to enable this check", "note"))
            break
        used, share = reading.memory_used_bytes or 0, reading.utilization or 0.0
        if used > _IDLE_BYTES or share > _IDLE_SHARE:
            message = f"GPU {index}: already in use ({used / _GIB:.1f} GiB of memory, {share:.0%} utilization)"
            problems.append(Problem(message, f"Stop the processes that use it: nvidia-smi -i {index}"))
        if reading.ecc_errors:
            message = f"GPU {index}: {reading.ecc_errors} uncorrected memory errors since its driver was loaded"
            problems.append(Problem(message, f"Drain the node and reset the GPU: nvidia-smi -q -d ECC -i {index}"))
        health = read_health(index)
        if health is None:
            continue
        links[index] = health
        if health.has_remap_failed:
            message = f"GPU {index}: a defective row of memory could not be remapped, because no spare row is left"
            remedy = f"Drain the node and replace the GPU: nvidia-smi -q -d ROW_REMAPPER -i {index}"
            problems.append(Problem(message, remedy))
        elif health.is_remap_pending:
            message = f"GPU {index}: defective rows of memory wait for a reset of the GPU to be remapped"
            problems.append(Problem(message, f"Drain the node and reset the GPU: nvidia-smi -r -i {index}"))
    return problems + _check_nvlinks(links)


def _check_nvlinks(health: Mapping[int, DeviceHealth]) -> list[Problem]:
    """Compare the active NVLinks of a node's GPUs: one with fewer than another is a fault.

    A GPU may have more links than its machine connects, so links that are inactive on all GPUs are only a note, as are
    those of a GPU without any, except among NVSwitches: bridges connect only some of a machine's GPUs.
    """
    has_switch = any(one.has_switch for one in health.values())
    most = max((one.num_active_links for one in health.values()), default=0)
    problems = []
    for index, one in health.items():
        message = f"GPU {index}: {one.num_active_links} of {one.num_links} NVLinks are active"
        remedy = f"Drain the node; nvidia-smi nvlink -s -i {index} lists the links, dmesg has their errors (Xid 74)"
        if one.num_active_links < most:
            message = f"{message}, but {most} on another GPU of this node"
            if one.num_active_links or has_switch:
                problems.append(Problem(message, remedy))
            else:
                problems.append(Problem(message, "Check that it is meant to have no bridge", "note"))
        elif 0 < most < one.num_links:
            problems.append(Problem(message, f"nvidia-smi nvlink -s -i {index} lists them", "note"))
    return problems


def _check_driver() -> list[Problem]:
    """Check that torch is built for CUDA, and that the driver is new enough for the CUDA that it is built for."""
    build = torch.version.cuda
    if build is None:
        remedy = "Install the CUDA build of the same version, which the usual package index serves"
        return [Problem(f"torch {torch.__version__} is built for CPUs only, so it cannot use GPUs", remedy)]
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        remedy = "Install the NVIDIA driver on the host; a container needs its runtime too (docker run --gpus all)"
        return [Problem(f"the NVIDIA driver's library cannot be loaded ({error})", remedy)]
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    supported, needed = version.value // 1000, int(build.split(".")[0])
    if supported >= needed:  # within a major version, older drivers run newer builds
        return []
    message = f"the NVIDIA driver is too old: it supports CUDA {supported}.{version.value % 1000 // 10}"
    minimum = _MIN_DRIVERS.get(needed)
    wanted = f"driver {minimum} or newer" if minimum else "a newer driver"
    return [Problem(f"{message}, but torch {torch.__version__} is built for CUDA {build}", f"Install {wanted}")]


def _check_kernels(num_gpus: int) -> list[Problem]:
    """Run kernels on each GPU, in a process of its own, which is abandoned if a GPU hangs."""
    command = [sys.executable, "-P", "-c", _PROBE, str(num_gpus)]
    done = run_command(command, limit_s=_PROBE_S)
    ending = f"no result after {_PROBE_S:g} s" if done.code is None else f"its process ended with code {done.code}"
    results = done.output.text.splitlines()
    results = results if len(results) == num_gpus else [*results, ending]
    return [
        Problem(
            f"GPU {index}: a kernel failed ({result})", f"Run nvidia-smi -q -i {index} and dmesg, or drain the node"
        )
        for index, result in enumerate(results)
        if result != "ok"
    ]


def check_interface(num_nodes: int, head: str) -> list[Problem]:
    """Check that a network interface routes to the head, on which this node's ranks will listen for others."""
    if num_nodes == 1 or find_interface(head) is not None:
        return []
    message = f"no network interface of this node routes to the head, {head}"
    return [Problem(message, "Check its routes (ip route get), or set GLOO_SOCKET_IFNAME to the interface to use")]


def check_tokens(config: RunConfig, environment: Mapping[str, str]) -> list[Problem]:
    """Check that credentials exist for the services that a config uses."""
    wandb = config.telemetry.wandb if config.telemetry is not None else None
    if wandb is None or wandb.mode != "online" or environment.get("WANDB_API_KEY"):
        return []
    netrc = Path(environment.get("NETRC") or Path(environment.get("HOME", "/")) / ".netrc")
    if netrc.is_file() and "api.wandb.ai" in netrc.read_text(encoding="utf-8", errors="replace"):
        return []
    remedy = "Export it and launch with --secret WANDB_API_KEY, or pass telemetry.wandb.mode=offline"
    return [Problem("telemetry.wandb: WANDB_API_KEY is empty", remedy)]


def list_source_paths(config: RunConfig) -> dict[str, str]:
    """Return the paths of the sources of a config's rows, also of those to replay, by their config keys."""
    sources = {f"data.sources.{i}.path": source.path for i, source in enumerate(config.data.sources)}
    replayed = [] if config.data.replay is None else config.data.replay.sources
    return sources | {f"data.replay.sources.{i}.path": source.path for i, source in enumerate(replayed)}


def list_hub_repositories(config: RunConfig) -> list[tuple[RepoKind, str, str | None, str]]:
    """List the hub repositories that a config names: kind, name, revision (None: the newest) and config key."""
    keys: list[tuple[RepoKind, str, str]] = [("model", "model.path", config.model.path)]
    keys += [("dataset", key, path) for key, path in list_source_paths(config).items()]
    if (rollouts := config.rollouts) is not None and rollouts.cases.startswith(RECORDED):
        keys.append(("dataset", f"{rollouts.section}.cases", rollouts.cases.removeprefix(RECORDED)))
    if config.distill is not None and config.distill.teacher is not None:
        keys.append(("model", "distill.teacher", config.distill.teacher))
    repositories: list[tuple[RepoKind, str, str | None, str]] = []
    for kind, key, path in keys:
        spec, _, revision = path.removeprefix("hf:").partition("@")
        name = spec.split(":")[0]
        if path.startswith("hf:") and not Path(name).is_dir():
            repositories.append((kind, name, revision or None, key))
    return repositories


def is_downloaded(kind: RepoKind, name: str, revision: str | None) -> bool:
    """Return True if the hub client's cache holds a complete snapshot of a repository."""
    return find_snapshot(kind, name, revision) is not None


def find_snapshot(kind: RepoKind, name: str, revision: str | None) -> Path | None:
    """Return the complete snapshot of a repository in the hub client's cache, or None."""
    from huggingface_hub import snapshot_download

    patterns = ALLOW_PATTERNS[kind]
    try:
        found = snapshot_download(
            name, repo_type=kind, revision=revision, local_files_only=True, allow_patterns=patterns
        )
    except Exception:  # the client raises errors of several families; any of them means that a download is needed
        return None
    return Path(found)


def count_partial_download(kind: RepoKind, name: str) -> int:
    """Return the bytes of a repository that an interrupted download has left, and a new one uses."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return count_bytes(Path(HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}" / "blobs")


def check_hub(config: RunConfig, environment: Mapping[str, str]) -> list[Problem]:
    """Check that every repository that a config names is downloaded or can be."""
    problems: list[Problem] = []
    seen: set[tuple[str, str]] = set()
    for kind, name, revision, key in list_hub_repositories(config):
        if (kind, name) in seen or is_downloaded(kind, name, revision):
            continue
        seen.add((kind, name))
        problem = _check_access(kind, name, key, environment)
        problems += [] if problem is None else [problem]
    return problems


def _check_access(kind: RepoKind, name: str, key: str, environment: Mapping[str, str]) -> Problem | None:
    from huggingface_hub import auth_check
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if environment.get("HF_HUB_OFFLINE") in ("1", "true", "True"):
        remedy = f"Unset it, or put the {kind} into HF_HOME={environment.get('HF_HOME', '')}"
        return Problem(f"{key}: {name} is not downloaded, and HF_HUB_OFFLINE is set", remedy)
    token = environment.get("HF_TOKEN") or None
    try:
        auth_check(name, repo_type=kind, token=token)
    except GatedRepoError:
        reason = "the account of HF_TOKEN has no access" if token else "HF_TOKEN is empty"
        page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name}"
        remedy = f"Accept the license at {page}" + ("" if token else ", export HF_TOKEN and pass --secret HF_TOKEN")
        return Problem(f"{key}: {name} is gated and {reason}", remedy)
    except RepositoryNotFoundError:
        remedy = "Check the name" + ("" if token else "; if it is private, pass --secret HF_TOKEN")
        return Problem(f"{key}: the hub has no {kind} {name}, or this token cannot see it", remedy)
    except Exception as error:  # no network, a proxy, or an outage of the hub
        reason = one_line(error, 120)
        remedy = f"Check the head's network, or download the {kind} into HF_HOME beforehand"
        return Problem(f"{key}: cannot reach the hub for {name} ({type(error).__name__}: {reason})", remedy)
    return None


def check_length(config: RunConfig) -> list[Problem]:
    """Note settings that do not suit the length of the run, as far as its data is known."""
    try:
        length = find_run_length(config)
    except DataError as error:
        return [Problem(str(error), "")]
    warnings = [] if length is None else find_length_warnings(config, length)
    return [Problem(warning, "", "note") for warning in warnings]


def check_head(config: RunConfig, mounts: Mounts, environment: Mapping[str, str]) -> list[Problem]:
    """Run the checks that the head makes for all nodes: shared disk space, tokens and hub access."""
    access = [*check_tokens(config, environment), *check_hub(config, environment)]
    return [*check_space(config, mounts), *access, *check_length(config)]


def describe_node() -> dict[str, Any]:
    """Host name, and the versions that must be the same on all nodes."""
    return {"host": socket.gethostname(), "versions": installed_versions() | {"source of fctune": _digest_source()}}


def _digest_source() -> str:
    """Digest of the library's source: one version number may cover different code on nodes set up at other times."""
    digest = hashlib.blake2b(digest_size=6)
    root = Path(__file__).parents[2]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free if path.is_dir() else 0
