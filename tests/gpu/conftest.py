"""Fixtures of tests that run on all GPUs of the machine, and on the CPU of a machine without."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device_type(request: pytest.FixtureRequest) -> str:
    """Kind of device under test; the CPU stands in for GPUs on machines without any."""
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("this machine's GPUs run the same test")
    return str(request.param)


@pytest.fixture
def num_ranks(device_type: str) -> int:
    """All GPUs of the machine, or two CPU ranks."""
    return torch.cuda.device_count() if device_type == "cuda" else 2


@pytest.fixture
def capability(device_type: str) -> tuple[int, int] | None:
    """CUDA's compute capability; None on the CPU."""
    return torch.cuda.get_device_capability() if device_type == "cuda" else None
