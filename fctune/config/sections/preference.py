"""Preference training: the loss of pairs of a better and a worse answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fctune.config.fields import AT_LEAST_0, Null, Range, SectionProblems, join_key

PreferenceLoss = Literal["dpo", "ipo", "simpo", "orpo"]

# Losses that compare with the reference: the base with its adapter switched off.
WITH_REFERENCE: frozenset[PreferenceLoss] = frozenset({"dpo", "ipo"})

# beta where none is given: that of each paper's main experiments; for IPO, of the trainers that have it.
_BETAS: dict[PreferenceLoss, float] = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "orpo": 0.1}


@dataclass(kw_only=True, slots=True)
class PreferenceConfig:
    """Loss of preference pairs; log-probabilities are of the supervised tokens of an answer."""

    loss: PreferenceLoss = "dpo"
    """`dpo`: the log-odds that the policy prefers the chosen answer more than the reference does (arXiv:2305.18290);
    `ipo`: a squared loss with a target, on means over tokens (arXiv:2310.12036); `simpo`: mean log-probabilities and a
    margin, without reference (arXiv:2405.14734); `orpo`: supervised loss of the chosen answer and an odds ratio,
    without reference (arXiv:2403.07691). The reference is the base with the adapter switched off."""
    beta: Annotated[float | None, Range(gt=0), Null("0.1 for `dpo`, `ipo` and `orpo`, 2.0 for `simpo`")] = None
    """Strength of the preference; in `orpo` the weight of the odds ratio. Larger values of `dpo` and `ipo` stay closer
    to the reference."""
    length_normalized: bool = False
    """With `dpo`, divide each answer's log-probability ratio by its tokens. The other losses always use means."""
    label_smoothing: Annotated[float, Range(ge=0, lt=0.5)] = 0.0
    """With `dpo`, the share of pairs assumed to be the wrong way round (conservative DPO)."""
    margin: Annotated[float, AT_LEAST_0] = 1.0
    """With `simpo`, the target difference of the rewards (gamma)."""
    sft_weight: Annotated[float, AT_LEAST_0] = 0.0
    """Weight of the supervised loss of the chosen answers, a mean over their tokens, added to the loss. With `orpo` it
    is always 1."""

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares with the reference."""
        return self.loss in WITH_REFERENCE

    @property
    def chosen_beta(self) -> float:
        """The configured beta, or the default of the loss."""
        return _BETAS[self.loss] if self.beta is None else self.beta

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check for options that belong to other losses."""
        for key, value, owner in (
            ("length_normalized", self.length_normalized, "dpo"),
            ("label_smoothing", self.label_smoothing != 0, "dpo"),
            ("margin", self.margin != 1.0, "simpo"),
        ):
            if value and self.loss != owner:
                name = join_key(where, key)
                problems.add(
                    (key, "loss"), f"{name}: belongs to loss={owner}, and {where}.loss={self.loss}; leave it out"
                )
        if self.loss == "orpo" and self.sft_weight:
            problems.add(
                ("sft_weight", "loss"),
                f"{where}.sft_weight: loss=orpo contains the supervised loss at weight 1; leave it out",
            )
