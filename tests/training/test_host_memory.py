"""Memory of runs on CPUs: pages are reused within a step, and the memory of a run does not grow."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fctune.base.distributed import World
from fctune.config.schema import RunConfig
from fctune.data.prepared_set import open_prepared, prepare
from fctune.runs.sinks import SinkGroup
from fctune.training.callbacks.base import Callback
from fctune.training.host_memory import HostMemoryCallback, reuse_freed_memory
from fctune.training.loop import build_loader, train
from fctune.training.setup import start_state
from tests.ranks import run_ranks
from tests.training.training_runs import build_trainable, make_config

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")

NUM_STEPS = 200

_FREE_TENSORS = """
import json, os, resource, sys
import torch
from fctune.training.host_memory import HostMemoryCallback, reuse_freed_memory

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

def take_step():
    sizes = [2 + (len(kept) + index) % 7 for index in range(10)]
    blocks = [torch.full((size * 2**20,), 1, dtype=torch.uint8) for size in sizes]
    kept.append(torch.full((2**16,), 1, dtype=torch.uint8))  # a small block that stays, above the freed ones

kept = []
took = reuse_freed_memory()
callback = HostMemoryCallback(interval_s=float(sys.argv[1]))
callback.on_step_end(1, False)
before = resident_mib()
take_step()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for step in range(12):
    take_step()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
callback.on_step_end(2, False)
print(json.dumps([took, resident_mib() - before, faults]))
"""


def free_tensors(interval_s: float, **environment: str) -> tuple[bool, float, int]:
    """Return whether memory is reused, the MiB that steps left, and their page faults."""
    command = [sys.executable, "-c", _FREE_TENSORS, str(interval_s)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    took, grown, faults = json.loads(done.stdout)
    return took, grown, faults


@pytest.mark.thorough
def test_freed_memory_is_reused_within_a_step_and_returned_between_steps() -> None:
    took, grown, faults = free_tensors(0.0)
    assert took
    assert grown < 8
    assert faults < 12 * 10 * 2**20 / 4096  # pages of 10 MiB a step, which allocates 50
    assert free_tensors(1000.0)[1] > 24  # before it is time


@pytest.mark.thorough
def test_settings_of_the_allocator_in_the_environment_are_kept() -> None:
    took, grown, faults = free_tensors(1000.0, MALLOC_MMAP_THRESHOLD_=str(2**20))
    assert not took
    assert grown < 8
    # New pages for every tensor: 50 MiB a step, less where the kernel gives huge pages.
    assert faults > 3 * free_tensors(1000.0)[2]
    assert not free_tensors(0.0, GLIBC_TUNABLES="glibc.malloc.mmap_threshold=1048576")[0]


class _Watch(Callback):
    """Notes the resident memory after each step, and keeps some bytes of each, to plant a leak."""

    def __init__(self, leak_bytes: int):
        self.resident_mib: list[float] = []
        self._leak_bytes, self._kept = leak_bytes, [torch.empty(0)]

    def on_step_end(self, step: int, is_last: bool) -> bool:
        if self._leak_bytes:
            self._kept.append(torch.ones(self._leak_bytes, dtype=torch.uint8))
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.resident_mib.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
        return False


def watch_memory(world: World, config: RunConfig, prepared: Path, leak_bytes: int) -> list[float]:
    """Train as a run does; returns the resident memory after each step, in MiB."""
    assert reuse_freed_memory()
    model, gradient_sync = build_trainable(config, world)
    state = start_state(model, config, NUM_STEPS, gradient_sync)
    watch = _Watch(leak_bytes)
    callbacks = [HostMemoryCallback(interval_s=0.0), watch]
    train(config, state, build_loader(config, open_prepared(prepared)), NUM_STEPS, world, SinkGroup(), callbacks)
    return watch.resident_mib


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "is_packed", "limit_mib"), [("bf16", False, 16.0), ("fp32", True, 2.0)])
def test_memory_stays_flat_over_200_steps(
    precision: str, is_packed: bool, limit_mib: float, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    data: dict[str, Any] = {"packed": is_packed, "sources": [{"path": "synthetic:train:60:3"}]}
    steps = {"max_steps": NUM_STEPS, "epochs": NUM_STEPS, "global_batch_size": 2, "validation": {"every_n_steps": 0}}
    config = make_config(make_model(), tmp_path, precision=precision, data=data, **steps)
    prepared = prepare(config.data, Path(config.model.path), tmp_path / "prepared")

    def measure(leak_bytes: int) -> tuple[float, float]:
        """Return the growth of the second half, and that of 100 steps without kernels of shapes that are rare."""
        (resident,) = run_ranks(watch_memory, 1, config, prepared.path, leak_bytes)
        half = resident[NUM_STEPS // 2 - 1 :]
        by_tens = [after - before for before, after in zip(half[::10], half[10::10], strict=False)]
        return half[-1] - half[0], 10 * statistics.median(by_tens)

    growth, drift = measure(0)
    assert growth < limit_mib
    assert drift < 1.5
    assert measure(2**15)[1] > 2.5  # otherwise the test would not notice a leak of 32 KiB a step
