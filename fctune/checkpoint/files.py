"""Files that are on the disk, whole, before anything says so: flushed and hashed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

_CHUNK_BYTES = 16 * 1024 * 1024


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write tensors of the CPU to one safetensors file and flush it to the disk; its checksum.

    Raises:
        OSError: the disk is full, gone or read-only.
    """
    try:
        save_file(dict(tensors), path, metadata=dict(metadata or {}) or None)
    except SafetensorError as error:  # what the library makes of an error of the disk
        raise OSError(None, f"{path.name} cannot be written ({error})") from None
    return flush(path)


def write_text(path: Path, text: str) -> str:
    """Write a small file and flush it to the disk; its checksum.

    Raises:
        OSError: the disk is full, gone or read-only.
    """
    path.write_text(text, encoding="utf-8")
    return flush(path)


def flush(path: Path) -> str:
    """Flush a written file to the disk; its checksum.

    Raises:
        OSError: the disk refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return checksum(path)


def checksum(path: Path) -> str:
    """The checksum of a file's bytes (XXH3, 128 bits).

    Raises:
        OSError: it cannot be read.
    """
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def flush_directory(path: Path) -> None:
    """Flush a directory's names to the disk, so that a rename in it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
