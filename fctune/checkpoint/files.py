"""Checkpoint files: written, flushed to disk, and recorded with their size and checksum."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fctune.base.files import checksum, flush


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Manifest entry of a file; ``name`` is relative to the checkpoint, ``checksum`` is XXH3-128."""

    name: str
    num_bytes: int
    checksum: str


def record_file(path: Path) -> FileRecord:
    """Flush a written file to disk and return its manifest entry.

    Raises:
        OSError: The disk cannot be written.
    """
    flush(path)
    return FileRecord(path.name, path.stat().st_size, checksum(path))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> FileRecord:
    """Write CPU tensors to one safetensors file and flush it to disk.

    Raises:
        OSError: The disk is full, gone or read-only.
    """
    try:
        save_file(dict(tensors), path, metadata=dict(metadata or {}) or None)
    except SafetensorError as error:  # safetensors wraps the disk's error
        raise OSError(None, f"{path.name} cannot be written ({error})") from None
    return record_file(path)


def write_json(path: Path, value: Any) -> FileRecord:
    """Write a JSON file and flush it to disk.

    Raises:
        OSError: The disk is full, gone or read-only.
    """
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    return record_file(path)


def read_tensor(path: Path, name: str) -> Tensor:
    """Read one tensor of a safetensors file onto the CPU."""
    with safe_open(path, framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    return tensor
