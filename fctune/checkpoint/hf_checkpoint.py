"""Checkpoints in Hugging Face's form: a model directory, or a PEFT adapter directory.

Other tools read them without this library. Each file has an owning rank, which gathers the file's tensors one by one,
so no rank ever holds the complete model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from fctune import distributed
from fctune.checkpoint.files import FileRecord, read_tensor, record_file, write_json, write_tensors
from fctune.checkpoint.tensors import named_trainable
from fctune.config.schema import AdapterConfig
from fctune.errors import CheckpointError
from fctune.models.architecture import Architecture
from fctune.models.export import BASE_PROMPTING, Prompting, copy_companions, write_adapter_config, write_model_config
from fctune.models.lora import copy_full_

_MAX_FILE_BYTES = 2 * 1024**3

WriteTensors = Callable[[Path, Mapping[str, Tensor], Mapping[str, str]], FileRecord]


class HFWeights(ABC):
    """Writes and reads a run's trainable weights as a directory that other tools load.

    Args:
        architecture: shape of the model.
        base_dir: the base model's directory, from which configs and tokenizer files are copied.
        prompting: template and switches for the directory to carry.
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
    def to_external_name(self, name: str) -> str:
        """Return the name under which one of our parameters is stored."""

    @abstractmethod
    def write_config(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the config that other tools read next to weights of this dtype."""

    def write(self, folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup) -> list[FileRecord]:
        """Write staged weights, keyed by our names, with configs and tokenizer. Every rank calls it.

        Returns:
            Records of the files that this rank wrote.
        """
        names = {self.to_external_name(name): name for name in tensors}
        by_name = {external: tensors[name] for external, name in names.items()}
        records = write_files(
            folder, self.stem, by_name, group, lambda name, full: self.architecture.to_hf_layout(names[name], full)
        )
        if dist.get_rank(group) == 0:
            before = set(folder.iterdir())
            self.write_config(folder, next(iter(tensors.values())).dtype)
            copy_companions(self.base_dir, folder, self.prompting)
            records += [record_file(path) for path in sorted(set(folder.iterdir()) - before)]
        return records

    def read_(self, folder: Path, model: nn.Module) -> None:
        """Fill the trainable weights of a model in place, without communication.

        Raises:
            CheckpointError: a tensor is missing or has another shape.
        """
        files = locate_tensors(folder, self.stem)
        for name, parameter in named_trainable(model).items():
            external = self.to_external_name(name)
            if external not in files:
                raise CheckpointError(f"{folder}: tensor {external} is missing.")
            full = read_tensor(files[external], external)
            if full.shape != parameter.shape:
                raise CheckpointError(
                    f"{files[external]}: {external} has shape {list(full.shape)}; this run has {list(parameter.shape)}."
                )
            copy_full_(parameter, self.architecture.from_hf_layout(name, full))


class HFModelWeights(HFWeights):
    """All weights, as a Hugging Face model directory."""

    stem = "model"

    def to_external_name(self, name: str) -> str:
        """Return Hugging Face's name of a parameter."""
        return self.architecture.to_hf_name(name)

    def write_config(self, folder: Path, dtype: torch.dtype) -> None:
        """Write ``config.json``."""
        write_model_config(folder, self.base_dir, dtype)


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

    def to_external_name(self, name: str) -> str:
        """Return PEFT's name of a parameter."""
        return self.architecture.to_peft_name(name)

    def write_config(self, folder: Path, dtype: torch.dtype) -> None:
        """Write ``adapter_config.json``, which does not record a dtype."""
        write_adapter_config(folder, self.config, self.base, self.architecture, self.token_ids)


def plan_files(stem: str, sizes: Mapping[str, int], max_bytes: int = _MAX_FILE_BYTES) -> dict[str, list[str]]:
    """Assign tensors to files, named as Hugging Face names the shards of a model.

    Args:
        stem: ``model`` gives ``model.safetensors``, or ``model-00001-of-00002.safetensors`` and so on.
        sizes: bytes of each tensor by name, in the order to write.
        max_bytes: limit of a file; a larger tensor gets a file to itself.
    """
    files: list[list[str]] = []
    free_bytes = 0
    for name, size in sizes.items():
        if size > free_bytes or not files:
            files.append([])
            free_bytes = max_bytes
        files[-1].append(name)
        free_bytes -= size
    if len(files) == 1:
        return {f"{stem}.safetensors": files[0]}
    return {f"{stem}-{i:05d}-of-{len(files):05d}.safetensors": names for i, names in enumerate(files, start=1)}


def write_files(
    folder: Path,
    stem: str,
    tensors: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    convert: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor,
    *,
    max_bytes: int = _MAX_FILE_BYTES,
    write: WriteTensors = write_tensors,
) -> list[FileRecord]:
    """Gather staged tensors and write each file on its owning rank. Every rank calls it.

    Rank 0 adds the index if there are several files. ``convert`` maps each gathered tensor, given its name.

    Returns:
        Records of the files that this rank wrote.

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
        # A rank whose disk failed keeps gathering, because the others keep sending to it.
        gathered = {name: distributed.gather_full_tensor(tensors[name], owner, group) for name in names}
        if rank == owner and error is None:
            try:
                full = {name: convert(name, t).contiguous() for name, t in gathered.items() if t is not None}
                records.append(write(folder / file, full, {"format": "pt"}))
            except OSError as caught:
                error = caught
    if error is not None:
        raise error
    if rank == 0 and len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        records.append(write_json(folder / f"{stem}.safetensors.index.json", index))
    return records


def locate_tensors(folder: Path, stem: str) -> dict[str, Path]:
    """Map each tensor name to its file, over the safetensors files whose names start with ``stem``.

    Raises:
        CheckpointError: there is no such file.
    """
    files = sorted(folder.glob(f"{stem}.safetensors")) or sorted(folder.glob(f"{stem}-*-of-*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: {stem}.safetensors is missing, so no run can resume from it.")
    located: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            located.update(dict.fromkeys(tensors.keys(), file))
    return located
