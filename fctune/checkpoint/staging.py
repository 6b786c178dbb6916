"""Copies of live tensors in the host's memory, taken while the next step runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._state_dict_stager import StateDictStager


class Stager:
    """Copies tensors to buffers on the CPU, which it keeps for the next copy.

    On CUDA the copies are queued on a stream of their own, behind what the training stream held when ``mark`` was
    called: they miss no update, and do not wait for the step that follows.

    Args:
        device: Device of the tensors.
    """

    def __init__(self, device: torch.device):
        self.device = device
        is_cuda = device.type == "cuda"
        self._stager = StateDictStager(pin_memory=is_cuda)
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._marked = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        """Mark the point of the training stream whose results ``stage`` copies; call it on the training thread."""
        if self._marked is not None:
            self._marked.record(torch.cuda.current_stream(self.device))

    def stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return copies on the CPU, valid until the next call; the tensors may change when this returns."""
        if self._stream is None or self._marked is None:
            return self._copy(tensors, non_blocking=False)
        # Pinned memory belongs to the thread's current device, and a new thread starts with device 0 on every rank.
        torch.cuda.set_device(self.device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._marked)
            staged = self._copy(tensors, non_blocking=True)
        # Not the entire device, on which the next step is running.
        self._stream.synchronize()
        return staged

    def close(self) -> None:
        """Free the host buffers that copies are made in."""
        self._stager.close()  # type: ignore[no-untyped-call]

    def _copy(self, tensors: dict[str, Tensor], non_blocking: bool) -> dict[str, Tensor]:
        staged: Any = self._stager.stage(tensors, non_blocking=non_blocking)
        copies: dict[str, Tensor] = staged
        return copies
