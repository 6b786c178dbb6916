"""Asynchronous saves: training waits until its state is copied to the CPU; a thread writes and publishes it."""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor import DTensor

from fctune.base import distributed
from fctune.base.distributed import World
from fctune.checkpoint.fault_hooks import fire
from fctune.checkpoint.files import FileRecord
from fctune.checkpoint.store import Checkpoint, CheckpointStore, Kind

logger = logging.getLogger("fctune")

# Ends the process if a block takes longer than it may: (what it does, limit in seconds).
Guard = Callable[[str, float], AbstractContextManager[None]]

# Writes this rank's files: (folder, tensors on the CPU, JSON description, group) -> their records.
WriteFiles = Callable[[Path, dict[str, Tensor], dict[str, Any], dist.ProcessGroup], list[FileRecord]]


# Limit of the first save: this, and the time at the rate of a slow disk. Later ones take at most ten times the slowest.
_FIRST_LIMIT_S, _SLOW_BYTES_S = 1800.0, 200e6
_MIN_LIMIT_S, _FACTOR = 600.0, 10.0


def first_write_limit(num_bytes: int) -> float:
    """Return the seconds after which a write of this size counts as hanging, without an earlier one to compare."""
    return _FIRST_LIMIT_S + num_bytes / _SLOW_BYTES_S


def no_guard(what: str, limit_s: float) -> AbstractContextManager[None]:
    """Return a ``Guard`` that has no limit."""
    return contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class SaveResult:
    """Outcome of a save, equal on all ranks; if it failed, ``checkpoint`` is None and ``error`` says why."""

    kind: Kind
    step: int
    checkpoint: Checkpoint | None
    error: str | None
    num_bytes: int  # over all ranks
    seconds: float


class Saver:
    """Copies tensors to the CPU, writes and publishes them, one save at a time, in a thread with its own process group.

    Every rank calls every method at the same step. A running save delays the next save, not the next step.

    Args:
        store: Where checkpoints are published.
        world: This rank.
        is_async: Save in a thread; otherwise ``start`` returns when the save is complete.
        guard: Ends the process if a save hangs.
    """

    def __init__(self, store: CheckpointStore, world: World, is_async: bool, guard: Guard = no_guard):
        self.store = store
        self.world = world
        self.is_async = is_async
        self.last: SaveResult | None = None  # the newest to end
        self.last_good: Checkpoint | None = None
        self._guard = guard
        self._slowest_s: float | None = None
        self._group = distributed.new_cpu_group()
        self._stager = Stager(world.device)
        self._thread: threading.Thread | None = None
        self._staged = threading.Event()
        self._crash: BaseException | None = None

    @property
    def is_running(self) -> bool:
        """True while this rank's part of a save runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(
        self,
        kind: Kind,
        step: int,
        tensors: dict[str, Tensor],
        description: dict[str, Any],
        write: WriteFiles,
        store: CheckpointStore | None = None,
    ) -> None:
        """Start saving live tensors, which must not change before ``wait_staged`` returns.

        Args:
            kind: Sharded or elastic.
            step: Optimizer steps taken.
            tensors: Tensors to copy and save.
            description: JSON part of the checkpoint.
            write: Writes this rank's files.
            store: Where to publish in place of the saver's store.
        """
        self.finish()
        self._staged.clear()
        self._stager.mark()
        arguments = (store or self.store, kind, step, tensors, description, write)
        if self.is_async:
            self._thread = threading.Thread(target=self._run, args=arguments, name="save", daemon=True)
            self._thread.start()
        else:
            self._run(*arguments)
            self._raise_crash()

    def wait_staged(self) -> None:
        """Wait until the tensors of a running save are copied and may change."""
        if self._thread is not None:
            self._staged.wait()

    def finish(self) -> SaveResult | None:
        """Wait for a running save; returns the outcome of the last one, None if there was none."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise_crash()
        return self.last

    def close(self) -> None:
        """Wait for a running save and free the buffers."""
        self.finish()
        self._stager.close()

    def _raise_crash(self) -> None:
        if self._crash is not None:
            raise self._crash

    def _run(
        self,
        store: CheckpointStore,
        kind: Kind,
        step: int,
        tensors: dict[str, Tensor],
        description: dict[str, Any],
        write: WriteFiles,
    ) -> None:
        started = time.perf_counter()
        try:
            try:
                fire("stage", f"{kind}-{step}")
                staged = self._stager.stage(tensors)
            finally:
                self._staged.set()
            num_bytes = sum(distributed.all_gather_objects(self._count_bytes(staged), self._group))
            limit_s = first_write_limit(num_bytes)
            if self._slowest_s is not None:
                limit_s = max(_MIN_LIMIT_S, _FACTOR * self._slowest_s)
            with self._guard(f"saving {store.path(kind, step)}", limit_s):
                error, checkpoint = self._write(store, kind, step, num_bytes, staged, description, write)
            self.last = SaveResult(kind, step, checkpoint, error, num_bytes, time.perf_counter() - started)
            if checkpoint is not None:
                self.last_good = checkpoint
                self._slowest_s = max(self.last.seconds, self._slowest_s or 0.0)
                if self.world.is_main:
                    size, seconds = num_bytes / 1e6, self.last.seconds
                    logger.info("checkpoint: %s (%.1f MB in %.1f s)", checkpoint.path, size, seconds)
        except BaseException as crash:  # a bug: raised at training's next call of the saver
            self._crash = crash

    def _write(
        self,
        store: CheckpointStore,
        kind: Kind,
        step: int,
        num_bytes: int,
        staged: dict[str, Tensor],
        description: dict[str, Any],
        write: WriteFiles,
    ) -> tuple[str | None, Checkpoint | None]:
        """Write and publish; returns the error or the checkpoint, equal on all ranks."""
        folder = store.partial_path(kind, step)
        records: list[FileRecord] = []

        def find_folder() -> None:
            if not folder.is_dir():
                raise OSError(None, f"{folder} is not visible on rank {self.world.rank}: output_dir is not shared")
            fire("write", folder.name)

        def write_own() -> None:
            records.extend(write(folder, staged, description, self._group))

        def publish() -> None:
            store.publish(kind, step, [record for of_rank in all_records for record in of_rank])

        error = self._agree(lambda: _start(store, kind, step, num_bytes) if self.world.is_main else None)
        error = error or self._agree(find_folder)
        error = error or self._agree(write_own)
        if not error:
            all_records = distributed.all_gather_objects(records, self._group)
            error = self._agree(lambda: publish() if self.world.is_main else None)
        if self.world.is_main:
            with contextlib.suppress(OSError):
                store.discard(kind, step) if error else store.prune()
        return error, None if error else Checkpoint(store.path(kind, step), kind, step)

    def _count_bytes(self, tensors: dict[str, Tensor]) -> int:
        """Bytes this rank writes; replicated tensors are counted once over all ranks."""
        num_bytes = 0
        for tensor in tensors.values():
            if isinstance(tensor, DTensor):
                local = tensor.to_local()
                sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
                num_copies = math.prod(size for size, placement in sizes if placement.is_replicate())
                num_bytes += local.numel() * local.element_size() // num_copies
            elif self.world.is_main:
                num_bytes += tensor.numel() * tensor.element_size()
        return num_bytes

    def _agree(self, action: Callable[[], None]) -> str | None:
        """Run ``action`` and return the first rank's error on every rank; None if no rank has one.

        An error that is not the disk's is a bug, and raised as well where it occurred, once the others know of it: they
        would wait for this rank otherwise.
        """
        error: str | None = None
        bug: Exception | None = None
        try:
            action()
        except OSError as caught:
            error = caught.strerror or str(caught)
        except Exception as caught:
            bug, error = caught, f"{type(caught).__name__}: {caught}"
        first = next((e for e in distributed.all_gather_objects(error, self._group) if e), None)
        if bug is not None:
            raise bug
        return first


def _start(store: CheckpointStore, kind: Kind, step: int, num_bytes: int) -> None:
    store.start(kind, step)
    free = shutil.disk_usage(store.root).free
    if free < num_bytes:
        raise OSError(None, f"{num_bytes:,} bytes are needed, but {free:,} are free on the disk of {store.root}")


class Stager:
    """Copies tensors to buffers on the CPU, which it keeps for the next copy.

    On CUDA the copies are queued on a stream of their own, behind what the training stream held when ``mark`` was
    called: they miss no update, and do not wait for the step that follows.
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
