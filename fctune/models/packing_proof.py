"""Proof that the conversations of packed rows do not see each other, on the model that is about to train.

Two rows of two conversations, and of some without tokens, as a compiled run's batches have, are computed twice, with
other first ones of the same length: the logits of the second ones must not change. They must also be those of the
second conversations alone, up to the rounding of products of another shape.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fctune.base.errors import ConfigError
from fctune.models.attention import DocumentBounds
from fctune.models.causal_lm import CausalLM

# Longer than the chunks that kernels of linear attention compute at once, which are of 64 tokens.
_LENGTHS = ((11, 0, 69, 0), (14, 66, 0, 0))
_ROW = sum(_LENGTHS[0])
# Tokens of a conversation that see the most of its neighbour, if they see any of it.
_NUM_FIRST = 16
# Largest differences that rounding explains, as a share of the logits' size.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}


@torch.no_grad()
def prove_packing(model: CausalLM, device: torch.device, seq_len: int) -> None:
    """Check that a model with its weights keeps the conversations of a packed row apart. Every rank must call this.

    Raises:
        ConfigError: A conversation sees its neighbour, or has different positions than alone; gives the remedy.
    """
    was_training = model.training
    model.eval()
    tolerance = _TOLERANCES[model.precision.compute_dtype]
    try:
        # Shapes that never occur again are not worth a compilation.
        with torch.compiler.set_stance("force_eager"), _unrounded_products(model):
            leak, shift = _compare(model, _draw(model, device, seq_len, 0))
            if max(leak, shift) > tolerance:
                # In a mixture of experts, rounding may send a token to another expert, but hardly twice.
                leak, shift = (
                    min(pair)
                    for pair in zip((leak, shift), _compare(model, _draw(model, device, seq_len, 1)), strict=True)
                )
            culprit = (
                None if leak <= tolerance else _find_leaking_module(model, _draw(model, device, seq_len, 0), tolerance)
            )
    finally:
        model.train(was_training)
    if leak > tolerance:
        raise ConfigError(
            f"data.packed: conversations of a packed row see each other in {culprit or 'this model'} (replacing the "
            f"first changes the second's logits by {leak:.1%}). Set data.packed=false."
        )
    if shift > tolerance:
        raise ConfigError(
            f"data.packed: a conversation in a packed row has different logits from those that it has alone in "
            f"this model (by {shift:.1%}). Set data.packed=false."
        )


@contextmanager
def _unrounded_products(model: CausalLM) -> Iterator[None]:
    """Multiply in 16 bits where a run multiplies in float8: the scale of all tokens there depends on every one of them.

    The scale is not what is to be proved, and one large token changes the rounding of its neighbours.
    """
    rounded: list[Any] = []
    if model.precision.has_float8_matmuls:
        from torchao.float8.float8_linear import Float8Linear

        rounded = [module for module in model.modules() if isinstance(module, Float8Linear)]
    for module in rounded:
        module.forward = functools.partial(nn.Linear.forward, module)
    try:
        yield
    finally:
        for module in rounded:
            del module.forward


@dataclass(frozen=True, slots=True)
class _Batch:
    """Packed rows that differ in the first conversation of each row alone.

    Attributes:
        tokens: Token ids of the rows, and of those with other first conversations, ``[2, rows, s]``.
        positions: Position of each token in its conversation, for both, ``[2, rows, s]``.
        bounds: Ends of the conversations of both.
        kept: Row and tokens of each second conversation.
    """

    tokens: Tensor
    positions: Tensor
    bounds: DocumentBounds
    kept: tuple[tuple[int, slice], ...]


def _draw(model: CausalLM, device: torch.device, seq_len: int, seed: int) -> _Batch:
    generator = torch.Generator().manual_seed(seed)
    size = min(_ROW, seq_len)
    lengths, kept = [], []
    for row, template in enumerate(_LENGTHS):
        first = template[0] * size // _ROW
        lengths.append([first, *(size - first if length else 0 for length in template[1:])])
        kept.append((row, slice(first, size)))
    tokens = torch.randint(0, model.architecture.vocab_size, (2, len(lengths), size), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths]).repeat(2, 1, 1)
    # A model may compute a batch otherwise if one of its positions is beyond the original ones.
    is_extended = model.original_length is not None and model.original_length < seq_len
    for row, place in kept:
        tokens[1, row, place] = tokens[0, row, place]
        if is_extended:
            positions[1, row, : place.start] += seq_len - place.start
    return _Batch(tokens.to(device), positions.to(device), model.make_bounds(lengths).to(device), tuple(kept))


def _compare(model: CausalLM, batch: _Batch) -> tuple[float, float]:
    """Return how much conversations' logits differ behind other ones, and alone, as shares of their size.

    The first is that of the token among the first ones that differs most, the second that of the median token; both of
    the conversation that differs most.
    """
    packed, other = (model(*inputs, batch.bounds) for inputs in zip(batch.tokens, batch.positions, strict=True))
    leak = shift = 0.0
    for row, place in batch.kept:
        tokens, positions = (t[0, row : row + 1, place] for t in (batch.tokens, batch.positions))
        bounds = model.make_bounds([[tokens.shape[1]]]).to(tokens.device)
        alone = _widen(model(tokens, positions, bounds)[0])
        size = alone.norm(dim=-1).clamp(min=torch.finfo(alone.dtype).tiny)
        kept = _widen(packed[row, place])
        changes = (kept - _widen(other[row, place])).norm(dim=-1) / size
        shifts = (kept - alone).norm(dim=-1) / size
        # A number that is not finite counts as a difference.
        leak = max(leak, float(changes[:_NUM_FIRST].nan_to_num(torch.inf).max()))
        shift = max(shift, float(shifts.nan_to_num(torch.inf).median()))
    return leak, shift


def _widen(logits: Tensor) -> Tensor:
    return logits if logits.dtype is torch.float64 else logits.float()


def _find_leaking_module(model: CausalLM, batch: _Batch, tolerance: float) -> str | None:
    """Return kind and name of the innermost module whose output carries a neighbour that its input does not."""
    shape = batch.tokens.shape[1:]
    is_kept = torch.zeros(shape, dtype=torch.bool, device=batch.tokens.device)
    for row, place in batch.kept:
        is_kept[row, place] = True
    calls: list[list[tuple[str, list[Tensor], list[Tensor]]]] = []

    def select(values: Iterable[Any]) -> list[Tensor]:
        """Return what tensors by token hold for the second conversations."""
        tensors = (value for value in values if isinstance(value, Tensor))
        return [t[is_kept].detach() for t in tensors if t.shape[:2] == shape and t.is_floating_point()]

    def differs(pair: tuple[Tensor, Tensor]) -> bool:
        size = pair[0].norm().clamp(min=torch.finfo(pair[0].dtype).tiny)
        return not bool((pair[0] - pair[1]).norm() / size <= tolerance)

    def watch(name: str, module: nn.Module) -> RemovableHandle:
        def record(module: nn.Module, arguments: Any, options: dict[str, Any], output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            calls[-1].append(
                (f"{type(module).__name__} ({name})", select((*arguments, *options.values())), select(outputs))
            )

        return module.register_forward_hook(record, with_kwargs=True)

    handles = [watch(name, module) for name, module in model.named_modules() if name]
    try:
        for tokens, positions in zip(batch.tokens, batch.positions, strict=True):
            calls.append([])
            model(tokens, positions, batch.bounds)
    finally:
        for handle in handles:
            handle.remove()
    for (name, read, written), (_, other_read, other_written) in zip(*calls, strict=True):
        is_read, is_written = (
            any(map(differs, zip(*pair, strict=True))) for pair in ((read, other_read), (written, other_written))
        )
        if read and is_written and not is_read:
            return str(name)
    return None
