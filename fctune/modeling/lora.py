"""LoRA adapters (https://arxiv.org/abs/2106.09685) on a model's linears, equal at any world size."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import linear

from fctune.config import AdapterConfig
from fctune.errors import ConfigError
from fctune.modeling.build import CausalLM
from fctune.modeling.dropout import TokenKeys, keyed_dropout, module_salt

# Hugging Face's module names (what configs and PEFT say) -> torchtune's attribute inside a block.
_BLOCK_ATTRIBUTES = {
    "q_proj": ("attn", "q_proj"),
    "k_proj": ("attn", "k_proj"),
    "v_proj": ("attn", "v_proj"),
    "o_proj": ("attn", "output_proj"),
    "gate_proj": ("mlp", "w1"),
    "up_proj": ("mlp", "w3"),
    "down_proj": ("mlp", "w2"),
}


class LoRALinear(nn.Module):
    """``x W' + b + scaling * dropout(x) A' B'``: a frozen linear with a trained low-rank part.

    Shapes: ``weight [out, in]``, ``lora_a [rank, in]``, ``lora_b [out, rank]``. The adapter is float32 whatever the
    base is (float64 for a float64 base) and is cast to the input's dtype for the product.
    """

    def __init__(self, base: nn.Linear, config: AdapterConfig, scaling: float, name: str, keys: TokenKeys):
        super().__init__()
        out_dim, in_dim = base.weight.shape
        dtype = torch.float64 if base.weight.dtype is torch.float64 else torch.float32
        device = base.weight.device
        self.weight = base.weight.requires_grad_(False)
        self.bias = None if base.bias is None else base.bias.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.empty(config.rank, in_dim, dtype=dtype, device=device))
        self.lora_b = nn.Parameter(torch.empty(out_dim, config.rank, dtype=dtype, device=device))
        self.scaling = scaling
        self.dropout = config.dropout
        self._salt = module_salt(name)
        self._keys = keys

    def forward(self, x: Tensor, token_keys: Tensor | None = None) -> Tensor:
        """Project ``[..., in]`` to ``[..., out]``; ``token_keys`` of the leading shape where x is not all the rows."""
        base = linear(x, self.weight, self.bias)
        inner = x
        if self.dropout and self.training:
            token_keys = self._keys.value if token_keys is None else token_keys
            assert token_keys is not None, "rows without keys reached an adapter with dropout"
            inner = keyed_dropout(x, self.dropout, token_keys, self._salt)
        low_rank = linear(linear(inner, self.lora_a.to(x.dtype)), self.lora_b.to(x.dtype))
        return base + self.scaling * low_rank


def adapter_scaling(config: AdapterConfig) -> float:
    """Factor on the low-rank product: alpha / rank, or alpha / sqrt(rank) for rsLoRA (https://arxiv.org/abs/2312.03732)."""
    return config.alpha / (math.sqrt(config.rank) if config.scaling == "rslora" else config.rank)


def apply_lora_(model: CausalLM, config: AdapterConfig) -> None:
    """Freeze the model and put an adapter on each linear that the config names.

    Raises:
        ConfigError: for an adapter on the output head of a model that ties it to its embeddings.
    """
    if "lm_head" in config.modules and model.architecture.is_tied:
        raise ConfigError(
            "adapter.modules: lm_head cannot take an adapter, as this model ties it to its embeddings; leave it out."
        )
    model.requires_grad_(False)
    scaling = adapter_scaling(config)
    keys = model.token_keys
    for index, block in enumerate(model.blocks):
        for name in config.modules:
            if name in _BLOCK_ATTRIBUTES:
                part, attribute = _BLOCK_ATTRIBUTES[name]
                parent: nn.Module = getattr(block, part)
                base: nn.Linear = getattr(parent, attribute)
                setattr(parent, attribute, LoRALinear(base, config, scaling, f"{index}.{name}", keys))
    if "lm_head" in config.modules:
        model.decoder.output = LoRALinear(model.decoder.output, config, scaling, "lm_head", keys)


def init_adapters_(model: CausalLM, seed: int) -> None:
    """Initialise every adapter in place: A uniform as ``nn.Linear`` does it, B zero, so the model starts as its base.

    Each A is drawn whole from a generator keyed by (seed, name) and then cut to the rank's shard, so the adapters are
    the same at any world size.
    """
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            key = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key, "little") % 2**63)
            bound = 1 / math.sqrt(module.lora_a.shape[1])  # kaiming_uniform_ with a = sqrt(5)
            full = torch.empty(module.lora_a.shape, dtype=module.lora_a.dtype).uniform_(
                -bound, bound, generator=generator
            )
            copy_full_(module.lora_a, full)
            nn.init.zeros_(module.lora_b)


@torch.no_grad()
def copy_full_(parameter: Tensor, full: Tensor) -> None:
    """Copy a whole tensor into a parameter that may be sharded; each rank keeps its part, nothing is communicated."""
    full = full.to(device=parameter.device, dtype=parameter.dtype)
    if isinstance(parameter, DTensor):
        full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(full)
