"""Pass rates of several answers to each case, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fctune.calls.metrics import wilson_interval


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """Return the probability that at least one of ``k`` answers drawn from a case's answers is right.

    1 - C(n - c, k) / C(n, k): the unbiased estimator of M. Chen et al., Evaluating Large Language Models Trained on
    Code (2021), section 2.1.
    """
    assert 0 <= num_right <= num_answers
    assert 1 <= k <= num_answers
    return 1 - math.comb(num_answers - num_right, k) / math.comb(num_answers, k)


def estimate_pass_rate(counts: Sequence[tuple[int, int]], k: int) -> dict[str, Any]:
    """Return the mean pass@k over cases with its 95 % interval: ``{"k", "rate", "n", "low", "high"}``.

    The interval accounts for the choice of cases; the answers to a case are one cluster. It is Wilson's, for the
    number of cases that would give the observed variance if each were right or wrong (N. Dean, M. Pagano, Evaluating
    confidence interval methods for binomial proportions in clustered surveys, Journal of Survey Statistics and
    Methodology 3, 2015). ``n`` counts the cases with at least ``k`` answers; others are left out. ``rate`` is None if
    there are none.

    Args:
        counts: The number of answers and of right ones, of each case.
        k: Number of answers drawn.
    """
    estimates = [pass_at_k(n, right, k) for n, right in counts if n >= k]
    n = len(estimates)
    if not n:
        return {"k": k, "rate": None, "n": 0, "low": 0.0, "high": 1.0}
    mean = math.fsum(estimates) / n
    variance = math.fsum((one - mean) ** 2 for one in estimates) / (n - 1) / n if n > 1 else 0.0
    # Equal estimates say nothing about their variance; each case then counts as one right or wrong answer.
    num_effective = mean * (1 - mean) / variance if variance > 0 else n
    low, high = wilson_interval(mean * num_effective, num_effective)
    return {"k": k, "rate": mean, "n": n, "low": low, "high": high}


def choose_ks(num_answers: int) -> list[int]:
    """Return the values of k to report for cases with this many answers: 1, 2, 4 and so on, and all of them."""
    return sorted({2**power for power in range(num_answers.bit_length()) if 2**power <= num_answers} | {num_answers})
