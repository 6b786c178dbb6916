"""Measurements of one device, on the CPU: products, timing, checksums and injected faults."""

from __future__ import annotations

import time

import pytest
import torch

from fctune.apps.acceptance.config import ComputeConfig
from fctune.apps.acceptance.devices import compute_checksums, make_product, time_calls
from fctune.apps.acceptance.fault_injection import FaultConfig, FaultInjector

CPU = torch.device("cpu")
HEALTHY = FaultInjector([], 0)


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-4), ("bf16", 0.05), ("fp8", 0.6)])
def test_a_product_multiplies_the_seeded_matrices_in_its_dtype(dtype: str, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=generator) for _ in range(2))
    found = make_product(dtype, 64, CPU)().float()
    exact = a.double() @ b.double()
    assert (found - exact).abs().mean() < tolerance
    assert torch.equal(found, make_product(dtype, 64, CPU)().float())


def test_each_call_is_timed_separately() -> None:
    waits = iter([0.0, 0.2, 0.0])
    seconds = time_calls(lambda: time.sleep(next(waits)), 3, CPU)
    assert len(seconds) == 3
    assert seconds[1] >= 0.2 > max(seconds[0], seconds[2])


def test_one_flipped_bit_changes_every_checksum() -> None:
    config = ComputeConfig(dtypes=["fp32", "bf16"], checksum_size=64)
    healthy = compute_checksums(config, CPU, HEALTHY)
    assert compute_checksums(config, CPU, HEALTHY) == healthy
    assert set(healthy) == {"fp32", "bf16", "attention"}
    broken = FaultInjector([FaultConfig(kind="corrupt_compute", rank=1)], 1)
    corrupt = compute_checksums(config, CPU, broken)
    assert all(corrupt[name] != healthy[name] for name in healthy)


def test_faults_affect_only_their_rank_and_kind() -> None:
    faults = FaultInjector(
        [FaultConfig(kind="slow_disk", rank=1, seconds=5), FaultConfig(kind="corrupt_send", rank=0)], 0
    )
    started = time.monotonic()
    faults.delay("slow_disk")
    faults.delay("slow_compute")
    faults.interrupt("compute")
    assert time.monotonic() - started < 1
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.full((5,), 3.0, dtype=dtype)
        faults.corrupt_("corrupt_receive", tensor)
        assert (tensor == 3).all()
        faults.corrupt_("corrupt_send", tensor)
        assert (tensor != 3).sum() == 1
        assert tensor[2] != 3
