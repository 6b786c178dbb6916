"""Strict typed match for the leaderboard's cases, in which each value has alternatives.

Reported next to the benchmark's own verdict, which accepts ``"New York"`` for ``"new-york"`` and pairs calls greedily.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fctune.calls.formats.base import Parsed
from fctune.calls.judge import ErrorKind, Outcome, classify
from fctune.calls.matching import assign, is_equal, value_key
from fctune.data.conversation import Call
from fctune.data.tool_schema import ToolSet
from fctune.tasks.benchmarks.bfcl.cases import BfclCase
from fctune.tasks.benchmarks.bfcl.checker import SCHEMA_TYPES, language_of, read_source

# More than any call has arguments: pairs that match completely are preferred to all others.
_COMPLETE_MATCH_GAIN = 1_000_000


class AnswerKey:
    """The answer of a single-turn case, prepared to judge many predictions.

    A value matches if it equals one of its alternatives as typed JSON, character for character. ``""`` among them means
    that the argument may be left out; it is a value only where the schema takes text. An optional argument counts as
    due if it was given. In Java and JavaScript the value of the source text is compared, and calls are not
    validated against their schemas, as every argument is text there.
    """

    def __init__(self, case: BfclCase) -> None:
        self._language = language_of(case.category)
        self._needs_any_call = case.category == "live_relevance"
        schemas = {f["name"]: f["parameters"].get("properties", {}) for f in case.functions}
        types = SCHEMA_TYPES[self._language]
        self._answers = [
            _Answer(name, _read_parameters(parameters, schemas.get(name, {}), types), schemas.get(name, {}))
            for answer in case.answers
            for name, parameters in answer.items()
        ]
        self._names = [answer.name for answer in self._answers]
        self._accepts = ToolSet(case.tools).accepts if case.tools and self._language == "python" else None

    @property
    def num_expected(self) -> int:
        """Number of calls that are due; one in live_relevance, where any call will do."""
        return len(self._answers) or int(self._needs_any_call)

    def judge(self, parsed: Parsed, is_exact: bool = False) -> Outcome:
        """Compare the calls of one prediction with the answer.

        Args:
            parsed: The answer as read.
            is_exact: The calls are known to be the answer; see ``BfclVerdict``.
        """
        calls = parsed.calls
        accepts = self._accepts
        num_schema_valid = sum([accepts(call) for call in calls]) if accepts else None
        if self._needs_any_call:
            verdict: ErrorKind = "malformed" if parsed.malformed else "correct" if calls else "missed_call"
            return Outcome(verdict, 1, len(calls), len(parsed.malformed), num_schema_valid=num_schema_valid)
        names = self._names
        if is_exact and not parsed.malformed:
            num_arguments = sum([len(call.arguments) for call in calls])
            counts = (len(calls), len(calls), 0, len(calls), num_arguments, num_arguments, num_arguments)
            return Outcome("correct", *counts, num_schema_valid)
        if (fitted := self._fit_in_order(calls)) is not None:
            pairs = [(index, index) for index in range(len(calls))]
        else:
            pairs, fitted = self._pair(calls)
        is_correct = (
            not parsed.malformed and len(pairs) == len(names) == len(calls) and all(fit.is_complete for fit in fitted)
        )
        return Outcome(
            "correct" if is_correct else classify(names, parsed),
            num_expected=len(names),
            num_called=len(calls),
            num_malformed=len(parsed.malformed),
            num_names_matched=len(pairs),
            num_arguments_expected=sum([fit.num_due for fit in fitted]),
            num_arguments_called=sum([len(calls[column].arguments) for _, column in pairs]),
            num_arguments_matched=sum([fit.num_matched for fit in fitted]),
            num_schema_valid=num_schema_valid,
        )

    def _fit_in_order(self, calls: Sequence[Call]) -> list[_Fit] | None:
        """Pair calls in order, which most predictions keep; None if another pairing may be better."""
        if len(calls) != len(self._answers):
            return None
        fitted = []
        for answer, call in zip(self._answers, calls, strict=True):
            if call.name != answer.name:
                return None
            fit = self._fit(answer, call)
            if not fit.is_complete and len(calls) > 1:
                return None
            fitted.append(fit)
        return fitted

    def _pair(self, calls: Sequence[Call]) -> tuple[list[tuple[int, int]], list[_Fit]]:
        """Find the best pairing of answers and calls, and how each pair fits."""
        fits = {}

        def gain(row: int, column: int) -> int:
            fit = fits[row, column] = self._fit(self._answers[row], calls[column])
            return fit.num_matched + (_COMPLETE_MATCH_GAIN if fit.is_complete else 0)

        pairs = assign(self._names, [call.name for call in calls], gain)
        return pairs, [fits.get(pair) or self._fit(self._answers[pair[0]], calls[pair[1]]) for pair in pairs]

    def _fit(self, answer: _Answer, call: Call) -> _Fit:
        num_matched = num_due = 0
        arguments = call.arguments
        is_source = self._language != "python"
        for key, (keys, objects, is_omittable) in answer.parameters.items():
            if key not in arguments:
                num_due += not is_omittable
                continue
            num_due += 1
            value = arguments[key]
            if is_source:
                value = self._read(value, answer.schemas.get(key))
            # A string or integer, like nine arguments of ten, is its own key.
            value_type = type(value)
            key_of_value = value if value_type is str or value_type is int else value_key(value)
            if key_of_value in keys or (objects and any(_fits_alternative(value, other) for other in objects)):
                num_matched += 1
        return _Fit(num_matched, num_due, num_matched == num_due == len(arguments))

    def _read(self, value: Any, schema: Mapping[str, Any] | None) -> Any:
        try:
            return value if schema is None else read_source(value, schema, self._language)
        except (KeyError, ValueError, NotImplementedError):
            return value


class _Fit(NamedTuple):
    """Match of a call with an answer; ``is_complete`` if every argument matches and none is missing or extra."""

    num_matched: int
    num_due: int
    is_complete: bool


class _Parameter(NamedTuple):
    """The alternatives of a parameter: keys of the values without objects, and the values that hold objects."""

    keys: frozenset[Hashable]
    objects: tuple[Any, ...]
    is_omittable: bool


@dataclass(frozen=True, slots=True)
class _Answer:
    name: str
    parameters: Mapping[str, _Parameter]
    schemas: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Alternatives:
    """The alternatives of one key inside an object."""

    values: tuple[Any, ...]
    is_omittable: bool


def _read_parameters(
    parameters: Mapping[str, Sequence[Any]], schemas: Mapping[str, Any], types: Mapping[str, type]
) -> dict[str, _Parameter]:
    read = {}
    for name, alternatives in parameters.items():
        values, is_omittable = _read_alternatives(alternatives, schemas.get(name, {}), types)
        objects = tuple(value for value in values if _holds_object(value))
        keys = frozenset(value_key(value) for value in values if not _holds_object(value))
        read[name] = _Parameter(keys, objects, is_omittable)
    return read


def _read_alternatives(
    alternatives: Sequence[Any], schema: Mapping[str, Any], types: Mapping[str, type]
) -> tuple[tuple[Any, ...], bool]:
    """Return the values that match, and whether the argument may be left out.

    Without a known type, ``""`` is a value if another alternative is text.
    """
    due = types.get(schema.get("type", ""))
    has_text = any(type(value) is str and value for value in alternatives) if due is None else due is str
    values = (_read_value(value, schema, types) for value in alternatives if has_text or value != "")
    return tuple(values), "" in alternatives


def _read_value(value: Any, schema: Mapping[str, Any], types: Mapping[str, type]) -> Any:
    """Return an alternative with ``_Alternatives`` for each key of the objects in it."""
    if isinstance(value, dict):
        schemas = schema.get("properties", {})
        lists = {key: held if isinstance(held, list) else [held] for key, held in value.items()}
        return {
            key: _Alternatives(*_read_alternatives(held, schemas.get(key, {}), types)) for key, held in lists.items()
        }
    if isinstance(value, list):
        return [_read_value(item, schema.get("items", {}), types) for item in value]
    return value


def _holds_object(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_holds_object, value)))


def _fits_alternative(value: Any, alternative: Any) -> bool:
    """Match a value with an alternative as ``_read_value`` returns it."""
    if isinstance(alternative, dict) and isinstance(value, dict):
        return value.keys() <= alternative.keys() and all(
            any(_fits_alternative(value[key], other) for other in others.values)
            if key in value
            else others.is_omittable
            for key, others in alternative.items()
        )
    if isinstance(alternative, list) and isinstance(value, list):
        return len(value) == len(alternative) and all(map(_fits_alternative, value, alternative))
    return not isinstance(alternative, (dict, list)) and is_equal(value, alternative)
