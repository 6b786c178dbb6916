"""Llama 3 and Qwen2 decoders with torchtune's names, behind the interface that training uses. Imports no torchtune."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from fctune.models.attention import AttentionKernel, DocumentBounds
from fctune.models.causal_lm import CausalLM, Linear
from fctune.models.precision import PrecisionPolicy
from fctune.models.torchtune.architecture import TorchtuneArchitecture
from fctune.models.torchtune.names import HEAD, LINEAR_PATHS, SHARED_INPUTS


class TorchtuneCausalLM(CausalLM):
    """A Llama 3 or Qwen2 decoder, built by torchtune, or a stand-in with its parameters (``shapes.py``)."""

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
        row_lengths: Tensor | None = None,
    ) -> Tensor:
        """Compute the normed output of the last block, ``[b, s, d]``; see ``CausalLM.hidden_states``."""
        hidden = self.decoder.tok_embeddings(tokens)
        for block in self.decoder.layers:
            hidden = block(hidden, mask=bounds, input_pos=positions)
        normed: Tensor = self.decoder.norm(hidden)
        return normed
