"""Statistics of reasoning before the answer: shares of answers and mean number of tokens, by category."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fctune.calls.metrics import rate

Row = Mapping[str, Any]


def summarise_reasoning(rows: Sequence[Row], has_total: bool) -> dict[str, dict[str, Any]]:
    """Return the use of reasoning by category; empty if no answer reasons.

    Each answer counts, so a conversation of several answers counts several times; cases without an answer do not.

    Each category has ``reasoned``, the share of answers with any reasoning; ``unclosed``, those whose reasoning never
    ended, so that nothing follows it; ``cut``, those of them that the limit of tokens ended; ``mean_tokens`` of the
    answers that reason, None if no number of tokens is known, and ``num_counted``, how many of them are known.

    Args:
        rows: Rows of results.
        has_total: Also summarise all categories together, as ``all``.
    """
    found: dict[str, list[Row | None]] = defaultdict(list)
    for row in rows:
        answers = [answer.get("reasoning") for answer in _iter_answers(row)]
        found[row["category"]] += answers
    by_category = {name: found[name] for name in sorted(found) if found[name]}
    if not any(answer is not None for answers in by_category.values() for answer in answers):
        return {}
    if has_total:
        by_category.pop("all", None)
        by_category["all"] = [answer for answers in found.values() for answer in answers]
    return {name: _summarise(answers) for name, answers in by_category.items()}


def _iter_answers(row: Row) -> Iterable[Row]:
    """Iterate over the answers of a row: the steps of a conversation, or the one answer of a single-turn case."""
    if "turns" in row:
        return (step for turn in row["turns"] for step in turn)
    return () if row.get("error") is not None else (row,)


def _summarise(answers: Sequence[Row | None]) -> dict[str, Any]:
    given = [answer for answer in answers if answer is not None]
    reasoned = [answer for answer in given if answer["text"]]
    counts = [answer["num_tokens"] for answer in reasoned if answer["num_tokens"] is not None]
    n = len(answers)
    return {
        "reasoned": rate(len(reasoned), n),
        "unclosed": rate(sum(not answer["is_closed"] for answer in given), n),
        "cut": rate(sum(answer["is_cut"] for answer in given), n),
        "mean_tokens": sum(counts) / len(counts) if counts else None,
        "num_counted": len(counts),
    }
