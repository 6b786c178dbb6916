"""Modules of transformers' decoders: built from a config without memory for their weights, found and named."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fctune.base.errors import ConfigError, one_line
from fctune.models.architecture import Block, Branch, ExpertShape, LinearShape
from fctune.models.causal_lm import ExpertWeight
from fctune.models.frozen_linear import is_linear
from fctune.models.mlp_tiles import is_mlp
from fctune.models.transformers.attention import ATTENTION
from fctune.models.transformers.experts import EXPERTS_IMPLEMENTATION, iter_expert_weights, iter_routers
from fctune.models.transformers.model_config import DecoderConfig, read_text_config

# Names under which modules and configs hold the number of experts that compute each token.
_NUM_CHOSEN = ("num_experts_per_tok", "top_k", "top_k_experts", "moe_topk", "moe_k", "num_experts_per_token")

# Endings of the keys of config.json that set a model's own dropout or noise. Dropout here is the adapters' alone, a
# function of step, row and position, so that runs do not depend on the number of ranks.
_NOISE = ("dropout", "_pdrop", "jitter_noise")


# Elements of a tensor that is not a buffer, such as a table of positions.
_LARGE = 2**26
_FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)


@dataclass(frozen=True, slots=True)
class Layout:
    """Names and shapes of a decoder's modules.

    Attributes:
        blocks: The linears of each block.
        stack: Path of the list of blocks in the decoder.
        embedding: Path of the token embedding in the decoder.
        head: Path of the output projection in the decoder.
    """

    blocks: tuple[Block, ...]
    stack: str
    embedding: str
    head: str


class _LargeOnMeta(TorchFunctionMode):
    """Creates large new tensors on the meta device.

    A parameter is moved there once it is registered; until then, the experts of a layer may need more memory than the
    machine has (30 GB in DeepSeek V3).
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if function in _FACTORIES:
            on_meta = function(*args, **{**options, "device": "meta"})
            if on_meta.numel() >= _LARGE:
                return on_meta
        return function(*args, **options)


@contextmanager
def _without_weights(where: str, what: str) -> Iterator[None]:
    """Build a model with its parameters on the meta device and its buffers on the CPU, while the context is open.

    Args:
        where: Path or name of the config.json, for messages.
        what: Description of the model, for messages.

    Raises:
        ConfigError: transformers cannot build it.
    """
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    try:
        with init_empty_weights(include_buffers=False), no_init_weights(), _LargeOnMeta(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # the library raises all kinds
        reason = one_line(error, 300)
        raise ConfigError(
            f"{where}: transformers cannot build {what} ({type(error).__name__}: {reason}). Compare it with the "
            "published one, or choose another model."
        ) from None


def build_decoder(architecture: DecoderConfig, dtype: torch.dtype) -> Any:
    """Build a decoder with its parameters on the meta device and its buffers, such as those of RoPE, on the CPU.

    Raises:
        ConfigError: transformers cannot build it.
    """
    from transformers import AutoModelForCausalLM

    shared = read_text_config(architecture.where, architecture.config_json)
    config = type(shared).from_dict(shared.to_dict())
    config.vocab_size = architecture.vocab_size
    config.tie_word_embeddings = architecture.is_tied
    config.use_cache = False
    for name in config.to_dict():
        if name.endswith(_NOISE):
            setattr(config, name, 0.0)
    for name in ("output_router_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            setattr(config, name, False)
    with _without_weights(architecture.where, f"model_type={architecture.model_type!r}"):
        decoder = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=ATTENTION, experts_implementation=EXPERTS_IMPLEMENTATION
        )
    _widen_buffers_(decoder, dtype)
    return decoder


def _widen_buffers_(decoder: Any, dtype: torch.dtype) -> None:
    """Keep in float32 those stored buffers that transformers keeps so, such as the bias of a router, in place."""
    for pattern, wide in decoder._get_dtype_plan(dtype).items():
        for name, buffer in list(decoder.named_buffers()):
            if re.search(pattern, name):
                path, _, leaf = name.rpartition(".")
                decoder.get_submodule(path)._buffers[leaf] = buffer.to(wide)


def build_empty(model_class: Any, config: Any, where: str) -> Any:
    """Build a model of any of transformers' classes on the meta device, to look up its names and shapes.

    Args:
        model_class: Class of the model.
        config: Its config, or one that holds a text model's config.
        where: Path or name of the config.json, for messages.

    Raises:
        ConfigError: transformers cannot build it.
    """
    if not isinstance(config, model_class.config_class):
        config = config.get_text_config()
    with _without_weights(where, model_class.__name__):
        return model_class._from_config(config, dtype=torch.bfloat16, attn_implementation="eager")


_layouts: dict[DecoderConfig, Layout] = {}  # of the models of this process


def find_layout(architecture: DecoderConfig, decoder: Any = None) -> Layout:
    """Return the names and shapes of a model's modules, read from a decoder as it was built if there is one already.

    Raises:
        ConfigError: transformers cannot build the model, or it has no list of blocks, embedding or head.
    """
    if architecture not in _layouts:
        decoder = build_decoder(architecture, torch.float32) if decoder is None else decoder
        _layouts[architecture] = _read_layout(decoder, architecture)
    return _layouts[architecture]


def _read_layout(decoder: Any, architecture: DecoderConfig) -> Layout:
    names = {id(module): name for name, module in decoder.named_modules()}
    stack = next(
        (
            name
            for name, module in decoder.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == architecture.num_layers
        ),
        None,
    )
    embedding, head = decoder.get_input_embeddings(), decoder.get_output_embeddings()
    if stack is None or embedding is None or head is None:
        raise ConfigError(
            f"{architecture.where}: model_type={architecture.model_type!r} has no list of blocks, token embedding or "
            "output projection that can be found; choose another model."
        )
    blocks = tuple(_read_block(block, decoder, architecture.embed_dim) for block in decoder.get_submodule(stack))
    return Layout(blocks, stack, names[id(embedding)], names[id(head)])


def iter_linears(block: nn.Module) -> Iterator[tuple[str, str, str]]:
    """Iterate over the linears of a block: name in ``adapter.modules``, key unique in the block, and path."""
    linears = [(path, module) for path, module in block.named_modules() if is_linear(module)]
    counts = Counter(path.rpartition(".")[2] for path, _ in linears)
    for path, _ in linears:
        name = path.rpartition(".")[2]
        yield name, name if counts[name] == 1 else path, path


def _read_block(block: nn.Module, decoder: Any, embed_dim: int) -> Block:
    """Return the linears and experts of a block; the linears within one of its children are one branch."""
    branches: dict[str, list[LinearShape]] = {}
    for path, module in block.named_modules():
        if is_linear(module):
            assert isinstance(module, nn.Linear)
            shape = LinearShape(path.rpartition(".")[2], module.in_features, module.out_features)
            branches.setdefault(path.partition(".")[0], []).append(shape)
    return Block(
        tuple(
            _make_branch(linears, embed_dim, "attn" in name or "attention" in name, is_mlp(block.get_submodule(name)))
            for name, linears in branches.items()
        ),
        tuple(
            _read_expert_shape(block.get_submodule(weight.path), weight, _find_num_chosen(block, decoder.config))
            for weight in iter_expert_weights(block)
        ),
        tuple(dict.fromkeys(router.module for router in iter_routers(block, decoder))),
    )


def _find_num_chosen(block: nn.Module, config: Any) -> int:
    """Return the number of experts that compute each token."""
    holders = [*block.modules(), config.get_text_config()]
    found = (getattr(holder, name, None) for holder in holders for name in _NUM_CHOSEN)
    return next((value for value in found if isinstance(value, int) and value > 0), 1)


def _read_expert_shape(experts: nn.Module, weight: ExpertWeight, num_chosen: int) -> ExpertShape:
    num_experts, *sizes = experts.get_parameter(weight.name).shape
    in_dim, out_dim = sizes if weight.is_transposed else reversed(sizes)
    return ExpertShape(weight.module, num_experts, in_dim, out_dim, weight.is_transposed, num_chosen)


def _make_branch(linears: list[LinearShape], embed_dim: int, is_attention: bool, is_mlp: bool) -> Branch:
    """Make a branch of linears in the order of their definition; the last of the hidden size is its output."""
    last = max((i for i, linear in enumerate(linears) if linear.out_dim == embed_dim), default=len(linears) - 1)
    return Branch((*linears[:last], *linears[last + 1 :]), linears[last], is_attention, is_mlp)
