"""What is said of a device over a stretch is what was read of it, and no step waits for a reading."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from fctune.telemetry.device import DeviceReading, DeviceSampler, DeviceUsage, lookup_peak_tflops, read_device

READING = DeviceReading("a GPU", 0.5, 1, 2, 300.0, 700.0, 60.0, 1980.0, 0, 0)


def wait_until(is_done: threading.Event) -> None:
    assert is_done.wait(10)


def test_a_stretch_is_the_mean_of_its_readings_and_the_hottest_of_them() -> None:
    readings = iter([READING, replace(READING, utilization=1.0, power_w=500.0, temperature_c=71.0), READING])
    is_done = threading.Event()

    def read() -> DeviceReading | None:
        reading = next(readings, None)
        if reading is None:
            is_done.set()
        return reading

    probe = DeviceSampler(read, every_s=0.001)
    wait_until(is_done)
    use = probe.take()
    assert use == DeviceUsage(pytest.approx(2 / 3), 71.0, pytest.approx(1100 / 3))  # type: ignore[arg-type]
    assert probe.take() is None  # since then nothing was read
    probe.close()


def test_what_a_driver_does_not_say_is_not_made_up() -> None:
    is_done, left = threading.Event(), [replace(READING, utilization=None, power_w=None)]

    def read() -> DeviceReading | None:
        if left:
            return left.pop()
        is_done.set()
        return None

    probe = DeviceSampler(read, every_s=0.001)
    wait_until(is_done)
    assert probe.take() == DeviceUsage(None, 60.0, None)
    probe.close()


def test_a_device_that_answers_slowly_holds_nobody() -> None:
    release, begun = threading.Event(), threading.Event()

    def read() -> DeviceReading | None:
        begun.set()
        release.wait(10)
        return None

    probe = DeviceSampler(read)
    wait_until(begun)
    started = time.perf_counter()
    assert probe.take() is None
    assert time.perf_counter() - started < 0.5
    release.set()
    probe.close()


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", None),  # another rate, which no table here has
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3060", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),  # a part of one
        ("Tesla T4", None),
    ],
)
def test_a_rate_is_found_by_the_name_that_a_driver_gives(name: str, tflops: float | None) -> None:
    assert lookup_peak_tflops(name) == tflops


@pytest.mark.gpu
def test_a_gpu_at_work_is_busy_warm_and_draws_power() -> None:
    import torch

    pytest.importorskip("pynvml")
    probe = DeviceSampler(lambda: read_device(0), every_s=0.1)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    until = time.monotonic() + 3
    while time.monotonic() < until:
        a = (a @ a).clamp(-1, 1)
        torch.cuda.synchronize()
    use = probe.take()
    probe.close()
    assert use is not None
    assert use.utilization is not None
    assert use.utilization > 0.5
    assert use.temperature_c is not None
    assert 20 < use.temperature_c < 110
    assert use.power_w is not None
    assert 50 < use.power_w < 1500
