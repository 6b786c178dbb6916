"""Layers that carry state along a row (convolutions, state space models, linear attention), kept within conversations.

Unlike attention, they have no mask. Where the kernels of such a layer take the bounds of conversations, the layer gets
them. Elsewhere, conversations of similar length are stacked as rows of their own, padded at the end, where no real
token sees the padding, and each stack is computed at once.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch import Tensor, nn

from fctune.base.errors import ConfigError
from fctune.models.attention import DocumentBounds
from fctune.models.document_attention import CPU_TILE, keeps_kernels
from fctune.models.dropout import TokenKeys
from fctune.models.forward_override import override_forward_
from fctune.models.frozen_linear import FrozenLinear
from fctune.models.transformers.attention import running_bounds

# Names of a forward's argument for the state that generation keeps between tokens.
_CACHE_ARGUMENTS = frozenset({"past_key_values", "past_key_value", "cache_params", "layer_past", "state"})
# A stack of conversations takes shorter ones until padding is this share of it.
_MAX_PADDING = 0.2
_BY_KERNELS = "by kernels for packed rows on CUDA"
_STACKED = "each conversation apart, those of similar length together"
_OLDEST_FLA = Version("0.5.1")


def find_state_layers(block: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the layers of a block that carry state: they keep a cache while generating, and are not attention.

    Only the innermost are returned, such as a convolution within an attention layer.
    """
    keepers = {module for module in block.modules() if module is not block and _has_cache(module)}
    for module in keepers:
        is_innermost = not any(inner in keepers for inner in module.modules() if inner is not module)
        if is_innermost and not _is_attention(module):
            yield module


def _has_cache(module: nn.Module) -> bool:
    return not _CACHE_ARGUMENTS.isdisjoint(inspect.signature(type(module).forward).parameters)


def _is_attention(module: nn.Module) -> bool:
    return hasattr(module, "is_causal") or "ALL_ATTENTION_FUNCTIONS" in _forward(type(module)).__code__.co_names


def _forward(kind: type[nn.Module]) -> Any:
    """Return the forward as its class defines it, without decorators."""
    return inspect.unwrap(kind.forward)


def separate_conversations_(blocks: Iterable[nn.Module], token_keys: TokenKeys, multiple: int = 1) -> str:
    """Make each layer with state compute the conversations of packed rows apart, in place.

    Args:
        blocks: Blocks of the decoder.
        token_keys: Keys of the tokens, which the adapters inside such layers read.
        multiple: Lengths of separately computed conversations are padded to a multiple of this.

    Returns:
        Number of such layers by class, and how they do it; empty if there are none.

    Raises:
        ConfigError: Kernels of a version that skips conversations are installed.
    """
    layers = [layer for block in blocks for layer in find_state_layers(block)]
    for layer in layers:
        stateful: Any = layer
        stateful._token_keys, stateful._length_multiple = token_keys, multiple
        override_forward_(layer, _run_apart)
    counts: Any = Counter(map(type, layers))
    for kind in counts:
        _check_versions(kind)
    return "; ".join(
        f"{count} {kind.__name__}, {_BY_KERNELS if find_kernels(kind).take_bounds else _STACKED}"
        for kind, count in counts.items()
    )


class _Kernels(NamedTuple):
    """Kernels of installed packages behind the functions that a class of layers calls.

    Attributes:
        names: Names of the functions.
        take_bounds: All functions over sequences have kernels, which take the bounds of conversations.
    """

    names: tuple[str, ...]
    take_bounds: bool


@functools.cache
def find_kernels(kind: Any) -> _Kernels:
    """Find the kernels of a class of layers with state.

    transformers chooses between a package's kernel and its own code when a model is imported. Its own code takes no
    bounds, and some of it ignores them silently.
    """
    code, scope = _forward(kind).__code__, _forward(kind).__globals__
    functions = {name: scope[name] for name in code.co_names if inspect.isfunction(scope.get(name))}
    parameters = {name: _kernel_parameters(function) for name, function in functions.items()}
    over_sequences = [parameters[name] for name, function in functions.items() if _is_over_sequences(function)]
    # A layer that names its bounds otherwise would drop them on the way to the kernel.
    needs_lengths = any("cu_seqlens" in found for found in over_sequences)
    is_passed = not needs_lengths or "cu_seq_lens_q" in code.co_consts
    takes_bounds = bool(over_sequences) and all({"cu_seqlens", "seq_idx"} & found for found in over_sequences)
    return _Kernels(tuple(name for name, found in parameters.items() if found), takes_bounds and is_passed)


def _check_versions(kind: Any) -> None:
    """Refuse kernels of flash-linear-attention before 0.5.1: conversations after an empty one were never computed."""
    code, scope = _forward(kind).__code__, _forward(kind).__globals__
    for name in code.co_names:
        if inspect.isfunction(scope.get(name)) and _kernel_parameters(scope[name]):
            kernel = inspect.getclosurevars(scope[name]).nonlocals["implementation"]
            package = sys.modules[kernel.__module__.partition(".")[0]]
            if package.__name__ == "fla" and Version(package.__version__) < _OLDEST_FLA:
                raise ConfigError(
                    f"flash-linear-attention {package.__version__}: its kernels for {kind.__name__} skip conversations "
                    f"of packed rows; install {_OLDEST_FLA} or later "
                    f"(pip install 'flash-linear-attention>={_OLDEST_FLA}')."
                )


def _is_over_sequences(function: Callable[..., Any]) -> bool:
    """Return whether a function takes sequences and options of kernels, and no state of a single token."""
    parameters = inspect.signature(function).parameters
    is_step = any(name.endswith("state") and p.default is p.empty for name, p in parameters.items())
    return not is_step and any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _kernel_parameters(function: Callable[..., Any]) -> set[str]:
    """Return the parameters of the kernel behind a function; none if it runs transformers' own code."""
    free = inspect.getclosurevars(function).nonlocals
    return set(free.get("applicable_params", ())) if free.get("is_new_implementation") is True else set()


@contextmanager
def _without_kernels(kind: Any) -> Iterator[None]:
    """Put transformers' own code in place of installed kernels, which run on CUDA alone."""
    scope = _forward(kind).__globals__
    kernels = {name: scope[name] for name in find_kernels(kind).names}
    scope.update({name: inspect.unwrap(kernel) for name, kernel in kernels.items()})
    try:
        yield
    finally:
        scope.update(kernels)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its shapes are those of each batch's conversations
def _run_apart(layer: Any, forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a layer's own forward so that it keeps the conversations of the running batch apart."""
    bounds = running_bounds()
    token_keys: TokenKeys = layer._token_keys
    keys, was_training = token_keys.value, layer.training
    # A fused kernel for training multiplies with the weights of the projections and leaves out their adapters.
    layer.training = was_training and not any(isinstance(child, FrozenLinear) for child in layer.children())
    kind: Any = type(layer)
    has_kernels = _has_kernels(_find_tensor(arguments, options).device)
    try:
        with nullcontext() if has_kernels else _without_kernels(kind):
            if bounds is None or _is_unpacked(bounds):
                return forward(*arguments, **options)
            if has_kernels and find_kernels(kind).take_bounds:
                return _run_by_kernels(forward, bounds, token_keys, arguments, options)
            return _run_in_stacks(forward, bounds, token_keys, layer._length_multiple, arguments, options)
    finally:
        token_keys.value, layer.training = keys, was_training


def _is_unpacked(bounds: DocumentBounds) -> bool:
    """Return whether each row is one conversation."""
    return len(set(bounds.host_ends)) == bounds.shape[0] + 1


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda"


def _find_tensor(arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """Return the first tensor of the arguments, the hidden states."""
    return next(value for value in (*arguments, *options.values()) if isinstance(value, Tensor))


def _run_by_kernels(
    forward: Callable[..., Any],
    bounds: DocumentBounds,
    token_keys: TokenKeys,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    """Pass the bounds of the conversations, with all rows in one."""
    shape = bounds.shape

    def flatten(x: Tensor) -> Tensor:
        return x.flatten(0, 1)[None]

    plan = _sequence_plan(bounds)
    token_keys.value = None if token_keys.value is None else flatten(token_keys.value)
    out = forward(
        *_map_tokens(flatten, shape, arguments),
        **_map_tokens(flatten, shape, options),
        cu_seq_lens_q=plan.ends,
        cu_seqlens_cpu=plan.host_ends,  # without it, some kernels wait for the device
        seq_idx=plan.indices,
    )
    return _map_tokens(lambda x: x.view(*shape, *x.shape[2:]), (1, shape[0] * shape[1]), out)


def _run_in_stacks(
    forward: Callable[..., Any],
    bounds: DocumentBounds,
    token_keys: TokenKeys,
    multiple: int,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    """Compute conversations as rows of their own, those of similar length together."""
    shape, keys = bounds.shape, token_keys.value
    first = _find_tensor(arguments, options)
    plan = _stack_plan(bounds, first.device, CPU_TILE if keeps_kernels(first) else multiple)
    out, outputs = None, []
    for index in plan.stacks:

        def stack(x: Tensor, index: Tensor = index) -> Tensor:
            return x.flatten(0, 1).index_select(0, index.flatten()).view(*index.shape, *x.shape[2:])

        token_keys.value = None if keys is None else stack(keys)
        out = forward(*_map_tokens(stack, shape, arguments), **_map_tokens(stack, shape, options))
        outputs.append(out if isinstance(out, tuple) else (out,))

    def join(parts: tuple[Any, ...]) -> Tensor | None:
        pairs = list(zip(parts, plan.stacks, strict=True))
        if any(not isinstance(part, Tensor) or part.shape[:2] != index.shape for part, index in pairs):
            return None  # not by token, such as a last state
        flat = torch.cat([part.flatten(0, 1) for part in parts])
        return flat.index_select(0, plan.inverse).view(*shape, *flat.shape[1:])

    joined = tuple(join(parts) for parts in zip(*outputs, strict=True))
    return joined if isinstance(out, tuple) else joined[0]


def _map_tokens(function: Callable[[Tensor], Tensor], shape: tuple[int, ...], value: Any) -> Any:
    """Apply a function to each tensor of values by token, ``[b, s, ...]``, within tuples and dictionaries."""
    if isinstance(value, dict):
        return {name: _map_tokens(function, shape, inner) for name, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(_map_tokens(function, shape, inner) for inner in value)
    if isinstance(value, Tensor) and value.dim() >= 2:
        if value.shape[:2] == (1, shape[1]):  # the same for all rows
            value = value.expand(shape[0], *value.shape[1:])
        if tuple(value.shape[:2]) == tuple(shape):
            return function(value)
    return value


@dataclass(frozen=True, slots=True)
class _StackPlan:
    """Conversations of packed rows as rows of their own.

    Attributes:
        stacks: For each stack, the index of each token in the flattened batch, ``[conversations, length]``; a padded
            conversation repeats its last token.
        inverse: For each token of the flattened batch, its index in the flattened stacks, ``[b * s]``.
    """

    stacks: tuple[Tensor, ...]
    inverse: Tensor


def _stack_plan(bounds: DocumentBounds, device: torch.device, multiple: int) -> _StackPlan:
    """Return the stacks of a batch, which are made once and kept with its bounds."""
    name = f"stacks of multiples of {multiple} on {device}"
    if name not in bounds.derived:
        bounds.derived[name] = _plan_stacks(bounds.host_ends, device, multiple)
    plan: _StackPlan = bounds.derived[name]
    return plan


def _plan_stacks(ends: Sequence[int], device: torch.device, multiple: int) -> _StackPlan:
    spans = [(stop - start, start) for start, stop in itertools.pairwise(ends) if stop > start]
    stacks, inverse, at = [], torch.empty(ends[-1], dtype=torch.int64), 0
    for group in _group_by_length(sorted(spans, reverse=True)):
        width = group[0][0] + -group[0][0] % multiple
        lengths, starts = torch.tensor(group).unbind(1)
        steps = torch.arange(width).expand(len(group), -1)
        index = starts[:, None] + torch.minimum(steps, lengths[:, None] - 1)
        is_real = steps < lengths[:, None]
        inverse[index[is_real]] = at + torch.arange(index.numel()).view_as(index)[is_real]
        at += index.numel()
        stacks.append(index)
    return _StackPlan(tuple(_copy(index, device) for index in stacks), _copy(inverse, device))


def _group_by_length(spans: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Split spans, the longest first, into groups whose padding is a small share."""
    group: list[tuple[int, int]] = []
    total = 0
    for span in spans:
        if group and total + span[0] < (1 - _MAX_PADDING) * group[0][0] * (len(group) + 1):
            yield group
            group, total = [], 0
        group.append(span)
        total += span[0]
    yield group


@dataclass(frozen=True, slots=True)
class _SequencePlan:
    """Bounds as kernels take them, without conversations that have no tokens.

    flash-linear-attention up to 0.5.0 counts sequences without the empty ones, and leaves out as many of the last rows.

    Attributes:
        ends: Cumulative lengths of the conversations, int32.
        host_ends: The same on the CPU.
        indices: Number of each token's conversation, int32 ``[1, b * s]``.
    """

    ends: Tensor
    host_ends: Tensor
    indices: Tensor


def _sequence_plan(bounds: DocumentBounds) -> _SequencePlan:
    if "sequences" not in bounds.derived:
        ends, device = torch.tensor([*dict.fromkeys(bounds.host_ends)], dtype=torch.int32), bounds.ends.device
        indices = torch.repeat_interleave(torch.arange(len(ends) - 1, dtype=torch.int32), ends.diff())
        bounds.derived["sequences"] = _SequencePlan(_copy(ends, device), ends, _copy(indices[None], device))
    plan: _SequencePlan = bounds.derived["sequences"]
    return plan


def _copy(index: Tensor, device: torch.device) -> Tensor:
    """Copy to a device without waiting for it."""
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index.to(device)
