"""Sample several answers to each case, judge them, and count the cases that are always, sometimes and never right."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fctune.base.distributed import World
from fctune.base.errors import ConfigError
from fctune.calls.formats.base import CallFormat
from fctune.calls.metrics import wilson_interval
from fctune.engines.engine import Engine
from fctune.tasks.evaluation.results import ResultsFile, read_rows
from fctune.tasks.evaluation.run import describe_run, run_suite
from fctune.tasks.judge import JudgedEpisode, Row, is_valid
from fctune.tasks.rewards import BINARY, REWARD_PARTS, score_answer, score_closeness, weigh_parts
from fctune.tasks.sampling.selection import group_by_case
from fctune.tasks.suite import Suite

# Fields of an evaluation's row that are the same for all answers to a case.
_CASE_FIELDS = ("messages", "tools", "expected_calls")


@dataclass(slots=True)
class Budget:
    """Limits after which no more answers are requested; answers in flight still count.

    Attributes:
        max_tokens: Generated tokens, including those of earlier runs into the same directory.
        max_seconds: Seconds of this run.
    """

    max_tokens: int | None = None
    max_seconds: float | None = None
    num_tokens: int = 0
    _start: float = field(default_factory=time.monotonic)

    @property
    def is_limited(self) -> bool:
        """True if tokens or seconds are limited."""
        return self.max_tokens is not None or self.max_seconds is not None

    def take(self, row: Row) -> bool:
        """Count an answer; returns True if the budget is used up.

        Raises:
            ConfigError: Tokens are limited, and the server does not report them.
        """
        if self.max_tokens is not None and row.get("error") is None:
            if row["num_tokens"] is None:
                raise ConfigError("--max-total-tokens: the server does not report tokens; pass --max-minutes instead.")
            self.num_tokens += row["num_tokens"]
        is_spent = self.max_tokens is not None and self.num_tokens >= self.max_tokens
        return is_spent or (self.max_seconds is not None and time.monotonic() - self._start >= self.max_seconds)


@dataclass(slots=True)
class Timings:
    """Duration of generating and judging in one run."""

    total_s: float = 0.0
    judging_s: float = 0.0
    num_answers: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the seconds, the number of answers, and the share of the time that judging took."""
        return {
            "total_s": self.total_s,
            "judging_s": self.judging_s,
            "num_answers": self.num_answers,
            "judging_share": self.judging_s / self.total_s,
        }


def sample_suite(
    suite: Suite,
    engine: Engine,
    call_format: CallFormat | None,
    results: ResultsFile,
    num_samples: int,
    *,
    max_new_tokens: int = 256,
    budget: Budget | None = None,
    is_fresh: bool = False,
    world: World | None = None,
    on_row: Callable[[Row, int, int], None] = lambda row, num_done, num_answers: None,
    settings: Mapping[str, Any] | None = None,
) -> tuple[list[Row] | None, dict[str, Any], Timings]:
    """Sample ``num_samples`` answers to each case of a suite; returns rows, settings and timings.

    A row is one answer: ``case``, ``sample``, the verdicts of both readings, ``scores`` (every part of a reward),
    ``closeness``, ``text`` and ``prose`` (without and with only what is not a call), ``num_tokens``, and the token ids
    with their log-probabilities if the engine keeps them. Rows survive a kill; the next run asks for the others.

    Args:
        suite: The cases; multi-turn ones are skipped.
        engine: The model or server.
        call_format: The call format of its text; None: the server has parsed the calls.
        results: Where rows are written, and where those of an earlier run are.
        num_samples: Answers to each case.
        max_new_tokens: Maximum length of an answer.
        budget: Limits; None: no limits.
        is_fresh: Discard the results of an earlier run.
        world: This process among several; None: there is only one.
        on_row: Called with each new row, the number of rows and the number of answers of this process.
        settings: Further settings that rows must have been written with.

    Raises:
        ConfigError: An earlier run into the same file had another model, tokenizer, suite or settings.
    """
    repeated, timings = repeat_cases(suite, num_samples), Timings()

    def to_row(judged: JudgedEpisode) -> Row:
        start = time.perf_counter()
        row = make_row(judged, max_new_tokens)
        timings.judging_s += judged.judging_s + time.perf_counter() - start
        timings.num_answers += 1
        return row

    if budget is not None and budget.max_tokens is not None and not is_fresh:
        budget.num_tokens = sum(row.get("num_tokens") or 0 for row in read_rows(results.path, is_partial=True))
    extra = {"num_samples": num_samples, **(settings or {})}
    start = time.perf_counter()
    rows = run_suite(
        repeated,
        engine,
        call_format,
        results,
        max_new_tokens=max_new_tokens,
        is_fresh=is_fresh,
        world=world,
        on_row=on_row,
        to_row=to_row,
        is_enough=budget.take if budget is not None and budget.is_limited else None,
        settings=extra,
    )
    timings.total_s = time.perf_counter() - start
    return rows, describe_run(repeated, engine, call_format, max_new_tokens) | extra, timings


def repeat_cases(suite: Suite, num_samples: int) -> Suite:
    """Return a suite that repeats each case ``num_samples`` times, with ids such as ``case#3``."""
    cases = [
        replace(case, id=f"{case.id}#{sample}", sample=sample) for sample in range(num_samples) for case in suite.cases
    ]
    return suite.with_cases(cases)


def make_row(judged: JudgedEpisode, max_new_tokens: int) -> Row:
    """Return the result row of one answer; see ``sample_suite``."""
    answer, strict = judged.answer, judged.reading.strict
    row = {key: value for key, value in judged.to_row().items() if key not in _CASE_FIELDS}
    row |= {
        "case": judged.case.id.rpartition("#")[0],
        "sample": judged.case.sample,
        "text": answer.reasoning.blank(answer.text).strip() if answer.reasoning else answer.text,
        "prose": strict.prose,
        "num_tokens": answer.num_tokens,
        "scores": score_answer(judged, max_new_tokens),
        "closeness": score_closeness(judged) if answer.error is None else 0.0,
    }
    if answer.tokens is not None:
        row |= {
            "prompt_token_ids": list(answer.tokens.prompt_ids),
            "token_ids": list(answer.tokens.ids),
            "logprobs": list(answer.tokens.logprobs),
        }
    return row


def summarise_samples(
    suite: Suite,
    rows: Sequence[Row],
    num_samples: int,
    settings: Mapping[str, Any],
    weights: Mapping[str, float] = BINARY,
) -> dict[str, Any]:
    """Count right answers and average rewards over all answers to the cases of a suite.

    ``pass_rates`` has a list of estimates by category, one for each k; ``shares`` counts the cases that are always,
    sometimes and never right, and those without any answer. Where no benchmark forbids it, ``all`` is a category.
    ``reward`` is the mean reward of all answers and that of each part.

    Args:
        suite: The cases, each once.
        rows: Rows of answers.
        num_samples: Answers requested for each case.
        settings: Settings that the answers depend on; copied into the summary.
        weights: Weights of the parts of the reward.
    """
    groups = group_by_case(row for row in rows if row.get("error") is None)
    counts = {case.id: count_right(groups.get(case.id, ())) for case in suite.cases}
    categories: dict[str, list[str]] = {}
    for case in suite.cases:
        categories.setdefault(case.category, []).append(case.id)
    if suite.benchmark is None:
        categories.pop("all", None)
        categories["all"] = [case.id for case in suite.cases]
    num_tokens = [row["num_tokens"] for group in groups.values() for row in group if row["num_tokens"] is not None]
    return {
        "suite": suite.name,
        "benchmark": suite.benchmark,
        "num_cases": len(suite.cases),
        "num_samples": num_samples,
        "num_answers": sum(n for n, _ in counts.values()),
        "num_missing": len(suite.cases) * num_samples - sum(n for n, _ in counts.values()),
        "num_cut": sum(bool(row.get("is_cut")) for row in rows),
        "mean_tokens": sum(num_tokens) / len(num_tokens) if num_tokens else None,
        "pass_rates": {
            name: [estimate_pass_rate([counts[i] for i in ids], k) for k in choose_ks(num_samples)]
            for name, ids in categories.items()
        },
        "shares": {name: _count_shares([counts[i] for i in ids]) for name, ids in categories.items()},
        "reward": _average_rewards(groups, weights),
        "not_run": dict(suite.not_run),
        "settings": dict(settings),
    }


def count_right(answers: Sequence[Row]) -> tuple[int, int]:
    """Return the number of answers, and of those that are right in the strict reading."""
    return len(answers), sum(map(is_valid, answers))


def name_share(num_answers: int, num_right: int) -> str:
    """Return ``always``, ``sometimes`` or ``never`` (right), or ``unanswered``."""
    if not num_answers:
        return "unanswered"
    return "always" if num_right == num_answers else "sometimes" if num_right else "never"


def _average_rewards(groups: Mapping[str, Sequence[Row]], weights: Mapping[str, float]) -> dict[str, Any]:
    scores = [row["scores"] for group in groups.values() for row in group]
    parts = {name: sum(one[name] for one in scores) / len(scores) for name in REWARD_PARTS} if scores else {}
    return {"weights": dict(weights), "mean": weigh_parts(parts, weights) if parts else None, "parts": parts}


def _count_shares(counts: Sequence[tuple[int, int]]) -> dict[str, int]:
    names = [name_share(*count) for count in counts]
    return {name: names.count(name) for name in ("always", "sometimes", "never", "unanswered")}


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
