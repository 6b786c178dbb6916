"""Names of modules and parameters in torchtune, Hugging Face and PEFT.

Nothing here imports torch, so a config's module names are checked before the slow imports.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fctune.config.parsing import suggest

# Linears that take a LoRA adapter. Hugging Face's and PEFT's name -> path inside a torchtune block.
BLOCK_LINEARS = {
    "q_proj": "attn.q_proj",
    "k_proj": "attn.k_proj",
    "v_proj": "attn.v_proj",
    "o_proj": "attn.output_proj",
    "gate_proj": "mlp.w1",
    "up_proj": "mlp.w3",
    "down_proj": "mlp.w2",
}
HEAD = "lm_head"

ADAPTER_MODULES = (*BLOCK_LINEARS, HEAD)
DEFAULT_ADAPTER_MODULES = tuple(BLOCK_LINEARS)

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
_ROOT_PATHS = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": HEAD}
_PEFT_LEAVES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}

_BLOCK = re.compile(r"(?:decoder\.)?layers\.(\d+)\.(.+)\.(weight|bias|scale|lora_a|lora_b|magnitude)")
_ROOT = re.compile(r"(?:decoder\.)?(\w+)\.(weight|bias|scale|lora_a|lora_b|magnitude)")


def find_module_problems(modules: Sequence[str] | None) -> list[str]:
    """Check the value of ``adapter.modules``; one line per problem, empty if it is valid.

    Null selects ``DEFAULT_ADAPTER_MODULES``: every linear of the blocks, but not the output head.
    """
    known = ", ".join(ADAPTER_MODULES)
    if modules is None:
        return []
    if not modules:
        return [f"adapter.modules: empty; choose from {known}, or leave it out for every linear of the blocks"]
    return [
        f"adapter.modules: no such module: {name}{suggest(name, ADAPTER_MODULES)}; known: {known}"
        for name in modules
        if name not in ADAPTER_MODULES
    ]


def resolve_adapter_modules(modules: Sequence[str] | None) -> tuple[str, ...]:
    """Return the modules that ``adapter.modules`` selects; null selects every linear of the blocks."""
    return DEFAULT_ADAPTER_MODULES if modules is None else tuple(modules)


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


def to_peft_name(name: str) -> str:
    """Convert the name of one of our adapter parameters to PEFT's."""
    stem, _, leaf = to_hf_name(name).rpartition(".")
    return f"base_model.model.{stem}.{_PEFT_LEAVES[leaf]}"
