"""Policy gradients on rollouts: GRPO, DAPO, GSPO and Dr. GRPO."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from fctune.config.sections.grpo import Advantage, GRPOConfig
from fctune.data.loader import StepTotals
from fctune.models.causal_lm import CausalLM
from fctune.training.objective import Objective
from fctune.training.preference import compute_reference
from fctune.training.prefetch import Inputs

_STD_EPS = 1e-4  # added to a group's standard deviation, as in TRL


class PolicyObjective(Objective):
    """Clipped policy-gradient loss of the rollouts of a step.

    There are three policies: the one in training, the old one with which the clip compares it, and the one that
    generated the tokens, whose log-probabilities came with them. With one update per batch, the old policy is the one
    in training, so the ratio is 1 and the clip has no effect. A weight then corrects for the generating policy, which
    may be an update older and uses different kernels: min(pi_old / mu, cap), truncated importance sampling (Espeholt
    et al., arXiv:1802.01561, section 4.1). With several updates, the generating policy is the old one, and the clip
    bounds the ratio pi / mu itself.

    Args:
        config: The ``grpo`` section of the run's config.
    """

    metrics = (
        "entropy",
        "clip_share",
        "ratio_mean",
        "ratio_capped_share",
        "engine_gap",
        "kl",
        "ratio_max",
    )
    maxima = frozenset({"ratio_max"})

    def __init__(self, config: GRPOConfig):
        self.config = config

    def compute(
        self, model: CausalLM, inputs: Inputs, totals: StepTotals, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return the part of the loss, and of the metrics, which are means over the generated tokens."""
        assert inputs.answer_lengths is not None
        assert inputs.advantages is not None
        assert inputs.logprobs is not None
        config = self.config
        lengths, advantages, generating = (
            tensor.to(device, non_blocking=True)
            for tensor in (inputs.answer_lengths, inputs.advantages, inputs.logprobs)
        )
        arguments = inputs.arguments(device) | {"is_summed": False}
        reference = -compute_reference(model, arguments).double() if config.kl_beta else None
        losses = model(**arguments)
        if not len(lengths):
            return losses.sum(), torch.zeros(len(self.metrics), dtype=torch.float64, device=device)
        policy = -losses.double()
        now = policy.detach()
        ratios = (now - generating).exp()
        is_first = config.updates_per_batch == 1
        old = now if is_first else generating
        each, is_clipped = clipped_losses(policy, old, advantages, lengths, config)
        if is_first:
            each = each * ratios.clamp(max=config.ratio_cap)
        divergence = torch.zeros_like(now)
        if reference is not None:
            penalty = divergences(policy, reference)
            each = each + config.kl_beta * penalty
            divergence = penalty.detach()
        loss = average_losses(each, lengths, totals, config)
        sums = [
            -now.sum(),
            is_clipped.double().sum(),
            ratios.sum(),
            (ratios > config.ratio_cap).double().sum(),
            (now - generating).abs().sum(),
            divergence.sum(),
        ]
        return loss, torch.cat([torch.stack(sums) / totals.num_supervised, ratios.max()[None]])


def compute_advantages(rewards: Sequence[float], kind: Advantage) -> list[float]:
    """Return the advantages of the answers of one group, two or more.

    ``group`` is (r - mean) / (std + 1e-4) with the standard deviation of a sample (Shao et al., arXiv:2402.03300,
    section 4.1.2), ``unbiased`` is r - mean (Liu et al., arXiv:2503.20783, section 3.2), and ``leave_one_out`` is r
    minus the mean of the others (Ahmadian et al., arXiv:2402.14740, equation 6).
    """
    mean, n = math.fsum(rewards) / len(rewards), len(rewards)
    gains = [reward - mean for reward in rewards]
    if kind == "leave_one_out":
        return [gain * n / (n - 1) for gain in gains]
    if kind == "group":
        std = statistics.stdev(rewards)
        return [gain / (std + _STD_EPS) for gain in gains]
    return gains


def clipped_losses(
    policy: Tensor, old: Tensor, advantages: Tensor, lengths: Tensor, config: GRPOConfig
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, ``[n]``, and where the clip stopped the gradient, bool ``[n]``.

    The loss is -min(r A, clip(r, 1 - low, 1 + high) A) with the ratio r = pi / pi_old of the token (arXiv:2402.03300,
    equation 3; two clips: arXiv:2503.14476, equation 10). With ``gspo``, r is the ratio of the answer, the geometric
    mean over its tokens (arXiv:2507.18071, equation 7).

    Args:
        policy: Log-probabilities under the policy in training, ``[n]``, answer by answer.
        old: Log-probabilities under the old policy, ``[n]``.
        advantages: Advantage of each answer, ``[a]``.
        lengths: Tokens of each answer, int64 ``[a]``.
        config: Loss and clips.
    """
    low, high = config.clips
    log_ratios = policy - old
    if config.loss == "gspo":
        sums = torch.segment_reduce(log_ratios, "sum", lengths=lengths, unsafe=True)
        log_ratios = (sums / lengths).repeat_interleave(lengths, output_size=len(policy))
    ratios = log_ratios.exp()
    gains = advantages.repeat_interleave(lengths, output_size=len(policy))
    clipped = ratios.clamp(1 - low, 1 + high)
    is_clipped = ((ratios < 1 - low) & (gains < 0)) | ((ratios > 1 + high) & (gains > 0))
    return -torch.minimum(ratios * gains, clipped * gains), is_clipped


def divergences(policy: Tensor, reference: Tensor) -> Tensor:
    """Return an estimate of the divergence from the reference at each token, ``[n]``: q/p - log(q/p) - 1.

    The estimate is unbiased and never negative (arXiv:2402.03300, equation 4).
    """
    difference = reference - policy
    return torch.expm1(difference) - difference


def average_losses(losses: Tensor, lengths: Tensor, totals: StepTotals, config: GRPOConfig) -> Tensor:
    """Return the part of a step's loss that these tokens add.

    ``grpo`` and ``gspo`` average over an answer's tokens, then over answers; ``dapo`` over all tokens
    (arXiv:2503.14476, equation 8); ``dr_grpo`` divides by a constant, the tokens of a batch whose answers are all as
    long as they may be (arXiv:2503.20783, section 3.2), so that an answer has the same weight if others are masked.

    Args:
        losses: Loss of each token, ``[n]``, answer by answer.
        lengths: Tokens of each answer, ``[a]``.
        totals: Totals over the global step.
        config: Loss, and the sizes of its constant.
    """
    if config.loss == "dapo":
        return losses.sum() / totals.num_supervised
    if config.loss == "dr_grpo":
        return losses.sum() / (config.answers_per_batch * config.max_new_tokens)
    sums: Tensor = torch.segment_reduce(losses, "sum", lengths=lengths, unsafe=True)
    return (sums / lengths).sum() / totals.num_answers
