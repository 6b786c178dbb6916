"""Tiny mixtures of experts of transformers, with random weights, for the tests of several modules."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.model_zoo import quantize_to_mxfp4_
from fctune.config.sections.adapter import AdapterConfig
from fctune.models.causal_lm import CausalLM, materialize_
from fctune.models.lora import apply_lora_, copy_full_, init_adapters_
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model
from fctune.models.transformers.architecture import parse_architecture
from fctune.models.transformers.attention import ATTENTION
from fctune.models.transformers.float64 import keep_float64_
from tests.conftest import TINY_BASE

VOCAB_SIZE = 128

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_local_experts": 5,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}

# Every way that transformers stores, gates and routes experts.
MODEL_TYPES = (
    *("qwen3_moe", "mixtral", "gpt_oss", "granitemoe", "olmoe", "glm4_moe", "deepseek_v3", "ernie4_5_moe"),
    *("minimax_m2", "nemotron_h"),
)


def make_config(model_type: str, **changes: Any) -> Any:
    """Return a tiny config of a model type."""
    from transformers import AutoConfig

    latent = _LATENT | {"head_dim": 16, "num_key_value_heads": 4} if model_type == "deepseek_v3" else {}
    if model_type == "nemotron_h":
        changes = {"layer_types": ["attention", "moe"]} | changes
    if "num_experts" in changes:  # by the names that families have for it
        changes |= dict.fromkeys(("num_local_experts", "n_routed_experts"), changes["num_experts"])
    return AutoConfig.for_model(model_type, **(_SIZES | _EXPERTS | latent | changes))


def make_reference(model_type: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """Return transformers' model of a tiny config, in evaluation mode; its experts are computed by its own code.

    Attention is ours, and float64 is kept throughout, so that experts are all that differs.
    """
    from transformers import AutoModelForCausalLM

    config = make_config(model_type, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the biases of routers and sinks that are added to below
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, experts_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
        else:  # of a bias, which is initialised to zero, an error would not show
            parameter.data += torch.empty_like(parameter).normal_(std=0.1, generator=generator)
    if dtype is torch.float64:
        keep_float64_(getattr(model, model.base_model_prefix))
    return model.to(dtype).eval()


def save_base(model_type: str, folder: Path, with_tokenizer: bool = False, **changes: Any) -> Path:
    """Save a float32 reference as a model directory; with the tiny base's tokenizer, data can be prepared for it."""
    if with_tokenizer:
        changes["vocab_size"] = json.loads((TINY_BASE / "config.json").read_text())["vocab_size"]
        changes["max_position_embeddings"] = 2048
    reference = make_reference(model_type, torch.float32, **changes)
    reference.config._experts_implementation = None
    reference.save_pretrained(folder)
    if with_tokenizer:
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (TINY_BASE / file).is_file():
                shutil.copyfile(TINY_BASE / file, folder / file)
    return folder


def quantize_to_mxfp4(base: Path, out: Path) -> Path:
    """Copy a gpt-oss with random blocks of four-bit numbers for its experts, as its published checkpoints have them."""
    shutil.copytree(base, out)
    # Larger weights would make logits whose rounding in float32 is about as large as what the tests allow.
    quantize_to_mxfp4_(out, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, exponents=(-7, 0))
    return out


def draw_ids(*shape: int) -> Tensor:
    """Return random token ids, other than special ones."""
    return torch.randint(3, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(1))


def make_model(reference: Any, adapter: AdapterConfig | None = None, seed: int = 0) -> CausalLM:
    """Return our model with the weights of a reference and adapters with nonzero B, so that errors in them show."""
    raw = reference.config.to_dict()
    dtype = next(reference.parameters()).dtype
    model = build_model(parse_architecture("config.json", raw), 256, PrecisionPolicy.uniform(dtype))
    if adapter is not None:
        apply_lora_(model, adapter)
    materialize_(model, torch.device("cpu"))
    copy_reference_(model, reference)
    if adapter is not None:
        init_adapters_(model, seed)
        draw_b_(model)
    return model.eval()


@torch.no_grad()
def copy_reference_(model: CausalLM, reference: Any) -> None:
    """Copy the parameters of a reference into our model, whose shards are in place."""
    parameters = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        copy_full_(parameters[f"decoder.{name}"], parameter)


@torch.no_grad()
def draw_b_(model: CausalLM) -> None:
    """Draw the B of every adapter, equally on any number of ranks."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            copy_full_(
                parameter, torch.empty(parameter.shape, dtype=parameter.dtype).normal_(std=0.1, generator=generator)
            )
