"""The categories of the Berkeley Function Calling Leaderboard as a suite.

Each question goes to the model as its messages with its functions as tools, as the leaderboard asks models with tool
calling of their own ("FC"). What it changes in the functions first is changed here too, and held against its own code
in the tests: types as JSON Schema has them, a word on the language, Java's and JavaScript's values as strings.
Multi-turn questions are made in ``fctune.evaluation.multi_turn``.
"""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune.calls.bfcl.answer_key import AnswerKey
from fctune.calls.bfcl.cases import MULTI_TURN, SINGLE_TURN, BfclCase, read_bfcl
from fctune.calls.bfcl.checker import BfclJudge, language_of
from fctune.calls.cases import Case
from fctune.calls.formats.base import Parsed
from fctune.calls.matching import describe_differences
from fctune.calls.metrics import Outcome, Verdict
from fctune.config.parsing import suggest
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.errors import ConfigError
from fctune.evaluation.multi_turn import MultiTurnCase, open_multi_turn

BFCL = "BFCL v4"

_AGENTIC = ("memory_kv", "memory_vector", "memory_rec_sum", "web_search_base", "web_search_no_snippet")
_NOT_RUN = {
    **dict.fromkeys(MULTI_TURN, "asks a model in several turns, which eval.tool_calls alone does"),
    **dict.fromkeys(_AGENTIC, "needs a memory or the network between turns"),
    "format_sensitivity": "asks for other formats than the model's own",
}
_GROUPS = {
    "single_turn": SINGLE_TURN,
    "live": tuple(name for name in SINGLE_TURN if name.startswith("live_")),
    "non_live": tuple(name for name in SINGLE_TURN if not name.startswith("live_")),
    "multi_turn": MULTI_TURN,
    "agentic": _AGENTIC,
}
_LANGUAGES = {"python": "Python 3", "java": "Java 8 SDK", "javascript": "JavaScript"}
_JSON_TYPES = {
    **dict.fromkeys(("integer", "byte", "short", "long", "Bigint"), "integer"),
    **dict.fromkeys(("number", "float", "double"), "number"),
    **dict.fromkeys(("boolean", "bool"), "boolean"),
    **dict.fromkeys(("array", "list", "tuple", "ArrayList", "Array", "Queue", "Stack"), "array"),
    **dict.fromkeys(("dict", "object", "HashMap", "Hashtable"), "object"),
}


@dataclass(frozen=True, slots=True)
class OpenedBfcl:
    """What was opened: the cases, how to judge those of one turn, and what is left out for which reason."""

    cases: tuple[Case, ...]
    multi_turn: tuple[MultiTurnCase, ...]
    judge: Callable[[Case, Parsed], tuple[Outcome, dict[str, Any]]]
    not_run: dict[str, str]


def open_bfcl(
    data_dir: str | Path | None, names: Sequence[str], has_plain_names: bool, has_multi_turn: bool = False
) -> OpenedBfcl:
    """The cases of categories or groups of them.

    Args:
        data_dir: The wheel's data directory; None: where it is installed.
        names: Categories, or ``single_turn``, ``live``, ``non_live``, ``multi_turn``, ``agentic``.
        has_plain_names: Write underscores for the dots in functions' names.
        has_multi_turn: Open the multi-turn categories, too, where the wheel that plays them is installed.

    Raises:
        ConfigError: No such category, or no wheel.
    """
    wanted = [category for name in names for category in _GROUPS.get(name, (name,))]
    known = (*SINGLE_TURN, *_NOT_RUN)
    for category in wanted:
        if category not in known:
            near = suggest(category, (*known, *_GROUPS)) or "."
            raise ConfigError(f"category {category!r}: the leaderboard has none{near}\n  Known: {', '.join(known)}.")
    directory = Path(data_dir) if data_dir is not None else _installed_data()
    run = [category for category in SINGLE_TURN if category in wanted]
    questions = [question for category in run for question in read_bfcl(directory, category)]
    if has_plain_names:
        questions = [question.without_dots() for question in questions]
    cases = tuple(map(_to_case, questions))
    judges = {question.id: _Judge(question) for question in questions}
    left_out = {name: _NOT_RUN[name] for name in _NOT_RUN if name in wanted}
    multi_turn: tuple[MultiTurnCase, ...] = ()
    if has_multi_turn:
        played = [name for name in MULTI_TURN if name in wanted]
        multi_turn, reasons = open_multi_turn(directory, played, to_tool)
        left_out = {name: reasons.get(name, why) for name, why in left_out.items() if name not in played or reasons}
    return OpenedBfcl(cases, multi_turn, lambda case, parsed: judges[case.id](case, parsed), left_out)


def to_tool(function: dict[str, Any], category: str, has_hint: bool = True) -> Tool:
    """A function of the benchmark as it is shown to a model: in JSON Schema, with the word on its language."""
    function = copy.deepcopy(function)
    language = language_of(category)
    if has_hint:
        function["description"] += f" Note that the provided function is in {_LANGUAGES[language]} syntax."
    properties = function["parameters"]["properties"]
    if language != "python":
        for schema in properties.values():
            _to_source(schema, "Java" if language == "java" else "JavaScript")
    function["parameters"]["type"] = "object"
    _to_json_schema(properties)
    return Tool(function)


def _to_source(schema: dict[str, Any], language: str) -> None:
    """In place: a string whose description says what its text is to be."""
    type_name = schema["type"]
    if type_name == "any":
        schema["description"] += f" This parameter can be of any type of {language} object in string representation."
    else:
        schema["description"] += f" This is {language} {type_name} type parameter in string representation."
    if type_name in (("ArrayList", "Array") if language == "Java" else ("array",)):
        item = schema.pop("items")["type"]
        schema["description"] += f" The list elements are of type {item}; they are not in string representation."
    if language == "JavaScript" and type_name == "dict" and "properties" in schema:
        schema["description"] += (
            " The dictionary entries have the following schema; they are not in string representation. "
            + json.dumps(schema.pop("properties"))
        )
    schema["type"] = "string"


def _to_json_schema(properties: dict[str, dict[str, Any]]) -> None:
    """In place: the types of JSON Schema; "any" and what is unknown is a string, as the leaderboard has it."""
    for schema in properties.values():
        if schema.get("type") == "float":
            schema["format"] = "float"
            schema["description"] += " This is a float type value."
        schema["type"] = _JSON_TYPES.get(schema.get("type", "string"), "string")
        nested = schema
        while nested["type"] in ("array", "object"):
            if "properties" in nested:
                _to_json_schema(nested["properties"])
                break
            if "items" not in nested:
                break
            nested = nested["items"]
            nested["type"] = _JSON_TYPES.get(nested.get("type", "string"), "string")


def _to_case(question: BfclCase) -> Case:
    (turn,) = question.turns
    messages = tuple(Message(message["role"], message["content"]) for message in turn)
    tools = tuple(to_tool(function, question.category) for function in question.functions)
    prompt = Conversation(messages, tools, f"{BFCL} {question.id}")
    return Case(question.id, question.category, prompt, tuple(map(_first_choice, question.answers)))


def _first_choice(answer: dict[str, dict[str, list[Any]]]) -> Call:
    """An answer as a call: of each parameter the first alternative but "", which is to leave it out."""
    ((name, parameters),) = answer.items()
    given = {key: [value for value in values if value != ""] for key, values in parameters.items()}
    return Call(name, {key: _first(values[0]) for key, values in given.items() if values})


def _first(value: Any) -> Any:
    """A value of an answer, in which each key of an object holds a list of alternatives."""
    if isinstance(value, dict):
        given = {key: [v for v in values if v != ""] if isinstance(values, list) else [values]
                 for key, values in value.items()}  # fmt: skip
        return {key: _first(values[0]) for key, values in given.items() if values}
    return [_first(item) for item in value] if isinstance(value, list) else value


class _Judge:
    """The verdicts on a case: the benchmark's in this project's classes, and what is kept beside it.

    The benchmark takes malformed for no call, which is right where none is due; ``bfcl`` in the results says what it
    would. ``typed`` there is the class under the strict typed match, in which ``"New York"`` is not ``"new-york"``.
    """

    def __init__(self, question: BfclCase):
        self._official = BfclJudge(question.category, question.functions, question.answers)
        self._typed = AnswerKey(question)

    def __call__(self, case: Case, parsed: Parsed) -> tuple[Outcome, dict[str, Any]]:
        official = self._official.judge(() if parsed.malformed else parsed.calls)
        outcome = self._typed.judge(parsed)
        details = {"bfcl": {"valid": official.valid, "reason": official.reason, "typed": outcome.verdict}}
        if official.valid and not parsed.malformed:
            return outcome._replace(verdict="correct", differences=()), details
        differences = [f"malformed: {stretch.reason}" for stretch in parsed.malformed]
        differences += [f"BFCL: {official.reason}"] if official.reason else []
        differences += describe_differences(case.expected, parsed.calls)
        verdict: Verdict = "wrong_arguments" if outcome.is_correct else outcome.verdict
        return outcome._replace(verdict=verdict, differences=tuple(differences)), details


def _installed_data() -> Path:
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "bfcl: the benchmark's data is not here. "
            "pip install --no-deps bfcl-eval==2026.3.23, or pass --bfcl-data DIR."
        )
    return Path(spec.submodule_search_locations[0]) / "data"
