"""Linears of a block that read the same tensor, found in a forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fctune.models.transformers.modules import iter_linears


@contextmanager
def recorded_inputs(blocks: Iterable[nn.Module]) -> Iterator[dict[str, str]]:
    """Record which linears read the same tensor in a forward pass while the context is open.

    Yields:
        For the key of a linear (see ``CausalLM.linears``) that of the first linear of its block with the same input,
        filled when the context closes. Linears that ran never or several times are not in it.
    """
    first_readers: dict[str, str] = {}
    inputs: dict[str, Tensor] = {}  # stay alive, so that none is taken for an earlier one at the same address
    runs: Counter[str] = Counter()
    order: dict[str, int] = {}

    def record(key: str, arguments: tuple[Any, ...]) -> None:
        runs[key] += 1
        if arguments:
            inputs[key] = arguments[0]

    hooks = []
    for index, block in enumerate(blocks):
        for _, name, path in iter_linears(block):
            key = f"{index}.{name}"
            order[key] = index
            hooks.append(
                block.get_submodule(path).register_forward_pre_hook(
                    lambda _, arguments, key=key: record(key, arguments)
                )
            )
    try:
        yield first_readers
    finally:
        for hook in hooks:
            hook.remove()
        seen: dict[tuple[int, int], str] = {}
        for key, index in order.items():
            if runs[key] == 1 and key in inputs:
                first_readers[key] = seen.setdefault((index, id(inputs[key])), key)


def copy_readers_(first_readers: dict[str, str], skipped: Mapping[int, int]) -> None:
    """Add what holds for blocks that were skipped, by the index of the block of their kind that ran, in place."""
    ran: dict[int, list[tuple[str, str]]] = {}
    for key, first in first_readers.items():
        number, _, name = key.partition(".")
        ran.setdefault(int(number), []).append((name, first.partition(".")[2]))
    for index, other in skipped.items():
        first_readers.update({f"{index}.{name}": f"{index}.{first}" for name, first in ran.get(other, [])})
