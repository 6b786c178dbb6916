"""The input of adapters: read once by all linears that share it, such as queries, keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from fctune.models.dropout import TokenKeys, keyed_dropout

if TYPE_CHECKING:
    from fctune.models.lora import LoRALinear


class AdapterInput:
    """A tensor that some linears of a block read, and the product of their A matrices with it.

    Thin products take the time of reading their input, and dropout that of a hash of each element. So the first linear
    to run multiplies the input by the A matrices of all, in one product after one dropout, and the others take their
    parts. Each keeps its own parameters. A linear that is called with another tensor computes its product by itself.

    Args:
        key: Name of the input within the model, equal for every source; seeds its dropout.
        dropout: Share of the elements that are dropped in training.
        token_keys: Keys of the tokens in the current forward, shared by all inputs of the model.
    """

    def __init__(self, key: str, dropout: float, token_keys: TokenKeys):
        self.key, self.dropout = key, dropout
        self._token_keys = token_keys
        self._readers: list[LoRALinear] = []
        # The tensor that parts are left of, and the parts of the readers that have not run yet.
        self._x: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    def add_reader(self, adapter: LoRALinear) -> int:
        """Add a linear that reads this input; returns its index, the argument of ``multiply``."""
        self._readers.append(adapter)
        return len(self._readers) - 1

    def multiply(self, index: int, x: Tensor, token_keys: Tensor | None = None) -> Tensor:
        """Return ``dropout(x) A'`` of one reader, ``[..., rank]``; see ``LoRALinear.forward``."""
        if len(self._readers) == 1:
            return linear(self._drop(self._readers[0], x, token_keys), self._readers[0].lora_a.to(x.dtype))
        if self._x is not x or index not in self._parts:
            self._x, self._parts = x, dict(enumerate(self._multiply_all(x, token_keys)))
        part = self._parts.pop(index)
        if not self._parts:
            self._x = None
        return part

    def _multiply_all(self, x: Tensor, token_keys: Tensor | None) -> tuple[Tensor, ...]:
        matrices = [reader.lora_a.to(x.dtype) for reader in self._readers]
        product = linear(self._drop(self._readers[0], x, token_keys), torch.cat(matrices))
        return torch.split(product, [len(matrix) for matrix in matrices], dim=-1)

    def _drop(self, reader: LoRALinear, x: Tensor, token_keys: Tensor | None) -> Tensor:
        if not (self.dropout and reader.training):
            return x
        token_keys = self._token_keys.value if token_keys is None else token_keys
        assert token_keys is not None, "an adapter with dropout was called without token keys"
        return keyed_dropout(x, self.dropout, token_keys, reader.channel_keys)
