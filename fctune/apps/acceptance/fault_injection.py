"""Injected faults, to test that an acceptance run finds them and blames the right rank."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

FaultKind = Literal[
    "slow_compute",
    "slow_collectives",
    "slow_disk",
    "corrupt_compute",
    "corrupt_send",
    "corrupt_receive",
    "die",
    "hang",
    "crash",
]


@dataclass(kw_only=True, slots=True)
class FaultConfig:
    """A fault to inject on one rank; the result lists it."""

    kind: FaultKind
    rank: int
    seconds: float = 0.05  # length of each delay
    times: int | None = None  # number of delays; null: unlimited
    at: str = "compute"  # phase in which a rank dies, hangs or crashes


class FaultInjector:
    """Injects the faults that a config lists for one rank."""

    def __init__(self, faults: Sequence[FaultConfig], rank: int):
        self._faults = [fault for fault in faults if fault.rank == rank]
        self._num_delays: Counter[FaultKind] = Counter()

    def delay(self, kind: FaultKind) -> None:
        """Sleep if a delay is configured for this rank in this kind of work."""
        for fault in self._faults:
            if fault.kind == kind and (fault.times is None or self._num_delays[kind] < fault.times):
                self._num_delays[kind] += 1
                time.sleep(fault.seconds)

    def corrupt_(self, kind: FaultKind, tensor: Tensor) -> None:
        """Flip an exponent bit of the tensor's middle element in place, if this rank is to corrupt data."""
        if any(fault.kind == kind for fault in self._faults):
            middle = tensor.view(-1)[tensor.numel() // 2 :][:1].view(torch.uint8)
            middle[-1] ^= 1

    def interrupt(self, phase: str) -> None:
        """Die, hang or raise at the start of a phase, if a fault is configured for it on this rank."""
        for fault in self._faults:
            if fault.at != phase:
                continue
            if fault.kind == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.kind == "hang":
                time.sleep(86_400)
            elif fault.kind == "crash":
                raise RuntimeError("injected crash")
