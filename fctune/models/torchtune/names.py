"""Names of modules and parameters in torchtune, Hugging Face and PEFT. Imports no torch."""

from __future__ import annotations

import re

from fctune.models.architecture import PEFT_LEAVES

HEAD = "lm_head"
EMBEDDING = "model.embed_tokens"

# Name of a linear in ``adapter.modules``, which is PEFT's -> its path inside a torchtune block.
LINEAR_PATHS = {
    "q_proj": "attn.q_proj",
    "k_proj": "attn.k_proj",
    "v_proj": "attn.v_proj",
    "o_proj": "attn.output_proj",
    "gate_proj": "mlp.w1",
    "up_proj": "mlp.w3",
    "down_proj": "mlp.w2",
}

# Linear -> the first one of the block that reads the same tensor.
SHARED_INPUTS = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}

# Path inside a torchtune block -> path inside a Hugging Face block.
_BLOCK_PATHS = {
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
_ROOT_PATHS = {"tok_embeddings": EMBEDDING, "norm": "model.norm", "output": HEAD}

_BLOCK = re.compile(r"(?:decoder\.)?layers\.(\d+)\.(.+)\.(weight|bias|scale|lora_a|lora_b|magnitude)")
_ROOT = re.compile(r"(?:decoder\.)?(\w+)\.(weight|bias|scale|lora_a|lora_b|magnitude|token_rows)")


def to_hf_name(name: str) -> str:
    """Convert the name of one of our parameters to Hugging Face's; adapter parameters keep their last component."""
    if match := _BLOCK.fullmatch(name):
        index, module, leaf = match.groups()
        stem = f"model.layers.{index}.{_BLOCK_PATHS[module]}"
    elif match := _ROOT.fullmatch(name):
        module, leaf = match.groups()
        stem = _ROOT_PATHS[module]
    else:
        raise AssertionError(f"parameter without a Hugging Face name: {name}")
    return f"{stem}.{'weight' if leaf == 'scale' else leaf}"


def to_own_path(key: str) -> str | None:
    """Return the path of a linear in our model by its key, such as ``0.q_proj``; None for a key of no such linear."""
    index, _, name = key.partition(".")
    if key == HEAD:
        return "decoder.output"
    return f"decoder.layers.{index}.{LINEAR_PATHS[name]}" if name in LINEAR_PATHS else None


def to_peft_name(name: str) -> str:
    """Convert the name of one of our adapter parameters to PEFT's."""
    stem, _, leaf = to_hf_name(name).rpartition(".")
    return f"base_model.model.{stem}.{PEFT_LEAVES[leaf]}"
