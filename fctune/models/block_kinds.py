"""Blocks of a model that are alike, of which a forward pass that only counts needs to run the first ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

# Attributes with the number of a block that it computes with: Beam's residuals are scaled by them.
COMPUTED_NUMBERS = frozenset({"attn_residual_add_idx", "mlp_residual_add_idx"})
# Attributes that number blocks which are otherwise alike. Under any other name, a number makes a block a kind of its
# own, which costs time and changes no count.
_NUMBERS = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number"}) | COMPUTED_NUMBERS
_PLAIN = (bool, int, float, str, type(None), torch.dtype, FunctionType)


def describe_block(block: nn.Module) -> Hashable:
    """Return what distinguishes a block from others: its modules, their plain attributes, and the shapes of tensors."""
    return tuple((path, type(module), *_describe(module)) for path, module in block.named_modules())


def _describe(module: nn.Module) -> Iterator[Hashable]:
    for name, value in vars(module).items():
        if isinstance(value, _PLAIN):
            if name not in _NUMBERS:
                yield name, value
        elif isinstance(value, list | tuple) and all(isinstance(one, _PLAIN) for one in value):
            yield name, tuple(value)
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield name, tensor.shape, tensor.dtype, tensor.requires_grad


@contextmanager
def repeats_skipped(blocks: Sequence[nn.Module], kinds: Sequence[Hashable], num_run: int) -> Iterator[dict[int, int]]:
    """Run only the first ``num_run`` blocks of each kind in a forward pass while the context is open.

    The others return their input. A block whose output has another form than its input always runs.

    Args:
        blocks: All blocks of a model.
        kinds: Kind of each block.
        num_run: Blocks of a kind to run.

    Yields:
        For the index of each block that was skipped, that of the last block of its kind that ran.
    """
    runs: Counter[Hashable] = Counter()
    latest: dict[Hashable, tuple[int, Any]] = {}
    skipped: dict[int, int] = {}

    def run(index: int, forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        kind = kinds[index]
        if runs[kind] >= num_run:
            ran, output = latest[kind]
            hidden = arguments[0] if arguments else options.get("hidden_states")
            first, *rest = output if isinstance(output, tuple) else (output,)
            if _is_alike(hidden, first):
                skipped[index] = ran
                return (hidden, *rest) if isinstance(output, tuple) else hidden
        runs[kind] += 1
        output = forward(*arguments, **options)
        latest[kind] = index, output
        return output

    forwards: list[Callable[..., Any]] = [block.forward for block in blocks]
    for index, (block, forward) in enumerate(zip(blocks, forwards, strict=True)):
        block.forward = partial(run, index, forward)
    try:
        yield skipped
    finally:
        for block, forward in zip(blocks, forwards, strict=True):
            block.forward = forward


def _is_alike(hidden: Any, output: Any) -> bool:
    is_pair = isinstance(hidden, Tensor) and isinstance(output, Tensor)
    return is_pair and (hidden.shape, hidden.dtype) == (output.shape, output.dtype)
