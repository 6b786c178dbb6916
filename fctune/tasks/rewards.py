"""Rewards: parts of a verdict as numbers from 0 to 1, and their weighted sum."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

from fctune.base.errors import ConfigError
from fctune.calls.judge import Outcome
from fctune.config.parsing import suggest
from fctune.tasks.judge import JudgedEpisode

CONTROL: dict[str, str] = {"random": "0 or 1 by chance: a control, which must not improve anything"}
"""The part that any task has, with its meaning."""

REWARD_PARTS: dict[str, str] = {
    "strict": "1 if the calls are the expected ones, read in the model's own call format",
    "lenient": "1 if they are the expected ones as a serving engine parses them",
    "names": "F1 of the called tools' names",
    "arguments": "F1 of the names times F1 of the arguments of the calls with expected names",
    "schema": "share of the calls that match their tool's schema; 1 without calls",
    "format": "1 if nothing in the answer is a call that cannot be read",
    "brevity": "1 minus the share of the token limit that the answer takes",
    **CONTROL,
}
"""The parts, each with its meaning."""

BINARY = {"strict": 1.0}
"""The default weights: the strict verdict alone."""


def check_reward(
    weights: Mapping[str, float],
    where: str = "reward",
    parts: Mapping[str, str] = REWARD_PARTS,
    reward: str = "a reward",
) -> None:
    """Check the names and weights of a reward.

    Args:
        weights: Weight of each part.
        where: Option or config key, for the message.
        parts: Parts that exist, each with its meaning.
        reward: What has these parts, for the message.

    Raises:
        ConfigError: A part does not exist, a weight is not a number, or all weights are 0.
    """
    known = ", ".join(parts)
    for name, weight in weights.items():
        if name not in parts:
            close = suggest(name, list(parts))
            raise ConfigError(f"{where}.{name}: no such part of {reward}{close} (parts: {known}).")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ConfigError(f"{where}.{name}={weight}: expected a number, the weight of this part.")
    if not any(weights.values()):
        raise ConfigError(
            f"{where}: no part has a weight other than 0, so all answers have equal rewards (parts: {known})."
        )


def score_answer(judged: JudgedEpisode, max_new_tokens: int) -> dict[str, float]:
    """Return every part of ``REWARD_PARTS`` for a judged answer; without an answer all are 0."""
    if judged.answer.error is not None:
        return dict.fromkeys(REWARD_PARTS, 0.0)
    outcome, num_tokens = judged.strict.outcome, judged.answer.num_tokens
    return {
        "strict": float(judged.strict.is_valid),
        "lenient": float(judged.lenient.is_valid),
        "names": score_names(outcome),
        "arguments": score_arguments(outcome),
        "schema": _share(outcome.num_schema_valid, outcome.num_called),
        "format": float(not outcome.num_malformed),
        "brevity": 0.0 if num_tokens is None else max(0.0, 1 - num_tokens / max_new_tokens),
        "random": toss_coin(judged.case.id, judged.answer.text),
    }


def toss_coin(task_id: str, text: str) -> float:
    """Return 0 or 1 by chance, the same whenever a task's answer is rewarded again."""
    return float(hashlib.blake2b(f"{task_id} {text}".encode("utf-8", "surrogatepass"), digest_size=1).digest()[0] & 1)


def weigh_parts(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the weighted sum of an answer's parts."""
    return sum(weight * parts[name] for name, weight in weights.items())


def score_names(outcome: Outcome) -> float:
    """Return the F1 of the called names; 1 if no call is due and none was made. A malformed call counts as wrong."""
    return _f1(outcome.num_names_matched, outcome.num_expected, outcome.num_called + outcome.num_malformed)


def score_arguments(outcome: Outcome) -> float:
    """Return the F1 of the names times the F1 of the arguments of paired calls."""
    matched, due, given = (
        outcome.num_arguments_matched,
        outcome.num_arguments_expected,
        outcome.num_arguments_called,
    )
    return score_names(outcome) * _f1(matched, due, given)


def score_closeness(judged: JudgedEpisode) -> float:
    """Return how close an answer is to a right one, from 0 to 1: the mean of names, arguments and format.

    Names and arguments come from the lenient reading, so an answer that is wrong only in its format is a near miss.
    """
    lenient = judged.lenient.outcome
    has_format = float(not judged.strict.outcome.num_malformed)
    return (score_names(lenient) + score_arguments(lenient) + has_format) / 3


def _f1(matched: int, due: int, given: int) -> float:
    return 2 * matched / (due + given) if due + given else 1.0


def _share(valid: int | None, n: int) -> float:
    return 1.0 if not n or valid is None else valid / n
