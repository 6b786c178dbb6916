"""Reinforcement learning from verdicts: rollouts, rewards, advantages and the clipped loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from fctune.config.fields import AT_LEAST_0, AT_LEAST_1, MAY_CHANGE, Null, Range, SectionProblems, join_key
from fctune.config.sections.rollouts import JudgeConfig, RolloutConfig, is_dialogue_source

PolicyLoss = Literal["grpo", "dapo", "gspo", "dr_grpo"]
Advantage = Literal["group", "unbiased", "leave_one_out"]

# Clips where none are given: those of each paper's main experiments.
_CLIPS: dict[PolicyLoss, tuple[float, float]] = {
    "grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "dr_grpo": (0.2, 0.2),
}


@dataclass(kw_only=True, slots=True)
class GRPOConfig(RolloutConfig):
    """Groups of answers to each case, rewarded by the judge, and the policy loss. A step's batch is all of its answers,
    so `global_batch_size` is not used; `epochs` are passes over the cases.
    """

    section: ClassVar[str] = "grpo"

    prompts_per_step: Annotated[int, AT_LEAST_1] = 16
    """Cases of each batch of rollouts."""
    group_size: Annotated[int, Range(ge=2)] = 8
    """Answers to each case; an advantage compares an answer with the others of its group."""
    # Not a default mapping, which given parts would be added to.
    reward: Annotated[
        dict[str, float] | None, Null("`strict: 1`, or `judge: 1` with a judge; in dialogues see docs/environments.md")
    ] = None
    """Weight of each part of the reward: `strict`, `lenient`, `names`, `arguments`, `schema`, `format`, `brevity`,
    `judge` (see `judge`), and `random` as a control."""
    judge: Annotated[JudgeConfig | None, Null("none")] = None
    """Language model that scores answers in words; not for dialogues, which have exact verdicts."""
    advantage: Advantage = "group"
    """Advantage of an answer: `group`, its reward minus the group's mean, over the group's standard deviation
    (arXiv:2402.03300); `unbiased`, without the division (arXiv:2503.20783); `leave_one_out`, its reward minus the mean
    of the others (arXiv:2402.14740)."""
    loss: PolicyLoss = "dapo"
    """Clipped loss: `grpo`, a mean over tokens, then over answers (arXiv:2402.03300); `dapo`, one mean over all tokens
    and a higher upper clip (arXiv:2503.14476); `gspo`, one ratio for each answer (arXiv:2507.18071); `dr_grpo`, a sum
    over tokens divided by a constant, `max_new_tokens` for each answer of the batch, masked ones included, so that
    length has no influence (arXiv:2503.20783)."""
    clip_low: Annotated[float | None, Range(gt=0, lt=1), Null("0.2; 3e-4 for `gspo`")] = None
    """The ratio is clipped at 1 minus this."""
    clip_high: Annotated[float | None, Range(gt=0), Null("0.2; 0.28 for `dapo`, 4e-4 for `gspo`")] = None
    """The ratio is clipped at 1 plus this."""
    kl_beta: Annotated[float, AT_LEAST_0] = 0.0
    """Weight of the divergence from the base with its adapter switched off, which takes one more forward pass per step;
    0: none."""
    updates_per_batch: Annotated[int, AT_LEAST_1] = 1
    """Optimizer steps on each batch of rollouts."""
    ratio_cap: Annotated[float, Range(gt=1)] = 2.0
    """Largest weight that corrects a token for the difference between the policy that generated it and the one in
    training (truncated importance sampling), with one update per batch. With several updates, the ratio itself is
    clipped."""
    drop_flat_groups: bool = True
    """Drop groups whose answers all have the same reward, which teach nothing, and use further cases instead."""
    max_refills: Annotated[int, AT_LEAST_0] = 2
    """Rounds of replacement cases per batch; after the last one, the batch is trained as it is. With batches ahead, a
    round is `prompts_per_step` cases."""
    max_flat_batches: Annotated[int, AT_LEAST_1, MAY_CHANGE] = 10
    """End the run after this many batches in a row without any group to learn from."""
    mask_cut: bool = True
    """Do not train answers that `max_new_tokens` cut off; they count in their group's mean."""

    @property
    def clips(self) -> tuple[float, float]:
        """The configured lower and upper clip, or the defaults of the loss."""
        low, high = _CLIPS[self.loss]
        return (low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high)

    @property
    def rows_per_step(self) -> int:
        """Conversations of each step that come from rows: none."""
        return 0

    @property
    def answers_per_batch(self) -> int:
        """Answers of a batch in which no group is dropped."""
        return self.prompts_per_step * self.group_size

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check the rollouts, and that a judge has answers in words to score."""
        RolloutConfig.check(self, where, problems)
        if self.judge is not None and is_dialogue_source(self.cases):
            key = join_key(where, "judge")
            problems.add(("judge", "cases"), f"{key}: only for cases of one turn, not for {self.cases}; remove it")
