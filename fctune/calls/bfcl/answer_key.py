"""The strict typed match for the leaderboard's cases: as ``score`` judges, where each value has alternatives.

Beside the benchmark's own verdict, which takes ``"New York"`` for ``"new-york"`` and pairs calls greedily.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fctune.calls.bfcl.cases import BfclCase
from fctune.calls.bfcl.checker import language_of, read_source
from fctune.calls.formats.base import Parsed
from fctune.calls.matching import assign, is_equal, value_key
from fctune.calls.metrics import Outcome, Verdict, classify
from fctune.data.conversation import Call
from fctune.data.tool_schema import ToolSet

# More than any call has arguments: a pair that fits in all of them comes before all pairs that do not.
_WHOLE = 1_000_000


class AnswerKey:
    """The answer of a single-turn case, made ready to judge many predictions.

    A value matches if it equals one of its alternatives as typed JSON, letter by letter. An argument that the answer
    lets be left out counts as due where it was given. In Java and JavaScript the value that the source text stands for
    is compared; calls are not held against a schema there, as all of them write text.
    """

    def __init__(self, case: BfclCase) -> None:
        self._language = language_of(case.category)
        self._needs_any_call = case.category == "live_relevance"
        schemas = {f["name"]: f["parameters"].get("properties", {}) for f in case.functions}
        self._answers = [
            _Answer(name, {key: _Parameter.of(values) for key, values in parameters.items()}, schemas.get(name, {}))
            for answer in case.answers
            for name, parameters in answer.items()
        ]
        self._names = [answer.name for answer in self._answers]
        self._accepts = ToolSet(case.tools).accepts if case.tools and self._language == "python" else None

    @property
    def num_expected(self) -> int:
        """How many calls are due; where any is, one."""
        return len(self._answers) or int(self._needs_any_call)

    def judge(self, parsed: Parsed, is_exact: bool = False) -> Outcome:
        """The outcome of one prediction.

        Args:
            parsed: What the model wrote.
            is_exact: The calls are known to be the answer, as ``BfclVerdict`` says.
        """
        calls = parsed.calls
        accepts = self._accepts
        num_schema_valid = sum([accepts(call) for call in calls]) if accepts else None
        if self._needs_any_call:
            verdict: Verdict = "malformed" if parsed.malformed else "correct" if calls else "missed_call"
            return Outcome(verdict, 1, len(calls), len(parsed.malformed), num_schema_valid=num_schema_valid)
        names = self._names
        if is_exact and not parsed.malformed:
            num_arguments = sum([len(call.arguments) for call in calls])
            counts = (len(calls), len(calls), 0, len(calls), num_arguments, num_arguments, num_arguments)
            return Outcome("correct", *counts, num_schema_valid)
        if (fitted := self._fit_in_order(calls)) is not None:
            pairs = [(place, place) for place in range(len(calls))]
        else:
            pairs, fitted = self._pair(calls)
        is_correct = (
            not parsed.malformed and len(pairs) == len(names) == len(calls) and all(fit.is_whole for fit in fitted)
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
        """How calls fit that stand where the answer has them, as most do; None where another pairing may be better."""
        if len(calls) != len(self._answers):
            return None
        fitted = []
        for answer, call in zip(self._answers, calls, strict=True):
            if call.name != answer.name:
                return None
            fit = self._fit(answer, call)
            if not fit.is_whole and len(calls) > 1:
                return None
            fitted.append(fit)
        return fitted

    def _pair(self, calls: Sequence[Call]) -> tuple[list[tuple[int, int]], list[_Fit]]:
        """The best pairing of answers and calls, and how each pair fits."""
        fits = {}

        def gain(row: int, column: int) -> int:
            fit = fits[row, column] = self._fit(self._answers[row], calls[column])
            return fit.num_matched + (_WHOLE if fit.is_whole else 0)

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
            # A text or whole number is its own key; nine arguments of ten are one.
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
    """How a call fits an answer: arguments that match, arguments that are due, and whether nothing is left over."""

    num_matched: int
    num_due: int
    is_whole: bool


class _Parameter(NamedTuple):
    """The alternatives of a parameter: keys of the values that hold no object, and those that do."""

    keys: frozenset[Hashable]
    objects: tuple[Any, ...]
    is_omittable: bool

    @staticmethod
    def of(alternatives: Sequence[Any]) -> _Parameter:
        objects = tuple(value for value in alternatives if _holds_object(value))
        keys = frozenset(value_key(value) for value in alternatives if not _holds_object(value))
        return _Parameter(keys, objects, "" in alternatives)


@dataclass(frozen=True, slots=True)
class _Answer:
    name: str
    parameters: Mapping[str, _Parameter]
    schemas: Mapping[str, Any]


def _holds_object(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_holds_object, value)))


def _fits_alternative(value: Any, alternative: Any) -> bool:
    """Whether a value is that of an answer in which an object holds a list of alternatives for each key."""
    if isinstance(alternative, dict) and isinstance(value, dict):
        return value.keys() <= alternative.keys() and all(
            any(_fits_alternative(value[key], other) for other in others) if key in value else "" in others
            for key, others in ((key, held if isinstance(held, list) else [held]) for key, held in alternative.items())
        )
    if isinstance(alternative, list) and isinstance(value, list):
        return len(value) == len(alternative) and all(map(_fits_alternative, value, alternative))
    return is_equal(value, alternative)
