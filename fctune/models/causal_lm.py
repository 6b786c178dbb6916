"""The interface between the training step and a model, whichever source builds it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fctune.base.errors import ConfigError
from fctune.data.loader import DEFAULT_COST
from fctune.models.architecture import Architecture, AttentionLayer
from fctune.models.attention import AttentionKernel, DocumentBounds, make_bounds
from fctune.models.context_exchange import WHOLE_ROWS
from fctune.models.dropout import TokenKeys
from fctune.models.loss import IGNORE, MAX_LOGITS, Criterion, supervised_losses
from fctune.models.precision import PrecisionPolicy
from fctune.models.router_balance import RouterBalance


class Linear(NamedTuple):
    """A linear that can be frozen or take an adapter."""

    module: str  # name in ``adapter.modules``
    key: str  # unique within the model and equal for every source
    path: str  # argument of ``nn.Module.get_submodule`` and ``set_submodule``
    input_key: str  # key of the first linear that reads the same tensor; seeds the dropout of its adapters


class ExpertWeight(NamedTuple):
    """A weight of all experts of a block, ``[experts, ...]``, that can take an adapter."""

    module: str  # name in ``adapter.modules``
    key: str  # unique within the model; seeds the dropout of its adapter
    path: str  # of the module that holds the experts' parameters
    name: str  # of the parameter in that module
    is_transposed: bool  # stored as ``[experts, in, out]``, not ``[experts, out, in]``


class Router(NamedTuple):
    """A module that chooses experts by its ``weight [experts, in]``, which can take an adapter."""

    module: str  # name in ``adapter.modules``
    path: str


class CausalLM(nn.Module, ABC):
    """A causal language model as training needs it: blocks, hidden states and an output head.

    A source of models implements the abstract members. The loss is computed inside ``forward``, because only there does
    sharding hold the head's full weight.

    Attributes:
        architecture: Sizes, names and weight layout.
        precision: Dtypes of the weights and of the computation.
        attention_kernel: Implementation of attention within packed rows; batches carry bounds made for it.
        windows: Sliding windows of the layers that use flex attention; None: see ``attention.make_bounds``.
        attention_warning: Why the layers' attention was not compared with their masks; None if it was.
        state_layers: Number and kind of the layers that carry state along a row, such as convolutions, and how they
            keep its conversations apart; empty if there are none.
        needs_packing_proof: A run checks with its weights that the conversations of a packed row stay apart.
        original_length: Positions that the model's RoPE extends, beyond which it may compute otherwise; None: it
            extends none.
        token_keys: Keys of the tokens in the current forward, which adapters read for their dropout.
        max_logits: Largest number of logits that the loss computes at once.
        row_cost: Cost of the rows that are dealt to ranks.
        router_balance: Load-balancing loss of the routers; None if the run has none.
        context_group: Ranks that share each row of a batch.
        attention_layers: The layers that attend, each time that they do; those that carry state are not among them.
    """

    def __init__(self, architecture: Architecture, precision: PrecisionPolicy, attention_kernel: AttentionKernel):
        super().__init__()
        self.architecture = architecture
        self.precision = precision
        self.attention_kernel = attention_kernel
        self.windows: tuple[int | None, ...] | None = None
        self.attention_warning: str | None = None
        self.state_layers = ""
        self.needs_packing_proof = False
        self.original_length: int | None = None
        self.token_keys = TokenKeys()
        self.max_logits = MAX_LOGITS
        self.row_cost = DEFAULT_COST
        self.router_balance: RouterBalance | None = None
        self.context_group = WHOLE_ROWS
        heads = AttentionLayer(architecture.num_heads, architecture.num_kv_heads, architecture.head_dim)
        self.attention_layers: tuple[AttentionLayer, ...] = (heads,) * architecture.num_layers

    @property
    @abstractmethod
    def blocks(self) -> Iterable[nn.Module]:
        """The transformer blocks in order: the units of sharding, checkpointing and compilation."""

    def block_kinds(self) -> Sequence[Hashable]:
        """Return the kind of each block, before adapters: blocks of one kind compute alike."""
        return range(len(list(self.blocks)))

    @property
    @abstractmethod
    def head(self) -> nn.Module:
        """The output projection, from ``[..., d]`` to ``[..., vocab]``; ``tied_module`` is the embedding it shares."""

    @property
    @abstractmethod
    def embedding(self) -> nn.Module:
        """The token embedding, from ids ``[...]`` to ``[..., d]``."""

    @abstractmethod
    def replace_ends_(self, embedding: nn.Module, head: Callable[[Tensor], Tensor]) -> None:
        """Replace the token embedding and the output head, in place."""

    @abstractmethod
    def linears(self) -> Iterator[Linear]:
        """Iterate over the linears of the blocks, block by block, and then the head."""

    def expert_weights(self) -> Iterator[ExpertWeight]:
        """Iterate over the weights of the experts, block by block; a dense model has none."""
        return iter(())

    def routers(self) -> Iterator[Router]:
        """Iterate over the routers of the experts, block by block; a dense model has none."""
        return iter(())

    def balance_routers_(self, coefficient: float | None) -> None:
        """Set up the load-balancing loss of the routers, in place.

        Args:
            coefficient: Factor on the loss; None takes what the model's config.json says, 0 has no such loss.

        Raises:
            ConfigError: The model has no such loss.
        """
        if coefficient:
            raise ConfigError(
                f"model.router_aux_loss={coefficient:g}: this model has no experts to balance; leave it out."
            )

    @abstractmethod
    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        bounds: DocumentBounds | None,
        row_lengths: Tensor | None = None,
    ) -> Tensor:
        """Compute the normed output of the last block.

        Args:
            tokens: Token ids, int64 ``[b, s]``.
            positions: Position of each token in its conversation, ``[b, s]``; None counts along the row.
            bounds: Ends of the conversations in each row; None is one conversation per row.
            row_lengths: Tokens of each row before its padding, int64 ``[b]``; None: no row has padding.

        Returns:
            Hidden states in the compute dtype, ``[b, s, d]``.
        """

    def make_bounds(self, lengths: Sequence[Sequence[int]]) -> DocumentBounds:
        """Return the bounds of packed rows whose conversations have these lengths, for the model's attention."""
        return make_bounds(lengths, self.attention_kernel, self.windows)

    def adopt_bounds(self, bounds: DocumentBounds) -> DocumentBounds:
        """Return bounds that were made for another model's attention, for this model's."""
        windows = ((None,) if self.attention_kernel == "flex" else ()) if self.windows is None else self.windows
        return replace(bounds, kernel=self.attention_kernel, windows=tuple(windows), derived={})

    def project(self, hidden: Tensor, token_keys: Tensor | None = None) -> Tensor:
        """Return the logits ``[n, vocab]`` of hidden states ``[n, d]``.

        ``token_keys [n]`` are needed by a head that is an adapter with dropout.
        """
        needs_keys = token_keys is not None and hasattr(self.head, "lora_a")
        logits: Tensor = self.head(hidden, token_keys) if needs_keys else self.head(hidden)
        return logits

    def stored_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the buffers that checkpoints store, such as the bias of a router, by name."""
        for path, module in self.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield (f"{path}.{name}" if path else name), buffer

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        bounds: DocumentBounds | None = None,
        labels: Tensor | None = None,
        loss_weights: Tensor | None = None,
        row_keys: Tensor | None = None,
        supervised: Tensor | None = None,
        row_lengths: Tensor | None = None,
        start: int = 0,
        is_summed: bool = True,
        criterion: Criterion | None = None,
    ) -> Tensor:
        """Return the summed, weighted loss of the supervised tokens, or the loss of each; without labels, the logits.

        A load-balancing loss of routers is not part of it: see ``router_balance``. If rows are split over ranks, all
        arguments but the bounds are of this rank's part of the tokens, and so is what is returned.

        Args:
            tokens: Token ids, int64 ``[b, s]``.
            positions: Position of each token in its conversation, ``[b, s]``; None counts along the row.
            bounds: Ends of the conversations in each row; None is one conversation per row.
            labels: The token that each position must predict, -100 where unsupervised, ``[b, s]``.
            loss_weights: Weight of each position's loss, float32 ``[b, s]``; None is 1.0.
            row_keys: int64 keys that dropout is a function of, ``[b]``; needed only by adapters with dropout.
            supervised: Indices of the supervised positions in the flattened batch, int64 ``[n]``; None finds them in
                the labels, for which the host waits on a CUDA device.
            row_lengths: Tokens of each row before its padding, int64 ``[b]``; None: no row has padding.
            start: Where in their rows these tokens start.
            is_summed: Return the sum of weight x loss; otherwise the loss of each supervised token, without its weight.
            criterion: Loss of a supervised position; None is the cross-entropy of its label.

        Returns:
            A scalar or ``[n]`` in float32 (float64 for a float64 model), or logits ``[b, s, vocab]``.
        """
        if row_keys is not None:
            self.token_keys.set_rows(row_keys, tokens.shape[1], start)
        if self.router_balance is not None:
            self.router_balance.start_forward(tokens, row_lengths, is_observed=self.training and labels is not None)
        hidden = self.hidden_states(tokens, positions, bounds, row_lengths)
        if self.router_balance is not None:
            self.router_balance.end_forward()
        keys = self.token_keys.value
        if labels is None:
            logits = self.project(hidden.flatten(0, 1), None if keys is None else keys.flatten())
            return logits.view(*tokens.shape, -1)
        if supervised is None:
            supervised = (labels.flatten() != IGNORE).nonzero().squeeze(1)
        num_vocab = self.architecture.vocab_size
        sizes = keys, supervised, self.max_logits
        losses = supervised_losses(hidden, self.project, num_vocab, labels, *sizes, criterion)
        if is_summed:
            return (losses if loss_weights is None else losses * loss_weights.flatten()[supervised]).sum()
        return losses


def materialize_(model: CausalLM, device: torch.device, is_offloaded: bool = False) -> None:
    """Give a meta model's parameters uninitialised memory and fill its buffers, in place.

    Buffers are position tables and dropout keys, which modules compute in ``init_buffers_``, and those that the base's
    checkpoint stores.

    Args:
        model: Model on the meta device.
        device: Device of the buffers, and of the parameters unless they are offloaded.
        is_offloaded: Keep the parameters in the host's memory.
    """
    model.to_empty(device=torch.device("cpu") if is_offloaded else device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            is_stored = name not in module._non_persistent_buffers_set
            module.register_buffer(name, buffer.to(device), persistent=is_stored)
        init_buffers_ = getattr(module, "init_buffers_", None)
        if init_buffers_ is not None:
            with torch.device(device):
                init_buffers_()
