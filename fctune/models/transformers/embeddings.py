"""Trained token rows in embeddings that do more than look up, such as Gemma's, which scales."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fctune.base.errors import ConfigError
from fctune.models.token_rows import TokenEmbedding, TokenRows


class _LookUp(TokenRows, nn.Embedding):  # type: ignore[misc]  # their weights are the same
    """The lookup that an embedding of another class builds upon."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the row of each token; see ``TokenRows.look_up``."""
        return self.look_up(tokens)


def keep_embedding_(trained: TokenEmbedding, original: nn.Module) -> None:
    """Make an embedding with trained rows compute what the class of the original one adds to the lookup, in place.

    Raises:
        ConfigError: That class does not build upon its parent's lookup.
    """
    kind = type(original)
    if kind is nn.Embedding:
        return
    own = {*vars(trained), "forward"}  # of which a float64 model's embedding has another
    trained.__dict__.update({name: value for name, value in vars(original).items() if name not in own})
    trained._buffers.update(original._buffers)
    trained._non_persistent_buffers_set |= original._non_persistent_buffers_set
    trained.__class__ = type(f"Trained{kind.__name__}", (kind, _LookUp), {})
    if not _looks_up(trained):
        raise ConfigError(
            f"adapter.train_tokens: {kind.__name__} looks up tokens with code of its own, so their rows cannot train "
            "alone; set adapter.train_tokens=off."
        )


def _looks_up(trained: TokenEmbedding) -> bool:
    """Return whether a meta embedding calls our lookup."""
    called = False

    def look_up(tokens: Tensor) -> Tensor:
        nonlocal called
        called = True
        return trained.weight.new_empty(*tokens.shape, trained.weight.shape[1])

    trained.look_up = look_up  # type: ignore[method-assign]
    buffers = {name: buffer.to("meta") for name, buffer in trained.named_buffers()}
    with torch.no_grad():
        torch.func.functional_call(trained, buffers, torch.zeros(1, dtype=torch.int64, device="meta"))
    del trained.look_up
    return called
