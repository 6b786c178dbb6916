"""Load-balancing loss of a mixture of experts over a global batch (https://arxiv.org/abs/2101.03961).

With E experts, of which each token chooses k in each layer, over all tokens of the batch but padding:

    loss = E * sum over experts e of (c[e] / n) * (s[e] / n)

n is the number of pairs of a token and a layer, c[e] how many of them have e among the k largest router logits, s[e]
the sum of the router's softmax for e; all layers together, as in transformers. It is not the sum of the losses of parts
of the batch, so c and n are added up over micro-batches and ranks first. The gradient flows through s alone, and is
then a sum over them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fctune.base import distributed
from fctune.models.forward_override import override_forward_


class RouterBalance:
    """Observes the routers of a model, and returns the part of a micro-batch in the loss of its global batch.

    The counts of the global batch are needed before its first backward. If a step has one micro-batch, ``loss`` adds
    them up over ranks; for several, pass each through the model first and call ``add_counts``, then ``finish_counts``.

    Attributes:
        value: Parts of the loss since the start of the step, without the coefficient; None before the first.
    """

    def __init__(self, coefficient: float, num_experts: int, top_k: int):
        self.coefficient, self.num_experts, self.top_k = coefficient, num_experts, top_k
        self.value: Tensor | None = None
        self._mask: Tensor | None = None  # tokens other than padding in the last forward; None: not observed
        self._routers: list[Any] = []
        self._is_recording = False
        self._counted: Tensor | None = None  # c and n of this rank
        self._totals: Tensor | None = None  # c and n of the global batch

    def observe_(self, router: Any, index: int) -> None:
        """Observe a router, whose output has its logits at ``index``, in place."""
        router._balance, router._logits_index, router._observed = self, index, None
        self._routers.append(router)
        override_forward_(router, _route_and_observe)

    def start_forward(self, tokens: Tensor, row_lengths: Tensor | None, is_observed: bool) -> None:
        """Start a forward pass of tokens ``[b, s]``, whose rows end in padding after ``row_lengths [b]`` tokens."""
        self._is_recording, self._mask = is_observed, None
        for router in self._routers:
            router._observed = None
        if is_observed:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            is_token = positions >= 0 if row_lengths is None else positions < row_lengths[:, None]
            self._mask = is_token.flatten()

    def end_forward(self) -> None:
        """End a forward pass; what recomputation repeats of it is not observed."""
        self._is_recording = False

    def start_step(self) -> None:
        """Start a global step: forget the choices of the step before."""
        self.value = self._counted = self._totals = None

    def add_counts(self) -> None:
        """Count the choices of the last forward pass."""
        counts = self._last_counts()
        self._counted = counts if self._counted is None else self._counted + counts

    def finish_counts(self) -> None:
        """Add up over ranks what was counted since the start of the step."""
        assert self._counted is not None, "no forward pass was counted"
        self._totals = distributed.sum_over_ranks(self._counted)

    def loss(self) -> Tensor:
        """Return the part of the last forward pass in the loss of the global batch, times the coefficient."""
        if self._totals is None:
            self.add_counts()
            self.finish_counts()
        assert self._totals is not None
        num_pairs = self._totals[-1]
        sums = torch.stack([sums for _, sums in self._observed]).sum(0)
        part = self.num_experts * (self._totals[:-1] / num_pairs * (sums / num_pairs)).sum()
        self.value = part.detach() if self.value is None else self.value + part.detach()
        return self.coefficient * part

    def _last_counts(self) -> Tensor:
        """Return c and n of the last forward pass, ``[experts + 1]``."""
        assert self._mask is not None
        observed = self._observed
        num_pairs = self._mask.sum() * len(observed)
        return torch.cat([torch.stack([counts for counts, _ in observed]).sum(0), num_pairs[None]])

    @property
    def _observed(self) -> list[tuple[Tensor, Tensor]]:
        """Return the counts and the sums of probabilities of each router that ran."""
        return [router._observed for router in self._routers if router._observed is not None]


def _route_and_observe(router: Any, own: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    outputs, balance = own(*inputs, **options), router._balance
    if balance._mask is not None:
        # Recomputation must save the tensors that forward saved, so it computes this again for nobody.
        observed = _count_choices(outputs[router._logits_index].flatten(0, -2), balance._mask, balance.top_k)
        if balance._is_recording:
            router._observed = observed
    return outputs


def _count_choices(logits: Tensor, mask: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return how often each expert is chosen, and the sum of its probabilities, both float64 ``[experts]``.

    Args:
        logits: Logits of a router, ``[tokens, experts]``.
        mask: Tokens to count, bool ``[tokens]``.
        top_k: Experts that a token chooses.
    """
    wide = torch.float64 if logits.dtype is torch.float64 else torch.float32
    chosen = logits.topk(top_k, dim=-1).indices
    weights = mask.to(torch.float64).repeat_interleave(top_k)
    counts = torch.zeros(logits.shape[-1], dtype=torch.float64, device=logits.device)
    counts = counts.index_add(0, chosen.flatten(), weights)
    probabilities = logits.softmax(-1, dtype=wide)
    return counts, (probabilities * mask[:, None]).sum(0).to(torch.float64)
