"""The leaderboard's overall number, weighed as ``generate_leaderboard_csv`` of bfcl-eval 2026.3.23 weighs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from fctune.tasks.benchmarks.bfcl.cases import MULTI_TURN, SINGLE_TURN
from fctune.tasks.suite import Measured

WEB_SEARCH = ("web_search_base", "web_search_no_snippet")
MEMORY = ("memory_kv", "memory_vector", "memory_rec_sum")
AGENTIC = (*MEMORY, *WEB_SEARCH)

WEIGHTS = {"non_live": 10, "live": 10, "irrelevance": 10, "multi_turn": 30, "agentic": 40}
"""Percent of the overall number."""

NUM_CASES = {
    "simple_python": 400,
    "simple_java": 100,
    "simple_javascript": 50,
    "multiple": 200,
    "parallel": 200,
    "parallel_multiple": 200,
    "irrelevance": 240,
    "live_simple": 258,
    "live_multiple": 1053,
    "live_parallel": 16,
    "live_parallel_multiple": 24,
    "live_irrelevance": 884,
    "live_relevance": 16,
    **dict.fromkeys(MULTI_TURN, 200),
    **dict.fromkeys(MEMORY, 155),
    **dict.fromkeys(WEB_SEARCH, 100),
}
"""Number of cases of each category in that version of the wheel."""

_SIMPLE = ("simple_python", "simple_java", "simple_javascript")
_LIVE = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")


def weigh(measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Return the overall number and its five parts, each from 0 to 1.

    A category without a result counts as 0, as on the leaderboard, so that the number is a lower bound until everything
    is measured. live_relevance and format_sensitivity are in no part.

    Args:
        measured: Results by category; other names are ignored.

    Returns:
        ``overall``; ``parts`` by name; ``weights`` of the parts in percent; ``not_measured``, the categories that
        counted as 0; and ``incomplete``, those with fewer cases than the wheel has.
    """
    results = {name: measured.get(name, Measured(0.0, n)) for name, n in NUM_CASES.items()}

    def mean(names: Iterable[str]) -> float:
        return fmean(results[name].accuracy for name in names)

    live = [results[name] for name in _LIVE]
    num_live = sum(one.num_cases for one in live)
    parts = {
        "non_live": fmean([mean(_SIMPLE), *(mean([name]) for name in ("multiple", "parallel", "parallel_multiple"))]),
        "live": sum(one.accuracy * one.num_cases for one in live) / num_live if num_live else 0.0,
        "irrelevance": mean(("irrelevance", "live_irrelevance")),
        "multi_turn": mean(MULTI_TURN),
        "agentic": fmean((mean(WEB_SEARCH), mean(MEMORY))),
    }
    counted = [name for name in (*SINGLE_TURN, *MULTI_TURN, *AGENTIC) if name != "live_relevance"]
    return {
        "overall": sum(WEIGHTS[name] * part for name, part in parts.items()) / sum(WEIGHTS.values()),
        "parts": parts,
        "weights": dict(WEIGHTS),
        "not_measured": [name for name in counted if name not in measured],
        "incomplete": [name for name in counted if name in measured and measured[name].num_cases < NUM_CASES[name]],
    }
