"""What each rank is: host, device, software, clock."""

from __future__ import annotations

import os
import platform
import re
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fctune.distributed import World
from fctune.telemetry.device import compute_capability, read_device, total_memory
from fctune.training.run_directory import versions

# What must be equal on every rank for them to run one program at one speed.
SAME = ("device", "memory_gib", "capability", "driver", "cuda", "nccl", "torch", "python", "packages", "cores")

_PINGS = 5
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")


def describe_rank(world: World, rank: int) -> dict[str, Any]:
    """What this rank runs on; ``rank`` is global."""
    device, is_cuda = world.device, world.device.type == "cuda"
    found: dict[str, Any] = {
        "rank": rank,
        "host": socket.gethostname(),
        "local_rank": world.local_rank,
        "pid": os.getpid(),
        "device": torch.cuda.get_device_name(device) if is_cuda else platform.processor() or platform.machine(),
        "memory_gib": round(total_memory(device, 1) / 2**30, 1),
        "capability": compute_capability(device),
        "cores": os.cpu_count(),
        "driver": _read_driver(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if is_cuda else None,  # type: ignore[no-untyped-call]
        "torch": torch.__version__,
        "python": platform.python_version(),
        "packages": versions(),
        "pci": None,
        "sm_clock_mhz": None,
    }
    if is_cuda:
        properties: Any = torch.cuda.get_device_properties(device)
        if hasattr(properties, "pci_bus_id"):  # not in every torch
            found["pci"] = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"
        reading = read_device(device.index)
        found["sm_clock_mhz"] = None if reading is None else reading.sm_clock_mhz
    return found


def measure_clock(world: World) -> float:
    """Seconds that this rank's clock is ahead of rank 0's, by the quickest of a few messages there and back."""
    offset = 0.0
    for other in range(1, world.world_size):
        best = float("inf")
        for _ in range(_PINGS):
            theirs = torch.zeros(1, dtype=torch.float64)
            if world.rank == other:
                sent = time.time()
                dist.send(torch.tensor([sent], dtype=torch.float64), 0)
                dist.recv(theirs, 0)
                received = time.time()
                if received - sent < best:
                    best, offset = received - sent, (sent + received) / 2 - theirs.item()
            elif world.rank == 0:
                dist.recv(theirs, other)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), other)
    return offset


def count_xids(lines: str, pci: str) -> int:
    """Errors that the kernel's log has of one GPU, by its address on the bus (domain:bus:device)."""
    return sum(_normalise(address) == _normalise(pci) for address, _ in _XID.findall(lines))


def read_kernel_log() -> str | None:
    """The kernel's log; None where this process may not read it, as in most containers."""
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    lines = []
    try:
        while True:
            lines.append(os.read(descriptor, 8192))
    except BlockingIOError:
        return b"".join(lines).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _normalise(address: str) -> tuple[int, ...]:
    """Of a PCI address, whatever its leading zeros and function."""
    return tuple(int(part, 16) for part in address.partition(".")[0].split(":"))


def _read_driver() -> str | None:
    try:
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    match = re.search(r"\d+\.\d+(?:\.\d+)?", first)
    return match[0] if match else None
