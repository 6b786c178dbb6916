"""Summaries of judged answers: rates by category in both readings, and the use of reasoning."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fctune.calls.judge import BenchmarkVerdict, Judgement, Outcome
from fctune.calls.metrics import rate, score_outcomes
from fctune.tasks.answer_defects import DEFECTS
from fctune.tasks.judge import Row, judge_row
from fctune.tasks.suite import Measured, Suite

# Rates of categories in which any call will do.
_RATES_OF_ANY_CALL = ("accuracy", "well_formed", "missed_call", "schema_valid")

# Outcome and validity of the strict reading, and of the lenient one if it differs.
_Judged = tuple[Outcome, bool, tuple[Outcome, bool] | None]


class Tally:
    """Counts judged answers and computes their rates; the one summary of every command.

    Rates over all categories, as ``all``, are left out for a benchmark, whose categories must not be added up.
    """

    def __init__(self, suite: Suite) -> None:
        self._has_total, self._weigh, self._any_call = suite.benchmark is None, suite.weigh, suite.any_call
        self._has_benchmark, self._measure = False, suite.measure
        self._verdicts: tuple[list[BenchmarkVerdict], list[BenchmarkVerdict]] = ([], [])
        # Counts by category of equal judgements: in a large file most are equal, and counting takes most time.
        self._counts: dict[str, Counter[_Judged]] = defaultdict(Counter)

    def add(self, category: str, strict: Judgement, lenient: Judgement) -> None:
        """Count one answer, in both readings."""
        if strict.benchmark is not None and lenient.benchmark is not None:
            self._has_benchmark |= strict.benchmark.details is None
            if self._measure is not None:
                self._verdicts[0].append(strict.benchmark)
                self._verdicts[1].append(lenient.benchmark)
        other = None if lenient is strict else (lenient.outcome, lenient.is_valid)
        self._counts[category][strict.outcome, strict.is_valid, other] += 1

    def summarise(self) -> dict[str, Any]:
        """Return the rates by category.

        ``scores`` and ``lenient`` hold the output of ``fctune.calls.metrics.score_outcomes`` for the strict and the
        lenient reading, except that ``accuracy`` is the share of valid answers: see ``Judgement.is_valid``. Cases of
        a benchmark with verdicts of its own on calls also give ``typed``, the share of answers whose verdict is
        "correct", and ``leaderboard``, the overall number of ``Benchmark.weigh``, if it has one. ``figures`` are those
        of ``Benchmark.measure``, if there are any.
        """
        readings: dict[str, dict[str, Counter[tuple[Outcome, bool]]]] = {
            "scores": defaultdict(Counter),
            "lenient": defaultdict(Counter),
        }
        for category, counts in self._counts.items():
            for (outcome, is_valid, lenient), times in counts.items():
                readings["scores"][category][outcome, is_valid] += times
                readings["lenient"][category][lenient or (outcome, is_valid)] += times
        summary = {name: self._score(counts) for name, counts in readings.items()}
        if self._has_benchmark:
            summary["typed"] = {
                category: rate(scores["verdicts"]["correct"], scores["n"])
                for category, scores in summary["scores"].items()
            }
            accuracies = {name: scores["rates"]["accuracy"] for name, scores in summary["scores"].items()}
            measured = {name: Measured(one["rate"], one["n"]) for name, one in accuracies.items()}
            weighed = None if self._weigh is None else self._weigh(measured)
            summary |= {} if weighed is None else {"leaderboard": weighed}
        if self._measure is not None:
            summary["figures"] = self._measure(*self._verdicts)
        return summary

    def _score(self, counts: Mapping[str, Counter[tuple[Outcome, bool]]]) -> dict[str, Any]:
        by_category = {name: counts[name] for name in sorted(counts)}
        if self._has_total and by_category:
            # Also the category of cases that name none.
            by_category.pop("all", None)
            by_category["all"] = sum(counts.values(), Counter())
        outcomes: dict[str, Counter[Outcome]] = {name: Counter() for name in by_category}
        valid: Counter[str] = Counter()
        for name, judged in by_category.items():
            for (outcome, is_valid), times in judged.items():
                outcomes[name][outcome] += times
                valid[name] += times * is_valid
        scores = score_outcomes(outcomes)
        for name, category in scores.items():
            category["rates"]["accuracy"] = rate(valid[name], category["n"])
        for name in self._any_call & scores.keys():
            rates = scores[name]["rates"]
            scores[name]["rates"] = {rate_name: rates[rate_name] for rate_name in _RATES_OF_ANY_CALL}
        return scores


def tally_judgements(suite: Suite, judged: Iterable[tuple[str, Judgement, Judgement]]) -> Tally:
    """Count ``(category, strict, lenient)`` of a suite's answers."""
    tally = Tally(suite)
    for category, strict, lenient in judged:
        tally.add(category, strict, lenient)
    return tally


def summarise_run(suite: Suite, rows: Sequence[Row], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Summarise the rows of a run, with the rates of ``Tally.summarise``.

    A case without a row counts as one without an answer. ``reasoning`` is that of ``summarise_reasoning``, ``defects``
    that of ``summarise_defects``.

    Args:
        suite: The cases.
        rows: Rows of results.
        settings: What the answers depend on; copied into the summary.
    """
    by_id = {row["id"]: row for row in rows}
    cases = suite.all_cases
    missing: Row = {"error": "no row in the results"}
    judged = ((case.category, *judge_row(case, by_id.get(case.id, missing))) for case in cases)
    tally = tally_judgements(suite, judged)
    return {
        "suite": suite.name,
        "benchmark": suite.benchmark,
        "release": suite.release,
        "num_cases": len(cases),
        "num_no_answer": sum(by_id.get(case.id, missing).get("error") is not None for case in cases),
        "num_cut": sum(bool(row.get("is_cut")) for row in rows),
        "reasoning": summarise_reasoning(rows, has_total=suite.benchmark is None),
        "defects": summarise_defects(rows, has_total=suite.benchmark is None),
        "not_run": dict(suite.not_run),
        "settings": dict(settings),
        **tally.summarise(),
    }


def summarise_defects(rows: Sequence[Row], has_total: bool) -> dict[str, dict[str, Any]]:
    """Return by category, for each of ``DEFECTS``, the share of cases with an answer that has it.

    Cases without an answer do not count, nor those whose answer was chosen and not written.

    Args:
        rows: Rows of results.
        has_total: Also summarise all categories together, as ``all``.
    """
    found: dict[str, list[Sequence[str]]] = defaultdict(list)
    for row in rows:
        if row.get("error") is None and "defects" in row and "choices" not in row:
            found[row["category"]].append(row["defects"])
    by_category = {name: found[name] for name in sorted(found)}
    if has_total and found:
        by_category.pop("all", None)
        by_category["all"] = [defects for answers in found.values() for defects in answers]
    return {
        category: {name: rate(sum(name in defects for defects in answers), len(answers)) for name in DEFECTS}
        for category, answers in by_category.items()
    }


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
