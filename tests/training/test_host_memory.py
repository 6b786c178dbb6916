"""Memory of runs on CPUs: freed tensors are returned to the system."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")

_FREE_TENSORS = """
import json, os, sys
import torch
from fctune.training.host_memory import return_freed_memory

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

if sys.argv[1] == "limited":
    return_freed_memory()
torch.full((24 * 2**20,), 1, dtype=torch.uint8)  # freed at once: glibc takes blocks up to this size from the heap now
before, kept = resident_mib(), []
for step in range(12):
    sizes = [2 + (step + index) % 7 for index in range(10)]
    blocks = [torch.full((size * 2**20,), 1, dtype=torch.uint8) for size in sizes]
    kept.append(torch.full((2**16,), 1, dtype=torch.uint8))  # a small block that stays, above the freed ones
    del blocks
print(json.dumps(resident_mib() - before))
"""


def measure_growth_mib(how: str) -> float:
    command = [sys.executable, "-c", _FREE_TENSORS, how]
    grown: float = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return grown


def test_the_memory_of_freed_tensors_of_many_sizes_is_returned() -> None:
    assert measure_growth_mib("limited") < 8
    assert measure_growth_mib("default") > 24  # otherwise the test does not provoke what the setting prevents
