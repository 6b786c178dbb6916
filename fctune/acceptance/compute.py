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
from fctune.acceptance.fault_injection import Faults
from fctune.acceptance.session import Session
from fctune.telemetry.device import compute_capability, read_device

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
# Of products timed together: on a GPU enough to launch ahead; on a CPU less than a scheduler's slice, so that some are
# whole on a machine that does other things too.
_WINDOW_S = {"cuda": 0.1, "cpu": 0.001}
_LEAST_WINDOWS = 5
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
    session: Session, config: ComputeConfig, dtype: str, device: torch.device, faults: Faults, found: dict[str, Any]
) -> None:
    """Add to ``found`` the rates of windows of products over ``sustain_s``, and what the device says of itself.

    ``tflops`` is what stands for the rank, of all rates that ``found`` has.
    """
    capability = compute_capability(device)
    if dtype == "fp8" and capability is not None and capability < _FP8_FROM:
        found["skipped"] = f"compute capability {capability[0]}.{capability[1]}; fp8 products need 8.9"
        return
    product = make_product(dtype, config.size, device)
    for _ in range(3):
        once = min(time_calls(product, 1, device))
    num_products = max(1, round(_WINDOW_S[device.type] / once))

    def window() -> None:
        faults.delay("slow_compute")
        for _ in range(num_products):
            product()

    session.meet(f"products in {dtype}")
    lasts_s = min(config.sustain_s, session.time_left())
    seconds: list[float] = []
    readings: list[dict[str, Any]] = found.setdefault("readings", [])
    started, read_at = time.monotonic(), 0.0
    while time.monotonic() - started < lasts_s or len(seconds) < _LEAST_WINDOWS:
        session.enter(f"products in {dtype}")
        seconds += time_calls(window, 1, device)
        if device.type == "cuda" and time.monotonic() - read_at > 1:
            read_at = time.monotonic()
            readings += _read(device.index)
    flops = 2 * config.size**3 * num_products
    _add_rates(found, "tflops", [flops / s / 1e12 for s in seconds], config)


def measure_copies(
    session: Session, config: ComputeConfig, device: torch.device, faults: Faults, found: dict[str, Any]
) -> None:
    """Add to ``found`` the bandwidth of copies on the device, counted both ways, and between it and the host."""
    source = torch.empty(config.copy_mib * 2**18, device=device).normal_()
    target = torch.empty_like(source)

    def measure(name: str, call: Callable[[], object], num_bytes: int) -> None:
        def delayed() -> None:
            faults.delay("slow_compute")
            call()

        session.time_left()
        session.enter("copies")
        time_calls(call, 2, device)
        session.meet(f"copies, {name}")
        session.enter("copies")
        seconds = time_calls(delayed, config.copy_repetitions, device)
        _add_rates(found.setdefault(name, {}), "gb_s", [num_bytes / s / 1e9 for s in seconds], config)

    measure("memory", lambda: target.copy_(source), 2 * 4 * source.numel())
    if device.type == "cuda":
        size = min(source.numel(), _MOST_PINNED)
        host, there = torch.empty(size, pin_memory=True), target[:size]
        measure("host_to_device", lambda: there.copy_(host, non_blocking=True), 4 * size)
        measure("device_to_host", lambda: host.copy_(there, non_blocking=True), 4 * size)


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


def _add_rates(found: dict[str, Any], name: str, rates: list[float], config: ComputeConfig) -> None:
    """Keep rates, and what stands for all that there are."""
    found["rates"] = found.get("rates", []) + [float(f"{rate:.5g}") for rate in rates]
    found[name] = max(found["rates"]) if config.estimator == "best" else statistics.median(found["rates"])
