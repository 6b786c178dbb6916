"""Judge the predictions in a file against a suite: one result for each row, and rates by category.

Each prediction counts once, even if ids repeat. A case of a scored category without a prediction counts as wrong, and
so does an answer that never came.
"""

from __future__ import annotations

import json
import json.encoder
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError
from fctune.base.files import write_atomically
from fctune.tasks.evaluation.predictions import JudgedPrediction, Prediction, judge_prediction, read_predictions
from fctune.tasks.evaluation.summary import Tally
from fctune.tasks.judge import to_plain
from fctune.tasks.suite import Suite

# A kill loses the verdicts of this time at most.
_FLUSH_EVERY_S = 0.5


def _make_encoder() -> Callable[[Any], str]:
    """Return a function that writes a row as ``json.dumps(row, ensure_ascii=False)`` does.

    ``JSONEncoder.encode`` makes its C encoder anew for each row, which takes as long as writing the row. Rows hold what
    was read from JSON, so there are no cycles to look for.
    """
    encoder = json.JSONEncoder(ensure_ascii=False, check_circular=False)
    make = vars(json.encoder).get("c_make_encoder")
    if make is None:  # Python without the C accelerator
        return encoder.encode
    write = make(None, encoder.default, json.encoder.encode_basestring, None, ": ", ", ", False, False, True)
    return lambda row: "".join(write(row, 0))


_encode = _make_encoder()


def score_file(
    suite: Suite, predictions: str | Path, out: str | Path, default_format: str | None = None
) -> dict[str, Any]:
    """Judge a file of predictions, write one row for each in its order, and return the summary.

    An output row has ``id``, ``category``, ``valid``, ``reason`` and ``verdict``; ``differences``, if there are any;
    the ``calls`` and ``malformed`` stretches of a text's strict reading; and ``valid_lenient`` and ``reason_lenient``
    for a text, or if the two readings differ. For cases of a benchmark, ``valid`` and ``reason`` are its own
    verdict; ``verdict`` is always that of the strict typed match. ``category`` is None if no case has the id, ``valid``
    if its category cannot be run. An answer that could not be judged has the verdict "not_judged" and counts as wrong.

    Rows are written as they are judged, to ``partial_path(out)``, which becomes the output file at the end. If the
    predictions or the disk fail before, the verdicts so far stay there.

    The summary has the rates of ``Tally.summarise``, ``num_cases``, ``not_run`` (categories and reasons),
    ``unknown_ids`` with how often each occurred, ``missing_ids``, ``num_repeated_ids`` and ``not_judged`` with the
    reason for each id.

    Args:
        suite: The cases.
        predictions: A JSONL file; see ``fctune.tasks.evaluation.predictions``.
        out: The JSONL file to write; the summary is written next to it, with the suffix ``.summary.json``.
        default_format: The call format of texts whose row names none.

    Raises:
        ConfigError: The output file cannot be written, or the call format does not exist.
        DataError: The predictions cannot be read.
    """
    out = Path(out)
    if out.exists() and not out.is_file():
        raise ConfigError(f"--out {out}: not a file. Pass a file path.")
    partial = partial_path(out)
    if Path(predictions).exists() and any(path.exists() and path.samefile(predictions) for path in (out, partial)):
        raise ConfigError(f"--out {out}: is also the file of predictions. Pass another file.")
    count = _Count(suite)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Half a surrogate pair, which JSON can express and UTF-8 cannot, stays escaped.
        with open(partial, "w", encoding="utf-8", errors="backslashreplace") as rows:
            flushed = time.monotonic()
            for prediction in read_predictions(predictions, default_format):
                rows.write(_encode(count.judge(prediction)) + "\n")
                if (now := time.monotonic()) - flushed > _FLUSH_EVERY_S:
                    rows.flush()
                    flushed = now
        summary = {"predictions": str(predictions), **count.summarise()}
        text = json.dumps(summary, indent=2, ensure_ascii=False) + "\n"
        write_atomically(out.with_suffix(".summary.json"), text.encode("utf-8", "backslashreplace"))
        partial.replace(out)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror}).") from None
    return summary


def partial_path(out: Path) -> Path:
    """Return the file next to ``out`` that verdicts are written to until all of them are made."""
    return out.with_suffix(f".partial{out.suffix}")


class _Count:
    """Judges predictions one by one and counts them."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self._tally = Tally(suite.benchmark is None, suite.weigh)
        self._ids: Counter[str] = Counter()
        self._unknown: Counter[str] = Counter()
        self._not_judged: dict[str, str] = {}

    def judge(self, prediction: Prediction) -> dict[str, Any]:
        """Judge and count one prediction, and return its output row."""
        self._ids[prediction.id] += 1
        case = self._suite.find(prediction.id)
        if case is None:
            category = self._suite.find_category(prediction.id)
            if (reason := self._suite.not_run.get(category or "")) is not None:
                return {"id": prediction.id, "category": category, "valid": None, "reason": reason}
            self._unknown[prediction.id] += 1
            return {"id": prediction.id, "category": None, "valid": False, "reason": "no such case"}
        judged = judge_prediction(case, prediction)
        strict, lenient = judged.strict, judged.lenient
        if strict.outcome.verdict == "not_judged" or lenient.outcome.verdict == "not_judged":
            self._not_judged[prediction.id] = next(
                one.reason for one in (lenient, strict) if one.outcome.verdict == "not_judged"
            )
        self._tally.add(case.category, strict, lenient)
        return _to_row(prediction.id, case.category, judged)

    def summarise(self) -> dict[str, Any]:
        """Count the cases without a prediction, and return the summary."""
        missing = [case for case in self._suite.all_cases if case.id not in self._ids]
        for case in missing:
            failure = case.judge_failure("no prediction")
            self._tally.add(case.category, failure, failure)
        return {
            "suite": self._suite.name,
            "benchmark": self._suite.benchmark,
            "release": self._suite.release,
            "num_cases": len(self._suite.all_cases),
            "not_run": dict(self._suite.not_run),
            **self._tally.summarise(),
            "unknown_ids": dict(self._unknown),
            "missing_ids": [case.id for case in missing],
            "not_judged": dict(self._not_judged),
            "num_repeated_ids": sum(times > 1 for times in self._ids.values()),
        }


def _to_row(case_id: str, category: str, judged: JudgedPrediction) -> dict[str, Any]:
    strict, lenient = judged.strict, judged.lenient
    row: dict[str, Any] = {
        "id": case_id,
        "category": category,
        "valid": strict.is_valid,
        "reason": strict.reason,
        "verdict": strict.outcome.verdict,
    }
    if strict.differences:
        row["differences"] = strict.differences
    if judged.parsed is not None:
        row |= to_plain(judged.parsed)
    if lenient is not strict:
        row["valid_lenient"], row["reason_lenient"] = lenient.is_valid, lenient.reason
    elif judged.parsed is not None:
        row["valid_lenient"], row["reason_lenient"] = row["valid"], row["reason"]
    return row
