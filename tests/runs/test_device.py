"""Device readings are summarized over an interval, and no step waits for one."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from fctune.runs.device import DeviceReading, DeviceSampler, DeviceUsage, lookup_peak_tflops, read_device

READING = DeviceReading("a GPU", 0.5, 1, 300.0, 60.0, 1980.0, 0, 0)


def wait_until(is_done: threading.Event) -> None:
    assert is_done.wait(10)


def test_an_interval_has_mean_utilization_and_power_and_the_highest_temperature() -> None:
    readings = iter([READING, replace(READING, utilization=1.0, power_w=500.0, temperature_c=71.0), READING])
    is_done = threading.Event()

    def read() -> DeviceReading | None:
        reading = next(readings, None)
        if reading is None:
            is_done.set()
        return reading

    sampler = DeviceSampler(read, every_s=0.001)
    wait_until(is_done)
    usage = sampler.take()
    assert usage == DeviceUsage(pytest.approx(2 / 3), 71.0, pytest.approx(1100 / 3))  # type: ignore[arg-type]
    assert sampler.take() is None  # no reading since then
    sampler.close()


def test_values_that_the_driver_does_not_report_are_none() -> None:
    is_done, left = threading.Event(), [replace(READING, utilization=None, power_w=None)]

    def read() -> DeviceReading | None:
        if left:
            return left.pop()
        is_done.set()
        return None

    sampler = DeviceSampler(read, every_s=0.001)
    wait_until(is_done)
    assert sampler.take() == DeviceUsage(None, 60.0, None)
    sampler.close()


def test_a_slow_device_does_not_block_the_caller() -> None:
    release, begun = threading.Event(), threading.Event()

    def read() -> DeviceReading | None:
        begun.set()
        release.wait(10)
        return None

    sampler = DeviceSampler(read)
    wait_until(begun)
    started = time.perf_counter()
    assert sampler.take() is None
    assert time.perf_counter() - started < 0.5
    release.set()
    sampler.close()


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("NVIDIA A10", 125),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),  # lower rates, not in the table
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3060", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),  # a slice of a GPU
        ("Tesla T4", None),
    ],
)
def test_the_rate_is_found_by_the_drivers_device_name(name: str, tflops: float | None) -> None:
    assert lookup_peak_tflops(name) == tflops


@pytest.mark.gpu
def test_a_busy_gpu_has_utilization_temperature_and_power() -> None:
    import torch

    pytest.importorskip("pynvml")
    sampler = DeviceSampler(lambda: read_device(0), every_s=0.1)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    until = time.monotonic() + 3
    while time.monotonic() < until:
        a = (a @ a).clamp(-1, 1)
        torch.cuda.synchronize()
    usage = sampler.take()
    sampler.close()
    assert usage is not None
    assert usage.utilization is not None
    assert usage.utilization > 0.5
    assert usage.temperature_c is not None
    assert 20 < usage.temperature_c < 110
    assert usage.power_w is not None
    assert 50 < usage.power_w < 1500
