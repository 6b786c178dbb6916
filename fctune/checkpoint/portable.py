"""The weights of an elastic checkpoint in Hugging Face's layout, and back: a whole model, or an adapter for PEFT."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fctune.checkpoint.elastic import flush_files, locate, read_tensor, write_files
from fctune.checkpoint.snapshot import named_trained
from fctune.checkpoint.store import FileRecord
from fctune.config.schema import AdapterConfig
from fctune.errors import CheckpointError
from fctune.models.export import copy_companions, write_adapter_config, write_model_config
from fctune.models.lora import copy_full_
from fctune.models.torchtune.architecture import Architecture
from fctune.models.torchtune.names import to_hf_name, to_peft_name
from fctune.models.torchtune.weights import from_hf_layout, to_hf_layout


class Portable(ABC):
    """The weights that train, as a directory that other tools read."""

    stem: str  # of the files' names

    def __init__(self, architecture: Architecture, base_dir: Path):
        self.architecture = architecture
        self.base_dir = base_dir

    @abstractmethod
    def name(self, name: str) -> str:
        """The name in the directory of one of our parameters."""

    @abstractmethod
    def write_config(self, folder: Path, dtype: torch.dtype) -> None:
        """Write what describes weights of this dtype to those tools."""

    def write(self, folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup) -> list[FileRecord]:
        """Write staged weights, by our names; the files of this rank. Every rank calls it."""
        names = {self.name(name): name for name in tensors}
        by_name = {theirs: tensors[name] for theirs, name in names.items()}
        records = write_files(
            folder, self.stem, by_name, group, lambda name, whole: to_hf_layout(names[name], whole, self.architecture)
        )
        if dist.get_rank(group) == 0:
            before = set(folder.iterdir())
            self.write_config(folder, next(iter(tensors.values())).dtype)
            copy_companions(self.base_dir, folder)
            records += flush_files(sorted(set(folder.iterdir()) - before))
        return records

    def read_(self, folder: Path, model: nn.Module) -> None:
        """Fill the weights that train from such a directory, in place, nothing communicated.

        Raises:
            CheckpointError: a tensor is missing or of another shape.
        """
        files = locate(folder, self.stem)
        for name, parameter in named_trained(model).items():
            _copy_(parameter, folder, files, self.name(name), name, self.architecture)


class PortableModel(Portable):
    """All weights, as a Hugging Face model directory."""

    stem = "model"

    def name(self, name: str) -> str:
        """Hugging Face's."""
        return to_hf_name(name)

    def write_config(self, folder: Path, dtype: torch.dtype) -> None:
        """``config.json``."""
        write_model_config(folder, self.base_dir, dtype)


class PortableAdapter(Portable):
    """The adapters alone, as PEFT's directory; arguments as in ``export_adapter``."""

    stem = "adapter_model"

    def __init__(self, architecture: Architecture, config: AdapterConfig, base: str, base_dir: Path):
        super().__init__(architecture, base_dir)
        self.config = config
        self.base = base

    def name(self, name: str) -> str:
        """PEFT's."""
        return to_peft_name(name)

    def write_config(self, folder: Path, dtype: torch.dtype) -> None:
        """``adapter_config.json``, which says nothing of the dtype."""
        write_adapter_config(folder, self.config, self.base)


def _copy_(
    parameter: Tensor, folder: Path, files: dict[str, Path], file_name: str, name: str, architecture: Architecture
) -> None:
    if file_name not in files:
        raise CheckpointError(f"{folder}: holds no {file_name}.")
    whole = read_tensor(files[file_name], file_name)
    if whole.shape != parameter.shape:
        raise CheckpointError(
            f"{files[file_name]}: {file_name} is {list(whole.shape)}, this run has {list(parameter.shape)}."
        )
    copy_full_(parameter, from_hf_layout(name, whole, architecture))
