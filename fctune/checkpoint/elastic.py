"""The portable checkpoint: a Hugging Face model, or an adapter in PEFT's layout, with what training needs to go on.

Nothing of this project is needed to use it. Each file has an owner among the ranks, which gathers the file's tensors
one by one: no rank ever holds the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from fctune import distributed
from fctune.checkpoint.files import flush, write_tensors, write_text
from fctune.checkpoint.store import FileRecord
from fctune.errors import CheckpointError

_MAX_FILE_BYTES = 2 * 1024**3


def plan_files(stem: str, sizes: Mapping[str, int], max_bytes: int = _MAX_FILE_BYTES) -> dict[str, list[str]]:
    """Which tensors go into which file, named as Hugging Face names the parts of a model.

    Args:
        stem: of the names: ``model`` gives ``model.safetensors``, or ``model-00001-of-00002.safetensors`` and so on.
        sizes: bytes of each tensor by name, in the order to write.
        max_bytes: of one file, unless a single tensor is larger.
    """
    files: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if size > room or not files:
            files.append([])
            room = max_bytes
        files[-1].append(name)
        room -= size
    if len(files) == 1:
        return {f"{stem}.safetensors": files[0]}
    return {f"{stem}-{i:05d}-of-{len(files):05d}.safetensors": names for i, names in enumerate(files, start=1)}


def write_files(
    folder: Path,
    stem: str,
    tensors: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    convert: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor,
    max_bytes: int = _MAX_FILE_BYTES,
) -> list[FileRecord]:
    """Write staged tensors whole, each file by its owner; the files of this rank. Every rank calls it.

    Rank 0 adds the index where there are several files. ``convert`` is given each whole tensor by name.

    Raises:
        OSError: this rank's disk is full, gone or read-only; the other ranks are not left waiting.
    """
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    files = plan_files(stem, sizes, max_bytes)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    records: list[FileRecord] = []
    error: OSError | None = None
    for number, (file, names) in enumerate(files.items()):
        owner = number % world_size
        # A rank whose disk failed goes on gathering: the others are sending to it.
        gathered = {name: distributed.gather_full_tensor(tensors[name], owner, group) for name in names}
        if rank == owner and error is None:
            try:
                whole = {name: convert(name, t).contiguous() for name, t in gathered.items() if t is not None}
                records.append(_record(folder / file, write_tensors(folder / file, whole, {"format": "pt"})))
            except OSError as caught:
                error = caught
    if error is not None:
        raise error
    if rank == 0 and len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        records.append(write_json(folder / f"{stem}.safetensors.index.json", index))
    return records


def write_json(path: Path, value: Any) -> FileRecord:
    """Write a JSON file and flush it.

    Raises:
        OSError: the disk is full, gone or read-only.
    """
    return _record(path, write_text(path, json.dumps(value, indent=2) + "\n"))


def flush_files(paths: Sequence[Path]) -> list[FileRecord]:
    """Flush files that a library wrote.

    Raises:
        OSError: the disk refuses.
    """
    return [_record(path, flush(path)) for path in paths]


def locate(folder: Path, stem: str) -> dict[str, Path]:
    """Which file of a portable checkpoint holds each tensor of the files named by ``stem``.

    Raises:
        CheckpointError: no such file.
    """
    files = sorted(folder.glob(f"{stem}.safetensors")) or sorted(folder.glob(f"{stem}-*-of-*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: holds no {stem}.safetensors, so a run cannot go on from it.")
    found: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            found.update(dict.fromkeys(tensors.keys(), file))
    return found


def read_tensor(file: Path, name: str) -> Tensor:
    """One tensor of a file, whole."""
    with safe_open(file, framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    return tensor


def _record(path: Path, digest: str) -> FileRecord:
    return FileRecord(path.name, path.stat().st_size, digest)
