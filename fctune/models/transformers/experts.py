"""Experts of transformers' models, computed by grouped products through its interface for them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fctune.models.architecture import EXPERT_ADAPTERS
from fctune.models.causal_lm import ExpertWeight, Router
from fctune.models.expert_exchange import EXPERT_EXCHANGE, ExpertExchange
from fctune.models.expert_lora import ExpertLoRA, to_local
from fctune.models.frozen_experts import FrozenExperts
from fctune.models.frozen_linear import is_linear
from fctune.models.grouped_products import multiply_groups

# Name of this implementation in ``config._experts_implementation``.
EXPERTS_IMPLEMENTATION = "fctune"


# Attribute of a module with experts that holds the mask of its model.
TOKEN_MASK = "token_mask"


class TokenMask:
    """Tokens of the current forward that are no padding, bool ``[tokens]``; None: all of them."""

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def set(self, tokens: Tensor, row_lengths: Tensor | None) -> None:
        """Set the mask for tokens ``[b, s]``, whose rows end in padding after ``row_lengths [b]`` tokens."""
        self.value = None
        if row_lengths is not None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
            self.value = (positions < row_lengths[:, None]).flatten()


class Routing(NamedTuple):
    """The rows that experts compute, sorted by expert; a row is a token for one of the experts it has chosen.

    Rows of padding, for the expert after the last, come at the end.
    """

    inverse: Tensor  # int64 [n]: row of each choice, the choices of a token one after the other
    tokens: Tensor  # int64 [n]: token of each row
    experts: Tensor  # int64 [n]: expert of each row
    ends: Tensor  # int32 [experts]: row after the last one of each expert


def sort_by_expert(choices: Tensor, num_experts: int) -> tuple[Tensor, Routing]:
    """Return the index of each row's choice, int64 ``[n]``, and the routing.

    Args:
        choices: Experts that each token has chosen, int64 ``[tokens, top_k]``.
        num_experts: Number of experts.
    """
    experts, order = torch.sort(choices.flatten(), stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    every = torch.arange(num_experts, device=order.device)
    ends = torch.searchsorted(experts, every, right=True, out_int32=True)
    return order, Routing(inverse, order // choices.shape[1], experts, ends)


class Dispatch(torch.autograd.Function):
    """Copies tokens ``[tokens, d]`` to the rows of a routing, ``[n, d]``; the adjoint of ``Combine``.

    Backward adds the gradients of a token in a fixed order, unlike that of an index, which is random on CUDA.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, inverse: Tensor, ends: Tensor | None) -> Tensor:
        """Return the row of each choice, ``[n, d]``, sorted by expert; ``ends`` are given if some are of padding."""
        ctx.save_for_backward(inverse, ends)
        ctx.num_tokens = len(x)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the tokens."""
        inverse, ends = ctx.saved_tensors
        grad = grad if ends is None else _zero_padding(grad, ends)
        return _add_choices(grad, inverse, ctx.num_tokens), None, None, None


class Combine(torch.autograd.Function):
    """Adds the rows ``[n, d]`` of each token, ``[tokens, d]``; the adjoint of ``Dispatch``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, tokens: Tensor, inverse: Tensor, num_tokens: int) -> Tensor:
        """Return the sum of each token's rows, ``[tokens, d]``."""
        ctx.save_for_backward(tokens)
        return _add_choices(rows, inverse, num_tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the rows."""
        (tokens,) = ctx.saved_tensors
        return grad.index_select(0, tokens), None, None, None


def _add_choices(rows: Tensor, inverse: Tensor, num_tokens: int) -> Tensor:
    return rows.index_select(0, inverse).view(num_tokens, -1, rows.shape[1]).sum(1)


def compute_experts(experts: Any, hidden: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, ``[tokens, d]``; the signature is transformers'.

    Args:
        experts: Module with the experts' parameters, and their adapters.
        hidden: Inputs, ``[tokens, d]``.
        choices: Experts of each token, int64 ``[tokens, top_k]``.
        weights: Weight of each, ``[tokens, top_k]``.
    """
    mask: TokenMask | None = getattr(experts, TOKEN_MASK, None)
    is_token = None if mask is None else mask.value
    if is_token is not None:  # all padding is one token, whose experts would get the rows of all of it
        choices = choices.masked_fill(~is_token[:, None], experts.num_experts)
    order, routing = sort_by_expert(choices, experts.num_experts)
    ends = None if is_token is None else routing.ends
    rows: Tensor = Dispatch.apply(hidden, routing.tokens, routing.inverse, ends)  # type: ignore[no-untyped-call]
    keys = _make_row_keys(experts, routing)
    exchange: ExpertExchange | None = getattr(experts, EXPERT_EXCHANGE, None)
    run = functools.partial(_run_experts, experts, is_token is not None and exchange is None)
    out = run(rows, keys, routing.ends) if exchange is None else exchange.run(run, rows, keys, routing.ends)
    out = out * weights.flatten()[order][:, None]
    summed: Tensor = Combine.apply(out, routing.tokens, routing.inverse, len(hidden))  # type: ignore[no-untyped-call]
    return summed.to(hidden.dtype)


def _make_row_keys(experts: Any, routing: Routing) -> Tensor | None:
    """Return the dropout keys of the rows; None if no adapter drops anything."""
    adapters = (find_adapter(experts, name) for name in weight_names(experts))
    adapter = next((adapter for adapter in adapters if adapter is not None), None)
    return None if adapter is None else adapter.make_row_keys(routing.tokens, routing.experts)


def _run_experts(experts: Any, has_padding: bool, rows: Tensor, keys: Tensor | None, ends: Tensor) -> Tensor:
    """Return the unweighted output of each row's expert, ``[n, d]``; rows are sorted by the experts of this rank.

    With padding, the rows after those of the last expert are zero.
    """
    up, down = weight_names(experts)
    inner = _project(experts, up, has_padding, rows, keys, ends)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    out = _project(experts, down, has_padding, inner, keys, ends)
    has_norm = getattr(experts, "has_post_expert_norm", False)  # missing in transformers 5.17
    return experts.post_expert_norm(out) if has_norm else out


def _project(experts: Any, name: str, has_padding: bool, x: Tensor, keys: Tensor | None, ends: Tensor) -> Tensor:
    """Return ``x W[e]' + b[e]`` for the expert e of each row, and add what an adapter adds."""
    weight = getattr(experts, name)
    if isinstance(weight, FrozenExperts):
        out = weight.multiply(x, ends)
    else:
        weight = to_local(weight).to(x.dtype)
        out = multiply_groups(x, weight if experts.is_transposed else weight.transpose(1, 2), ends)
    if experts.has_bias:
        bias = to_local(getattr(experts, f"{name}_bias")).to(x.dtype)
        rows = torch.arange(len(x), device=x.device)
        index = torch.searchsorted(ends, rows, right=True)
        out = out + bias[index.clamp(max=len(bias) - 1) if has_padding else index]
    adapter = find_adapter(experts, name)
    out = out if adapter is None else out + adapter(x, keys, ends)
    return _zero_padding(out, ends) if has_padding else out


def _zero_padding(rows: Tensor, ends: Tensor) -> Tensor:
    """Return rows with zeros after those of the last expert, where products leave any number."""
    is_routed = torch.arange(len(rows), device=rows.device) < ends[-1]
    return torch.where(is_routed[:, None], rows, 0.0)


def weight_names(experts: Any) -> tuple[str, str]:
    """Return the names of the parameters that experts multiply with, in the order of computation."""
    return ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")


def find_adapter(experts: nn.Module, name: str) -> ExpertLoRA | None:
    """Return the adapter of an experts' parameter; None if it has none."""
    adapter: ExpertLoRA | None = getattr(getattr(experts, EXPERT_ADAPTERS, None), name, None)
    return adapter


def is_experts(module: nn.Module) -> bool:
    """Return whether a module holds the parameters of experts, which ``compute_experts`` can compute."""
    return all(hasattr(module, name) for name in ("num_experts", "has_gate", "is_transposed", "down_proj"))


def iter_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Iterate over the modules that hold experts, by path."""
    return ((path, module) for path, module in model.named_modules() if is_experts(module))


def iter_expert_weights(block: nn.Module) -> Iterator[ExpertWeight]:
    """Iterate over the weights of a block's experts, in the order of computation; keys and paths are in the block."""
    for path, experts in iter_experts(block):
        for name in weight_names(experts):
            module = f"{path.rpartition('.')[2]}.{name}"
            yield ExpertWeight(module, f"{path}.{name}", path, name, experts.is_transposed)


def find_router_class(decoder: Any) -> tuple[type[nn.Module] | None, int]:
    """Return the class of a decoder's routers, None if it has none, and the place of the logits in their output."""
    recorder = (getattr(decoder, "_can_record_outputs", None) or {}).get("router_logits")
    return getattr(recorder, "target_class", None), getattr(recorder, "index", 0)


def iter_routers(block: nn.Module, decoder: Any) -> Iterator[Router]:
    """Iterate over the routers of a block that are not linears, by path in the block."""
    kind, _ = find_router_class(decoder)
    for path, module in block.named_modules():
        if kind is not None and isinstance(module, kind) and not is_linear(module):
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.ndim == 2:
                yield Router(path.rpartition(".")[2], path)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, compute_experts)
