"""What a Hugging Face config.json says of a model, reduced to what the builders need."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fctune.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes and choices of a Llama 3 or Qwen2 decoder; ``rope_factor`` is None where RoPE is not scaled."""

    family: Literal["llama", "qwen2"]
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    embed_dim: int
    intermediate_dim: int
    norm_eps: float
    rope_base: float
    rope_factor: float | None
    max_position_embeddings: int
    is_tied: bool

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.embed_dim // self.num_heads


def read_architecture(model_dir: str | Path) -> Architecture:
    """The architecture that ``config.json`` of a model directory describes.

    Raises:
        ConfigError: when the file is missing or broken, or describes a model that has no builder here.
    """
    path = Path(model_dir) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a Hugging Face model directory holds one.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error}). Download the model again.") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(raw).__name__}. Download the model again.")
    family = raw.get("model_type")
    if family not in ("llama", "qwen2"):
        raise ConfigError(
            f"{path}: model_type={family!r} has no builder here; "
            "known: llama (Llama 3, 3.1, 3.2, 3.3) and qwen2 (Qwen2, Qwen2.5)."
        )
    return _read_fields(path, raw, family)


def _read_fields(path: Path, raw: dict[str, Any], family: Literal["llama", "qwen2"]) -> Architecture:
    sizes: dict[str, int] = {}
    for key in ("vocab_size", "num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size"):
        value = raw.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{path}: {key}={value!r}; expected a whole number over 0. Download the model again.")
        sizes[key] = value
    num_heads, embed_dim = sizes["num_attention_heads"], sizes["hidden_size"]
    num_kv_heads = raw.get("num_key_value_heads") or num_heads
    head_dim = raw.get("head_dim") or embed_dim // num_heads
    if head_dim * num_heads != embed_dim:
        raise ConfigError(
            f"{path}: head_dim={head_dim} x {num_heads} heads is not hidden_size={embed_dim}; not supported."
        )
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{path}: num_key_value_heads={num_kv_heads} does not divide num_attention_heads={num_heads}."
        )
    _refuse_unsupported(path, raw, family)
    rope_base, rope_factor = _read_rope(path, raw, family)
    return Architecture(
        family=family,
        vocab_size=sizes["vocab_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        embed_dim=embed_dim,
        intermediate_dim=sizes["intermediate_size"],
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_base=rope_base,
        rope_factor=rope_factor,
        max_position_embeddings=int(raw.get("max_position_embeddings", 8192)),
        is_tied=bool(raw.get("tie_word_embeddings", False)),
    )


def _refuse_unsupported(path: Path, raw: dict[str, Any], family: str) -> None:
    """Stop at a choice that the builders would silently ignore, since the weights would then mean something else."""
    refused = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {"use_sliding_window": True}
    for key, value in refused.items():
        if raw.get(key) == value:
            raise ConfigError(f"{path}: {key}={raw[key]} is not supported for model_type={family}.")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{path}: hidden_act={raw['hidden_act']!r} is not supported; expected silu.")


def _read_rope(path: Path, raw: dict[str, Any], family: str) -> tuple[float, float | None]:
    """RoPE's base and scale factor, from rope_theta + rope_scaling or from rope_parameters (transformers 5)."""
    scaling: dict[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    base = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return base, None
    if kind == "llama3" and family == "llama":
        expected = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        for key, value in expected.items():
            if float(scaling.get(key, value)) != value:
                raise ConfigError(f"{path}: rope scaling {key}={scaling[key]} is not supported; expected {value:g}.")
        return base, float(scaling["factor"])
    raise ConfigError(f"{path}: rope_type={kind!r} is not supported for model_type={family}.")
