"""The verdict of the Berkeley Function Calling Leaderboard, v4, on single-turn cases.

Agrees with the ``ast_checker`` of the ``bfcl-eval`` wheel on every verdict, its peculiarities included: it is a
yardstick, and a better one would measure something else. The rules that surprise:

- A string matches without its spaces, case and ``,./-_*^``; lists of strings likewise, one level deep.
- An integer passes for a float, never a float for an integer; in lists neither.
- An argument whose schema type is not the type of the answer counts as a variable: it is compared exactly.
- Calls may come in any order, but each expected one takes the first that fits, without trying another pairing.
- The schema's defaults, enums and bounds are not looked at.

Where the wheel's checker would raise, the verdict is "not valid".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fctune.calls.bfcl.source_values import JAVA_TYPES, JAVASCRIPT_TYPES, read_java, read_javascript
from fctune.calls.matching import shorten
from fctune.data.conversation import Call

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
_NESTED_SOURCE_TYPES = ("Array", "ArrayList", "array")
_DROPPED = str.maketrans({**dict.fromkeys(" ,./-_*^"), "'": '"'})

# What a parameter may be, as the answers have it: values, lists of values, objects of alternatives.
Alternatives = Sequence[Any]
Answer = Mapping[str, Mapping[str, Alternatives]]


class BfclVerdict(NamedTuple):
    """Whether the benchmark takes the calls; ``reason`` is empty if so, else says what is wrong first.

    ``is_exact`` says that each argument was found to be one of its alternatives as typed JSON, letter by letter, and
    that none is missing or left over: any stricter rule takes the calls as well. Where it is false, they may be.
    """

    valid: bool
    reason: str = ""
    is_exact: bool = False


_VALID = BfclVerdict(True)
_EXACT = BfclVerdict(True, is_exact=True)


class _MismatchError(Exception):
    """One call is not the expected one; the message is the reason."""


def judge_bfcl(
    category: str,
    functions: Sequence[Mapping[str, Any]],
    answers: Sequence[Answer],
    calls: Sequence[Call],
    dots_as_underscores: bool = False,
) -> BfclVerdict:
    """The benchmark's verdict on the calls of one case.

    Args:
        category: The category's name, which decides how many calls are due and in which language values are written.
        functions: The case's functions as its question file has them.
        answers: The case's ``ground_truth``; not looked at in relevance and irrelevance, which have none.
        calls: What the model called. In the categories of Java and JavaScript each value is a string of source text.
        dots_as_underscores: Expect ``a_b`` where a function is called ``a.b``, for models that cannot write dots.
    """
    check = _Check(language_of(category), dots_as_underscores, {})
    return _judge(check, category, lambda answer: _find_function(category, functions, answer), answers, calls)


class BfclJudge:
    """The verdict of ``judge_bfcl`` on one case, made ready for many predictions of it."""

    def __init__(self, category: str, functions: Sequence[Mapping[str, Any]], answers: Sequence[Answer]) -> None:
        language = language_of(category)
        ready: dict[int, _Ready] = {}
        found = {id(answer): _find_function(category, functions, answer) for answer in answers}
        if language == "python":
            ready = {id(answer): _make_ready(found[id(answer)], answer) for answer in answers}
        self._check = _Check(language, False, ready)
        self._case = (category, lambda answer: found[id(answer)], answers)

    def judge(self, calls: Sequence[Call]) -> BfclVerdict:
        """The verdict on one prediction."""
        return _judge(self._check, *self._case, calls)


def _judge(
    check: _Check,
    category: str,
    find_function: Callable[[Answer], Mapping[str, Any]],
    answers: Sequence[Answer],
    calls: Sequence[Call],
) -> BfclVerdict:
    if "relevance" in category:
        return _judge_relevance("irrelevance" not in category, calls)
    is_parallel = "parallel" in category
    num_due = len(answers) if is_parallel or "multiple" in category else 1
    if len(calls) != num_due:
        return BfclVerdict(False, f"{len(calls)} calls instead of {num_due}")
    try:
        if not is_parallel:
            is_exact = check.require(find_function(answers[0]), calls[0], answers[0]) and len(answers) == 1
            return _EXACT if is_exact else _VALID
        left = list(calls)
        is_exact = True
        for answer in answers:
            taken = _first_fitting(check, find_function(answer), left, answer)
            if taken is None:
                return BfclVerdict(False, f"no call fits the expected {next(iter(answer))}")
            del left[taken[0]]
            is_exact = is_exact and taken[1]
        return _EXACT if is_exact else _VALID
    except _MismatchError as mismatch:
        return BfclVerdict(False, str(mismatch))
    except (TypeError, KeyError, IndexError, AttributeError, ValueError, NotImplementedError, RecursionError) as error:
        return BfclVerdict(False, f"the answer or its schema cannot be compared with: {type(error).__name__}")


def language_of(category: str) -> str:
    """In which language a category's values are written: ``python``, ``java`` or ``javascript``."""
    return next((language for language in ("java", "javascript") if category.endswith(language)), "python")


def read_source(value: Any, schema: Mapping[str, Any], language: str) -> Any:
    """The value of an argument's source text in Java or JavaScript, by its schema; other values as they are."""
    if language == "python" or type(value) is not str:
        return value
    type_name = schema["type"]
    item_name = schema["items"]["type"] if type_name in _NESTED_SOURCE_TYPES else None
    read: Callable[[str, str, str | None], Any] = read_java if language == "java" else read_javascript
    return read(value, type_name, item_name)


def standardize(text: str) -> str:
    """The text as the benchmark compares it: without case, spaces and ``,./-_*^``, with one kind of quote."""
    return text.translate(_DROPPED).lower()


def _judge_relevance(is_due: bool, calls: Sequence[Call]) -> BfclVerdict:
    if bool(calls) == is_due:
        return BfclVerdict(True)
    return BfclVerdict(False, "no call where one was due" if is_due else "a call where none was due")


def _find_function(category: str, functions: Sequence[Mapping[str, Any]], answer: Answer) -> Mapping[str, Any]:
    """The function that an answer calls; in the simple categories the only one, whatever its name."""
    if "multiple" not in category and "parallel" not in category:
        return functions[0]
    name = next(iter(answer))
    for function in functions:
        if not function or function["name"] == name:
            return function
    return {}


def _first_fitting(
    check: _Check, function: Mapping[str, Any], calls: Sequence[Call], answer: Answer
) -> tuple[int, bool] | None:
    for place, call in enumerate(calls):
        try:
            return place, check.require(function, call, answer)
        except _MismatchError:
            continue
    return None


@dataclass(frozen=True, slots=True)
class _Check:
    """The comparison of one call with one answer."""

    language: str
    dots_as_underscores: bool
    # By the identity of an answer.
    ready: Mapping[int, _Ready]

    def require(self, function: Mapping[str, Any], call: Call, answer: Answer) -> bool:
        """Raise ``_MismatchError`` unless the call is the expected one; whether it was found to be so exactly."""
        name: str = function["name"]
        if self.dots_as_underscores:
            name = name.replace(".", "_")
        if call.name != name:
            raise _MismatchError(f"calls {call.name[:80]} instead of {name}")
        alternatives = next(iter(answer.values()))
        schemas = function["parameters"]["properties"]
        ready = self.ready.get(id(answer), _NOTHING_READY)
        arguments = call.arguments
        is_whole = is_exact = ready.due is not None and ready.due <= arguments.keys()
        if not is_whole:
            for parameter in function["parameters"]["required"]:
                if parameter not in arguments:
                    raise _MismatchError(f"required {parameter} is missing")
        for parameter, value in arguments.items():
            known = ready.known.get(parameter)
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
        if not is_whole:
            for parameter, values in alternatives.items():
                if parameter not in arguments and "" not in values:
                    raise _MismatchError(f"{parameter} is missing and has no default")
        return is_exact

    def _fits(self, value: Any, schema: Mapping[str, Any], alternatives: Alternatives) -> bool:
        """Whether an argument is among its alternatives; raises where its type alone rules it out."""
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
            wanted = standardize(value)
            return any(type(item) is str and standardize(item) == wanted for item in alternatives)
        if due is list:
            # By place: an object among the alternatives raises, as in the wheel.
            lists = [[_plain(items[place]) for place in range(len(items))] for items in alternatives]
            return [_plain(item) for item in value] in lists
        return value in alternatives

    def _read(self, value: Any, type_name: str, schema: Mapping[str, Any]) -> tuple[Any, type, type | None]:
        """The value in Python's types, the type due and that of its items."""
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
    """Alternatives that all have the type due, which a value of that type is one of or not."""

    type: type
    values: frozenset[Any]
    standardized: frozenset[str]


class _Ready(NamedTuple):
    """What of an answer is made ready: the parameters that no call may lack, and those of plain alternatives.

    ``due`` is None where that cannot be said beforehand.
    """

    due: frozenset[str] | None
    known: Mapping[str, _Known]


_NOTHING_READY = _Ready(None, {})


def _make_ready(function: Mapping[str, Any], answer: Answer) -> _Ready:
    """Of the alternatives those that are texts, or numbers, or true and false, and nothing else."""
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
        return _Ready(None, known)
    return _Ready(frozenset(required).union(key for key, values in parameters.items() if "" not in values), known)


def _is_variable(value: Any, alternatives: Alternatives, due: type[Any], item_due: type[Any] | None) -> bool | None:
    """Whether a value of a right type is to be compared as it is; None for a value of a wrong type."""
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
    """Whether every item has the type due or that of the answer's items; anything passes where that is no list."""
    if type(answer) is not list:
        return True
    answer_type = _answer_type(answer)
    return all(type(item) is due or type(item) is answer_type for item in items)


def _dict_fits(value: Mapping[str, Any], alternative: Mapping[str, Alternatives]) -> bool:
    has_only = all(
        key in alternative and _plain(item) in [_plain(answer) for answer in alternative[key]]
        for key, item in value.items()
    )
    # Looked at in either case, as in the wheel, where an answer without items raises here.
    has_all = all(key in value or "" in answers for key, answers in alternative.items())
    return has_only and has_all


def _dicts_fit(values: Sequence[Any], answers: Sequence[Any]) -> bool:
    return len(values) == len(answers) and all(
        answer != "" and _dict_fits(value, answer) for value, answer in zip(values, answers, strict=True)
    )


def _plain(value: Any) -> Any:
    return standardize(value) if type(value) is str else value
