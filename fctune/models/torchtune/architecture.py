"""Llama 3 and Qwen2 architectures, read from Hugging Face's config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fctune.base.errors import ConfigError
from fctune.models.architecture import ALL_LINEAR, Architecture, Block, Branch, LinearShape
from fctune.models.torchtune import names

if TYPE_CHECKING:
    from torch import Tensor

    from fctune.models.tensor_files import TensorHeader
    from fctune.models.weight_plan import WeightPlan


@dataclass(frozen=True, slots=True)
class Family:
    """Facts about a model family that torchtune builds."""

    models: str  # the models it covers, for messages
    rotates_neighbours: bool  # torchtune's RoPE rotates neighbouring rows of a head; Hugging Face's its two halves
    unsupported: Mapping[str, object]  # keys and values of config.json that torchtune's builder would ignore


# By model_type of config.json.
FAMILIES = {
    "llama": Family("Llama 3, 3.1, 3.2, 3.3", True, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": Family("Qwen2, Qwen2.5", False, {"use_sliding_window": True}),
}

_REMEDY = "Set model.source=transformers."
# Linears whose rows RoPE rotates in pairs.
_ROTATED = (".q_proj.", ".k_proj.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchtuneArchitecture(Architecture):
    """Sizes of a Llama 3 or Qwen2 decoder."""

    intermediate_dim: int
    norm_eps: float
    rope_base: float
    rope_factor: float | None  # None: RoPE is not scaled

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The linears of each block, which are all alike."""
        d, i, kv_dim = self.embed_dim, self.intermediate_dim, self.num_kv_heads * self.head_dim
        sizes = {"q_proj": (d, d), "k_proj": (d, kv_dim), "v_proj": (d, kv_dim), "o_proj": (d, d)}
        sizes |= {"gate_proj": (d, i), "up_proj": (d, i), "down_proj": (i, d)}
        query, key, value, output, gate, up, down = (LinearShape(name, *sizes[name]) for name in names.LINEAR_PATHS)
        attention, mlp = Branch((query, key, value), output, True), Branch((gate, up), down, False, is_mlp=True)
        return (Block((attention, mlp)),) * self.num_layers

    @property
    def head(self) -> str:
        """Name of the output projection."""
        return names.HEAD

    @property
    def embedding(self) -> str:
        """Name of the token embedding in Hugging Face checkpoints."""
        return names.EMBEDDING

    @property
    def has_plain_blocks(self) -> bool:
        """True for Llama and Qwen2."""
        return True

    def to_hf_name(self, name: str) -> str:
        """Convert the name of one of our parameters to Hugging Face's; adapter parameters keep their last component."""
        return names.to_hf_name(name)

    def to_peft_name(self, name: str, modules: Sequence[str] | str = ALL_LINEAR) -> str:
        """Convert the name of one of our adapter parameters to PEFT's."""
        return names.to_peft_name(name)

    def to_hf_layout(self, name: str, tensor: Tensor) -> Tensor:
        """Reorder the rows of a weight, or of the B of its adapter, as Hugging Face stores them.

        torchtune's Llama rotates neighbouring rows of a head, Hugging Face's rotates its two halves: the rows of the
        query and key projections differ by that permutation. In Qwen2, both rotate halves.
        """
        return self._permute(name, tensor, (-1, self.head_dim // 2, 2))

    def from_hf_layout(self, name: str, tensor: Tensor) -> Tensor:
        """Reorder the rows of a parameter from Hugging Face's order to ours; the inverse of ``to_hf_layout``."""
        return self._permute(name, tensor, (-1, 2, self.head_dim // 2))

    def row_group(self, name: str) -> int:
        """Number of consecutive rows that the layouts reorder among themselves: those of a head where RoPE rotates."""
        is_rotated = any(part in name for part in _ROTATED) and not name.endswith(".lora_a")
        return self.head_dim if FAMILIES[self.model_type].rotates_neighbours and is_rotated else 1

    def _permute(self, name: str, tensor: Tensor, groups: Sequence[int]) -> Tensor:
        if self.row_group(name) == 1:
            return tensor
        shape = tensor.shape
        return tensor.reshape(*groups, *shape[1:]).transpose(1, 2).reshape(shape)

    def plan_weights(self, model_dir: Path, headers: Mapping[str, TensorHeader]) -> WeightPlan:
        """Plan a checkpoint of Llama 3 or Qwen2, which stores each parameter by itself; see ``Architecture``."""
        from fctune.models.weight_plan import plan_directly  # imports torch

        tied = {self.head_weight: self.embedding_weight} if self.is_tied else {}
        # Older checkpoints store the frequencies of RoPE, which are computed.
        return plan_directly(model_dir, headers, tied, ("rotary_emb.inv_freq",))


def parse_architecture(source: str, raw: dict[str, Any]) -> TorchtuneArchitecture:
    """Read the architecture from the content of a ``config.json``.

    Args:
        source: Path or name of the file, for messages.
        raw: Content of the file.

    Raises:
        ConfigError: A missing or invalid size, or a feature that torchtune's builders would ignore.
    """
    family = raw.get("model_type")
    if family not in FAMILIES:
        known = " and ".join(f"{name} ({facts.models})" for name, facts in FAMILIES.items())
        raise ConfigError(
            f"{source}: model_type={family!r} is not built by torchtune, which builds {known}; set "
            "model.source=transformers."
        )
    sizes: dict[str, int] = {}
    for key in ("vocab_size", "num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size"):
        value = raw.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{source}: {key}={value!r}; expected a positive integer. Download the model again.")
        sizes[key] = value
    num_heads, embed_dim = sizes["num_attention_heads"], sizes["hidden_size"]
    num_kv_heads = raw.get("num_key_value_heads") or num_heads
    head_dim = raw.get("head_dim") or embed_dim // num_heads
    if head_dim * num_heads != embed_dim:
        raise ConfigError(
            f"{source}: head_dim={head_dim} x {num_heads} heads must equal hidden_size={embed_dim}. {_REMEDY}"
        )
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{source}: num_key_value_heads={num_kv_heads} does not divide num_attention_heads={num_heads}. "
            "Download the model again."
        )
    _reject_unsupported(source, raw, family)
    rope_base, rope_factor = _read_rope(source, raw, family)
    is_tied = bool(raw.get("tie_word_embeddings", False))
    if is_tied and family == "llama" and rope_factor is None:
        raise ConfigError(f"{source}: torchtune cannot build a Llama with tied embeddings and unscaled RoPE. {_REMEDY}")
    return TorchtuneArchitecture(
        model_type=family,
        vocab_size=sizes["vocab_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        embed_dim=embed_dim,
        head_dim=head_dim,
        intermediate_dim=sizes["intermediate_size"],
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_base=rope_base,
        rope_factor=rope_factor,
        max_position_embeddings=int(raw.get("max_position_embeddings", 8192)),
        is_tied=is_tied,
    )


def _reject_unsupported(source: str, raw: dict[str, Any], family: str) -> None:
    """Reject features that the builders would ignore, which would give a different model from that of the weights."""
    for key, value in FAMILIES[family].unsupported.items():
        if raw.get(key) == value:
            raise ConfigError(f"{source}: {key}={raw[key]} is not supported for model_type={family}. {_REMEDY}")
    if raw.get("quantization_config"):
        raise ConfigError(f"{source}: torchtune's models cannot be loaded from quantised weights. {_REMEDY}")
    if set(raw.get("layer_types") or ()) - {"full_attention"}:
        raise ConfigError(f"{source}: layer_types other than full_attention are not supported by torchtune. {_REMEDY}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{source}: hidden_act={raw['hidden_act']!r} is not supported; expected silu. {_REMEDY}")


def _read_rope(source: str, raw: dict[str, Any], family: str) -> tuple[float, float | None]:
    """Return RoPE's base and scale factor from rope_theta and rope_scaling, or rope_parameters (transformers 5)."""
    scaling: dict[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    base = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return base, None
    if kind == "llama3" and family == "llama":
        expected = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        for key, value in expected.items():
            if float(scaling.get(key, value)) != value:
                raise ConfigError(f"{source}: rope scaling {key}={scaling[key]} is not supported; expected {value:g}.")
        return base, float(scaling["factor"])
    raise ConfigError(f"{source}: rope_type={kind!r} is not supported for model_type={family}. {_REMEDY}")
