"""Predictions in a file judged against a suite: a row out for each row in, and rates by category.

Each prediction counts as one, also where ids repeat. A case of a scored category without a prediction counts as wrong,
and so does an answer that never came. There is no rate over categories.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fctune.calls.cases import Case
from fctune.calls.formats.base import Parsed
from fctune.calls.metrics import Outcome, judge, judge_failure, rate, score
from fctune.calls.predictions import Prediction, read_predictions
from fctune.data.tool_schema import ToolSet
from fctune.errors import ConfigError
from fctune.files import open_atomically, write_atomically

_encode = json.JSONEncoder(ensure_ascii=False).encode


class Verdict(NamedTuple):
    """What came of one prediction.

    ``category`` is None where there is no such case, ``valid`` where it could not be judged; ``reason`` says why it is
    not True. ``outcome`` is the strict typed match, where there is one. Of a text there are ``parsed``, its strict
    reading, and ``lenient``, whether the lenient one is valid and why not.
    """

    category: str | None
    valid: bool | None
    reason: str = ""
    outcome: Outcome | None = None
    parsed: Parsed | None = None
    lenient: tuple[bool, str] | None = None


class Suite(ABC):
    """Cases that predictions are judged against."""

    @abstractmethod
    def judge(self, prediction: Prediction) -> Verdict:
        """The verdict on one prediction."""

    @abstractmethod
    def ids(self) -> Iterable[str]:
        """The ids of all cases of the categories that are scored, when every prediction was judged."""

    def select_rates(self, category: str, rates: dict[str, Any]) -> dict[str, Any]:
        """Those of the strict match's rates that say something of a category."""
        return rates


class CaseSuite(Suite):
    """Cases with their expected calls; a prediction is valid if its calls are those, typed and in any order."""

    def __init__(self, cases: Iterable[Case]) -> None:
        self._cases = {case.id: (case, ToolSet(case.prompt.tools)) for case in cases}

    def judge(self, prediction: Prediction) -> Verdict:
        """As ``Suite`` says."""
        if prediction.id not in self._cases:
            return Verdict(None, False, "no such case")
        case, tools = self._cases[prediction.id]
        readings = prediction.read(case.prompt.tools)
        if readings is None:
            failure = prediction.failure or "a case of one turn needs calls or text"
            return Verdict(case.category, False, failure, judge_failure(len(case.expected), failure))
        strict, lenient = (judge(case.expected, parsed, tools) for parsed in readings)
        return Verdict(
            case.category,
            strict.is_correct,
            _reason(strict),
            strict,
            *((readings[0], (lenient.is_correct, _reason(lenient))) if prediction.text is not None else ()),
        )

    def ids(self) -> Iterable[str]:
        """As ``Suite`` says."""
        return self._cases


def score_file(
    suite: Suite, predictions: str | Path, out: str | Path, default_format: str | None = None
) -> dict[str, Any]:
    """Judge a file of predictions, write a row for each in its order, and return the summary.

    An out row has ``id``, ``category``, ``valid`` and ``reason``; ``verdict`` and ``differences`` of the strict typed
    match, where there is one; and of a text the ``calls`` and ``malformed`` stretches of its strict reading, and
    ``valid_lenient`` and ``reason_lenient`` of its lenient one. The out file is whole or not there.

    The summary has ``categories``, each with ``n``, ``num_missing``, the rate ``valid``, where there were texts the
    rate ``valid_lenient``, and ``verdicts`` and ``rates`` of the strict match as ``score`` gives them; or ``n`` and
    ``not_run``, the reason. Beside them are ``unknown_ids`` with how often each came, ``missing_ids`` and
    ``num_repeated_ids``.

    Args:
        suite: The cases.
        predictions: JSONL; see ``read_predictions``.
        out: The JSONL file to write; the summary is written beside it, with the suffix ``.summary.json``.
        default_format: The wire format of texts whose row names none.

    Raises:
        ConfigError: The out file cannot be written, or there is no such format.
        DataError: What is wrong with the predictions.
    """
    out = Path(out)
    if out.exists() and not out.is_file():
        raise ConfigError(f"--out {out}: is no file; name one.")
    if out.exists() and Path(predictions).exists() and out.samefile(predictions):
        raise ConfigError(f"--out {out}: is the file of predictions; name another.")
    count = _Count()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # What JSON can say and UTF-8 cannot, half of a pair of surrogates, stays as JSON says it.
        with open_atomically(out, errors="backslashreplace") as rows:
            for prediction in read_predictions(predictions, default_format):
                verdict = suite.judge(prediction)
                rows.write(_to_row(prediction.id, verdict))
                count.add(prediction.id, verdict)
            summary = {"predictions": str(predictions), **count.summarise(suite)}
            text = json.dumps(summary, indent=2, ensure_ascii=False) + "\n"
            write_atomically(out.with_suffix(".summary.json"), text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror}).") from None
    return summary


@dataclass(slots=True)
class _Count:
    """What is counted of a file."""

    tallies: dict[str, _Tally] = field(default_factory=dict)
    ids: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)

    def add(self, case_id: str, verdict: Verdict) -> None:
        self.ids[case_id] += 1
        if verdict.category is None:
            self.unknown[case_id] += 1
        else:
            self._tally(verdict.category).add(verdict)

    def summarise(self, suite: Suite) -> dict[str, Any]:
        missing = [case_id for case_id in suite.ids() if case_id not in self.ids]
        for case_id in missing:
            verdict = suite.judge(Prediction(case_id, 0, failure="no prediction"))
            assert verdict.category is not None
            self._tally(verdict.category).add(verdict, is_missing=True)
        return {
            "categories": {name: tally.summarise(suite, name) for name, tally in sorted(self.tallies.items())},
            "unknown_ids": dict(self.unknown),
            "missing_ids": missing,
            "num_repeated_ids": sum(times > 1 for times in self.ids.values()),
        }

    def _tally(self, category: str) -> _Tally:
        if category not in self.tallies:
            self.tallies[category] = _Tally()
        return self.tallies[category]


@dataclass(slots=True)
class _Tally:
    """What is counted of one category."""

    valid: Counter[bool | None] = field(default_factory=Counter)
    valid_leniently: Counter[bool | None] = field(default_factory=Counter)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    num_texts: int = 0
    num_missing: int = 0
    not_run: str = ""

    def add(self, verdict: Verdict, is_missing: bool = False) -> None:
        self.valid[verdict.valid] += 1
        self.valid_leniently[verdict.lenient[0] if verdict.lenient else verdict.valid] += 1
        self.num_texts += verdict.lenient is not None
        self.num_missing += is_missing
        if verdict.valid is None:
            self.not_run = verdict.reason
        if (outcome := verdict.outcome) is not None:
            self.outcomes[outcome._replace(differences=()) if outcome.differences else outcome] += 1

    def summarise(self, suite: Suite, category: str) -> dict[str, Any]:
        n = self.valid.total()
        if self.not_run:
            return {"n": n, "not_run": self.not_run}
        summary: dict[str, Any] = {"n": n, "num_missing": self.num_missing, "valid": rate(self.valid[True], n)}
        if self.num_texts:
            summary["valid_lenient"] = rate(self.valid_leniently[True], n)
        if self.outcomes:
            scores = score({category: self.outcomes})[category]
            summary["verdicts"] = scores["verdicts"]
            summary["rates"] = suite.select_rates(category, scores["rates"])
        return summary


def _to_row(case_id: str, verdict: Verdict) -> str:
    row: dict[str, Any] = {
        "id": case_id,
        "category": verdict.category,
        "valid": verdict.valid,
        "reason": verdict.reason,
    }
    if verdict.outcome is not None:
        row["verdict"] = verdict.outcome.verdict
        if verdict.outcome.differences:
            row["differences"] = verdict.outcome.differences
    if verdict.parsed is not None:
        row["calls"] = [{"name": call.name, "arguments": call.arguments} for call in verdict.parsed.calls]
        row["malformed"] = [{"start": m.start, "end": m.end, "reason": m.reason} for m in verdict.parsed.malformed]
    if verdict.lenient is not None:
        row["valid_lenient"], row["reason_lenient"] = verdict.lenient
    return _encode(row) + "\n"


def _reason(outcome: Outcome) -> str:
    return "" if outcome.is_correct else next(iter(outcome.differences), outcome.verdict)
