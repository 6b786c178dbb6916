"""Sizes of a causal language model, and the facts about its family that training needs. Imports no torch.

A source of models (a package in this folder) subclasses ``Architecture`` and ``fctune.models.causal_lm.CausalLM``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fctune.config.parsing import suggest

if TYPE_CHECKING:
    from torch import Tensor

    from fctune.models.attention import AttentionKernel
    from fctune.models.causal_lm import CausalLM
    from fctune.models.precision import PrecisionPolicy


def find_module_problems(modules: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Check the names in ``adapter.modules`` against the known ones; one line per problem."""
    if modules is None:
        return []
    if not modules:
        return [
            f"adapter.modules: empty; choose from {', '.join(known)}, or leave it out for all linears of the blocks"
        ]
    return [
        f"adapter.modules: no such module: {name}{suggest(name, known)}; known: {', '.join(known)}"
        for name in modules
        if name not in known
    ]


@dataclass(frozen=True, slots=True)
class BlockLinears:
    """Names, as in ``adapter.modules``, of the linears of a block, grouped by the activation that they read."""

    attention_inputs: tuple[str, ...]  # read the normed input of the attention
    attention_output: str
    mlp_inputs: tuple[str, ...]  # read the normed input of the MLP
    mlp_output: str

    @property
    def all(self) -> tuple[str, ...]:
        """All linears, in the order of computation."""
        return (*self.attention_inputs, self.attention_output, *self.mlp_inputs, self.mlp_output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture(ABC):
    """Sizes of a decoder, with the names and the weight layout of its family."""

    block_linears: ClassVar[BlockLinears]
    head: ClassVar[str]  # name of the output projection in ``adapter.modules``
    embedding: ClassVar[str]  # name of the token embedding in Hugging Face checkpoints, by its last component

    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    embed_dim: int
    intermediate_dim: int
    max_position_embeddings: int
    is_tied: bool  # the output projection shares its weight with the token embedding

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.embed_dim // self.num_heads

    @property
    def adapter_modules(self) -> tuple[str, ...]:
        """Names of the linears that can take a LoRA adapter."""
        return (*self.block_linears.all, self.head)

    def resolve_adapter_modules(self, modules: Sequence[str] | None) -> tuple[str, ...]:
        """Return the linears that ``adapter.modules`` selects; None selects every linear of the blocks."""
        return self.block_linears.all if modules is None else tuple(modules)

    def find_adapter_problems(self, modules: Sequence[str] | None) -> list[str]:
        """Check the value of ``adapter.modules``; one line per problem, with the nearest known name."""
        problems = find_module_problems(modules, self.adapter_modules)
        if self.is_tied and self.head in (modules or ()):
            problems.append(
                f"adapter.modules: {self.head} cannot take an adapter, because this model ties it to its embeddings; "
                "leave it out"
            )
        return problems

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Return (inputs, outputs) of each linear of a block by name, in the order of computation."""
        linears, d = self.block_linears, self.embed_dim
        query, *key_value = linears.attention_inputs
        shapes = {query: (d, d)} | dict.fromkeys(key_value, (d, self.num_kv_heads * self.head_dim))
        shapes[linears.attention_output] = (d, d)
        shapes |= dict.fromkeys(linears.mlp_inputs, (d, self.intermediate_dim))
        return shapes | {linears.mlp_output: (self.intermediate_dim, d)}

    @abstractmethod
    def to_hf_name(self, name: str) -> str:
        """Convert the name of one of our parameters to Hugging Face's; adapter parameters keep their last component."""

    @abstractmethod
    def to_peft_name(self, name: str) -> str:
        """Convert the name of one of our adapter parameters to PEFT's."""

    @abstractmethod
    def to_hf_layout(self, name: str, tensor: Tensor) -> Tensor:
        """Reorder the rows of a parameter as Hugging Face stores them; any multiple of ``row_group(name)`` rows."""

    @abstractmethod
    def from_hf_layout(self, name: str, tensor: Tensor) -> Tensor:
        """Reorder the rows of a parameter from Hugging Face's order to ours; the inverse of ``to_hf_layout``."""

    @abstractmethod
    def row_group(self, name: str) -> int:
        """Number of consecutive rows of a parameter that the layouts reorder among themselves; 1 if they agree."""

    @abstractmethod
    def build_model(
        self, max_seq_len: int, precision: PrecisionPolicy, attention_kernel: AttentionKernel = "per_document"
    ) -> CausalLM:
        """Build the model on the meta device, without memory for its weights.

        Args:
            max_seq_len: longest row, in tokens; sizes the position embedding's tables.
            precision: dtypes of the weights and of the computation.
            attention_kernel: implementation of attention within packed rows.

        Raises:
            ConfigError: rows longer than the positions of the model, or a combination that the source cannot build.
        """
