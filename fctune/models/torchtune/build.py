"""Models built by torchtune, behind the interface that training uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchtune.models.llama3._component_builders import llama3
from torchtune.models.llama3_2._component_builders import llama3_2
from torchtune.models.qwen2._component_builders import qwen2

from fctune.models.attention import AttentionKernel, DocumentBounds
from fctune.models.causal_lm import CausalLM, Linear
from fctune.models.precision import PrecisionPolicy
from fctune.models.torchtune.architecture import TorchtuneArchitecture
from fctune.models.torchtune.layers import replace_layers_
from fctune.models.torchtune.names import HEAD, LINEAR_PATHS, SHARED_INPUTS


class TorchtuneCausalLM(CausalLM):
    """A Llama 3 or Qwen2 decoder built by torchtune."""

    decoder: Any  # torchtune's TransformerDecoder, whose annotations a type checker cannot follow

    def __init__(
        self,
        decoder: nn.Module,
        architecture: TorchtuneArchitecture,
        precision: PrecisionPolicy,
        attention_kernel: AttentionKernel,
    ):
        super().__init__(architecture, precision, attention_kernel)
        self.decoder = decoder

    @property
    def blocks(self) -> Iterable[nn.Module]:
        """The transformer blocks in order."""
        layers: Iterable[nn.Module] = self.decoder.layers
        return layers

    @property
    def head(self) -> nn.Module:
        """The output projection; torchtune's ``TiedLinear`` if it shares the weight of the embedding."""
        output: nn.Module = self.decoder.output
        return output

    @property
    def embedding(self) -> nn.Module:
        """Module that maps token ids to embeddings; its rows are those of the vocabulary."""
        embedding: nn.Module = self.decoder.tok_embeddings
        return embedding

    def replace_ends_(self, embedding: nn.Module, head: Callable[[Tensor], Tensor]) -> None:
        """Replace the token embedding and the output head, in place."""
        self.decoder.tok_embeddings, self.decoder.output = embedding, head

    def linears(self) -> Iterator[Linear]:
        """Iterate over the linears of the blocks, block by block, and then the head."""
        for index, _ in enumerate(self.blocks):
            for module, path in LINEAR_PATHS.items():
                input_key = f"{index}.{SHARED_INPUTS.get(module, module)}"
                yield Linear(module, f"{index}.{module}", f"decoder.layers.{index}.{path}", input_key)
        yield Linear(HEAD, HEAD, "decoder.output", HEAD)

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        bounds: DocumentBounds | None,
    ) -> Tensor:
        """Compute the normed output of the last block, ``[b, s, d]``; see ``CausalLM.hidden_states``."""
        hidden = self.decoder.tok_embeddings(tokens)
        for block in self.decoder.layers:
            hidden = block(hidden, mask=bounds, input_pos=positions)
        normed: Tensor = self.decoder.norm(hidden)
        return normed


def build_model(
    architecture: TorchtuneArchitecture,
    max_seq_len: int,
    precision: PrecisionPolicy,
    attention_kernel: AttentionKernel,
) -> TorchtuneCausalLM:
    """Build the model on the meta device; see ``Architecture.build_model``.

    Raises:
        ConfigError: ``max_seq_len`` exceeds the model's positions, or torchtune cannot build this combination.
    """
    architecture.check_seq_len(max_seq_len)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(precision.weight_dtype)
    try:
        with torch.device("meta"):
            decoder = _build_decoder(architecture, max_seq_len)
            replace_layers_(decoder)
    finally:
        torch.set_default_dtype(previous)
    return TorchtuneCausalLM(decoder, architecture, precision, attention_kernel)


def _build_decoder(a: TorchtuneArchitecture, max_seq_len: int) -> nn.Module:
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
    else:
        decoder = llama3(**common)
    return decoder
