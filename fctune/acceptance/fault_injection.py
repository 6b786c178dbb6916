"""Faults on purpose: what a config's ``faults`` name is done, so that one can see whether it is found."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from fctune.acceptance.config import FaultConfig, FaultKind


class Faults:
    """The faults of one rank; none, where its config names none."""

    def __init__(self, faults: Sequence[FaultConfig], rank: int):
        self._faults = [fault for fault in faults if fault.rank == rank]
        self._num_delays: Counter[FaultKind] = Counter()

    def delay(self, kind: FaultKind) -> None:
        """Wait, where this rank is to be slow."""
        for fault in self._faults:
            if fault.kind == kind and (fault.times is None or self._num_delays[kind] < fault.times):
                self._num_delays[kind] += 1
                time.sleep(fault.seconds)

    def corrupt_(self, kind: FaultKind, tensor: Tensor) -> None:
        """Flip a bit of the exponent of the tensor's middle element, in place, where this rank is to corrupt."""
        if any(fault.kind == kind for fault in self._faults):
            of_middle = tensor.view(-1)[tensor.numel() // 2 :][:1].view(torch.uint8)
            of_middle[-1] ^= 1

    def end(self, phase: str) -> None:
        """Die, hang or meet an error, where this rank is to in this phase."""
        for fault in self._faults:
            if fault.at == phase and fault.kind == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.at == phase and fault.kind == "hang":
                time.sleep(86_400)
            elif fault.at == phase and fault.kind == "crash":
                raise RuntimeError("an error on purpose")
