"""Load the base model's weights from safetensors files, each rank only the regions of its shards.

Ranks of a node that hold the same region read a part of it each, and send it to each other.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fctune.base import distributed
from fctune.base.distributed import World
from fctune.base.errors import CheckpointError
from fctune.models.architecture import Architecture
from fctune.models.causal_lm import CausalLM
from fctune.models.frozen_experts import FrozenExperts, Mxfp4Experts, iter_frozen_experts
from fctune.models.frozen_linear import (
    copy_rows_,
    find_weight_device,
    is_nf4,
    is_quantized,
    is_scale,
    rows_of_shard,
)
from fctune.models.lora import is_adapter
from fctune.models.tensor_files import OpenFile, TensorReader, read_headers
from fctune.models.weight_plan import WeightPlan
from fctune.models.weight_sources import Stored

# A smaller part is not worth an exchange of its own.
_MIN_PART_BYTES = 1 << 20

ReadRegion = Callable[[Tensor, Sequence[int]], None]
FillRows = Callable[[int, int], None]


class Target(NamedTuple):
    """A parameter or buffer of a model to load, with its name there and in transformers' model."""

    name: str
    hf_name: str
    tensor: Tensor | FrozenExperts


def load_base_(
    model: CausalLM, model_dir: str | Path, open_file: OpenFile = safe_open, world: World | None = None
) -> None:
    """Copy the weights of a model directory into a model's parameters, in place; adapters are left as they are.

    A rank reads only the regions of its shards, rounded to the row groups that the layouts reorder, so it never holds
    more than its shards and a part of one tensor. 4-bit weights are read in full, because scales are shared across
    shards. With ``world``, every rank calls it, and what several ranks of a node hold is read once on that node.

    Args:
        model: Model with memory for its parameters.
        model_dir: Hugging Face model directory.
        open_file: Opens a safetensors file, with the signature of ``safetensors.safe_open``.
        world: This rank, to share reading with others of its node; None reads everything on each rank.

    Raises:
        CheckpointError: A file is missing or damaged, or its tensors differ from the model's in name or shape. A rank
            that cannot read takes part in the exchange to its end, so that no other waits for it.
    """
    check = functools.partial(check_base, model, model_dir)
    # A rank that cannot read the headers would leave the others waiting.
    plan = check() if world is None else distributed.run_on_all_ranks(check)
    targets = list(find_targets(model))
    first = {target.name: next(plan.sources[target.hf_name][0].leaves()) for target in targets}
    # In the order of the files, which disks read fastest.
    targets.sort(key=lambda target: str(first[target.name].headers()[0].file))
    with TensorReader(open_file) as reader, _reading_shared(targets, world) as shares:
        for target in targets:
            load_(model, target, plan, reader, shares[target.name])
    for share in shares.values():
        if share.error is not None:
            raise share.error


class Share:
    """Part in reading that a rank takes of the regions that it holds in common with others of its node.

    Args:
        group: Those ranks; None if it holds them alone.
        defers_errors: Keep an error in ``error`` and go on with undefined numbers, for others wait for this rank's.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, defers_errors: bool = False):
        self.error: CheckpointError | None = None
        self._group, self._defers_errors = group, defers_errors
        self._turn = 0  # of the ranks to read first

    @property
    def is_common(self) -> bool:
        """True if several ranks read."""
        return self._group is not None

    def read_(self, out: Tensor, offsets: Sequence[int], step: int, read_: ReadRegion) -> None:
        """Fill a region, in place, of which each rank reads some rows and sends them to the others.

        Args:
            out: The region, contiguous and on the device on which the ranks exchange it.
            offsets: Index of its first element in the full tensor.
            step: Rows at whose multiples the full tensor may be cut.
            read_: Fills a region in the host's memory.
        """
        if not out.ndim:
            self._attempt(_read_on_host_, out, offsets, read_)
            return
        first = offsets[0]

        def read_rows_(start: int, stop: int) -> None:
            _read_on_host_(out[start - first : stop - first], (start, *offsets[1:]), read_)

        self.fill_([out], first, step, read_rows_)

    def fill_(self, outs: Sequence[Tensor], first: int, step: int, fill_rows_: FillRows) -> None:
        """Fill tensors of equally many rows, in place, of which each rank fills some and sends them to the others.

        Args:
            outs: The tensors, contiguous and on the device on which the ranks exchange them.
            first: Index of their first row in the full tensors.
            step: Rows at whose multiples the full tensors may be cut.
            fill_rows_: Fills the rows of all tensors from one index in the full tensors to another, which is excluded.
        """
        last = first + len(outs[0])
        if self._group is None:
            self._attempt(fill_rows_, first, last)
            return
        size, rank = self._group.size(), self._group.rank()
        num_parts = min(size, math.ceil(sum(out.nbytes for out in outs) / _MIN_PART_BYTES))
        steps = range(first // step, math.ceil(last / step))
        cuts = [steps.start + math.ceil(len(steps) * part / num_parts) for part in range(1, num_parts)]
        bounds = sorted({first, *(min(cut * step, last) for cut in cuts), last})
        parts = [(*rows, (self._turn + part) % size) for part, rows in enumerate(itertools.pairwise(bounds))]
        self._turn += len(parts)
        for start, stop, source in parts:
            if source == rank:
                self._attempt(fill_rows_, start, stop)
        distributed.broadcast_parts_(
            [(out[start - first : stop - first], source) for start, stop, source in parts for out in outs], self._group
        )

    def _attempt(self, read: Callable[..., None], *args: object) -> None:
        """Read without the other ranks, unless an earlier read failed."""
        if self.error is not None:
            return
        try:
            read(*args)
        except CheckpointError as error:
            if not self._defers_errors:
                raise
            self.error = error


def _read_on_host_(out: Tensor, offsets: Sequence[int], read_: ReadRegion) -> None:
    """Fill a region on any device, in place, by a function that fills one in the host's memory."""
    host = out if out.device.type == "cpu" else torch.empty(out.shape, dtype=out.dtype)
    read_(host, offsets)
    if host is not out:
        out.copy_(host)


@contextlib.contextmanager
def _reading_shared(targets: Sequence[Target], world: World | None) -> Iterator[dict[str, Share]]:
    """Yield the share that this rank takes in reading each target, by name; every rank enters and exits it."""
    if world is None or world.world_size == 1:
        alone = Share()
        yield {target.name: alone for target in targets}
        return
    node = world.rank // world.ranks_per_node
    layouts = {target.name: _describe_layout(target.tensor) for target in targets}
    # Layouts are the same on every rank; where a rank's shard is within the full tensor differs.
    positions = dict(layouts.values())
    with distributed.equal_ranks_grouped([(node, position) for position in positions.values()]) as groups:
        shares = {layout: Share(group, defers_errors=True) for layout, group in zip(positions, groups, strict=True)}
        yield {name: shares[layout] for name, (layout, _) in layouts.items()}


def _describe_layout(tensor: Tensor | FrozenExperts) -> tuple[Hashable, Hashable]:
    """Return how a tensor is split over ranks, and which part this one reads."""
    if isinstance(tensor, FrozenExperts):
        tensor = tensor.parts[0]  # the others are sharded alike
    if not isinstance(tensor, DTensor) or is_nf4(tensor):
        return None, ()
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    shape, placements = tuple(mesh.shape), tuple(map(str, tensor.placements))
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return (shape, placements), tuple(coordinate[axis] for axis in axes)


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
def load_(model: CausalLM, target: Target, plan: WeightPlan, reader: TensorReader, share: Share | None = None) -> None:
    """Read this rank's part of one parameter or buffer, in place; ``share`` lets others of its node read some of it."""
    name, hf_name, tensor = target
    source, share = plan.sources[hf_name][0], share or Share()
    if isinstance(tensor, FrozenExperts):
        rows = rows_of_shard(tensor.parts[0])
        if rows.start < rows.stop:
            load_experts_ = functools.partial(tensor.load_, source, reader)
            share.fill_(tensor.local_parts, rows.start, source.step_along(0), load_experts_)
        return
    group = model.architecture.row_group(name)
    step = math.lcm(group, source.step_along(0)) if source.shape else 1
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if group == 1 and not is_quantized(tensor):
        offsets = _first_indices(tensor)
        if not local.numel():
            return  # more ranks than rows

        def read_(part: Tensor, offsets: Sequence[int]) -> None:
            source.read_(part, offsets, reader)
            plan.check_duplicate(hf_name, part, offsets, reader)

        # Straight into the parameter, or into its copy in the host's memory.
        share.read_(local, offsets, step, read_)
        return
    rows = rows_of_shard(tensor)
    if rows.start == rows.stop:
        return
    first, last = rows.start // group * group, math.ceil(rows.stop / group) * group
    device = find_weight_device(model) if share.is_common else torch.device("cpu")
    part = torch.empty((last - first, *source.shape[1:]), dtype=source.dtype, device=device)
    offsets = (first, *(0 for _ in source.shape[1:]))
    share.read_(part, offsets, step, lambda part, offsets: source.read_(part, offsets, reader))
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
