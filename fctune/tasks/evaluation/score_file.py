"""Judge the predictions in a file against a suite: one result for each row, and rates by category.

Each prediction counts once, even if ids repeat. A case of a scored category without a prediction counts as wrong, and
so does an answer that never came.

A row of the file is one answer, in JSON:

- ``{"id", "calls": [{"name", "arguments"}, ...]}``: calls that were parsed elsewhere, also in OpenAI's shape; see
  ``fctune.calls.tool_calls``. An additional ``"malformed": [reason, ...]`` lists parts of the answer that were meant as
  calls but could not be parsed.
- ``{"id", "text", "format"}``: the model's text and its call format, parsed here. Reasoning in the text, such as
  ``<think>...</think>``, is left out: a call inside it is none.
- ``{"id", "turns": [[step, ...], ...]}``: for a multi-turn case, the model's answers in each turn of the user, until it
  makes no more calls; a step is a list of calls or a text.

Any other row with an id is a case without an answer, such as ``{"id", "error"}``; it is wrong, never skipped.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fctune.base.errors import ConfigError, DataError
from fctune.base.files import write_atomically
from fctune.base.json_reader import ParseError, decode_json
from fctune.calls.answers import read_text
from fctune.calls.formats.base import CallFormat, Malformed, Parsed, with_decoded
from fctune.calls.formats.registry import get_format
from fctune.calls.judge import Judgement, judge_error
from fctune.calls.reasoning.registry import find_reasoning
from fctune.calls.tool_calls import Reading, read_tool_calls
from fctune.data.conversation import Tool
from fctune.tasks.evaluation.results import name_beside
from fctune.tasks.evaluation.summary import Tally
from fctune.tasks.judge import judge_answer_case, judge_reading, judge_turns, to_plain
from fctune.tasks.suite import Suite
from fctune.tasks.suite_files import check_rows
from fctune.tasks.task import AnswerCase, Case, MultiTurnCase

_FLUSH_EVERY_S = 0.5  # a kill loses the verdicts of this time at most


class Prediction(NamedTuple):
    """One row of a file of predictions; ``calls``, ``text`` or ``turns`` holds the answer, if there is one.

    ``failure`` is the reason that there is none. ``fault`` is why the row is not strict JSON: then no part of it can be
    read strictly.
    """

    id: str
    calls: Reading | None = None
    text: str | None = None
    turns: tuple[tuple[Any, ...], ...] | None = None
    call_format: CallFormat | None = None
    failure: str = ""
    fault: str = ""

    def read(self, tools: Sequence[Tool]) -> Reading | None:
        """Read the answer to a single-turn case; None if the row holds none."""
        if self.calls is not None:
            return self.calls
        if self.text is None or self.call_format is None:
            return None
        return read_text(self.text, self.call_format, tools, find_reasoning(self.text))

    def read_turns(self, tools: Sequence[Sequence[Tool]]) -> list[list[Reading]] | None:
        """Read the steps of each turn of a multi-turn case; None if the row holds none.

        Args:
            tools: The tools on offer in each turn.
        """
        if self.turns is None:
            return None
        offered = [*tools, *[tools[-1]] * (len(self.turns) - len(tools))] if tools else [()] * len(self.turns)
        pairs = zip(self.turns, offered, strict=False)
        return [[self._read_step(step, on_offer) for step in turn] for turn, on_offer in pairs]

    def _read_step(self, step: Any, tools: Sequence[Tool]) -> Reading:
        if isinstance(step, str):
            assert self.call_format is not None
            return read_text(step, self.call_format, tools, find_reasoning(step))
        return _read_calls(step, self.fault)


class JudgedPrediction(NamedTuple):
    """A prediction's judgement in both readings; ``parsed`` is the strict reading of a text."""

    strict: Judgement
    lenient: Judgement
    parsed: Parsed | None = None


def judge_prediction(case: Case | MultiTurnCase, prediction: Prediction) -> JudgedPrediction:
    """Read and judge a prediction; an answer of the wrong kind, or none, is a failure.

    Whatever reading or judging raises becomes the judgement "not_judged".
    """
    try:
        if not isinstance(case, Case):
            return _judge_turns(case, prediction)
        if isinstance(case, AnswerCase):
            return _judge_text(case, prediction)
        reading = prediction.read(case.prompt.tools)
        if reading is not None:
            parsed = reading.strict if prediction.text is not None else None
            return JudgedPrediction(*judge_reading(case, reading), parsed)
        failure = case.judge_failure(prediction.failure or "a single-turn case needs calls or text")
        return JudgedPrediction(failure, failure)
    except Exception as error:  # a prediction may hold anything, and must not end the scoring of the others
        failure = judge_error(case.judge_failure(""), error)
        return JudgedPrediction(failure, failure)


def _judge_turns(case: MultiTurnCase, prediction: Prediction) -> JudgedPrediction:
    turns = prediction.read_turns([turn.tools for turn in case.turns])
    if turns is None:
        failure = case.judge_failure(prediction.failure or "a multi-turn case needs turns")
        return JudgedPrediction(failure, failure)
    return JudgedPrediction(*judge_turns(case, turns))


def _judge_text(case: AnswerCase, prediction: Prediction) -> JudgedPrediction:
    if prediction.text is None:
        failure = case.judge_failure(prediction.failure or "needs text")
        return JudgedPrediction(failure, failure)
    reasoning = find_reasoning(prediction.text)
    content = prediction.text if reasoning is None else reasoning.blank(prediction.text).strip()
    return JudgedPrediction(*judge_answer_case(case, content))


def read_predictions(
    path: str | Path, default_format: str | None = None, has_calls: bool = True
) -> Iterator[Prediction]:
    """Read the rows of a JSONL file, in order.

    Args:
        path: The file.
        default_format: The call format of texts whose row names none.
        has_calls: Calls are read in texts, which therefore need a format.

    Raises:
        ConfigError: The call format does not exist.
        DataError: The file is missing or empty, or has invalid rows, all of which are reported after the last row.
    """
    path = Path(path)
    formats: dict[Any, CallFormat] = {None: get_format(default_format)} if default_format else {}
    problems: list[str] = []
    num_rows = 0
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as lines:
            for number, line in enumerate(lines, start=1):
                if line.isspace():
                    continue
                num_rows += 1
                found = _read_row(line, formats, has_calls)
                if isinstance(found, str):
                    problems.append(f"{path}:{number}: {found}")
                else:
                    yield found
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}). Pass a JSONL file of predictions: id with calls, or with text "
            "and format."
        ) from None
    check_rows(path, "prediction", num_rows, problems)


def _read_row(line: str, formats: dict[Any, CallFormat], has_calls: bool) -> Prediction | str:
    """Read the prediction of a line, or return the reason that it cannot be read."""
    fault, is_readable = "", True
    try:
        row = decode_json(line)
    except ParseError as error:
        # The model's arguments may not be strict JSON; the id should be readable all the same.
        fault = error.reason
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return f"not JSON ({error.reason}, column {error.position + 1})"
        try:
            decode_json(line, lenient=True)
        except ParseError:
            is_readable = False
    if not isinstance(row, dict):
        return f"expected an object, got {type(row).__name__}"
    case_id = row.get("id")
    if isinstance(case_id, int) and not isinstance(case_id, bool):
        case_id = str(case_id)
    if not isinstance(case_id, str):
        return "no id, or one that is not a string"
    if not is_readable:
        unreadable = Parsed((), (Malformed(0, 0, fault),))
        strict = with_decoded(unreadable, lambda: read_tool_calls(row.get("calls")).strict)
        return Prediction(case_id, Reading(strict, unreadable))
    if (calls := row.get("calls")) is not None:
        reading = _read_calls(calls, fault)
        if row.get("malformed"):
            stretch = Malformed(0, 0, str(row["malformed"])[:200])
            reading = Reading(*(one._replace(malformed=(*one.malformed, stretch), decoded=None) for one in reading))
        return Prediction(case_id, reading)
    text, turns = row.get("text"), row.get("turns")
    if isinstance(turns, list) and all(isinstance(turn, list) for turn in turns):
        has_text = any(isinstance(step, str) for turn in turns for step in turn)
        call_format = _find_format(row, formats) if has_text else None
        if isinstance(call_format, str):
            return call_format
        return Prediction(case_id, turns=tuple(map(tuple, turns)), call_format=call_format, fault=fault)
    if isinstance(text, str):
        if not has_calls:
            return Prediction(case_id, text=text)
        call_format = _find_format(row, formats)
        return call_format if isinstance(call_format, str) else Prediction(case_id, text=text, call_format=call_format)
    return Prediction(case_id, failure=str(row.get("error") or "the row has no calls, text or turns")[:200])


def _read_calls(calls: Any, fault: str) -> Reading:
    """Read calls of a row; ``fault`` is why the row is not strict JSON."""
    reading = read_tool_calls(calls, is_bounded=True)
    if not fault:
        return reading
    refused = Parsed((), (Malformed(0, 0, fault),))
    return Reading(with_decoded(refused, lambda: read_tool_calls(calls).strict), reading.lenient)


def _find_format(row: dict[str, Any], formats: dict[Any, CallFormat]) -> CallFormat | str:
    name = row.get("format")
    if name not in formats:
        if not isinstance(name, str):
            return "text without its call format. Add it to the row as format, or pass --format"
        try:
            formats[name] = get_format(name)
        except ConfigError as error:
            return str(error).split("\n")[0]
    return formats[name]


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
        predictions: A JSONL file; see ``fctune.tasks.evaluation.score_file``.
        out: The JSONL file to write; the summary is written next to it, with the suffix ``.summary.json``.
        default_format: The call format of texts whose row names none.

    Raises:
        ConfigError: The output file holds something else or cannot be written, or the call format does not exist.
        DataError: The predictions cannot be read.
    """
    out = Path(out)
    if out.exists() and not out.is_file():
        raise ConfigError(f"--out {out}: not a file. Pass a file path.")
    partial = partial_path(out)
    if Path(predictions).exists() and any(path.exists() and path.samefile(predictions) for path in (out, partial)):
        raise ConfigError(f"--out {out}: is also the file of predictions. Pass another file.")
    if out.exists() and not _holds_verdicts(out):
        raise ConfigError(f"--out {out}: holds something other than verdicts of fctune score. Pass another file.")
    count = _Count(suite)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Half a surrogate pair, which JSON can express and UTF-8 cannot, stays escaped.
        with open(partial, "w", encoding="utf-8", errors="backslashreplace") as rows:
            flushed = time.monotonic()
            has_calls = not all(isinstance(case, AnswerCase) for case in suite.cases) or not suite.cases
            for prediction in read_predictions(predictions, default_format, has_calls):
                rows.write(json.dumps(count.judge(prediction), ensure_ascii=False) + "\n")
                if (now := time.monotonic()) - flushed > _FLUSH_EVERY_S:
                    rows.flush()
                    flushed = now
        summary = {"predictions": str(predictions), **count.summarise()}
        text = json.dumps(summary, indent=2, ensure_ascii=False) + "\n"
        write_atomically(name_beside(out, ".summary.json"), text.encode("utf-8", "backslashreplace"))
        partial.replace(out)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror}).") from None
    return summary


def _holds_verdicts(path: Path) -> bool:
    """Return True if the first line is a verdict, or there is none; cases and questions would be lost otherwise."""
    try:
        with open(path, "rb") as lines:
            first = lines.readline()
        row = json.loads(first) if first.strip() else {"id": "", "valid": None}
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be read ({error.strerror}).") from None
    except ValueError:
        return False
    return isinstance(row, dict) and row.keys() >= {"id", "valid"}


def partial_path(out: Path) -> Path:
    """Return the file next to ``out`` that verdicts are written to until all of them are made."""
    return out.with_suffix(f".partial{out.suffix}")


class _Count:
    """Judges predictions one by one and counts them."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self._tally = Tally(suite)
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
