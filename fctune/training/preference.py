"""Objectives of preference pairs: DPO, IPO, SimPO and ORPO."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fctune.config.sections.preference import PreferenceConfig
from fctune.data.loader import StepTotals
from fctune.models.causal_lm import CausalLM
from fctune.models.lora import adapters_off
from fctune.training.objective import Objective
from fctune.training.prefetch import Inputs


class PreferenceObjective(Objective):
    """Mean loss of the preference pairs of a step.

    The policy and the reference are the same model, with and without its adapters, so the reference takes a forward
    pass but no memory of its own.

    Args:
        config: The ``preference`` section of the run's config.
    """

    metrics = (
        "reward_accuracy",
        "reward_margin",
        "reward_chosen",
        "reward_rejected",
        "logps_chosen",
        "logps_rejected",
        "sft_loss",
    )

    def __init__(self, config: PreferenceConfig):
        self.config = config

    def compute(
        self, model: CausalLM, inputs: Inputs, totals: StepTotals, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return the part of the mean loss over pairs, and of the metrics, which are means over pairs too."""
        assert inputs.answer_lengths is not None
        lengths = inputs.answer_lengths.to(device, non_blocking=True)
        arguments = inputs.arguments(device) | {"is_summed": False}
        reference = None
        if self.config.needs_reference:
            reference = sum_answers(compute_reference(model, arguments), lengths)
        losses = model(**arguments)
        policy = sum_answers(losses, lengths)
        if not len(lengths):
            return losses.sum(), losses.new_zeros(len(self.metrics))
        each, rewards = pair_losses(policy, reference, lengths, self.config)
        sft = -policy[0::2].sum() / totals.num_chosen
        loss = each.sum() / totals.num_preferences
        if weight := 1.0 if self.config.loss == "orpo" else self.config.sft_weight:
            loss = loss + weight * sft
        chosen, rejected = rewards.detach()
        sums = [(chosen > rejected).to(chosen), chosen - rejected, chosen, rejected, *policy.detach().view(-1, 2).T]
        means = torch.stack([one.sum() for one in sums]) / totals.num_preferences
        return loss, torch.cat([means, sft.detach()[None]])


@torch.no_grad()
def compute_reference(model: CausalLM, arguments: dict[str, object]) -> Tensor:
    """Return the losses of the supervised tokens, ``[n]``, without adapters and dropout."""
    was_training = model.training
    model.eval()
    with adapters_off(model):
        losses: Tensor = model(**arguments)
    model.train(was_training)
    return losses


def sum_answers(losses: Tensor, lengths: Tensor) -> Tensor:
    """Return the log-probability of each answer, float64 ``[a]``.

    Args:
        losses: Negative log-probabilities of the supervised tokens, answer by answer, ``[n]``.
        lengths: Supervised tokens of each answer, int64 ``[a]``.
    """
    if not len(lengths):
        return losses.double()[:0]
    # Lengths come from the loader; checking them would make the host wait for the device.
    total: Tensor = torch.segment_reduce(-losses.double(), "sum", lengths=lengths, unsafe=True)
    return total


def pair_losses(
    policy: Tensor, reference: Tensor | None, lengths: Tensor, config: PreferenceConfig
) -> tuple[Tensor, Tensor]:
    """Return the loss of each pair, ``[p]``, and the rewards of the chosen and the rejected answers, ``[2, p]``.

    The rewards are beta x log-probability, relative to the reference if there is one, in the loss's own normalisation.

    Args:
        policy: Log-probabilities of the answers under the policy, chosen and rejected in turn, ``[2p]``.
        reference: Log-probabilities under the reference; None if the loss has none.
        lengths: Supervised tokens of each answer, ``[2p]``.
        config: Loss and its options.
    """
    beta = config.chosen_beta
    scores = policy if reference is None else policy - reference
    if config.loss != "dpo" or config.length_normalized:
        scores = scores / lengths
    rewards = beta * scores.view(-1, 2).T
    margin = rewards[0] - rewards[1]
    match config.loss:
        case "dpo":
            smoothing = config.label_smoothing
            losses = -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
        case "ipo":
            losses = (margin / beta - 1 / (2 * beta)) ** 2
        case "simpo":
            losses = -logsigmoid(margin - config.margin)
        case "orpo":
            means = scores.view(-1, 2).T
            odds = means - log1mexp(means)
            losses = -beta * logsigmoid(odds[0] - odds[1])
    return losses, rewards


def log1mexp(x: Tensor) -> Tensor:
    """Return ``log(1 - exp(x))`` for ``x < 0``, without loss of digits near 0 or far from it (Maechler 2012)."""
    x = x.clamp(max=-torch.finfo(x.dtype).eps)  # a certain answer has infinite odds
    is_near = x > -math.log(2)
    return torch.where(
        is_near, torch.log(-torch.expm1(x.clamp(min=-math.log(2)))), torch.log1p(-torch.exp(x.clamp(max=-math.log(2))))
    )
