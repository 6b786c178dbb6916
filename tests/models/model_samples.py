"""Small models, their references and inputs, shared by the tests of several packages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fctune.config.sections.adapter import AdapterConfig
from fctune.config.sections.model import ModelSource
from fctune.models.base_weights import load_base_
from fctune.models.causal_lm import CausalLM, materialize_
from fctune.models.lora import apply_lora_, init_adapters_
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model, read_architecture
from fctune.models.token_rows import init_token_rows_, train_tokens_

ALL_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def load_model(
    path: Path,
    adapter: AdapterConfig | None = None,
    dtype: torch.dtype = torch.float32,
    token_ids: Sequence[int] = (),
    seq_len: int = 256,
    source: ModelSource = "auto",
) -> CausalLM:
    """Load a model on CPU in evaluation mode; its adapters have nonzero B, so that errors in merging show."""
    model = build_model(read_architecture(path, source), seq_len, PrecisionPolicy.uniform(dtype))
    if adapter is not None:
        apply_lora_(model, adapter)
        train_tokens_(model, token_ids)
    materialize_(model, torch.device("cpu"))
    load_base_(model, path)
    if adapter is not None:
        init_adapters_(model, 0)
        init_token_rows_(model, path)
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter.data.normal_(std=0.05, generator=generator)
    return model.eval()


def load_reference(path: Path) -> Any:
    """Load the same directory with transformers, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def draw_tokens(path: Path) -> torch.Tensor:
    """Draw random token ids of the model's vocabulary, ``[2, 40]``."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, read_architecture(path).vocab_size, (2, 40), generator=generator)
