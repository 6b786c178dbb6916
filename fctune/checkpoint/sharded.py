"""Sharded tensors on disk: every rank writes its own shards; any number of ranks reads the parts it needs.

``torch.distributed.checkpoint`` plans the writes and reads. Files are safetensors with its sharding header, so nothing
is ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fctune.base.errors import CheckpointError
from fctune.checkpoint.files import FileRecord, write_tensors


class _ShardWriter(HuggingFaceStorageWriter):
    """Writes one file per rank, without a second copy in memory, and records it."""

    def __init__(self, folder: Path):
        super().__init__(str(folder), save_distributed=True)
        self.folder = folder
        self.written: list[FileRecord] = []

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors: dict[str, Tensor] = {}
        offsets: dict[str, dict[str, list[int]]] = {}
        results: list[WriteResult] = []
        name = f"shard-{plan.storage_data['shard_index']:05d}.safetensors"
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            assert item.tensor_data is not None
            assert item.index.fqn not in tensors, "a rank holds one shard of a tensor"
            tensors[item.index.fqn] = tensor.detach().contiguous()
            offsets[item.index.fqn] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
            results.append(WriteResult(item.index, tensor.numel() * tensor.element_size(), storage_data=name))
        if tensors:
            header = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
            self.written.append(write_tensors(self.folder / name, tensors, header))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write no index: readers take everything from the files' headers."""


def write_shards(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> list[FileRecord]:
    """Write this rank's shards of CPU tensors. Every rank of the group calls it.

    Returns:
        Records of the files that this rank wrote.

    Raises:
        OSError: The disk of any rank is full, gone or read-only.
    """
    writer = _ShardWriter(folder)
    try:
        save(dict(tensors), storage_writer=writer, process_group=group)
    except CheckpointException as error:
        raise OSError(None, _first_cause(error)) from None
    return writer.written


def read_shards_(folder: Path, tensors: dict[str, Any]) -> None:
    """Fill tensors, sharded in any way, from a folder of shards, in place. Every rank calls it.

    Raises:
        CheckpointError: A tensor is missing or has another shape.
    """
    try:
        load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:
        raise CheckpointError(f"{folder}: cannot be loaded: {_first_cause(error)}.") from None


def list_tensors(folder: Path) -> set[str]:
    """Return the names of all tensors in a folder of shards."""
    return set(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)


def _first_cause(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items())
    text = " ".join((getattr(cause, "strerror", None) or str(cause)).split())
    return f"rank {rank}: {text}"
