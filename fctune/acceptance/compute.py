"""One device by itself: products, copies, and whether the same product comes out twice.

All ranks measure at the same time, which is what training asks of power and cooling.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fctune.acceptance.config import ComputeConfig
from fctune.acceptance.faults import Faults
from fctune.acceptance.session import Session
from fctune.telemetry.device import capability_of, read_device

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_WINDOW_S = 0.1  # of products timed together
_FP8_FROM = (8, 9)
_MOST_PINNED = 2**28  # float32 numbers; pinning takes a second a few GiB, on every rank of the host

# NVML's reasons that mean a GPU is held back by more than its own power limit: hardware slowdown, thermal in software
# and hardware, power brake (nvml.h, nvmlClocksEventReason*).
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80


def time_calls(call: Callable[[], object], repetitions: int, device: torch.device) -> list[float]:
    """Seconds of each of a number of calls; on CUDA by events, for which the host waits once."""
    if device.type != "cuda":
        seconds = []
        for _ in range(repetitions):
            started = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started)
        return seconds
    marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    marks[-1].synchronize()
    return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(marks)]


def make_product(dtype: str, size: int, device: torch.device) -> Callable[[], Tensor]:
    """A product of two seeded square matrices in a format, ready to be called."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator).to(device) for _ in range(2))
    if dtype == "fp8":
        left, one = a.to(_DTYPES["fp8"]), torch.ones((), device=device)
        right = b.to(_DTYPES["fp8"]).t().contiguous().t()  # by columns, as the kernel takes it
        options: dict[str, Any] = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        return lambda: torch._scaled_mm(left, right, **options)
    left, right = a.to(_DTYPES[dtype]), b.to(_DTYPES[dtype])
    return lambda: left @ right


def measure_products(
    session: Session, config: ComputeConfig, dtype: str, device: torch.device, faults: Faults
) -> dict[str, Any]:
    """Rates of windows of products over ``sustain_s``, and what the device says of itself meanwhile."""
    capability = capability_of(device)
    if dtype == "fp8" and capability is not None and capability < _FP8_FROM:
        return {"skipped": f"compute capability {capability[0]}.{capability[1]}; fp8 products need 8.9"}
    product = make_product(dtype, config.size, device)
    for _ in range(3):
        once = min(time_calls(product, 1, device))
    num_products = max(1, round(_WINDOW_S / once)) if device.type == "cuda" else 1

    def window() -> None:
        faults.delay("slow_compute")
        for _ in range(num_products):
            product()

    session.meet(f"products in {dtype}")
    seconds: list[float] = []
    readings: list[dict[str, Any]] = []
    started, read_at = time.monotonic(), 0.0
    while time.monotonic() - started < config.sustain_s or len(seconds) < 5:
        session.enter(f"products in {dtype}")
        seconds += time_calls(window, 1, device)
        if device.type == "cuda" and time.monotonic() - read_at > 1:
            read_at = time.monotonic()
            readings += _read(device.index)
    flops = 2 * config.size**3 * num_products
    rates = [flops / s / 1e12 for s in seconds]
    rate = max(rates) if config.estimator == "best" else statistics.median(rates)
    return {"tflops": rate, "windows": len(rates), "rates": _thin(rates), "readings": readings}


def measure_copies(session: Session, config: ComputeConfig, device: torch.device, faults: Faults) -> dict[str, Any]:
    """Bandwidth of copies on the device, counted both ways, and between it and the host."""
    source = torch.empty(config.copy_mib * 2**18, device=device).normal_()
    target = torch.empty_like(source)

    def rate(call: Callable[[], object], num_bytes: int) -> list[float]:
        def delayed() -> None:
            faults.delay("slow_compute")
            call()

        session.enter("copies")
        time_calls(call, 2, device)
        return [num_bytes / s / 1e9 for s in time_calls(delayed, config.copy_repetitions, device)]

    session.meet("copies")
    found: dict[str, Any] = {"memory": rate(lambda: target.copy_(source), 2 * 4 * source.numel())}
    if device.type == "cuda":
        size = min(source.numel(), _MOST_PINNED)
        host, there = torch.empty(size, pin_memory=True), target[:size]
        found["host_to_device"] = rate(lambda: there.copy_(host, non_blocking=True), 4 * size)
        found["device_to_host"] = rate(lambda: host.copy_(there, non_blocking=True), 4 * size)
    choose = max if config.estimator == "best" else statistics.median
    return {name: {"gb_s": choose(rates), "rates": _thin(rates)} for name, rates in found.items()}


def checksum_products(config: ComputeConfig, dtypes: list[str], device: torch.device, faults: Faults) -> dict[str, str]:
    """Checksums of seeded products in each format and of a seeded attention: equal on every device of one kind."""
    size = config.checksum_size
    found = {}
    for dtype in dtypes:
        found[dtype] = _digest(make_product(dtype, size, device)(), faults)
    generator = torch.Generator().manual_seed(1)
    format = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(1, 4, size, 64, generator=generator).to(device, format) for _ in range(3))
    found["attention"] = _digest(scaled_dot_product_attention(q, k, v, is_causal=True), faults)
    return found


def _digest(result: Tensor, faults: Faults) -> str:
    result = result.detach().contiguous()
    faults.corrupt_("corrupt_compute", result)
    return xxhash.xxh3_64_hexdigest(result.view(torch.uint8).cpu().numpy().tobytes())


def _read(index: int) -> list[dict[str, Any]]:
    reading = read_device(index)
    if reading is None:
        return []
    return [
        {
            "temperature_c": reading.temperature_c,
            "power_w": reading.power_w,
            "sm_clock_mhz": reading.sm_clock_mhz,
            "throttle_reasons": reading.throttle_reasons,
            "ecc_errors": reading.ecc_errors,
        }
    ]


def _thin(values: list[float], most: int = 200) -> list[float]:
    """At most so many values, evenly taken, to four digits."""
    step = max(1, len(values) // most)
    return [float(f"{value:.4g}") for value in values[::step]]
