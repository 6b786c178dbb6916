"""Load the base model's weights from safetensors files, each rank only the regions of its shards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fctune.base.errors import CheckpointError
from fctune.models.architecture import Architecture
from fctune.models.causal_lm import CausalLM
from fctune.models.frozen_experts import FrozenExperts, Mxfp4Experts, iter_frozen_experts
from fctune.models.frozen_linear import copy_rows_, is_quantized, is_scale, rows_of_shard
from fctune.models.lora import is_adapter
from fctune.models.tensor_files import OpenFile, TensorReader, read_headers
from fctune.models.weight_plan import WeightPlan
from fctune.models.weight_sources import Stored


class Target(NamedTuple):
    """A parameter or buffer of a model to load, with its name there and in transformers' model."""

    name: str
    hf_name: str
    tensor: Tensor | FrozenExperts


def load_base_(model: CausalLM, model_dir: str | Path, open_file: OpenFile = safe_open) -> None:
    """Copy the weights of a model directory into a model's parameters, in place; adapters are left as they are.

    A rank reads only the regions of its shards, rounded to the row groups that the layouts reorder, so it never holds
    more than its shards and a part of one tensor. 4-bit weights are read in full, because scales are shared across
    shards.

    Args:
        model: Model with memory for its parameters.
        model_dir: Hugging Face model directory.
        open_file: Opens a safetensors file, with the signature of ``safetensors.safe_open``.

    Raises:
        CheckpointError: A file is missing or damaged, or its tensors differ from the model's in name or shape.
    """
    plan = check_base(model, model_dir)
    targets = list(find_targets(model))
    first = {target.name: next(plan.sources[target.hf_name][0].leaves()) for target in targets}
    # In the order of the files, which disks read fastest.
    targets.sort(key=lambda target: str(first[target.name].headers()[0].file))
    with TensorReader(open_file) as reader:
        for target in targets:
            load_(model, target, plan, reader)


def check_base(model: CausalLM, model_dir: str | Path) -> WeightPlan:
    """Compare the tensors of a model directory with a model, which may be without memory; returns the plan of loading.

    Reads the files' headers alone.

    Raises:
        CheckpointError: A file is missing or damaged, or its tensors differ from the model's in name or shape.
    """
    plan = plan_base(model.architecture, model_dir)
    targets = list(find_targets(model))
    plan.check({target.hf_name: target.tensor.shape for target in targets})
    for target in targets:
        if isinstance(target.tensor, Mxfp4Experts):
            target.tensor.check_stored(plan.sources[target.hf_name][0])
    return plan


def plan_base(architecture: Architecture, model_dir: str | Path) -> WeightPlan:
    """Plan how the parameters of a model consist of the tensors of a model directory; reads the files' headers.

    Raises:
        CheckpointError: A file is missing or damaged, or tensors are quantised in a way that cannot be undone.
    """
    return architecture.plan_weights(Path(model_dir), read_headers(model_dir))


def find_targets(model: CausalLM) -> Iterator[Target]:
    """Iterate over the parameters and buffers of a model that its base's checkpoint stores."""
    experts = dict(iter_frozen_experts(model))
    for name, parameter in model.named_parameters():
        if not is_adapter(name) and not is_scale(name) and name.rpartition(".")[0] not in experts:
            yield Target(name, model.architecture.to_hf_name(name), parameter)
    yield from (Target(path, model.architecture.to_hf_name(path), weight) for path, weight in experts.items())
    stored = model.stored_buffers()
    yield from (Target(name, model.architecture.to_hf_name(name), buffer) for name, buffer in stored)


@torch.no_grad()
def load_(model: CausalLM, target: Target, plan: WeightPlan, reader: TensorReader) -> None:
    """Read this rank's part of one parameter or buffer, in place."""
    name, hf_name, tensor = target
    source = plan.sources[hf_name][0]
    if isinstance(tensor, FrozenExperts):
        tensor.load_(source, reader)
        return
    group = model.architecture.row_group(name)
    if group == 1 and not is_quantized(tensor):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        offsets = _first_indices(tensor)
        if not local.numel():
            return  # more ranks than rows
        # Straight into the parameter, or into its copy in the host's memory.
        out = local if local.device.type == "cpu" else torch.empty(local.shape, dtype=local.dtype)
        source.read_(out, offsets, reader)
        plan.check_duplicate(hf_name, out, offsets, reader)
        if out is not local:
            local.copy_(out)
        return
    rows = rows_of_shard(tensor)
    if rows.start == rows.stop:
        return
    first, last = rows.start // group * group, math.ceil(rows.stop / group) * group
    part = torch.empty((last - first, *source.shape[1:]), dtype=source.dtype)
    source.read_(part, (first, *(0 for _ in source.shape[1:])), reader)
    ours = model.architecture.from_hf_layout(name, part)
    copy_rows_(model, name, ours[rows.start - first : rows.stop - first])


def _first_indices(tensor: Tensor) -> tuple[int, ...]:
    """Return the index, in the full tensor, of the first element of this rank's shard."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets)


def read_matrix(plan: WeightPlan, hf_name: str) -> Tensor:
    """Read a parameter in full, in the dtype in which it is stored; mapped, not copied, where it is stored as it is.

    Raises:
        CheckpointError: The parameter is missing, or its file is damaged.
    """
    _require(plan, hf_name)
    source = plan.sources[hf_name][0]
    with TensorReader() as reader:
        return reader.read_all(source.header) if isinstance(source, Stored) else source.read(reader)


def read_rows(plan: WeightPlan, hf_name: str, ids: Sequence[int]) -> Tensor:
    """Read some rows of a parameter, ``[len(ids), ...]`` in the dtype in which it is stored.

    Raises:
        CheckpointError: The parameter is missing, or its file is damaged.
    """
    _require(plan, hf_name)
    source = plan.sources[hf_name][0]
    out = torch.empty((len(ids), *source.shape[1:]), dtype=source.dtype)
    with TensorReader() as reader:
        for row, token in enumerate(ids):
            source.read_(out[row : row + 1], (token, *(0 for _ in source.shape[1:])), reader)
    return out


def _require(plan: WeightPlan, hf_name: str) -> None:
    if hf_name not in plan.sources:
        raise CheckpointError(f"{plan.model_dir}: {hf_name} is missing; download the model again.")
