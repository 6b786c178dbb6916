"""Models built by transformers, behind the interface that training uses."""

from __future__ import annotations

import functools
import operator
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.utils import ModelOutput

from fctune.base.errors import ConfigError
from fctune.data.loader import ROW_MULTIPLE
from fctune.models.architecture import Architecture
from fctune.models.attention import AttentionKernel, DocumentBounds
from fctune.models.block_kinds import COMPUTED_NUMBERS, describe_block, repeats_skipped
from fctune.models.causal_lm import CausalLM, ExpertWeight, Linear, Router
from fctune.models.forward_override import override_forward_
from fctune.models.precision import PrecisionPolicy
from fctune.models.router_balance import RouterBalance
from fctune.models.token_rows import TokenEmbedding, TokenRows
from fctune.models.transformers.architecture import TransformersArchitecture
from fctune.models.transformers.attention import AttentionUse, run_block
from fctune.models.transformers.attention_check import AttentionFindings, check_attention
from fctune.models.transformers.experts import (
    TOKEN_MASK,
    TokenMask,
    find_router_class,
    iter_expert_weights,
    iter_experts,
    iter_routers,
)
from fctune.models.transformers.float64 import keep_float64_
from fctune.models.transformers.fused_norms import fuse_norms_
from fctune.models.transformers.long_rope import TokenLengths, choose_by_conversation_, find_original_length
from fctune.models.transformers.model_config import read_text_config
from fctune.models.transformers.modules import Layout, build_decoder, find_layout, iter_linears
from fctune.models.transformers.state_layers import separate_conversations_


class TiedHead(nn.Module):
    """An output head with the weight of the token embedding, of which it holds no second copy.

    Args:
        embedding: The module whose weight it shares.
        bias: Bias of the logits, ``[vocab]``, or None.
    """

    def __init__(self, embedding: nn.Module, bias: nn.Parameter | None):
        super().__init__()
        self._shared = (embedding,)  # in a tuple, so that it is not registered as a child
        self.bias = bias

    @property
    def tied_module(self) -> nn.Module:
        """The embedding whose weight the head shares."""
        return self._shared[0]

    @property
    def weight(self) -> Tensor:
        """Weight of the embedding, ``[vocab, d]``."""
        weight: Any = self.tied_module.weight
        return weight  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits ``[..., vocab]`` of hidden states ``[..., d]``."""
        return linear(x, self.weight, self.bias)


@dataclass
class HiddenStates(ModelOutput):  # type: ignore[misc]
    """The output of a decoder without its head that has hidden states only.

    The other fields are all that the forwards of transformers' causal models read of it; a test compares them.
    """

    last_hidden_state: Tensor | None = None
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None
    cross_attentions: None = None
    router_logits: None = None
    cache_params: None = None  # of state space models
    state: None = None  # of RWKV
    shared_kv_states: None = None  # of Gemma 4


class _StandIn:
    """An object with some attributes of its own, and those of another one otherwise."""

    def __init__(self, original: Any, **own: Any):
        self.__dict__ |= {"_original": original, **own}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


class _StandInModule(_StandIn):
    """A module that computes by another function, ``compute``."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.compute(*arguments, **options)


class TransformersCausalLM(CausalLM):
    """A decoder built by transformers, with the attention of packed rows.

    Args:
        decoder: transformers' model, with its parameters on the meta device and its buffers on the CPU.
        layout: Names of its modules.

    Attributes:
        first_readers: For the key of a linear, that of the first one of its block that reads the same tensor; what is
            not in it reads a tensor of its own.
    """

    decoder: Any  # transformers' PreTrainedModel, whose annotations a type checker cannot follow

    def __init__(
        self,
        decoder: nn.Module,
        layout: Layout,
        architecture: TransformersArchitecture,
        precision: PrecisionPolicy,
        attention_kernel: AttentionKernel,
    ):
        super().__init__(architecture, precision, attention_kernel)
        self.needs_packing_proof = True
        self.decoder = decoder
        self.layout = layout
        self.first_readers: Mapping[str, str] = {}
        self._bounds: DocumentBounds | None = None
        self.original_length = find_original_length(decoder)
        self._token_lengths = TokenLengths()
        choose_by_conversation_(decoder, self._token_lengths)
        # Memory for parameters is given to buffers, too, whose values are lost by that.
        self._buffers_of_decoder = {name: buffer.clone() for name, buffer in decoder.named_buffers()}
        if architecture.is_tied:
            embedding, head = self.embedding, decoder.get_submodule(layout.head)
            decoder.set_submodule(layout.head, TiedHead(embedding, getattr(head, "bias", None)))
        fuse_norms_(decoder)
        self._token_mask = TokenMask()
        for _, experts in iter_experts(decoder):
            setattr(experts, TOKEN_MASK, self._token_mask)
        if precision.compute_dtype is torch.float64:
            keep_float64_(decoder.get_submodule(self._base))
        # Float8 products over tokens need a multiple of 16 of them; elsewhere padding would only cost time and digits.
        multiple = ROW_MULTIPLE if precision.has_float8_matmuls else 1
        self.state_layers = separate_conversations_(self.blocks, self.token_keys, multiple)
        for block in self.blocks:
            for name in COMPUTED_NUMBERS & vars(block).keys():
                # One graph of a compiled block serves all floats, but only one integer.
                setattr(block, name, float(getattr(block, name)))
            override_forward_(block, run_block)
            block.register_forward_pre_hook(self._pass_bounds, with_kwargs=True)

    def _pass_bounds(
        self, block: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return arguments, options | {"bounds": self._bounds}

    def init_buffers_(self) -> None:
        """Copy the values of the decoder's buffers to the device."""
        for name, value in self._buffers_of_decoder.items():
            self.decoder.get_buffer(name).copy_(value)

    @property
    def _base(self) -> str:
        """Name of the model without its head, in the decoder."""
        return self.layout.stack.partition(".")[0]

    @property
    def blocks(self) -> Iterable[nn.Module]:
        """The transformer blocks in order."""
        stack: Iterable[nn.Module] = self.decoder.get_submodule(self.layout.stack)
        return stack

    def block_kinds(self) -> Sequence[Hashable]:
        """Return the kind of each block: what ``describe_block`` finds, and what its config says of that layer."""
        blocks = list(self.blocks)
        # An unrelated list of equal length makes more kinds than there are, which only slows this down.
        by_layer = [
            value
            for value in self.decoder.config.to_dict().values()
            if isinstance(value, list | tuple) and len(value) == len(blocks)
        ]
        return [
            (describe_block(block), *(repr(values[index]) for values in by_layer)) for index, block in enumerate(blocks)
        ]

    @property
    def head(self) -> nn.Module:
        """The output projection; ``tied_module`` is the embedding whose weight it shares, if any."""
        head: nn.Module = operator.attrgetter(self.layout.head)(self.decoder)
        return head

    @property
    def embedding(self) -> nn.Module:
        """The token embedding; some families scale what it returns."""
        embedding: nn.Module = self.decoder.get_submodule(self.layout.embedding)
        return embedding

    def replace_ends_(self, embedding: nn.Module, head: Callable[[Tensor], Tensor]) -> None:
        """Replace the token embedding and the output head, in place."""
        if isinstance(embedding, TokenEmbedding):
            keep_embedding_(embedding, self.embedding)
        self.decoder.set_submodule(self.layout.embedding, embedding)
        path, _, name = self.layout.head.rpartition(".")
        owner = self.decoder.get_submodule(path)
        delattr(owner, name)  # a head without parameters is not a module, and would be refused in place of one
        setattr(owner, name, head)

    def linears(self) -> Iterator[Linear]:
        """Iterate over the linears of the blocks, block by block, and then the head."""
        for index, block in enumerate(self.blocks):
            for name, key, path in iter_linears(block):
                key = f"{index}.{key}"
                input_key = self.first_readers.get(key, key)
                yield Linear(name, key, f"decoder.{self.layout.stack}.{index}.{path}", input_key)
        head = self.layout.head
        yield Linear(head, head, f"decoder.{head}", head)

    def expert_weights(self) -> Iterator[ExpertWeight]:
        """Iterate over the weights of the experts, block by block."""
        for index, block in enumerate(self.blocks):
            for weight in iter_expert_weights(block):
                path = f"decoder.{self.layout.stack}.{index}.{weight.path}"
                yield weight._replace(key=f"{index}.{weight.key}", path=path)

    def routers(self) -> Iterator[Router]:
        """Iterate over the routers of the experts, block by block."""
        for index, block in enumerate(self.blocks):
            for router in iter_routers(block, self.decoder):
                yield router._replace(path=f"decoder.{self.layout.stack}.{index}.{router.path}")

    def balance_routers_(self, coefficient: float | None) -> None:
        """Set up the load-balancing loss of the routers, in place; see ``CausalLM.balance_routers_``."""
        self.router_balance = make_router_balance(self.decoder, self.architecture, coefficient)

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        bounds: DocumentBounds | None,
        row_lengths: Tensor | None = None,
    ) -> Tensor:
        """Compute the normed output of the last block, ``[b, s, d]``; see ``CausalLM.hidden_states``."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        self._bounds = self._rows_as_bounds(tokens) if bounds is None else bounds
        self._token_mask.set(tokens, row_lengths)
        if self.original_length is not None:
            self._token_lengths.set(tokens, bounds, row_lengths)
        base = getattr(self.decoder, self._base)
        output = base(input_ids=tokens, position_ids=positions, use_cache=False, return_dict=True)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _rows_as_bounds(self, tokens: Tensor) -> DocumentBounds | None:
        """Return bounds of one conversation a row, for kernels that need the bounds of any; else None."""
        if self.attention_kernel == "per_document":
            return None
        rows, length = tokens.shape
        ends = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=tokens.device)
        host_ends = tuple(range(0, (rows + 1) * length, length))
        return DocumentBounds(self.attention_kernel, ends, length, (rows, length), host_ends)

    def project(self, hidden: Tensor, token_keys: Tensor | None = None) -> Tensor:
        """Return the logits with the scale and soft cap of the family, by the decoder's own code."""
        head = _StandInModule(self.head, compute=functools.partial(super().project, token_keys=token_keys))
        base = getattr(self.decoder, self._base)
        # Its forward computes the logits of these hidden states alone.
        base = _StandInModule(base, compute=lambda *arguments, **options: HiddenStates(hidden[None]))
        ends = {self._base: base, self.layout.head: head}
        stand_in = _StandIn(self.decoder, **ends)
        logits: Tensor = type(self.decoder).forward(stand_in, inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits


def build_model(
    architecture: TransformersArchitecture,
    max_seq_len: int,
    precision: PrecisionPolicy,
    attention_kernel: AttentionKernel,
) -> TransformersCausalLM:
    """Build the model on the meta device; see ``sources.build_model``.

    Raises:
        ConfigError: ``max_seq_len`` exceeds the model's positions, or transformers cannot build the model.
    """
    architecture.check_seq_len(max_seq_len)
    findings, first_readers = _inspect(architecture, max_seq_len, precision, attention_kernel, is_complete=True)
    model = _build(architecture, precision, attention_kernel)
    model.first_readers = first_readers
    model.attention_warning = findings.warning
    _set_attention_layers_(model, findings)
    if attention_kernel != "per_document" and findings.warning is None:
        is_flex = attention_kernel == "flex"
        model.windows = tuple(dict.fromkeys(use.layer.window for use in findings.uses if is_flex or use.needs_flex))
    return model


def build_shapes(
    architecture: TransformersArchitecture, max_seq_len: int, precision: PrecisionPolicy
) -> TransformersCausalLM:
    """Build a model to count, of whose blocks the first one of each kind is inspected; see ``build_model``."""
    architecture.check_seq_len(max_seq_len)
    findings, first_readers = _inspect(architecture, max_seq_len, precision, "per_document", is_complete=False)
    model = _build(architecture, precision, "per_document")
    model.first_readers = first_readers
    _set_attention_layers_(model, findings)
    return model


def _set_attention_layers_(model: TransformersCausalLM, findings: AttentionFindings) -> None:
    """Set the layers that attend, if they are known; their heads may differ from those of the config."""
    if findings.warning is None:
        model.attention_layers = tuple(use.layer for use in findings.uses)


@functools.lru_cache(maxsize=8)
def _inspect(
    architecture: TransformersArchitecture,
    max_seq_len: int,
    precision: PrecisionPolicy,
    attention_kernel: AttentionKernel,
    is_complete: bool,
) -> tuple[AttentionFindings, Mapping[str, str]]:
    """Return how a model's layers attend, see ``check_attention``, and which linears read the same tensor.

    A run and its plan build several such models, so the result is kept. A complete inspection runs every block, else
    one of each kind stands for the others.
    """
    checked = _build(architecture, precision, attention_kernel)  # keeps what its forward on the meta device caches
    blocks = list(checked.blocks)
    skipping: AbstractContextManager[dict[int, int]]
    skipping = nullcontext({}) if is_complete else repeats_skipped(blocks, checked.block_kinds(), 1)
    with skipping as skipped:
        with recorded_inputs(blocks) as first_readers:
            findings = check_attention(checked, checked.decoder, architecture, max_seq_len)
        copy_readers_(first_readers, skipped)
    return findings._replace(uses=_repeat_uses(findings.uses, blocks, skipped)), first_readers


def _repeat_uses(
    uses: Sequence[AttentionUse], blocks: Sequence[nn.Module], skipped: Mapping[int, int]
) -> tuple[AttentionUse, ...]:
    """Add how blocks that were skipped attend, by the index of the block of their kind that ran."""
    owners = {id(module): index for index, block in enumerate(blocks) for module in block.modules()}
    times = Counter(skipped.values())
    return tuple(use for use in uses for _ in range(1 + times[owners.get(use.module, -1)]))


def _build(
    architecture: TransformersArchitecture, precision: PrecisionPolicy, attention_kernel: AttentionKernel
) -> TransformersCausalLM:
    decoder = build_decoder(architecture, precision.weight_dtype)
    return TransformersCausalLM(decoder, find_layout(architecture, decoder), architecture, precision, attention_kernel)


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


def make_router_balance(decoder: Any, architecture: Architecture, coefficient: float | None) -> RouterBalance | None:
    """Observe the routers of a decoder for the load-balancing loss, in place; None if the run has no such loss.

    Args:
        decoder: transformers' model.
        architecture: Architecture of the model.
        coefficient: Factor on the loss; None takes that of config.json if it sets ``output_router_logits``, as
            transformers does.

    Raises:
        ConfigError: A coefficient for a model that has no such loss.
    """
    assert isinstance(architecture, TransformersArchitecture)
    # The same function in all models that have one, see ``RouterBalance``.
    has_loss = hasattr(sys.modules[type(decoder).__module__], "load_balancing_loss_func")
    kind, index = find_router_class(decoder)
    routers = [module for module in decoder.modules() if kind is not None and isinstance(module, kind)]
    if coefficient is None:
        config = read_text_config(architecture.where, architecture.config_json)
        is_set = has_loss and routers and getattr(config, "output_router_logits", False)
        coefficient = float(config.router_aux_loss_coef) if is_set else 0.0
    if not coefficient:
        return None
    if not has_loss or not routers:
        how = "balances its experts by a bias, which stays as it is" if routers else "has no routers to balance"
        raise ConfigError(
            f"model.router_aux_loss={coefficient:g}: model_type={architecture.model_type!r} {how}; leave it out."
        )
    balance = RouterBalance(coefficient, decoder.num_experts, decoder.num_experts_per_tok)
    for router in routers:
        balance.observe_(router, index)
    return balance


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
