"""A machine with several CUDA devices, played on the CPU: current devices, streams, events and delayed copies.

The current device and streams belong to a thread, and a new thread starts with device 0, as in CUDA. Work that is
launched runs as late as CUDA allows: when something that waits for it is synchronised. Tensors are CPU tensors; those
given to ``put`` count as being on a device, and a copy of their storage is launched on the thread's stream there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.cuda._pin_memory_utils as pinning


class Stream:
    """Work in order, not yet run."""

    def __init__(self, machine: CudaStandIn, device: int):
        self.machine, self.device_index = machine, device
        self.queue: list[Callable[[], object]] = []
        self.num_done = 0
        self.lock = threading.RLock()

    def launch(self, work: Callable[[], object]) -> None:
        with self.lock:
            self.queue.append(work)

    def run_until(self, position: int) -> None:
        with self.lock:
            while self.num_done < position:
                work, self.num_done = self.queue[self.num_done], self.num_done + 1
                work()

    def synchronize(self) -> None:
        self.machine.contexts.add(self.device_index)
        self.run_until(len(self.queue))

    def wait_event(self, event: Event) -> None:
        stream, position = event.recorded
        self.launch(lambda: stream.run_until(position))


class Event:
    """A position in a stream."""

    recorded: tuple[Stream, int]

    def __init__(self, machine: CudaStandIn):
        self.machine = machine

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.machine.current_stream()
        self.recorded = (stream, len(stream.queue))

    def synchronize(self) -> None:
        stream, position = self.recorded
        stream.run_until(position)


class CudaStandIn:
    """The state of the machine; ``contexts`` are the devices that the process has used."""

    def __init__(self, num_devices: int = 4):
        self.defaults = [Stream(self, device) for device in range(num_devices)]
        self.contexts: set[int] = set()
        self.pinned_on: set[int] = set()
        self._device_of: dict[int, int] = {}  # storage -> device
        self._kept: list[torch.Tensor] = []
        self._thread = threading.local()

    def put(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """Let a CPU tensor count as being on a device."""
        self._kept.append(tensor)
        self._device_of[tensor.untyped_storage().data_ptr()] = device
        return tensor

    def launch(self, work: Callable[[], object]) -> None:
        """Launch work on the thread's current stream, as a kernel."""
        self.contexts.add(self.current_device())
        self.current_stream().launch(work)

    def current_device(self) -> int:
        return getattr(self._thread, "device", 0)

    def set_device(self, device: Any) -> None:
        self._thread.device = torch.device("cuda", device).index if isinstance(device, int) else device.index
        self.contexts.add(self._thread.device)

    def current_stream(self, device: Any = None) -> Stream:
        index = self.current_device() if device is None else torch.device(device).index
        streams: dict[int, Stream] = getattr(self._thread, "streams", {})
        return streams.get(index, self.defaults[index])

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        device, streams = self.current_device(), dict(getattr(self._thread, "streams", {}))
        self.set_device(torch.device("cuda", stream.device_index))
        self._thread.streams = streams | {stream.device_index: stream}
        try:
            yield
        finally:
            self._thread.streams = streams
            self.set_device(torch.device("cuda", device))

    def synchronize(self, device: Any = None) -> None:
        index = self.current_device() if device is None else torch.device(device).index
        self.contexts.add(index)
        for stream in [*self.defaults, *self._streams]:
            if stream.device_index == index:
                stream.synchronize()

    @contextlib.contextmanager
    def installed(self) -> Iterator[CudaStandIn]:
        """Replace torch's CUDA functions by this machine's."""
        self._streams: list[Stream] = []
        copy = torch.UntypedStorage.copy_

        def make_stream(device: Any = None, **_: Any) -> Stream:
            index = self.current_device() if device is None else torch.device(device).index
            self._streams.append(Stream(self, index))
            return self._streams[-1]

        def copy_(target: Any, source: Any, non_blocking: bool = False) -> Any:
            device = self._device_of.get(source.data_ptr())
            if device is None:
                return copy(target, source, non_blocking)
            stream = self.current_stream(torch.device("cuda", device))
            stream.launch(lambda: copy(target, source, False))
            if not non_blocking:
                stream.synchronize()
            return target

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.UntypedStorage, "copy_", copy_)
            patch.setattr(pinning, "pin_memory", lambda *_: self.pinned_on.add(self.current_device()))
            patch.setattr(pinning, "unpin_memory", lambda *_: None)
            patch.setattr(torch.accelerator, "is_available", lambda: True)
            patch.setattr(torch.accelerator, "synchronize", self.synchronize)
            functions: dict[str, Any] = {
                "is_available": lambda: True,
                "current_device": self.current_device,
                "set_device": self.set_device,
                "current_stream": self.current_stream,
                "stream": self.stream,
                "synchronize": self.synchronize,
                "Stream": make_stream,
                "Event": lambda **_: Event(self),
            }
            for name, function in functions.items():
                patch.setattr(torch.cuda, name, function)
            yield self
