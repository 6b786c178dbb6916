"""Measurements of one rank by itself: identity, clock, matrix products, copies and checksums.

All ranks measure at the same time, which loads power and cooling the way training does.
"""

from __future__ import annotations

import itertools
import os
import platform
import re
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fctune.apps.acceptance.config import ComputeConfig
from fctune.apps.acceptance.fault_injection import FaultInjector
from fctune.apps.acceptance.session import Session
from fctune.base.distributed import World
from fctune.runs.device import compute_capability, read_device, total_memory
from fctune.runs.directory import installed_versions

# Properties that must be equal on all ranks, so that they run the same program at the same speed.
UNIFORM = ("device", "memory_gib", "capability", "driver", "cuda", "nccl", "torch", "python", "packages", "cores")

# NVML throttle reasons other than the GPU's own power limit: hardware slowdown, thermal slowdown in software and in
# hardware, power brake (nvml.h, nvmlClocksEventReason*).
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_FP8_CAPABILITY = (8, 9)
# Seconds of products timed together: on a GPU enough to queue kernels ahead; on a CPU less than a scheduler's time
# slice, so that some windows run without interruption on a busy machine.
_WINDOW_S = {"cuda": 0.1, "cpu": 0.001}
_MIN_WINDOWS = 5
_MAX_PINNED = 2**28  # float32 elements; pinning takes a second for a few GiB, on every rank of the host
_PINGS = 5
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")


def describe_rank(world: World, rank: int) -> dict[str, Any]:
    """Describe the host, device and software of a rank, given by its global number."""
    device, is_cuda = world.device, world.device.type == "cuda"
    description: dict[str, Any] = {
        "rank": rank,
        "host": socket.gethostname(),
        "local_rank": world.local_rank,
        "pid": os.getpid(),
        "device": torch.cuda.get_device_name(device) if is_cuda else platform.processor() or platform.machine(),
        "memory_gib": round(total_memory(device, 1) / 2**30, 1),
        "capability": compute_capability(device),
        "cores": os.cpu_count(),
        "driver": _read_driver_version(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if is_cuda else None,  # type: ignore[no-untyped-call]
        "torch": torch.__version__,
        "python": platform.python_version(),
        "packages": installed_versions(),
        "pci": None,
        "sm_clock_mhz": None,
    }
    if is_cuda:
        properties: Any = torch.cuda.get_device_properties(device)
        if hasattr(properties, "pci_bus_id"):  # missing in some versions of torch
            address = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
            description["pci"] = "{:04x}:{:02x}:{:02x}".format(*address)
        reading = read_device(device.index)
        description["sm_clock_mhz"] = None if reading is None else reading.sm_clock_mhz
    return description


def measure_clock(world: World) -> float:
    """Measure how many seconds this rank's clock is ahead of rank 0's, by the fastest of several round trips."""
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


def read_kernel_log() -> str | None:
    """Return the kernel log; None if this process may not read it, as in most containers."""
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


def count_xids(kernel_log: str, pci: str) -> int:
    """Count the driver's errors (Xids) for one GPU, given by its PCI address (domain:bus:device)."""

    def normalize(address: str) -> tuple[int, ...]:
        return tuple(int(part, 16) for part in address.partition(".")[0].split(":"))

    return sum(normalize(address) == normalize(pci) for address, _ in _XID.findall(kernel_log))


def time_calls(call: Callable[[], object], repetitions: int, device: torch.device) -> list[float]:
    """Time each of several calls, in seconds; on CUDA with events, so that the host waits only once."""
    if device.type != "cuda":
        seconds = []
        for _ in range(repetitions):
            started = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started)
        return seconds
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    events[-1].synchronize()
    return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(events)]


def make_product(dtype: str, size: int, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that multiplies two seeded ``[size, size]`` matrices of a dtype."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator).to(device) for _ in range(2))
    if dtype == "fp8":
        left, one = a.to(_DTYPES["fp8"]), torch.ones((), device=device)
        right = b.to(_DTYPES["fp8"]).t().contiguous().t()  # column-major, as the kernel requires
        options: dict[str, Any] = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        return lambda: torch._scaled_mm(left, right, **options)
    left, right = a.to(_DTYPES[dtype]), b.to(_DTYPES[dtype])
    return lambda: left @ right


def measure_products(
    session: Session,
    config: ComputeConfig,
    dtype: str,
    device: torch.device,
    faults: FaultInjector,
    sample: dict[str, Any],
) -> None:
    """Add to ``sample`` the rates of matrix products over ``sustain_s``, and NVML's readings meanwhile.

    ``sample["tflops"]`` is the estimate from all rates that the sample holds, earlier ones included.
    """
    capability = compute_capability(device)
    if dtype == "fp8" and capability is not None and capability < _FP8_CAPABILITY:
        sample["skipped"] = f"compute capability {capability[0]}.{capability[1]}; fp8 products need 8.9"
        return
    product = make_product(dtype, config.size, device)
    for _ in range(3):
        once = min(time_calls(product, 1, device))
    num_products = max(1, round(_WINDOW_S[device.type] / once))

    def window() -> None:
        faults.delay("slow_compute")
        for _ in range(num_products):
            product()

    session.barrier(f"products in {dtype}")
    duration_s = min(config.sustain_s, session.time_left())
    seconds: list[float] = []
    readings: list[dict[str, Any]] = sample.setdefault("readings", [])
    started, read_at = time.monotonic(), 0.0
    while time.monotonic() - started < duration_s or len(seconds) < _MIN_WINDOWS:
        session.enter(f"products in {dtype}")
        seconds += time_calls(window, 1, device)
        if device.type == "cuda" and time.monotonic() - read_at > 1:
            read_at = time.monotonic()
            readings += _read_nvml(device.index)
    flops = 2 * config.size**3 * num_products
    _add_rates(sample, "tflops", [flops / s / 1e12 for s in seconds], config)


def measure_copies(
    session: Session, config: ComputeConfig, device: torch.device, faults: FaultInjector, sample: dict[str, Any]
) -> None:
    """Add to ``sample`` the bandwidth of copies on the device (reads plus writes) and between it and the host."""
    source = torch.empty(config.copy_mib * 2**18, device=device).normal_()
    target = torch.empty_like(source)

    def measure(name: str, call: Callable[[], object], num_bytes: int) -> None:
        def delayed() -> None:
            faults.delay("slow_compute")
            call()

        session.time_left()
        session.enter("copies")
        time_calls(call, 2, device)
        session.barrier(f"copies, {name}")
        session.enter("copies")
        seconds = time_calls(delayed, config.copy_repetitions, device)
        _add_rates(sample.setdefault(name, {}), "gb_s", [num_bytes / s / 1e9 for s in seconds], config)

    measure("memory", lambda: target.copy_(source), 2 * 4 * source.numel())
    if device.type == "cuda":
        size = min(source.numel(), _MAX_PINNED)
        pinned, on_device = torch.empty(size, pin_memory=True), target[:size]
        measure("host_to_device", lambda: on_device.copy_(pinned, non_blocking=True), 4 * size)
        measure("device_to_host", lambda: pinned.copy_(on_device, non_blocking=True), 4 * size)


def compute_checksums(config: ComputeConfig, device: torch.device, faults: FaultInjector) -> dict[str, str]:
    """Compute checksums of a seeded product of each dtype and of a seeded attention; equal on equal devices."""
    size = config.checksum_size
    checksums = {dtype: _digest(make_product(dtype, size, device)(), faults) for dtype in config.dtypes}
    generator = torch.Generator().manual_seed(1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(1, 4, size, 64, generator=generator).to(device, dtype) for _ in range(3))
    checksums["attention"] = _digest(scaled_dot_product_attention(q, k, v, is_causal=True), faults)
    return checksums


def _digest(result: Tensor, faults: FaultInjector) -> str:
    result = result.detach().contiguous()
    faults.corrupt_("corrupt_compute", result)
    return xxhash.xxh3_64_hexdigest(result.view(torch.uint8).cpu().numpy().tobytes())


def _read_nvml(index: int) -> list[dict[str, Any]]:
    reading = read_device(index)
    names = ("temperature_c", "power_w", "sm_clock_mhz", "throttle_reasons", "ecc_errors")
    return [] if reading is None else [{name: getattr(reading, name) for name in names}]


def _add_rates(sample: dict[str, Any], name: str, rates: list[float], config: ComputeConfig) -> None:
    sample["rates"] = sample.get("rates", []) + [float(f"{rate:.5g}") for rate in rates]
    sample[name] = max(sample["rates"]) if config.estimator == "best" else statistics.median(sample["rates"])


def _read_driver_version() -> str | None:
    try:
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    match = re.search(r"\d+\.\d+(?:\.\d+)?", first)
    return match[0] if match else None
