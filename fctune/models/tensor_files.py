"""Safetensors files of a model directory: the tensors that they hold, a reader of parts of them, and their writer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fctune.base.errors import CheckpointError, one_line

INDEX = "model.safetensors.index.json"

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}

# https://huggingface.co/docs/safetensors: the header's length, and the longest header that its own readers accept.
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000

OpenFile = Callable[..., Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Name, place, shape and dtype of a stored tensor."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


def read_headers(model_dir: str | Path) -> dict[str, TensorHeader]:
    """Read the headers of all tensors of a model directory, by name.

    Raises:
        CheckpointError: No safetensors, a file that the index names is missing, or one is damaged.
    """
    found: dict[str, TensorHeader] = {}
    for file, names in _list_files(Path(model_dir)):
        try:
            entries = _read_entries(file)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: damaged safetensors ({error}). Download the model again.") from None
        for name, (dtype, shape) in entries.items():
            # A tensor that the index has in another file is an earlier version, as the matrices of an extended base.
            if names.get(name, file.name) != file.name:
                continue
            if dtype not in _DTYPES:
                raise CheckpointError(
                    f"{file}: {name} has the unsupported dtype {dtype}; use a checkpoint in bfloat16."
                )
            found[name] = TensorHeader(name, file, shape, _DTYPES[dtype])
    return found


def _read_entries(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each tensor of a file, by name.

    Only the header is read: opening a file with safetensors maps all of it, which limits on memory can forbid.

    Raises:
        OSError: The file cannot be read.
        ValueError: The header is invalid, or the file does not have the bytes that it describes.
    """
    num_bytes = file.stat().st_size
    with open(file, "rb") as stored:
        size = int.from_bytes(stored.read(_LENGTH_BYTES), "little")
        if num_bytes < _LENGTH_BYTES or size > min(_MAX_HEADER_BYTES, num_bytes - _LENGTH_BYTES):
            raise ValueError("no header, or an incomplete one")
        content = stored.read(size)
    entries: dict[str, tuple[str, tuple[int, ...]]] = {}
    ends = [0]
    try:
        header = json.loads(content)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = map(int, entry["data_offsets"])
            dtype, shape = str(entry["dtype"]), tuple(map(int, entry["shape"]))
            if min(start, *shape, 0) < 0 or (
                dtype in _DTYPES and end - start != math.prod(shape) * _DTYPES[dtype].itemsize
            ):
                raise ValueError(f"{name} does not have the number of bytes of its shape")
            entries[name] = dtype, shape
            ends.append(end)
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"invalid header: {type(error).__name__}: {error}") from None
    if max(ends) != (left := num_bytes - _LENGTH_BYTES - size):
        raise ValueError(f"{left:,} bytes of tensors in place of {max(ends):,}")
    return entries


def _list_files(root: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Iterate over the weight files of a model directory, each with the index's map from tensors to file names."""
    index = root / INDEX
    weight_map: dict[str, str] = {}
    names = ["model.safetensors"]
    if index.is_file():
        try:
            weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            names = sorted(set(weight_map.values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index}: cannot be read ({error}). Download the model again.") from None
    for name in names:
        file = root / Path(name).name  # .name: never read outside of the directory
        if not file.is_file():
            raise CheckpointError(_explain_missing(root, file))
        yield file, weight_map


def _explain_missing(root: Path, file: Path) -> str:
    """Return the message for a directory without one of its safetensors files."""
    if (root / "adapter_config.json").is_file():
        return (
            f"{root}: contains an adapter, not a model. Set model.path to its base (base_model_name_or_path in "
            "adapter_config.json), or merge the adapter into the base first."
        )
    if not (root / INDEX).is_file() and (pickles := sorted(root.glob("*.bin"))):
        return (
            f"{root}: its weights are pickled ({pickles[0].name}), which can run code when read. Convert them to "
            'safetensors first: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{root}', dtype='auto').save_pretrained('{root}-safetensors')\", then copy the "
            "tokenizer's files there."
        )
    return (
        f"{file}: no such file; the model directory is incomplete. Download it again, or, if the model is published "
        "without safetensors, convert it with transformers' save_pretrained."
    )


class TensorReader:
    """Reads parts of stored tensors; keeps the files open that it has read from. A context manager.

    Args:
        open_file: Opens a safetensors file, with the signature of ``safetensors.safe_open``.
    """

    def __init__(self, open_file: OpenFile = safe_open):
        self._open_file = open_file
        self._opened: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._opened.clear()

    def read(self, header: TensorHeader, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the region of a stored tensor with the given first indices and shape; it is mapped, not copied.

        Raises:
            CheckpointError: The region holds NaN or infinity, or the file is damaged or cannot be mapped.
        """
        try:
            if header.file not in self._opened:
                self._opened[header.file] = self._stack.enter_context(self._open_file(header.file, framework="pt"))
            file = self._opened[header.file]
            if header.shape:
                region = tuple(slice(first, first + size) for first, size in zip(offsets, shape, strict=True))
                part: Tensor = file.get_slice(header.name)[region]
            else:
                part = file.get_tensor(header.name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{header.file}: damaged safetensors ({error}). Download the model again.") from None
        except (MemoryError, RuntimeError) as error:  # safetensors' and torch's, if the file cannot be mapped
            reason = one_line(error, 200)
            raise CheckpointError(
                f"{header.file}: cannot be read ({reason}). If memory is limited (ulimit -v), raise the limit "
                "above the file's size."
            ) from None
        if part.is_floating_point() and part.element_size() > 1 and part.numel() and not _is_finite(part):
            raise CheckpointError(f"{header.file}: {header.name} holds NaN or infinity; download the model again.")
        return part

    def read_all(self, header: TensorHeader) -> Tensor:
        """Return a complete stored tensor; see ``read``."""
        return self.read(header, (0,) * len(header.shape), header.shape)


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers are finite, without a temporary of the tensor's size."""
    return all(bool(torch.isfinite(extreme)) for extreme in tensor.aminmax())


def group_by_size(items: Iterable[T], size_of: Callable[[T], int], max_bytes: int) -> Iterator[list[T]]:
    """Yield the items of each file in their order; a larger item than ``max_bytes`` gets a file to itself."""
    group: list[T] = []
    num_bytes = 0
    for item in items:
        size = size_of(item)
        if group and num_bytes + size > max_bytes:
            yield group
            group, num_bytes = [], 0
        group.append(item)
        num_bytes += size
    yield group


def shard_names(stem: str, count: int) -> list[str]:
    """Return the names of a model's files as Hugging Face gives them.

    Args:
        stem: ``model`` gives ``model.safetensors``, or ``model-00001-of-00002.safetensors`` and so on.
        count: Number of files.
    """
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def make_index(weight_map: Mapping[str, str], total_bytes: int) -> dict[str, Any]:
    """Return the index of several files: the file of each tensor, and the bytes of all tensors together."""
    return {"metadata": {"total_size": total_bytes}, "weight_map": dict(weight_map)}


def write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> None:
    """Write a model's tensors in their order, each file as soon as its tensors are there.

    Raises:
        SafetensorError: The disk is full, gone or read-only.
        OSError: As above.
    """
    written: list[list[str]] = []
    total_bytes = 0
    for shard in group_by_size(tensors, lambda tensor: tensor[1].nbytes, max_bytes):
        # A plain weight may share memory with the live model; save_file reads it and does not keep it.
        save_file(dict(shard), folder / f"{len(written)}.safetensors", metadata={"format": "pt"})
        written.append([name for name, _ in shard])
        total_bytes += sum(tensor.nbytes for _, tensor in shard)
        shard.clear()  # before the tensors of the next file are read
    files = shard_names("model", len(written))
    for number, file in enumerate(files):  # whose names contain their number
        (folder / f"{number}.safetensors").rename(folder / file)
    if len(files) > 1:
        index = make_index(
            {name: file for file, names in zip(files, written, strict=True) for name in names}, total_bytes
        )
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
