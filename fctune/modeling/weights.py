"""Weights between Hugging Face's names and layout and torchtune's, one tensor at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fctune.errors import CheckpointError
from fctune.modeling.architecture import Architecture
from fctune.modeling.build import CausalLM
from fctune.modeling.lora import copy_full_

# torchtune's name inside a block -> Hugging Face's.
_BLOCK_NAMES = {
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.o_proj",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w2": "mlp.down_proj",
    "mlp.w3": "mlp.up_proj",
    "sa_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
_ROOT_NAMES = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_BLOCK = re.compile(r"(?:decoder\.)?layers\.(\d+)\.(.+)\.(weight|bias|scale|lora_a|lora_b)")
_ROOT = re.compile(r"(?:decoder\.)?(\w+)\.(weight|bias|scale|lora_a|lora_b)")


def to_hf_name(name: str) -> str:
    """Hugging Face's name of one of our parameters; ``lora_a`` and ``lora_b`` keep their last word."""
    if match := _BLOCK.fullmatch(name):
        index, module, leaf = match.groups()
        stem = f"model.layers.{index}.{_BLOCK_NAMES[module]}"
    elif match := _ROOT.fullmatch(name):
        module, leaf = match.groups()
        stem = _ROOT_NAMES[module]
    else:
        raise AssertionError(f"parameter without a Hugging Face name: {name}")
    return f"{stem}.{'weight' if leaf == 'scale' else leaf}"


def to_hf_layout(name: str, tensor: Tensor, architecture: Architecture) -> Tensor:
    """A weight, or the B of its adapter, in Hugging Face's row order.

    torchtune's Llama rotates neighbouring pairs of a head's rows, Hugging Face's rotates halves: the rows of the query
    and key projections differ by that permutation. Qwen2 is built with halves in both.
    """
    heads = _num_rotated_heads(name, architecture)
    if heads is None:
        return tensor
    shape = tensor.shape
    return tensor.reshape(heads, architecture.head_dim // 2, 2, *shape[1:]).transpose(1, 2).reshape(shape)


def from_hf_layout(name: str, tensor: Tensor, architecture: Architecture) -> Tensor:
    """The inverse of ``to_hf_layout``."""
    heads = _num_rotated_heads(name, architecture)
    if heads is None:
        return tensor
    shape = tensor.shape
    return tensor.reshape(heads, 2, architecture.head_dim // 2, *shape[1:]).transpose(1, 2).reshape(shape)


def load_base_(model: CausalLM, model_dir: str | Path) -> None:
    """Copy a directory's safetensors into the model in place, each rank keeping its shard of one tensor at a time.

    Adapters are not in the directory and are left as they are.

    Raises:
        CheckpointError: when a file is missing or damaged, or its tensors are not exactly those of the model.
    """
    wanted = {to_hf_name(n): (n, p) for n, p in model.named_parameters() if not n.endswith((".lora_a", ".lora_b"))}
    index = locate_tensors(model_dir)
    if model.architecture.is_tied:
        index.pop("lm_head.weight", None)
    _check_names(model_dir, wanted, index)
    by_file: dict[Path, list[str]] = {}
    for name, file in index.items():
        by_file.setdefault(file, []).append(name)
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as tensors:
            for hf_name in names:
                name, parameter = wanted[hf_name]
                full = tensors.get_tensor(hf_name)
                if full.shape != parameter.shape:
                    raise CheckpointError(
                        f"{file}: {hf_name} is {list(full.shape)}, config.json asks for {list(parameter.shape)}."
                    )
                if not torch.isfinite(full).all():
                    raise CheckpointError(f"{file}: {hf_name} holds NaN or infinity; download the model again.")
                copy_full_(parameter, from_hf_layout(name, full, model.architecture))


def locate_tensors(model_dir: str | Path) -> dict[str, Path]:
    """Which safetensors file holds each tensor of a model directory.

    Raises:
        CheckpointError: when there are no safetensors, one that the index names is missing, or one is damaged.
    """
    root = Path(model_dir)
    index_file = root / "model.safetensors.index.json"
    if index_file.is_file():
        try:
            names = sorted(set(json.loads(index_file.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index_file}: cannot be read ({error}). Download the model again.") from None
        files = [root / Path(name).name for name in names]  # .name: nothing outside the directory is read
    else:
        files = [root / "model.safetensors"]
    found: dict[str, Path] = {}
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file}: no such file; the model directory is not whole. Download it again.")
        try:
            with safe_open(file, framework="pt") as tensors:
                found.update(dict.fromkeys(tensors.keys(), file))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: damaged safetensors ({error}). Download the model again.") from None
    return {name: file for name, file in found.items() if not name.endswith("rotary_emb.inv_freq")}


def _check_names(model_dir: str | Path, wanted: Iterable[str], found: Iterable[str]) -> None:
    missing, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    problems = [
        f"{len(names)} {what}: {', '.join(names[:3])}"
        for what, names in (("missing", missing), ("extra", extra))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{model_dir}: weights do not match config.json: {'; '.join(problems)}. Download the model again."
        )


def _num_rotated_heads(name: str, architecture: Architecture) -> int | None:
    if architecture.family != "llama" or name.endswith(".lora_a"):
        return None
    if ".q_proj." in name:
        return architecture.num_heads
    return architecture.num_kv_heads if ".k_proj." in name else None
