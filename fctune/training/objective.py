"""Training objectives: means over the global batch, to which each micro-batch of each rank adds its part."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from fctune.data.loader import StepTotals
from fctune.models.causal_lm import CausalLM
from fctune.training.prefetch import Inputs


class Objective(ABC):
    """The loss of a training step.

    Attributes:
        metrics: Names of the metrics that it computes besides the loss.
        maxima: The last of the metrics, none negative, of which a step takes the maximum over its micro-batches and not
            the sum.
    """

    metrics: tuple[str, ...] = ()
    maxima: frozenset[str] = frozenset()

    @abstractmethod
    def compute(
        self, model: CausalLM, inputs: Inputs, totals: StepTotals, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return the parts that a micro-batch adds to the loss, a scalar, and to the metrics, ``[k]`` and detached.

        A micro-batch without any data returns a zero connected to every parameter, because sharded ranks must run the
        same collectives in backward.

        Args:
            model: Model to train, or to evaluate without gradients.
            inputs: Inputs of the micro-batch.
            totals: Totals over the global batch, which turn sums into means.
            device: Device of the model.
        """


class SupervisedObjective(Objective):
    """Weighted mean cross-entropy of the supervised tokens."""

    def compute(
        self, model: CausalLM, inputs: Inputs, totals: StepTotals, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return the part of the loss; there are no other metrics."""
        loss: Tensor = model(**inputs.arguments(device))
        return loss / totals.weight_sum, loss.new_zeros(0)
