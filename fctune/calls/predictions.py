"""Predictions in a file: what a model answered to each case, as calls or as text.

A row is one answer, in JSON:

- ``{"id", "calls": [{"name", "arguments"}, ...]}``: the calls as read by whoever asked the model. OpenAI's shape is
  taken too: each inside of ``function``, arguments as a string of JSON. ``"malformed": [reason, ...]`` beside them says
  what of the answer was meant as a call and was none.
- ``{"id", "text", "format"}``: what the model wrote and in which wire format, read here in both readings.
- ``{"id", "turns": [[step, ...], ...]}``: of a multi-turn case, for each turn of the user the answers of the model one
  after another until it calls no more; a step is a list of calls or a text.

Any other row with an id is a case without an answer, such as ``{"id", "error"}``; that is wrong, never skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fctune.calls.formats.base import CallFormat, Malformed, Parsed
from fctune.calls.formats.registry import get_format
from fctune.data.conversation import Call, Tool
from fctune.errors import ConfigError, DataError
from fctune.parsing.json_reader import ParseError, decode_json

_NUM_SHOWN = 10

# The strict reading and the lenient one; of calls that were read elsewhere there is only one.
Readings = tuple[Parsed, Parsed]


class Prediction(NamedTuple):
    """One row of a file of predictions; what it holds of ``calls``, ``text`` and ``turns`` is the answer.

    ``failure`` says why there is none, and is empty where there is one.
    """

    id: str
    line: int
    calls: Parsed | None = None
    text: str | None = None
    turns: tuple[tuple[Any, ...], ...] | None = None
    call_format: CallFormat | None = None
    failure: str = ""

    def read(self, tools: Sequence[Tool]) -> Readings | None:
        """The answer of a single-turn case in both readings; None where the row holds none."""
        if self.calls is not None:
            return self.calls, self.calls
        if self.text is None or self.call_format is None:
            return None
        return self.call_format.parse_both(self.text, tools)

    def read_turns(self, tools: Sequence[Tool]) -> list[list[Readings]] | None:
        """The steps of each turn of a multi-turn case in both readings; None where the row holds none."""
        if self.turns is None:
            return None
        return [[self._read_step(step, tools) for step in turn] for turn in self.turns]

    def _read_step(self, step: Any, tools: Sequence[Tool]) -> Readings:
        if isinstance(step, str):
            assert self.call_format is not None
            return self.call_format.parse_both(step, tools)
        parsed = read_calls(step)
        return parsed, parsed


def read_predictions(path: str | Path, default_format: str | None = None) -> Iterator[Prediction]:
    """The rows of a JSONL file, in order.

    Args:
        path: The file.
        default_format: The wire format of texts whose row names none.

    Raises:
        ConfigError: No such format.
        DataError: No such file, no rows, or rows that say of no case what was answered; all of them in one report,
            when the last was read.
    """
    path = Path(path)
    formats: dict[Any, CallFormat] = {None: get_format(default_format)} if default_format else {}
    problems: list[str] = []
    number = num_rows = 0
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as lines:
            for number, line in enumerate(lines, start=1):
                if line.isspace():
                    continue
                num_rows += 1
                found = _read_row(line, number, formats)
                if isinstance(found, str):
                    problems.append(f"{path}:{number}: {found}")
                else:
                    yield found
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}). Pass a JSONL file of predictions: id with calls, or with text "
            "and format."
        ) from None
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:_NUM_SHOWN])
        count = "1 row is no prediction" if len(problems) == 1 else f"{len(problems):,} rows are no predictions"
        raise DataError(f"{path}: {count}\n{shown}\nFix what is named, or take it out.")
    if not num_rows:
        raise DataError(f"{path}: holds no predictions.")


def read_calls(value: Any) -> Parsed:
    """The calls of a list as endpoints give it; what is none is malformed, of no length as there is no text."""
    if not isinstance(value, list):
        return _malformed(f"calls are no list but {type(value).__name__}")
    calls = []
    faults = []
    for item in value:
        call = _read_call(item)
        if isinstance(call, Call):
            calls.append(call)
        else:
            faults.append(Malformed(0, 0, call))
    return Parsed(tuple(calls), tuple(faults))


def _read_row(line: str, number: int, formats: dict[Any, CallFormat]) -> Prediction | str:
    """The prediction of a line, or why it is none."""
    fault = ""
    try:
        row = decode_json(line)
    except ParseError as error:
        # What a model gave as arguments may be no JSON by the letter; whose answer it is should be legible.
        fault = error.reason
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return f"not JSON ({error.reason}, column {error.position + 1})"
    if not isinstance(row, dict):
        return f"an object was expected, not {type(row).__name__}"
    case_id = row.get("id")
    if isinstance(case_id, int) and not isinstance(case_id, bool):
        case_id = str(case_id)
    if not isinstance(case_id, str):
        return "no id that is text"
    if fault:
        return Prediction(case_id, number, calls=_malformed(fault))
    if (calls := row.get("calls")) is not None:
        parsed = read_calls(calls)
        if row.get("malformed"):
            parsed = Parsed(parsed.calls, (*parsed.malformed, *_malformed(str(row["malformed"])[:200]).malformed))
        return Prediction(case_id, number, calls=parsed)
    text, turns = row.get("text"), row.get("turns")
    if isinstance(turns, list) and all(isinstance(turn, list) for turn in turns):
        has_text = any(isinstance(step, str) for turn in turns for step in turn)
        call_format = _find_format(row, formats) if has_text else None
        if isinstance(call_format, str):
            return call_format
        return Prediction(case_id, number, turns=tuple(map(tuple, turns)), call_format=call_format)
    if isinstance(text, str):
        call_format = _find_format(row, formats)
        return (
            call_format
            if isinstance(call_format, str)
            else Prediction(case_id, number, text=text, call_format=call_format)
        )
    return Prediction(case_id, number, failure=str(row.get("error") or "the row holds no calls, text or turns")[:200])


def _find_format(row: dict[str, Any], formats: dict[Any, CallFormat]) -> CallFormat | str:
    name = row.get("format")
    if name not in formats:
        if not isinstance(name, str):
            return "text without its format. Add it to the row, or pass --format"
        try:
            formats[name] = get_format(name)
        except ConfigError as error:
            return str(error).split("\n")[0]
    return formats[name]


def _read_call(value: Any) -> Call | str:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        return f"a call is no object but {type(value).__name__}"
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        return "a call without a name"
    if isinstance(arguments, str):
        try:
            arguments = decode_json(arguments)
        except ParseError as error:
            return f"{name[:80]}: its arguments are no JSON: {error.reason}"
    if not isinstance(arguments, dict):
        return f"{name[:80]}: its arguments are no object but {type(arguments).__name__}"
    return Call(name, arguments)


def _malformed(reason: str) -> Parsed:
    return Parsed((), (Malformed(0, 0, reason),))
