"""Weights between Hugging Face's names and layout and torchtune's, one tensor at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fctune.errors import CheckpointError
from fctune.models.frozen_linear import copy_rows_, is_scale, rows_of_shard
from fctune.models.lora import is_adapter
from fctune.models.torchtune.architecture import Architecture
from fctune.models.torchtune.build import CausalLM
from fctune.models.torchtune.names import to_hf_name


def to_hf_layout(name: str, tensor: Tensor, architecture: Architecture) -> Tensor:
    """A weight, or the B of its adapter, in Hugging Face's row order; whole, or the rows of some heads.

    torchtune's Llama rotates neighbouring pairs of a head's rows, Hugging Face's rotates halves: the rows of the query
    and key projections differ by that permutation. Qwen2 is built with halves in both.
    """
    if not _is_rotated(name, architecture):
        return tensor
    shape = tensor.shape
    return tensor.reshape(-1, architecture.head_dim // 2, 2, *shape[1:]).transpose(1, 2).reshape(shape)


def from_hf_layout(name: str, tensor: Tensor, architecture: Architecture) -> Tensor:
    """The inverse of ``to_hf_layout``."""
    if not _is_rotated(name, architecture):
        return tensor
    shape = tensor.shape
    return tensor.reshape(-1, 2, architecture.head_dim // 2, *shape[1:]).transpose(1, 2).reshape(shape)


def load_base_(model: CausalLM, model_dir: str | Path) -> None:
    """Copy a directory's safetensors into the model in place.

    A rank reads of each tensor the rows that its shard is made of, and of the rotated projections the heads they lie
    in, so it never holds more than its shards and a part of one tensor. 4-bit weights alone are read whole, as their
    scales are those of the whole tensor. Adapters are not in the directory and are left as they are.

    Raises:
        CheckpointError: when a file is missing or damaged, or its tensors are not exactly those of the model.
    """
    parameters = dict(model.named_parameters())
    wanted = {to_hf_name(name): name for name in parameters if not is_adapter(name) and not is_scale(name)}
    index = locate_tensors(model_dir)
    if model.architecture.is_tied:
        index.pop("lm_head.weight", None)
    _check_names(model_dir, wanted, index)
    by_file: dict[Path, list[str]] = {}
    for hf_name, file in index.items():
        by_file.setdefault(file, []).append(hf_name)
    for file, hf_names in by_file.items():
        with safe_open(file, framework="pt") as tensors:
            for hf_name in hf_names:
                name = wanted[hf_name]
                stored = tensors.get_slice(hf_name)
                shape = list(parameters[name].shape)
                if stored.get_shape() != shape:
                    raise CheckpointError(
                        f"{file}: {hf_name} is {stored.get_shape()}, config.json asks for {shape}. "
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
    """Rows of a tensor of a file in our order, of which some heads are read where rows are permuted within them."""
    if not _is_rotated(name, architecture):
        part: Tensor = stored[rows]
        return part
    size = architecture.head_dim
    first = rows.start // size * size
    heads = from_hf_layout(name, stored[first : math.ceil(rows.stop / size) * size], architecture)
    return heads[rows.start - first : rows.stop - first]


def locate_tensors(model_dir: str | Path) -> dict[str, Path]:
    """Which safetensors file holds each tensor of a model directory.

    Raises:
        CheckpointError: when there are no safetensors, one that the index names is missing, or one is damaged.
    """
    root = Path(model_dir)
    index_file = root / "model.safetensors.index.json"
    if index_file.is_file():
        try:
            names = sorted(set(json.loads(index_file.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index_file}: cannot be read ({error}). Download the model again.") from None
        files = [root / Path(name).name for name in names]  # .name: nothing outside the directory is read
    else:
        files = [root / "model.safetensors"]
    found: dict[str, Path] = {}
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file}: no such file; the model directory is not whole. Download it again.")
        try:
            with safe_open(file, framework="pt") as tensors:
                found.update(dict.fromkeys(tensors.keys(), file))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: damaged safetensors ({error}). Download the model again.") from None
    return {name: file for name, file in found.items() if not name.endswith("rotary_emb.inv_freq")}


def _check_names(model_dir: str | Path, wanted: Iterable[str], found: Iterable[str]) -> None:
    missing, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    problems = [
        f"{len(names)} {what}: {', '.join(names[:3])}"
        for what, names in (("missing", missing), ("extra", extra))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{model_dir}: weights do not match config.json: {'; '.join(problems)}. Download the model again."
        )


def _is_rotated(name: str, architecture: Architecture) -> bool:
    """Whether the rows of a parameter are permuted within the heads."""
    is_query_or_key = ".q_proj." in name or ".k_proj." in name
    return architecture.family == "llama" and is_query_or_key and not name.endswith(".lora_a")
