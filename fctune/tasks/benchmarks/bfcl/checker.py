"""The verdict of the Berkeley Function Calling Leaderboard, v4, on single-turn cases.

Agrees with ``ast_checker`` of the ``bfcl-eval`` wheel on every verdict, including its peculiarities: it is a yardstick,
and a better one would measure something else. Its surprising rules:

- Strings match regardless of case, spaces and ``,./-_*^``; strings in lists likewise, one level deep.
- An integer passes for a float, but never a float for an integer; in lists, neither does.
- If an argument's schema type is not the type of the answer, it is taken for a variable and compared exactly.
- Calls may come in any order, but each expected call takes the first that fits, without trying another pairing.
- Defaults, enums and bounds of the schema are ignored.

Where the wheel's checker would raise, the verdict is "not valid".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fctune.calls.matching import shorten
from fctune.config.intervals import format_count
from fctune.data.conversation import Call
from fctune.tasks.benchmarks.bfcl.source_values import JAVA_TYPES, JAVASCRIPT_TYPES, read_java, read_javascript

PYTHON_TYPES: dict[str, type] = {
    "string": str,
    "integer": int,
    "float": float,
    "boolean": bool,
    "array": list,
    "tuple": list,
    "dict": dict,
    "any": str,
}
SCHEMA_TYPES: dict[str, dict[str, type]] = {
    "python": PYTHON_TYPES,
    "java": JAVA_TYPES,
    "javascript": JAVASCRIPT_TYPES,
}
"""By language, the Python type of each type that a function's schema names."""
_NESTED_SOURCE_TYPES = ("Array", "ArrayList", "array")
_DROPPED = str.maketrans({**dict.fromkeys(" ,./-_*^"), "'": '"'})

# The possible values of a parameter in the answers: values, lists of values, objects of alternatives.
Alternatives = Sequence[Any]
Answer = Mapping[str, Mapping[str, Alternatives]]


class BfclVerdict(NamedTuple):
    """The benchmark's verdict on the calls of one case; ``reason`` is the first problem, empty if valid.

    ``is_exact`` is True only if every argument is one of its alternatives as typed JSON, character for character, and
    none is missing or extra: any stricter rule accepts the calls as well. False says nothing.
    """

    valid: bool
    reason: str = ""
    is_exact: bool = False


_VALID = BfclVerdict(True)
_EXACT = BfclVerdict(True, is_exact=True)


class _MismatchError(Exception):
    """One call is not the expected one; the message is the reason."""


class CallChecker:
    """Checks calls against the answer of one single-turn case; prepared once for many predictions.

    Args:
        category: The category's name, which decides how many calls are due and in which language values are written.
        functions: The case's functions as its question file has them.
        answers: The case's ``ground_truth``; ignored in relevance and irrelevance, which have none.
    """

    def __init__(self, category: str, functions: Sequence[Mapping[str, Any]], answers: Sequence[Answer]) -> None:
        self._answers = answers
        self._is_call_due = "irrelevance" not in category if "relevance" in category else None
        self._is_parallel = "parallel" in category
        self._num_due = len(answers) if self._is_parallel or "multiple" in category else 1
        self._functions = [_find_function(category, functions, answer) for answer in answers]
        language = language_of(category)
        prepared: dict[int, _Prepared] = {}
        if language == "python":
            prepared = {id(a): _prepare(f, a) for f, a in zip(self._functions, answers, strict=True)}
        self._comparison = _Comparison(language, prepared)

    def check(self, calls: Sequence[Call]) -> BfclVerdict:
        """Return the benchmark's verdict on one prediction.

        Args:
            calls: The model's calls. In the Java and JavaScript categories each value is a string of source text.
        """
        answers = self._answers
        if self._is_call_due is not None:
            return _check_relevance(self._is_call_due, calls)
        if len(calls) != self._num_due:
            return BfclVerdict(False, f"{format_count(len(calls), 'call')} instead of {self._num_due}")
        require = self._comparison.require
        try:
            if not self._is_parallel:
                is_exact = require(self._functions[0], calls[0], answers[0]) and len(answers) == 1
                return _EXACT if is_exact else _VALID
            remaining = list(calls)
            is_exact = True
            for function, answer in zip(self._functions, answers, strict=True):
                found = _find_match(require, function, remaining, answer)
                if found is None:
                    return BfclVerdict(False, f"no call fits the expected {next(iter(answer))}")
                del remaining[found[0]]
                is_exact = is_exact and found[1]
            return _EXACT if is_exact else _VALID
        except _MismatchError as mismatch:
            return BfclVerdict(False, str(mismatch))
        except (
            TypeError,
            KeyError,
            IndexError,
            AttributeError,
            ValueError,
            NotImplementedError,
            OverflowError,
            RecursionError,
        ) as error:
            return BfclVerdict(False, f"the answer or its schema cannot be compared with: {type(error).__name__}")


def language_of(category: str) -> str:
    """Return the language that a category's values are written in: ``python``, ``java`` or ``javascript``."""
    return next((language for language in ("java", "javascript") if category.endswith(language)), "python")


def read_source(value: Any, schema: Mapping[str, Any], language: str) -> Any:
    """Read an argument's Java or JavaScript source text by its schema; other values are returned as they are."""
    if language == "python" or type(value) is not str:
        return value
    type_name = schema["type"]
    item_name = schema["items"]["type"] if type_name in _NESTED_SOURCE_TYPES else None
    read: Callable[[str, str, str | None], Any] = read_java if language == "java" else read_javascript
    return read(value, type_name, item_name)


def standardize(text: str) -> str:
    """Normalize a string as the benchmark does: lower case, double quotes, no spaces or ``,./-_*^``."""
    return text.translate(_DROPPED).lower()


def _check_relevance(is_due: bool, calls: Sequence[Call]) -> BfclVerdict:
    if bool(calls) == is_due:
        return BfclVerdict(True)
    return BfclVerdict(False, "no call where one was due" if is_due else "a call where none was due")


def _find_function(category: str, functions: Sequence[Mapping[str, Any]], answer: Answer) -> Mapping[str, Any]:
    """Return the function that an answer calls; in the simple categories the only one, whatever its name."""
    if "multiple" not in category and "parallel" not in category:
        return functions[0]
    name = next(iter(answer))
    for function in functions:
        if not function or function["name"] == name:
            return function
    return {}


def _find_match(
    require: Callable[[Mapping[str, Any], Call, Answer], bool],
    function: Mapping[str, Any],
    calls: Sequence[Call],
    answer: Answer,
) -> tuple[int, bool] | None:
    """Return the position of the first call that fits, and whether it does exactly."""
    for position, call in enumerate(calls):
        try:
            return position, require(function, call, answer)
        except _MismatchError:
            continue
    return None


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Compares one call with one answer; ``prepared`` is keyed by the identity of the answer."""

    language: str
    prepared: Mapping[int, _Prepared]

    def require(self, function: Mapping[str, Any], call: Call, answer: Answer) -> bool:
        """Raise ``_MismatchError`` unless the call is the expected one; return True if it is so exactly."""
        name: str = function["name"]
        if call.name != name:
            raise _MismatchError(f"calls {call.name[:80]} instead of {name}")
        alternatives = next(iter(answer.values()))
        schemas = function["parameters"]["properties"]
        prepared = self.prepared.get(id(answer), _UNPREPARED)
        arguments = call.arguments
        has_all_due = is_exact = prepared.due is not None and prepared.due <= arguments.keys()
        if not has_all_due:
            for parameter in function["parameters"]["required"]:
                if parameter not in arguments:
                    raise _MismatchError(f"required {parameter} is missing")
        for parameter, value in arguments.items():
            known = prepared.known.get(parameter)
            if known is not None and type(value) is known.type:
                if value in known.values:
                    continue
                is_exact = False
                if isinstance(value, str) and standardize(value) in known.standardized:
                    continue
                raise _MismatchError(f"{parameter} is {shorten(value)}, expected {shorten(alternatives[parameter])}")
            is_exact = False
            if parameter not in schemas or parameter not in alternatives:
                raise _MismatchError(f"{parameter[:80]} is not expected")
            try:
                fits = self._fits(value, schemas[parameter], alternatives[parameter])
            except _MismatchError as mismatch:
                raise _MismatchError(f"{parameter} {mismatch}") from None
            if not fits:
                raise _MismatchError(f"{parameter} is {shorten(value)}, expected {shorten(alternatives[parameter])}")
        if not has_all_due:
            for parameter, values in alternatives.items():
                if parameter not in arguments and "" not in values:
                    raise _MismatchError(f"{parameter} is missing and has no default")
        return is_exact

    def _fits(self, value: Any, schema: Mapping[str, Any], alternatives: Alternatives) -> bool:
        """Return True if an argument is among its alternatives; raise if its type alone rules it out."""
        type_name = schema["type"]
        value, due, item_due = self._read(value, type_name, schema)
        if type_name == "tuple" and type(value) is tuple:
            value = list(value)
        is_variable = _is_variable(value, alternatives, due, item_due)
        if is_variable is None:
            raise _MismatchError(f"is {shorten(value)}, expected the type {type_name}")
        if is_variable:
            return value in alternatives
        if due is dict:
            return any(_dict_fits(value, alternative) for alternative in alternatives if alternative != "")
        if due is list and item_due is dict:
            return any(_dicts_fit(value, alternative) for alternative in alternatives)
        if due is str:
            standardized = standardize(value)
            return any(type(item) is str and standardize(item) == standardized for item in alternatives)
        if due is list:
            # By index: an object among the alternatives raises, as in the wheel.
            lists = [[_standardize_string(items[index]) for index in range(len(items))] for items in alternatives]
            return [_standardize_string(item) for item in value] in lists
        return value in alternatives

    def _read(self, value: Any, type_name: str, schema: Mapping[str, Any]) -> tuple[Any, type, type | None]:
        """Return the value in Python's types, the expected type and that of its items."""
        if self.language == "python":
            due = PYTHON_TYPES[type_name]
            item_due = PYTHON_TYPES[schema["items"]["type"]] if due is list else None
            if due is float and type(value) is int:
                value = float(value)
            return value, due, item_due
        types = JAVA_TYPES if self.language == "java" else JAVASCRIPT_TYPES
        due = types[type_name]
        if type(value) is not str:
            raise _MismatchError(f"is {shorten(value)}, expected source text")
        item_due = types[schema["items"]["type"]] if type_name in _NESTED_SOURCE_TYPES else None
        return read_source(value, schema, self.language), due, item_due


class _Known(NamedTuple):
    """Alternatives that all have the expected type: a value of that type can be looked up."""

    type: type
    values: frozenset[Any]
    standardized: frozenset[str]


class _Prepared(NamedTuple):
    """The parameters of an answer that no call may lack, and those whose alternatives are plain values.

    ``due`` is None if it cannot be known in advance.
    """

    due: frozenset[str] | None
    known: Mapping[str, _Known]


_UNPREPARED = _Prepared(None, {})


def _prepare(function: Mapping[str, Any], answer: Answer) -> _Prepared:
    schemas = function.get("parameters", {}).get("properties", {})
    parameters = next(iter(answer.values()))
    known = {}
    for parameter, alternatives in parameters.items():
        due = PYTHON_TYPES.get(schemas.get(parameter, {}).get("type", ""))
        if due in (str, int, float, bool) and all(type(value) is due or value == "" for value in alternatives):
            standardized = frozenset(standardize(value) for value in alternatives if isinstance(value, str))
            known[parameter] = _Known(due, frozenset(alternatives), standardized)
    required = function.get("parameters", {}).get("required")
    if required is None or list(answer) != [function.get("name")]:
        return _Prepared(None, known)
    return _Prepared(frozenset(required).union(key for key, values in parameters.items() if "" not in values), known)


def _is_variable(value: Any, alternatives: Alternatives, due: type[Any], item_due: type[Any] | None) -> bool | None:
    """Return True if a value is compared exactly, as a variable; None if its type is wrong."""
    answer_type = _answer_type(alternatives)
    if type(value) is not due:
        return True if answer_type is not None and type(value) is answer_type else None
    if item_due is not None and not any(_items_have_type(value, answer, item_due) for answer in alternatives):
        return None
    return answer_type is not None and answer_type is not due


def _answer_type(alternatives: Alternatives) -> type | None:
    for item in alternatives:
        if item != "":
            return type(item)
    return None


def _items_have_type(items: Sequence[Any], answer: Any, due: type) -> bool:
    """Return True if every item has the expected type or that of the answer's items, or if the answer is not a list."""
    if type(answer) is not list:
        return True
    answer_type = _answer_type(answer)
    return all(type(item) is due or type(item) is answer_type for item in items)


def _dict_fits(value: Mapping[str, Any], alternative: Mapping[str, Alternatives]) -> bool:
    has_only = all(
        key in alternative
        # By index: an object in place of the alternatives raises, as in the wheel.
        and _standardize_string(item)
        in [_standardize_string(alternative[key][i]) for i in range(len(alternative[key]))]
        for key, item in value.items()
    )
    # Evaluated in either case, as in the wheel, where an answer without items raises here.
    has_all = all(key in value or "" in answers for key, answers in alternative.items())
    return has_only and has_all


def _dicts_fit(values: Sequence[Any], answers: Sequence[Any]) -> bool:
    return len(values) == len(answers) and all(
        answer != "" and _dict_fits(value, answer) for value, answer in zip(values, answers, strict=True)
    )


def _standardize_string(value: Any) -> Any:
    return standardize(value) if type(value) is str else value
