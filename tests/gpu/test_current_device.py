"""Threads and evaluations use the rank's own device, on a stand-in for a machine with several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fctune.base.distributed import World, use_expandable_segments
from fctune.data.loader import GlobalLoader
from fctune.data.prepared_set import prepare
from fctune.runs.device import DeviceSampler, read_device
from fctune.tasks.evaluation.live import random_state_restored
from fctune.training.prefetch import Prefetcher
from tests.cuda_stand_in import CudaStandIn
from tests.training.training_runs import make_config

DEVICE = torch.device("cuda", 3)


def test_batches_are_pinned_for_the_ranks_own_device(
    make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(make_model(), tmp_path, data={"packed": True})
    prepared = prepare(config.data, Path(config.model.path), tmp_path / "prepared")
    with CudaStandIn().installed() as cuda:
        cuda.set_device(DEVICE)
        pinned_on: set[int] = set()

        def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
            pinned_on.add(cuda.current_device())
            return tensor

        monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
        from fctune.models.attention import make_bounds

        loader = GlobalLoader(prepared, "train", 4, 1)
        with Prefetcher(loader, World(3, 4, 3, DEVICE), 2, lambda rows: make_bounds(rows, "varlen"), 2) as prefetcher:
            assert prefetcher.take(1).inputs
    assert pinned_on == cuda.contexts == {3}


def test_reading_the_device_in_a_thread_starts_no_other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Nvml:
        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: asked.append((name, arguments))

    monkeypatch.setattr("fctune.runs.device._load_nvml", Nvml)
    with CudaStandIn().installed() as cuda:
        properties = type("Properties", (), {"uuid": "of-3"})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties if index == 3 else None)
        sampler = DeviceSampler(lambda: read_device(3))
        sampler.close()
    assert ("nvmlDeviceGetHandleByUUID", ("GPU-of-3",)) in asked
    assert not cuda.contexts


def test_evaluating_while_training_starts_no_other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    with CudaStandIn().installed():
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: used.append(device) or torch.zeros(1))
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: used.append(device))
        with random_state_restored(DEVICE):
            pass
    assert set(used) == {DEVICE}


@pytest.mark.parametrize("name", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_blocks_may_grow_unless_the_user_set_the_allocator(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: list[str] = []
    for other in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(other, raising=False)
    if name is not None:
        monkeypatch.setenv(name, "max_split_size_mb:128")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    use_expandable_segments()
    assert settings == ([] if name else ["expandable_segments:True"])
