"""Checkpoints in Hugging Face's form: a model directory, or a PEFT adapter directory.

Other tools read them without this library. Each file has an owning rank, which gathers the file's tensors one by one,
so no rank ever holds the complete model.
"""

from __future__ import annotations

import contextlib
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from fctune.base import distributed
from fctune.base.errors import CheckpointError
from fctune.checkpoint.files import FileRecord, read_tensor, record_file, write_json, write_tensors
from fctune.checkpoint.tensors import named_trainable
from fctune.config.sections.adapter import AdapterConfig
from fctune.models.architecture import Architecture
from fctune.models.base_weights import find_targets, load_, plan_base
from fctune.models.causal_lm import CausalLM
from fctune.models.export import BASE_PROMPTING, Prompting, copy_companions, write_adapter_config, write_model_config
from fctune.models.lora import copy_full_
from fctune.models.tensor_files import TensorReader, group_by_size, make_index, shard_names
from fctune.models.weight_plan import Unit, WeightPlan

_MAX_FILE_BYTES = 2 * 1024**3

WriteTensors = Callable[[Path, Mapping[str, Tensor], Mapping[str, str]], FileRecord]


@dataclass(frozen=True, slots=True)
class FilePart:
    """Stored tensors that are made of the same staged ones, and are written to one file.

    Attributes:
        names: Staged tensors to gather.
        sizes: Bytes of each stored tensor, by name.
        convert: Turns the full staged tensors into the stored ones; called by the rank that writes them.
    """

    names: tuple[str, ...]
    sizes: Mapping[str, int]
    convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


class HFWeights(ABC):
    """Writes and reads a run's trainable weights as a directory that other tools load.

    Args:
        architecture: Shape of the model.
        base_dir: The base model's directory, from which configs and tokenizer files are copied.
        prompting: Template and switches for the directory to carry.
    """

    stem: str  # of the weight files' names

    def __init__(
        self,
        architecture: Architecture,
        base_dir: Path,
        prompting: Prompting = BASE_PROMPTING,
    ):
        self.architecture = architecture
        self.base_dir = base_dir
        self.prompting = prompting

    @abstractmethod
    def list_parts(self, tensors: Mapping[str, Tensor]) -> list[FilePart]:
        """Return what to write of staged weights, keyed by our names."""

    @abstractmethod
    def write_config(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the config that other tools read next to weights of this dtype."""

    @abstractmethod
    def read_(self, folder: Path, model: CausalLM) -> None:
        """Fill the trainable weights of a model in place, without communication.

        Raises:
            CheckpointError: A tensor is missing or has another shape.
        """

    def prepare(self, model: CausalLM) -> None:
        """Look up all names that ``write`` needs, in the thread that trains.

        transformers builds the model without weights for them, and until it has, torch's default dtype and
        ``nn.Module`` are changed in all threads: in a thread that saves, it would change what the others compute. A
        base that cannot be read is an error of the saves, of which there may be none.
        """
        with contextlib.suppress(CheckpointError, OSError):
            self.list_parts({name: parameter.detach() for name, parameter in named_trainable(model).items()})

    def write(self, folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup) -> list[FileRecord]:
        """Write staged weights, keyed by our names, with configs and tokenizer. Every rank calls it.

        Returns:
            Records of the files that this rank wrote.
        """
        records = write_files(folder, self.stem, tensors, group, self.list_parts(tensors))
        if dist.get_rank(group) == 0:
            before = set(folder.iterdir())
            self.write_config(folder, next(iter(tensors.values())).dtype)
            copy_companions(self.base_dir, folder, self.prompting)
            records += [record_file(path) for path in sorted(set(folder.iterdir()) - before)]
        return records


class HFModelWeights(HFWeights):
    """All weights, as a Hugging Face model directory with the tensors of the base's."""

    stem = "model"

    def list_parts(self, tensors: Mapping[str, Tensor]) -> list[FilePart]:
        """Return the base's stored tensors, of which those without a staged weight are copied."""
        ours = {self.architecture.to_hf_name(name): name for name in tensors}
        dtype = next(iter(tensors.values())).dtype
        parts = []
        for unit in self.plan.units():
            staged = [name for name in unit.parameters if name in ours]
            sizes = {
                leaf.name: math.prod(leaf.shape) * (dtype if staged else leaf.dtype).itemsize for leaf in unit.leaves
            }
            names = {ours[name]: name for name in staged}
            parts.append(FilePart(tuple(names), sizes, functools.partial(self._convert, unit, names)))
        return parts

    @functools.cached_property
    def plan(self) -> WeightPlan:
        """Plan of the base's directory."""
        return plan_base(self.architecture, self.base_dir)

    def _convert(self, unit: Unit, names: Mapping[str, str], full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the full parameters of a unit to its stored tensors; ``names`` maps ours to transformers'."""
        with TensorReader() as reader:
            if not names:
                return {leaf.name: leaf.read(reader) for leaf in unit.leaves}
            tensors = {names[name]: self.architecture.to_hf_layout(name, tensor) for name, tensor in full.items()}
            dtype = next(iter(full.values())).dtype
            for name in set(unit.parameters) - set(tensors):
                tensors[name] = self.plan.sources[name][0].read(reader, dtype)
        return dict(self.plan.split(tensors.items()))

    def write_config(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the base model's ``config.json`` with the dtype of these weights, so that transformers loads them."""
        write_model_config(folder, self.base_dir, dtype, is_dequantized=self.plan.is_dequantized)

    def read_(self, folder: Path, model: CausalLM) -> None:
        """Read this rank's part of the trainable weights; see ``HFWeights.read_``."""
        plan = plan_base(self.architecture, folder)
        targets = list(find_targets(model))
        shapes = {target.hf_name: target.tensor.shape for target in targets}
        plan.check(shapes, "Resume from another checkpoint.")
        with TensorReader() as reader:
            for target in targets:
                if target.tensor.requires_grad:
                    load_(model, target, plan, reader)


class HFAdapterWeights(HFWeights):
    """Adapter weights alone, as a PEFT directory; arguments as in ``export_adapter`` and ``write_adapter_config``."""

    stem = "adapter_model"

    def __init__(
        self,
        architecture: Architecture,
        config: AdapterConfig,
        base: str,
        base_dir: Path,
        prompting: Prompting = BASE_PROMPTING,
        token_ids: Sequence[int] = (),
    ):
        super().__init__(architecture, base_dir, prompting)
        self.config = config
        self.base = base
        self.token_ids = token_ids

    def list_parts(self, tensors: Mapping[str, Tensor]) -> list[FilePart]:
        """Return each weight under PEFT's name."""
        return [self._to_part(name, tensor) for name, tensor in tensors.items()]

    def _to_part(self, name: str, tensor: Tensor) -> FilePart:
        peft_name = self.architecture.to_peft_name(name, self.config.modules)

        def convert(full: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {peft_name: self.architecture.to_peft_layout(name, full[name])}

        return FilePart((name,), {peft_name: _num_bytes(tensor)}, convert)

    def read_(self, folder: Path, model: CausalLM) -> None:
        """Read each weight in full; see ``HFWeights.read_``."""
        files = locate_tensors(folder, self.stem)
        for name, parameter in named_trainable(model).items():
            external = self.architecture.to_peft_name(name, self.config.modules)
            if external not in files:
                raise CheckpointError(f"{folder}: tensor {external} is missing.")
            stored = read_tensor(files[external], external)
            expected = self.architecture.to_peft_layout(name, torch.empty(parameter.shape, device="meta")).shape
            if stored.shape != expected:
                raise CheckpointError(
                    f"{files[external]}: {external} has shape {list(stored.shape)}; this run has {list(expected)}."
                )
            copy_full_(parameter, self.architecture.from_peft_layout(name, stored, parameter.shape))

    def write_config(self, folder: Path, dtype: torch.dtype) -> None:
        """Write ``adapter_config.json``, which does not record a dtype."""
        write_adapter_config(folder, self.config, self.base, self.architecture, self.token_ids)


def plan_files(stem: str, sizes: Mapping[str, int], max_bytes: int = _MAX_FILE_BYTES) -> dict[str, list[str]]:
    """Assign tensors to files.

    Args:
        stem: Start of the files' names; see ``shard_names``.
        sizes: Bytes of each tensor by name, in the order to write.
        max_bytes: Limit of a file; a larger tensor gets a file to itself.
    """
    files = [[name for name, _ in group] for group in group_by_size(sizes.items(), lambda item: item[1], max_bytes)]
    return dict(zip(shard_names(stem, len(files)), files, strict=True))


def write_files(
    folder: Path,
    stem: str,
    tensors: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    parts: Sequence[FilePart] | None = None,
    *,
    max_bytes: int = _MAX_FILE_BYTES,
    write: WriteTensors = write_tensors,
) -> list[FileRecord]:
    """Gather staged tensors and write each file on its owning rank. Every rank calls it.

    Rank 0 adds the index if there are several files.

    Args:
        folder: Existing directory.
        stem: See ``plan_files``.
        tensors: Staged tensors by name, shards or full.
        group: Ranks that write.
        parts: What to write of them; by default each tensor as it is.
        max_bytes: See ``plan_files``.
        write: Writes a file.

    Returns:
        Records of the files that this rank wrote.

    Raises:
        OSError: This rank's disk is full, gone or read-only; the other ranks are not left waiting.
    """
    if parts is None:
        parts = [FilePart((name,), {name: _num_bytes(tensor)}, dict) for name, tensor in tensors.items()]
    by_name = {next(iter(part.sizes)): part for part in parts}
    files = plan_files(stem, {name: sum(part.sizes.values()) for name, part in by_name.items()}, max_bytes)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    records: list[FileRecord] = []
    error: OSError | None = None
    for number, (file, names) in enumerate(files.items()):
        owner = number % world_size
        full: dict[str, Tensor] = {}
        for part in (by_name[name] for name in names):
            # A rank whose disk failed keeps gathering, because the others keep sending to it.
            gathered = {name: distributed.gather_full_tensor(tensors[name], owner, group) for name in part.names}
            if rank == owner and error is None:
                own = {name: tensor for name, tensor in gathered.items() if tensor is not None}
                try:
                    full |= {name: tensor.contiguous() for name, tensor in part.convert(own).items()}
                except CheckpointError as caught:  # the base, of which tensors are copied
                    error = OSError(None, str(caught))
        if rank == owner and error is None:
            try:
                records.append(write(folder / file, full, {"format": "pt"}))
            except OSError as caught:
                error = caught
    if error is not None:
        raise error
    if rank == 0 and len(files) > 1:
        weight_map = {name: file for file, names in files.items() for part in names for name in by_name[part].sizes}
        total = sum(size for part in parts for size in part.sizes.values())
        records.append(write_json(folder / f"{stem}.safetensors.index.json", make_index(weight_map, total)))
    return records


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def locate_tensors(folder: Path, stem: str) -> dict[str, Path]:
    """Map each tensor name to its file, over the safetensors files whose names start with ``stem``.

    Raises:
        CheckpointError: There is no such file.
    """
    files = sorted(folder.glob(f"{stem}.safetensors")) or sorted(folder.glob(f"{stem}-*-of-*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: {stem}.safetensors is missing, so no run can resume from it.")
    located: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            located.update(dict.fromkeys(tensors.keys(), file))
    return located
