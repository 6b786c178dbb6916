"""Sizes of a causal language model, and the facts about its family that training needs. Imports no torch.

A source of models (a package in this folder) subclasses ``Architecture`` and ``fctune.models.causal_lm.CausalLM``;
``fctune.models.sources`` builds the models of all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fctune.base.errors import ConfigError
from fctune.config.parsing import suggest

if TYPE_CHECKING:
    from torch import Tensor

    from fctune.models.tensor_files import TensorHeader
    from fctune.models.weight_plan import WeightPlan

TINY_WEIGHTS = 20_000_000
"""A model with fewer weights knows no language yet."""
TINY_ROWS = 10_000
"""Conversations that such a model has to read, repeated or not; the demo's number."""

# Value of ``adapter.modules`` that selects every linear of the blocks.
ALL_LINEAR = "all-linear"

# Names of the submodules that hold the adapters of experts, by weight, and that of a router.
EXPERT_ADAPTERS = "adapters"
ROUTER_ADAPTER = "adapter"

# PEFT's names of an adapter's parameters.
PEFT_LEAVES = {
    "lora_a": "lora_A.weight",
    "lora_b": "lora_B.weight",
    "magnitude": "lora_magnitude_vector",
    "token_rows": "token_adapter.trainable_tokens_delta",  # the rows themselves, in spite of the name
}


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear of a block: its name, as in ``adapter.modules``, and its sizes."""

    name: str
    in_dim: int
    out_dim: int


@dataclass(frozen=True, slots=True)
class Branch:
    """The linears of one residual branch of a block, such as its attention or its MLP.

    Attributes:
        inputs: Linears before the branch's mixing, such as queries, keys and values, or gate and up.
        output: Linear that writes the branch's result.
        is_attention: The branch mixes tokens by attention.
        is_mlp: The branch computes each token by itself, and can be computed in tiles; see ``mlp_tiles``.
    """

    inputs: tuple[LinearShape, ...]
    output: LinearShape
    is_attention: bool
    is_mlp: bool = False

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        """All linears, in the order of computation."""
        return (*self.inputs, self.output)


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A weight of all experts of a block: its name, as in ``adapter.modules``, and its sizes."""

    name: str
    num_experts: int
    in_dim: int
    out_dim: int
    is_transposed: bool  # stored as ``[experts, in, out]``, not ``[experts, out, in]``
    num_chosen: int  # experts that compute each token

    @property
    def num_weights(self) -> int:
        """Weights of all experts."""
        return self.num_experts * self.in_dim * self.out_dim

    @property
    def num_active_weights(self) -> int:
        """Weights that each token is multiplied by."""
        return self.num_chosen * self.in_dim * self.out_dim


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Sizes of a layer's attention.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key heads.
        head_dim: Size of a head; where keys and values differ in size, their mean.
        window: Tokens that a token sees, itself included; None is all before it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: float
    window: int | None = None

    @property
    def width(self) -> float:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    def limit_pairs(self, pairs_per_token: float) -> float:
        """Return how many tokens a token sees on average, given how many it would see without a window.

        Conversations are taken to be of one length, at which a token sees (length + 1) / 2 tokens.
        """
        length = 2 * pairs_per_token - 1
        if self.window is None or length <= self.window:
            return pairs_per_token
        return self.window - self.window * (self.window - 1) / (2 * length)


def sum_attention(layers: Sequence[AttentionLayer], pairs_per_token: float) -> float:
    """Return the sum over layers of the width of their heads times the tokens that a token sees on average.

    A forward pass computes four times as many FLOPs per token: the scores, and the sum of values.
    """
    return sum(count * one.width * one.limit_pairs(pairs_per_token) for one, count in Counter(layers).items())


@dataclass(frozen=True, slots=True)
class Block:
    """The linears of a transformer block, by residual branch, and its experts.

    Attributes:
        branches: The linears, without those of experts.
        experts: Weights of the experts, in the order of computation; none in a dense block.
        routers: Names, as in ``adapter.modules``, of modules that choose the experts and are not linears.
    """

    branches: tuple[Branch, ...]
    experts: tuple[ExpertShape, ...] = ()
    routers: tuple[str, ...] = ()

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        """All linears, in the order of computation."""
        return tuple(linear for branch in self.branches for linear in branch.linears)

    @property
    def without_mlps(self) -> Block:
        """The block without the branches that can be computed in tiles."""
        return replace(self, branches=tuple(branch for branch in self.branches if not branch.is_mlp))

    @property
    def num_expert_weights(self) -> int:
        """Weights of all experts."""
        return sum(expert.num_weights for expert in self.experts)

    @property
    def num_active_weights(self) -> int:
        """Weights of the linears and experts that each token is multiplied by."""
        linears = sum(linear.in_dim * linear.out_dim for linear in self.linears)
        return linears + sum(expert.num_active_weights for expert in self.experts)


def find_module_problems(modules: Sequence[str] | str, known: Sequence[str]) -> list[str]:
    """Check the names in ``adapter.modules`` against the known ones; one line per problem."""
    if modules == ALL_LINEAR:
        return []
    if not modules:
        return [
            f"adapter.modules: empty; choose from {', '.join(known)}, or use {ALL_LINEAR} for all linears of the blocks"
        ]
    return [
        f"adapter.modules: no such module: {name}{suggest(name, known)}; known: {', '.join(known)}"
        for name in modules
        if name not in known
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture(ABC):
    """Sizes of a decoder, with the names and the weight layout of its family."""

    model_type: str  # of config.json
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    embed_dim: int
    head_dim: int
    max_position_embeddings: int
    is_tied: bool  # the output projection shares its weight with the token embedding

    @property
    @abstractmethod
    def blocks(self) -> tuple[Block, ...]:
        """The linears of each block."""

    @property
    @abstractmethod
    def head(self) -> str:
        """Name of the output projection in ``adapter.modules`` and in Hugging Face checkpoints."""

    @property
    @abstractmethod
    def embedding(self) -> str:
        """Name of the token embedding in Hugging Face checkpoints."""

    @property
    def has_plain_blocks(self) -> bool:
        """The blocks are two fused norms, attention and one gated MLP, which the planner's formulas describe."""
        return False

    @property
    def has_mlps(self) -> bool:
        """Some blocks have MLPs that can be computed in tiles."""
        return any(branch.is_mlp for block in dict.fromkeys(self.blocks) for branch in block.branches)

    @property
    def largest_block(self) -> Block:
        """The block that multiplies a token by the most weights."""
        return max(self.blocks, key=lambda block: block.num_active_weights)

    @property
    def linear_names(self) -> tuple[str, ...]:
        """Names of the linears of all blocks."""
        return tuple(dict.fromkeys(linear.name for block in dict.fromkeys(self.blocks) for linear in block.linears))

    @property
    def expert_names(self) -> tuple[str, ...]:
        """Names of the experts' weights of all blocks; none in a dense model."""
        return tuple(dict.fromkeys(expert.name for block in dict.fromkeys(self.blocks) for expert in block.experts))

    @property
    def router_names(self) -> tuple[str, ...]:
        """Names of the routers of all blocks; none in a dense model."""
        return tuple(dict.fromkeys(name for block in dict.fromkeys(self.blocks) for name in block.routers))

    @property
    def adapter_modules(self) -> tuple[str, ...]:
        """Names of what can take a LoRA adapter."""
        return (*self.linear_names, *self.expert_names, *self.router_names, self.head)

    @property
    def unadaptable(self) -> Mapping[str, str]:
        """Linears that take no adapter in this family, by name, with the reason."""
        return {}

    @property
    def unquantized(self) -> frozenset[str]:
        """Linears that keep the run's precision whatever ``adapter.base`` is, by name."""
        return frozenset()

    @property
    def stores_mxfp4(self) -> bool:
        """True if the model's checkpoint stores its experts in MXFP4, which ``adapter.base`` can keep."""
        return False

    def resolve_adapter_modules(self, modules: Sequence[str] | str) -> tuple[str, ...]:
        """Return the names that ``adapter.modules`` selects; ``all-linear`` selects every linear and expert.

        It leaves out linears that take no adapter, so that every exported adapter loads and has an effect.
        """
        if modules != ALL_LINEAR:
            return tuple(modules)
        return tuple(name for name in (*self.linear_names, *self.expert_names) if name not in self.unadaptable)

    def find_adapter_problems(self, modules: Sequence[str] | str) -> list[str]:
        """Check the value of ``adapter.modules``; one line per problem, with the nearest known name."""
        problems = find_module_problems(modules, self.adapter_modules)
        if self.is_tied and self.head in modules:
            problems.append(
                f"adapter.modules: {self.head} cannot take an adapter, because this model ties it to its embeddings; "
                "leave it out"
            )
        problems += [
            f"adapter.modules: {name} takes no adapter in this family, because {reason}; leave it out"
            for name, reason in self.unadaptable.items()
            if name in modules
        ]
        return problems

    def check_seq_len(self, max_seq_len: int) -> None:
        """Check that the model has positions for rows of this many tokens.

        Raises:
            ConfigError: It has fewer.
        """
        if max_seq_len > self.max_position_embeddings:
            raise ConfigError(
                f"data.seq_len={max_seq_len}: exceeds the model's {self.max_position_embeddings} positions; lower it."
            )

    @abstractmethod
    def to_hf_name(self, name: str) -> str:
        """Convert the name of one of our parameters to Hugging Face's; adapter parameters keep their last component."""

    @abstractmethod
    def to_peft_name(self, name: str, modules: Sequence[str] | str = ALL_LINEAR) -> str:
        """Convert the name of one of our adapter parameters to PEFT's, which may depend on ``adapter.modules``."""

    def to_peft_layout(self, name: str, tensor: Tensor) -> Tensor:
        """Reorder an adapter parameter as PEFT stores it."""
        return self.to_hf_layout(name, tensor)

    def from_peft_layout(self, name: str, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """Reorder an adapter parameter of this shape from PEFT's order to ours; the inverse of ``to_peft_layout``."""
        return self.from_hf_layout(name, tensor)

    def peft_targets(self, modules: Sequence[str] | str) -> list[str] | str:
        """Return the linears that ``adapter.modules`` selects as PEFT's ``target_modules``: names, or a pattern."""
        return sorted({*self.linear_names, self.head}.intersection(self.resolve_adapter_modules(modules)))

    @abstractmethod
    def to_hf_layout(self, name: str, tensor: Tensor) -> Tensor:
        """Reorder the rows of a parameter as Hugging Face stores them; any multiple of ``row_group(name)`` rows."""

    @abstractmethod
    def from_hf_layout(self, name: str, tensor: Tensor) -> Tensor:
        """Reorder the rows of a parameter from Hugging Face's order to ours; the inverse of ``to_hf_layout``."""

    @abstractmethod
    def row_group(self, name: str) -> int:
        """Number of consecutive rows of a parameter that the layouts reorder among themselves; 1 if they agree."""

    @property
    def embedding_weight(self) -> str:
        """Name of the token embedding's weight in transformers' model."""
        return f"{self.embedding}.weight"

    @property
    def head_weight(self) -> str:
        """Name of the output head's weight in transformers' model."""
        return f"{self.head}.weight"

    @property
    def token_matrices(self) -> dict[Literal["embedding", "head"], str]:
        """Names of the weights with a row per token; a head that shares the embedding's is left out."""
        matrices: dict[Literal["embedding", "head"], str] = {"embedding": self.embedding_weight}
        return matrices if self.is_tied else matrices | {"head": self.head_weight}

    @abstractmethod
    def plan_weights(self, model_dir: Path, headers: Mapping[str, TensorHeader]) -> WeightPlan:
        """Plan how the parameters, by their names in transformers' model, consist of the tensors of a checkpoint.

        Raises:
            CheckpointError: Tensors are quantised in a way that cannot be undone, or do not fit together.
        """


def count_weights(architecture: Architecture) -> int:
    """Return the number of weights in linears, experts and token matrices, without norms and biases."""
    blocks = 0
    for block in architecture.blocks:
        blocks += sum(linear.in_dim * linear.out_dim for linear in block.linears)
        blocks += block.num_expert_weights
    return blocks + (1 if architecture.is_tied else 2) * architecture.vocab_size * architecture.embed_dim
