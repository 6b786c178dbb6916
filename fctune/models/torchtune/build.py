"""A model built by torchtune from its architecture, seen by the training step through one narrow class."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torchtune.models.llama3._component_builders import llama3
from torchtune.models.llama3_2._component_builders import llama3_2
from torchtune.models.qwen2._component_builders import qwen2

from fctune.errors import ConfigError
from fctune.models.attention import DocumentBounds, Kernel
from fctune.models.dropout import TokenKeys
from fctune.models.loss import sum_supervised_loss
from fctune.models.precision import PrecisionPolicy
from fctune.models.torchtune.architecture import Architecture
from fctune.models.torchtune.layers import replace_layers_


class CausalLM(nn.Module):
    """What the step needs of a model: hidden states, the output head, the list of blocks.

    Another source of models can stand beside torchtune's by offering ``blocks``, ``forward`` and ``architecture``.
    The loss is computed inside ``forward`` because only there does sharding hold the head's whole weight.
    """

    decoder: Any  # torchtune's TransformerDecoder, whose annotations a type checker cannot follow

    def __init__(self, decoder: nn.Module, architecture: Architecture):
        super().__init__()
        self.decoder = decoder
        self.architecture = architecture
        self.token_keys = TokenKeys()
        self.layout: Any = (
            None  # how it lies on the ranks, once that is chosen: fctune.parallel.sharding.ParallelLayout
        )
        self.holds_gradients = True  # whether gradients stay whole while they accumulate
        self.activations: AbstractContextManager[Any] = nullcontext()  # where those of the blocks wait for backward
        dtype = next(decoder.parameters()).dtype
        self.precision = PrecisionPolicy(dtype, dtype)
        self.kernel: Kernel = "each"  # that attends within packed rows

    @property
    def blocks(self) -> Iterable[nn.Module]:
        """The transformer blocks in order: the units of sharding, checkpointing and compilation."""
        layers: Iterable[nn.Module] = self.decoder.layers
        return layers

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        bounds: DocumentBounds | None = None,
        labels: Tensor | None = None,
        loss_weights: Tensor | None = None,
        row_keys: Tensor | None = None,
        supervised: Tensor | None = None,
    ) -> Tensor:
        """Sum of the weighted losses of the supervised tokens; without labels, the logits.

        Args:
            tokens: token ids, ``[b, s]``.
            positions: position of each token in its conversation, ``[b, s]``; None counts along the row.
            bounds: where the conversations of each row end; None is one conversation a row.
            labels: the token each position must predict, -100 where nothing is learnt, ``[b, s]``.
            loss_weights: weight of each position's loss, float32 ``[b, s]``; None is 1.0.
            row_keys: int64 keys that dropout is a function of, ``[b]``; needed only where adapters drop.
            supervised: places of the supervised positions in the rows laid end to end, int64 ``[n]``; None finds them
                in the labels, for which the host waits on a CUDA device.

        Returns:
            A scalar in float32 (float64 for a float64 model), or logits ``[b, s, vocab]``.
        """
        if row_keys is not None:
            self.token_keys.set_rows(row_keys, tokens.shape[1])
        hidden = self.decoder.tok_embeddings(tokens)
        with self.activations:
            for block in self.decoder.layers:
                hidden = block(hidden, mask=bounds, input_pos=positions)
        hidden = self.decoder.norm(hidden)
        if labels is None:
            logits: Tensor = self.decoder.output(hidden)
            return logits
        keys = self.token_keys.value
        return sum_supervised_loss(hidden, self.decoder.output, labels, loss_weights, keys, supervised)

    def head_weight(self) -> Tensor:
        """The output projection's weight ``[vocab, d]``, the embedding's where they are tied."""
        output: Any = self.decoder.output
        weight: Tensor = output.tied_module.weight if self.architecture.is_tied else output.weight
        return weight


def build_model(architecture: Architecture, max_seq_len: int, dtype: torch.dtype) -> CausalLM:
    """The model's modules on the meta device, without memory for weights.

    Args:
        architecture: sizes and choices.
        max_seq_len: longest row, in tokens; sizes the RoPE tables.
        dtype: of all parameters.

    Raises:
        ConfigError: when rows are longer than the model's positions.
    """
    if max_seq_len > architecture.max_position_embeddings:
        raise ConfigError(
            f"data.seq_len={max_seq_len}: over the model's {architecture.max_position_embeddings} positions; lower it."
        )
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            decoder = _build_decoder(architecture, max_seq_len)
    finally:
        torch.set_default_dtype(previous)
    replace_layers_(decoder)
    return CausalLM(decoder, architecture)


def materialize_(model: CausalLM, device: torch.device, is_offloaded: bool = False) -> None:
    """Give every parameter uninitialised memory and fill the buffers: RoPE tables, keys of dropout.

    Parameters are on ``device``, or on the host where they are offloaded to it; buffers are where they are used.
    """
    model.to_empty(device=torch.device("cpu") if is_offloaded else device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device), persistent=False)
        init_buffers = getattr(module, "init_buffers_", None)
        if init_buffers is not None:
            init_buffers()
        init_rope = getattr(module, "rope_init", None)
        if init_rope is not None:
            with torch.device(device):
                init_rope()


def _build_decoder(a: Architecture, max_seq_len: int) -> nn.Module:
    common: dict[str, Any] = {
        "vocab_size": a.vocab_size,
        "num_layers": a.num_layers,
        "num_heads": a.num_heads,
        "num_kv_heads": a.num_kv_heads,
        "embed_dim": a.embed_dim,
        "intermediate_dim": a.intermediate_dim,
        "max_seq_len": max_seq_len,
        "norm_eps": a.norm_eps,
        "rope_base": a.rope_base,
    }
    decoder: nn.Module
    if a.family == "qwen2":
        decoder = qwen2(**common, tie_word_embeddings=a.is_tied)
    elif a.rope_factor is not None:
        decoder = llama3_2(**common, scale_factor=a.rope_factor, tie_word_embeddings=a.is_tied)
    elif a.is_tied:
        raise ConfigError("a Llama with tied embeddings and unscaled RoPE has no torchtune builder.")
    else:
        decoder = llama3(**common)
    return decoder
