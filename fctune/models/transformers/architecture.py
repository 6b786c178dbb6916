"""Architectures that transformers builds, read from Hugging Face's config.json.

Importing this module imports neither torch nor transformers; what only they know is read when it is asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fctune.base.errors import ConfigError
from fctune.models.architecture import (
    ALL_LINEAR,
    EXPERT_ADAPTERS,
    PEFT_LEAVES,
    ROUTER_ADAPTER,
    Architecture,
    Block,
    ExpertShape,
)
from fctune.models.transformers.model_config import (
    DecoderConfig,
    find_quantization,
    read_full_config,
    read_text_config,
)

if TYPE_CHECKING:
    from torch import Tensor

    from fctune.models.tensor_files import TensorHeader
    from fctune.models.transformers.modules import Layout
    from fctune.models.weight_plan import WeightPlan

# Positions of a model whose config.json gives no limit, such as one without positional embeddings.
_UNLIMITED = 2**31

# Linears that take no adapter, by model_type: PEFT 0.18 refuses some (``_check_lora_target_modules_mamba`` in its
# tuners_utils), and transformers multiplies with the weight of others itself.
_PEFT_REFUSES, _PAST_ADAPTERS = "PEFT does not load one there", "its weight is multiplied past any adapter"
_UNADAPTABLE = {
    "falcon_h1": {"out_proj": _PEFT_REFUSES},
    "falcon_mamba": {"out_proj": _PEFT_REFUSES, "dt_proj": _PAST_ADAPTERS},
    "jamba": {"dt_proj": _PAST_ADAPTERS},
    "mamba": {"out_proj": _PEFT_REFUSES, "dt_proj": _PAST_ADAPTERS},
    "mamba2": {"out_proj": _PEFT_REFUSES},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersArchitecture(DecoderConfig):
    """Sizes of a decoder that transformers builds, with its names and weight layout."""

    @property
    def layout(self) -> Layout:
        """Names and shapes of the model's modules, from the model on the meta device."""
        from fctune.models.transformers.modules import find_layout  # imports torch and transformers

        return find_layout(self)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The linears of each block."""
        return self.layout.blocks

    @property
    def head(self) -> str:
        """Name of the output projection."""
        return self.layout.head

    @property
    def embedding(self) -> str:
        """Name of the token embedding."""
        return self.layout.embedding

    @property
    def unadaptable(self) -> Mapping[str, str]:
        """Linears that take no adapter in this family, by name, with the reason."""
        return _UNADAPTABLE.get(self.model_type, {})

    @property
    def unquantized(self) -> frozenset[str]:
        """Linears whose weight transformers multiplies itself, which it cannot in 4 or 8 bits."""
        return frozenset(name for name, reason in self.unadaptable.items() if reason is _PAST_ADAPTERS)

    @property
    def stores_mxfp4(self) -> bool:
        """True if config.json says that the checkpoint stores experts in MXFP4."""
        return (find_quantization(json.loads(self.config_json)) or {}).get("quant_method") == "mxfp4"

    def to_hf_name(self, name: str) -> str:
        """Convert the name of one of our parameters to Hugging Face's; adapter parameters keep their last component."""
        return name.removeprefix("decoder.")

    def to_peft_name(self, name: str, modules: Sequence[str] | str = ALL_LINEAR) -> str:
        """Convert the name of one of our adapter parameters to PEFT's, which for experts depends on the other ones."""
        from fctune.models.transformers.weights import to_loaded_name  # imports torch and transformers

        stem, _, leaf = self.to_hf_name(name).rpartition(".")
        if (expert := self._find_expert(name)) is not None:
            chosen = [other for other in self.expert_names if other in self.resolve_adapter_modules(modules)]
            owner, leaf = _name_peft_module(stem, expert, chosen), _swap_leaf(leaf, expert)
            return f"base_model.model.{to_loaded_name(self, owner)}.{PEFT_LEAVES[leaf]}"
        stem = stem.removesuffix(f".{ROUTER_ADAPTER}")
        return f"base_model.model.{to_loaded_name(self, stem)}.{PEFT_LEAVES[leaf]}"

    def to_peft_layout(self, name: str, tensor: Tensor) -> Tensor:
        """Join the adapters of all experts to two matrices, as PEFT does; other adapters are stored as they are."""
        expert = self._find_expert(name)
        return tensor if expert is None else _join_experts(name.rpartition(".")[2], tensor, expert)

    def from_peft_layout(self, name: str, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """Split the adapters of the experts again; the inverse of ``to_peft_layout``."""
        expert = self._find_expert(name)
        return tensor if expert is None else _split_experts(name.rpartition(".")[2], tensor, expert, shape[0])

    def _find_expert(self, name: str) -> ExpertShape | None:
        """Return the weight that an adapter parameter of experts belongs to; None for other names."""
        owner, _, rest = name.rpartition(f".{EXPERT_ADAPTERS}.")
        known = f"{owner.rpartition('.')[2]}.{rest.rpartition('.')[0]}"
        return next((expert for block in self.blocks for expert in block.experts if expert.name == known), None)

    def peft_targets(self, modules: Sequence[str] | str) -> list[str] | str:
        """Return PEFT's ``target_modules``, a pattern where PEFT loads a vision tower, too; see ``Architecture``."""
        from fctune.models.transformers.weights import to_loaded_name  # imports torch and transformers

        names = Architecture.peft_targets(self, modules)
        stack = self.layout.stack
        if not names or to_loaded_name(self, stack) == stack:
            return names
        blocks = re.escape(f"{to_loaded_name(self, stack)}.")
        linears = "|".join(re.escape(name) for name in names if name != self.head)
        head = f"|{re.escape(to_loaded_name(self, self.head))}" if self.head in names else ""
        return rf"{blocks}\d+\.(.*\.)?({linears}){head}"

    def to_hf_layout(self, name: str, tensor: Tensor) -> Tensor:
        """Return the tensor as it is: both layouts are transformers'."""
        return tensor

    def from_hf_layout(self, name: str, tensor: Tensor) -> Tensor:
        """Return the tensor as it is: both layouts are transformers'."""
        return tensor

    def row_group(self, name: str) -> int:
        """Return 1: no rows are reordered."""
        return 1

    def plan_weights(self, model_dir: Path, headers: Mapping[str, TensorHeader]) -> WeightPlan:
        """Plan the weights by transformers' own rules; see ``Architecture.plan_weights``."""
        from fctune.models.transformers.weights import plan_weights  # imports torch and transformers

        return plan_weights(self, model_dir, headers)


def parse_architecture(where: str, raw: dict[str, Any]) -> TransformersArchitecture:
    """Read the architecture from the content of a ``config.json`` that ``check_config`` has passed.

    Imports transformers, whose classes hold the defaults of keys that the file leaves out.

    Args:
        where: Path or name of the file, for messages.
        raw: Content of the file.

    Raises:
        ConfigError: transformers cannot read the file.
    """
    config_json = json.dumps(raw, sort_keys=True)
    config = read_text_config(where, config_json)
    sizes: dict[str, int] = {}
    for key in ("vocab_size", "num_hidden_layers", "num_attention_heads", "hidden_size"):
        values = _values(config, key)
        if not values:
            raise ConfigError(
                f"{where}: model_type={raw.get('model_type')!r} has no {key}, which fctune needs. If the published "
                "config.json has it, download the model again; else choose another model."
            )
        sizes[key] = max(values)
    num_heads = sizes["num_attention_heads"]
    return TransformersArchitecture(
        model_type=config.model_type,
        config_json=config_json,
        where=where,
        vocab_size=sizes["vocab_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=max(_values(config, "num_key_value_heads"), default=num_heads),
        embed_dim=sizes["hidden_size"],
        head_dim=min(
            _values(config, "qk_head_dim") or _values(config, "head_dim"), default=sizes["hidden_size"] // num_heads
        ),
        max_position_embeddings=max(_values(config, "max_position_embeddings"), default=_UNLIMITED),
        # Of a vision-language model, its own value counts, not that of its text model.
        is_tied=bool(read_full_config(where, config_json).tie_word_embeddings),
    )


def _values(config: Any, key: str) -> list[int]:
    """Return the positive values of a key of transformers' config: none, one, or those of its layers if they differ."""
    try:
        found = [getattr(config, key, None)]
    except Exception:  # transformers raises one of its own for keys that depend on the layer
        found = [getattr(layer, key, None) for layer in config.per_layer_config]
    return [value for value in found if isinstance(value, int) and value > 0]


# PEFT's form of adapters on experts: ``target_parameters`` of PEFT 0.18. It joins the adapters of all experts to two
# matrices. It takes the second dim of a weight for its input, whichever it is, so that for weights stored as
# ``[experts, out, in]`` its A is our B, transposed. Later versions differ in this.
_SWAPPED = {"lora_a": "lora_b", "lora_b": "lora_a"}


def _name_peft_module(stem: str, expert: ExpertShape, chosen: Sequence[str]) -> str:
    """Return the path of PEFT's module for a weight of experts.

    PEFT wraps the module that holds the experts once for each of its weights that has an adapter, in their order.

    Args:
        stem: Path of our adapter.
        expert: The weight.
        chosen: Names of all weights of experts that have an adapter, in the order of computation.
    """
    owner = stem.rpartition(f".{EXPERT_ADAPTERS}.")[0]
    return owner + ".base_layer" * (len(chosen) - 1 - list(chosen).index(expert.name))


def _swap_leaf(leaf: str, expert: ExpertShape) -> str:
    """Return which of our matrices, ``lora_a`` or ``lora_b``, PEFT would call what ``leaf`` is."""
    return leaf if expert.is_transposed else _SWAPPED[leaf]


def _join_experts(leaf: str, tensor: Tensor, expert: ExpertShape) -> Tensor:
    """Return PEFT's matrix for an adapter's ``lora_a [experts, rank, in]`` or ``lora_b [experts, out, rank]``."""
    by_rank = tensor if leaf == "lora_a" else tensor.transpose(1, 2)  # [experts, rank, size]
    if _swap_leaf(leaf, expert) == "lora_a":
        return by_rank.flatten(0, 1)  # A: rows of the first expert first
    return by_rank.permute(2, 1, 0).flatten(1)  # B: columns of the first rank first


def _split_experts(leaf: str, tensor: Tensor, expert: ExpertShape, num_experts: int) -> Tensor:
    """Return an adapter's ``lora_a`` or ``lora_b`` from PEFT's matrix; the inverse of ``_join_experts``."""
    if _swap_leaf(leaf, expert) == "lora_a":
        by_rank = tensor.view(num_experts, -1, tensor.shape[1])
    else:
        by_rank = tensor.view(len(tensor), -1, num_experts).permute(2, 1, 0)
    return by_rank if leaf == "lora_a" else by_rank.transpose(1, 2)
