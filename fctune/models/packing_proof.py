"""Proof that the conversations of a packed row do not see each other, on the model that is about to train.

A row of two conversations is computed twice, with another first one of the same length: the logits of the second must
not change. They must also be those of the second conversation alone, up to the rounding of products of another shape.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fctune.errors import ConfigError
from fctune.models.attention import DocumentBounds
from fctune.models.causal_lm import CausalLM

_LENGTHS = (11, 13)
# Largest differences that rounding explains, as a share of the logits' size.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}


@torch.no_grad()
def prove_packing(model: CausalLM, device: torch.device) -> None:
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
            leak, shift = _compare(model, device, 0)
            if not (leak <= tolerance and shift <= tolerance):
                # In a mixture of experts, rounding may send a token to another expert, but hardly twice.
                leak, shift = (min(pair) for pair in zip((leak, shift), _compare(model, device, 1), strict=True))
            culprit = None if leak <= tolerance else _find_leaking_module(model, device, tolerance)
    finally:
        model.train(was_training)
    if not leak <= tolerance:
        raise ConfigError(
            f"data.packed: conversations of a packed row see each other in {culprit or 'this model'} (replacing the "
            f"first changes the second's logits by {leak:.1%}). Set data.packed=false."
        )
    if not shift <= tolerance:
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


def _compare(model: CausalLM, device: torch.device, seed: int) -> tuple[float, float]:
    """Return how much a conversation's logits differ behind another one, and alone, as shares of their size.

    The first is that of the token that differs most, the second that of the median token.
    """
    packed, other, alone = _compute(model, device, seed)
    size = alone.norm(dim=-1).clamp(min=torch.finfo(alone.dtype).tiny)
    return float(((packed - other).norm(dim=-1) / size).max()), float(((packed - alone).norm(dim=-1) / size).median())


def _find_leaking_module(model: CausalLM, device: torch.device, tolerance: float) -> str | None:
    """Return kind and name of the innermost module whose output carries a neighbour that its input does not."""
    first = _LENGTHS[0]
    calls: list[list[tuple[str, list[Tensor], list[Tensor]]]] = []

    def select(values: Iterable[Any]) -> list[Tensor]:
        """Return what tensors by token hold for the second conversation."""
        tensors = (value for value in values if isinstance(value, Tensor))
        return [t[:, first:].detach() for t in tensors if t.shape[:2] == (1, sum(_LENGTHS)) and t.is_floating_point()]

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
    tokens, positions, bounds = _draw(model, device, 0)
    try:
        for row in tokens:
            calls.append([])
            model(row[None], positions, bounds)
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


def _draw(model: CausalLM, device: torch.device, seed: int) -> tuple[Tensor, Tensor, DocumentBounds]:
    """Return two rows that differ in their first conversation, ``[2, s]``, with positions and the bounds of a row."""
    generator = torch.Generator().manual_seed(seed)
    first, length = _LENGTHS
    drawn = torch.randint(0, model.architecture.vocab_size, (2, first + length), generator=generator)
    drawn[1, first:] = drawn[0, first:]
    positions = torch.cat([torch.arange(n) for n in _LENGTHS])[None].to(device)
    return drawn.to(device), positions, model.make_bounds([_LENGTHS]).to(device)


def _compute(model: CausalLM, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits of a conversation behind another, behind a third, and alone, ``[tokens, vocab]``."""
    first, length = _LENGTHS
    tokens, positions, bounds = _draw(model, device, seed)
    packed, other = (model(row[None], positions, bounds)[0, first:] for row in tokens)
    alone = model(tokens[:1, first:], positions[:, first:], model.make_bounds([[length]]).to(device))[0]
    wide = torch.float64 if alone.dtype is torch.float64 else torch.float32
    return packed.to(wide), other.to(wide), alone.to(wide)
