"""Plans that map the parameters of a model to the tensors of a checkpoint, for reading and for exports alike.

Parameters go by their names in transformers' model, in its layout: see ``Architecture.to_hf_name``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fctune.base.errors import CheckpointError
from fctune.models.tensor_files import TensorHeader, TensorReader
from fctune.models.weight_sources import Dequantized, Leaf, Source, Stored

# A changed config.json is as likely as a wrong or incomplete download.
_OTHER_MODEL = (
    "Either config.json or the weights are another model's: compare config.json with the published one, or download "
    "the model again."
)


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters and the stored tensors that consist of these alone.

    Attributes:
        parameters: Names of the parameters; none for tensors that are copied from the base.
        leaves: Stored tensors.
    """

    parameters: tuple[str, ...]
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Plan of how a model's parameters consist of the tensors of a checkpoint.

    Attributes:
        model_dir: Directory of the checkpoint.
        sources: For each parameter and stored buffer, what it is read from. Where a checkpoint stores a tied weight
            more than once, all are listed: the first is read, the others must equal it, and exports write every one.
        copied: Tensors of other parts of the checkpoint, such as a vision tower, which exports copy.
        unknown: Names of stored tensors that the model has no place for.
        incomplete: Fused parameters that lack stored tensors, such as those of one expert, with the names of these.
    """

    model_dir: Path
    sources: Mapping[str, Sequence[Source]]
    copied: Sequence[Leaf] = ()
    unknown: Sequence[str] = ()
    incomplete: Mapping[str, Sequence[str]] = field(default_factory=dict)
    is_dequantized: bool = field(init=False)  # exports are in the run's dtype, though the base is quantised

    def __post_init__(self) -> None:
        leaves = [leaf for sources in self.sources.values() for source in sources for leaf in source.leaves()]
        object.__setattr__(self, "is_dequantized", any(isinstance(leaf, Dequantized) for leaf in leaves))

    def check(self, shapes: Mapping[str, Sequence[int]], remedy: str = _OTHER_MODEL) -> None:
        """Compare the plan with a model.

        Args:
            shapes: Shape of each parameter and stored buffer of the model, by name.
            remedy: Last sentence of the message.

        Raises:
            CheckpointError: Tensors are missing, have no place in the model, or differ in shape.
        """
        missing = sorted(set(shapes) - set(self.sources) - set(self.incomplete))
        missing += [name for names in self.incomplete.values() for name in names]
        unplaced = [self.sources[name] for name in set(self.sources) - set(shapes)]
        extra = sorted({*self.unknown, *(leaf.name for sources in unplaced for s in sources for leaf in s.leaves())})
        problems = [
            f"{len(names)} {kind}: {', '.join(names[:3])}"
            for kind, names in (("missing", missing), ("extra", extra))
            if names
        ]
        if problems:
            raise CheckpointError(
                f"{self.model_dir}: weights do not match config.json: {'; '.join(problems)}. {remedy}"
            )
        differing = [
            (name, source, list(shape))
            for name, shape in shapes.items()
            for source in self.sources[name]
            if source.shape != tuple(shape)
        ]
        if differing:
            total = f" ({len(differing)} tensors differ)" if len(differing) > 1 else ""
            raise CheckpointError(f"{_describe_shape(*differing[0])}{total}. {remedy}")

    def check_duplicate(self, name: str, values: Tensor, offsets: Sequence[int], reader: TensorReader) -> None:
        """Check that the other stored copies of a tied weight equal a region of the one that was read.

        Raises:
            CheckpointError: A copy differs.
        """
        first, *others = self.sources[name]
        for other in others:
            copy = torch.empty_like(values)
            other.read_(copy, offsets, reader)
            if not torch.equal(copy, values):
                a, b = (next(source.leaves()).name for source in (other, first))
                raise CheckpointError(
                    f"{self.model_dir}: {a} differs from {b}, though config.json ties them. Set tie_word_embeddings "
                    "to false in config.json."
                )

    def split(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Convert full parameters to the tensors that an export stores, as soon as each is complete.

        Args:
            tensors: Name and full value of each parameter; holds no more than the stored tensors that are incomplete.

        Yields:
            Stored name and contiguous tensor, in the dtype of the parameter.
        """
        pending: dict[str, Tensor] = {}
        num_left: dict[str, int] = {}
        for name, full in tensors:
            for copy, source in enumerate(self.sources[name]):
                for leaf, offsets, values in source.split(full, (0,) * full.ndim):
                    if tuple(values.shape) == leaf.shape:
                        # Files cannot hold two tensors that share memory.
                        yield leaf.name, values.contiguous() if copy == 0 else values.clone()
                        continue
                    whole = pending.setdefault(leaf.name, values.new_empty(leaf.shape))
                    region = tuple(slice(o, o + size) for o, size in zip(offsets, values.shape, strict=True))
                    whole[region] = values
                    num_left[leaf.name] = num_left.get(leaf.name, whole.numel()) - values.numel()
                    if not num_left[leaf.name]:
                        yield leaf.name, pending.pop(leaf.name)
        assert not pending, f"incomplete stored tensors: {sorted(pending)[:3]}"

    def read_copied(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Read the tensors that exports copy, one at a time; dequantised ones in ``dtype``, others as stored."""
        with TensorReader() as reader:
            for leaf in self.copied:
                yield leaf.name, leaf.read(reader, dtype if isinstance(leaf, Dequantized) else None)

    def units(self) -> list[Unit]:
        """Group the parameters that share stored tensors, in order; each tensor that is copied is a group by itself."""
        group_of: dict[str, int] = {}  # by name of a leaf
        groups: dict[int, tuple[list[str], dict[str, Leaf]]] = {}
        for number, (name, sources) in enumerate(self.sources.items()):
            leaves = {leaf.name: leaf for source in sources for leaf in source.leaves()}
            names = [name]
            for other in sorted({group_of[leaf] for leaf in leaves if leaf in group_of}):
                other_names, other_leaves = groups.pop(other)
                names, leaves = other_names + names, other_leaves | leaves
            groups[number] = (names, leaves)
            group_of.update(dict.fromkeys(leaves, number))
        units = [Unit(tuple(names), tuple(leaves.values())) for names, leaves in groups.values()]
        return units + [Unit((), (leaf,)) for leaf in self.copied]


def plan_directly(
    model_dir: Path, headers: Mapping[str, TensorHeader], tied: Mapping[str, str], ignored: Sequence[str] = ()
) -> WeightPlan:
    """Plan a checkpoint that stores every parameter under its own name.

    Args:
        model_dir: Directory of the checkpoint.
        headers: Its tensors.
        tied: Parameters that share the weight of another, by name.
        ignored: Ends of the names of tensors that are computed, not read.
    """
    sources: dict[str, list[Source]] = {}
    copied: list[Leaf] = []
    for name, header in headers.items():
        if name.endswith(tuple(ignored)):
            copied.append(Stored(header))
        elif (source := tied.get(name)) in headers:
            sources.setdefault(str(source), []).append(Stored(header))
        else:
            sources.setdefault(tied.get(name, name), []).insert(0, Stored(header))
    return WeightPlan(model_dir, sources, copied)


def _describe_shape(name: str, source: Source, shape: list[int]) -> str:
    leaves = list(source.leaves())
    if len(leaves) == 1 and isinstance(leaf := leaves[0], Stored):
        made = f"{leaf.header.file}: {leaf.name} has the shape {list(leaf.shape)}"
    else:
        made = (
            f"{name}: its {len(leaves)} stored tensors, such as {leaves[0].name}, make the shape {list(source.shape)}"
        )
    return f"{made}, config.json implies {shape}"
