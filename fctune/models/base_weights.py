"""Load the base model's weights from safetensors files, each rank only the rows of its shards."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fctune.errors import CheckpointError
from fctune.models.architecture import Architecture
from fctune.models.causal_lm import CausalLM
from fctune.models.frozen_linear import copy_rows_, is_scale, rows_of_shard
from fctune.models.lora import is_adapter


def load_base_(model: CausalLM, model_dir: str | Path, open_file: Callable[..., Any] = safe_open) -> None:
    """Copy the weights of a model directory into a model's parameters, in place; adapters are left as they are.

    A rank reads only the rows of its shards, rounded to the row groups that the layouts reorder, so it never holds more
    than its shards and a part of one tensor. 4-bit weights are read in full, because scales are shared across shards.

    Args:
        model: model with memory for its parameters.
        model_dir: Hugging Face model directory.
        open_file: opens a safetensors file, with the signature of ``safetensors.safe_open``.

    Raises:
        CheckpointError: a file is missing or damaged, or its tensors differ from the model's in name or shape.
    """
    parameters = dict(model.named_parameters())
    loadable = [name for name in parameters if not is_adapter(name) and not is_scale(name)]
    expected = {model.architecture.to_hf_name(name): name for name in loadable}
    index = locate_tensors(model_dir)
    if model.architecture.is_tied:
        index.pop(f"{model.architecture.head}.weight", None)
    _check_names(model_dir, expected, index)
    by_file: dict[Path, list[str]] = {}
    for hf_name, file in index.items():
        by_file.setdefault(file, []).append(hf_name)
    for file, hf_names in by_file.items():
        with open_file(file, framework="pt") as tensors:
            for hf_name in hf_names:
                name = expected[hf_name]
                stored = tensors.get_slice(hf_name)
                shape = list(parameters[name].shape)
                if stored.get_shape() != shape:
                    raise CheckpointError(
                        f"{file}: {hf_name} has the shape {stored.get_shape()}, config.json implies {shape}. "
                        "Download the model again."
                    )
                rows = rows_of_shard(parameters[name])
                if rows.start == rows.stop:
                    continue  # more ranks than rows
                part = _read_rows(stored, rows, name, model.architecture)
                if not torch.isfinite(part).all():
                    raise CheckpointError(f"{file}: {hf_name} holds NaN or infinity; download the model again.")
                copy_rows_(model, name, part)


def _read_rows(stored: Any, rows: slice, name: str, architecture: Architecture) -> Tensor:
    """Read rows of a stored tensor in our order."""
    size = architecture.row_group(name)
    first = rows.start // size * size
    groups = architecture.from_hf_layout(name, stored[first : math.ceil(rows.stop / size) * size])
    return groups[rows.start - first : rows.stop - first]


def read_rows(model_dir: str | Path, hf_name: str, ids: Sequence[int]) -> Tensor:
    """Read some rows of a stored tensor, ``[len(ids), ...]`` in its dtype.

    Raises:
        CheckpointError: the tensor is missing, or its file is damaged.
    """
    file = locate_tensors(model_dir).get(hf_name)
    if file is None:
        raise CheckpointError(f"{model_dir}: {hf_name} is missing; download the model again.")
    with safe_open(file, framework="pt") as tensors:
        stored = tensors.get_slice(hf_name)
        return torch.cat([stored[i : i + 1] for i in ids])


def locate_tensors(model_dir: str | Path) -> dict[str, Path]:
    """Map the name of each tensor of a model directory to the safetensors file that holds it.

    Raises:
        CheckpointError: no safetensors, a file that the index names is missing, or one is damaged.
    """
    root = Path(model_dir)
    index_file = root / "model.safetensors.index.json"
    weight_map: dict[str, str] = {}
    if index_file.is_file():
        try:
            weight_map = dict(json.loads(index_file.read_text(encoding="utf-8"))["weight_map"])
            names = sorted(set(weight_map.values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index_file}: cannot be read ({error}). Download the model again.") from None
        files = [root / Path(name).name for name in names]  # .name: never read outside of the directory
    else:
        files = [root / "model.safetensors"]
    found: dict[str, Path] = {}
    for file in files:
        # A tensor that the index has in another file is an earlier version, as the matrices of an extended base.
        if not file.is_file():
            raise CheckpointError(f"{file}: no such file; the model directory is incomplete. Download it again.")
        try:
            with safe_open(file, framework="pt") as tensors:
                keys = tensors.keys()
                found.update((key, file) for key in keys if weight_map.get(key, file.name) == file.name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: damaged safetensors ({error}). Download the model again.") from None
    # Older checkpoints store the frequencies of RoPE, which are computed.
    return {name: file for name, file in found.items() if not name.endswith("rotary_emb.inv_freq")}


def _check_names(model_dir: str | Path, expected: Iterable[str], found: Iterable[str]) -> None:
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    problems = [
        f"{len(names)} {kind}: {', '.join(names[:3])}"
        for kind, names in (("missing", missing), ("extra", extra))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{model_dir}: weights do not match config.json: {'; '.join(problems)}. Download the model again."
        )
