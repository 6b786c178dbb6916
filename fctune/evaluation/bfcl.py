"""The categories of the Berkeley Function Calling Leaderboard as evaluation cases.

Each question goes to the model as its messages, with its functions as tools, the way the leaderboard asks models with
native tool calling ("FC"). Functions are changed as it changes them, which the tests compare with its own code: JSON
Schema types, a note on the language, Java and JavaScript values as strings.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune.calls.bfcl.cases import MULTI_TURN, SINGLE_TURN, BfclCase, read_bfcl
from fctune.calls.bfcl.checker import language_of
from fctune.calls.bfcl.judge import SingleTurnJudge
from fctune.calls.formats.base import Parsed
from fctune.calls.judge import Judgement, describe_malformed
from fctune.calls.matching import describe_differences
from fctune.config.parsing import suggest
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.errors import ConfigError
from fctune.evaluation.cases import Case
from fctune.evaluation.multi_turn import MultiTurnCase, open_multi_turn

BFCL = "BFCL v4"

_AGENTIC = ("memory_kv", "memory_vector", "memory_rec_sum", "web_search_base", "web_search_no_snippet")
_NOT_RUN = {
    **dict.fromkeys(_AGENTIC, "needs a memory or network access between turns"),
    "format_sensitivity": "prompts for other call formats than the model's own",
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


@dataclass(frozen=True)
class BfclSingleTurnCase(Case):
    """A single-turn question of the leaderboard; ``expected`` holds the first choice of each answer."""

    question: BfclCase

    @functools.cached_property
    def _judge(self) -> SingleTurnJudge:
        return SingleTurnJudge(self.question)

    def judge(self, parsed: Parsed, decoded: Parsed | None = None) -> Judgement:
        """Judge one reading of an answer by the benchmark's rules, and by the strict typed match."""
        return self._judge.judge(parsed, decoded)

    def judge_failure(self, reason: str) -> Judgement:
        """Judge a case without an answer."""
        return self._judge.judge_failure(reason)

    def describe_differences(self, parsed: Parsed, judgement: Judgement) -> tuple[str, ...]:
        """List everything that is wrong with an answer, one line each."""
        if judgement.benchmark is None or (judgement.is_valid and judgement.outcome.is_correct):
            return judgement.differences
        lines = [describe_malformed(stretch) for stretch in parsed.malformed]
        lines += [f"BFCL: {judgement.benchmark.reason}"] if judgement.benchmark.reason else []
        return (*lines, *describe_differences(self.expected, parsed.calls))


def resolve_categories(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Expand groups of categories: return the categories to run, in order, and those that cannot be, with the reason.

    Args:
        names: Categories, or ``single_turn``, ``live``, ``non_live``, ``multi_turn``, ``agentic``.

    Raises:
        ConfigError: A category does not exist.
    """
    named = [category for name in names for category in _GROUPS.get(name, (name,))]
    known = (*SINGLE_TURN, *MULTI_TURN, *_NOT_RUN)
    for category in named:
        if category not in known:
            near = suggest(category, (*known, *_GROUPS)) or "."
            raise ConfigError(
                f"category {category!r}: not a category of the leaderboard{near}\n  Expected one of {', '.join(known)}."
            )
    runnable = [category for category in (*SINGLE_TURN, *MULTI_TURN) if category in named]
    return runnable, {category: reason for category, reason in _NOT_RUN.items() if category in named}


def load_category(
    data_dir: Path, category: str, has_plain_names: bool
) -> tuple[tuple[Case, ...], tuple[MultiTurnCase, ...], dict[str, str]]:
    """Load one category: its single-turn cases, its multi-turn cases, and the reason if it cannot be run.

    Args:
        data_dir: The wheel's data directory.
        category: A single- or multi-turn category.
        has_plain_names: Write underscores for the dots in functions' names.
    """
    if category in MULTI_TURN:
        return (), *open_multi_turn(data_dir, [category], to_tool)
    questions = read_bfcl(data_dir, category)
    if has_plain_names:
        questions = [question.without_dots() for question in questions]
    return tuple(map(_to_case, questions)), (), {}


def find_installed_data() -> Path:
    """Return the data directory of the installed ``bfcl-eval`` wheel.

    Raises:
        ConfigError: The wheel is not installed.
    """
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "bfcl: the benchmark's data is not installed. "
            "pip install --no-deps bfcl-eval==2026.3.23, or pass --bfcl-data DIR."
        )
    return Path(spec.submodule_search_locations[0]) / "data"


def to_tool(function: dict[str, Any], category: str, has_hint: bool = True) -> Tool:
    """Convert a function of the benchmark to the tool shown to a model: in JSON Schema, with a note on its language."""
    function = copy.deepcopy(function)
    language = language_of(category)
    if has_hint:
        function["description"] += f" Note that the provided function is in {_LANGUAGES[language]} syntax."
    properties = function["parameters"]["properties"]
    if language != "python":
        for schema in properties.values():
            _describe_as_source(schema, "Java" if language == "java" else "JavaScript")
    function["parameters"]["type"] = "object"
    _rename_types(properties)
    return Tool(function)


def _describe_as_source(schema: dict[str, Any], language: str) -> None:
    """Turn a schema, in place, into a string whose description says what its source text should be."""
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


def _rename_types(properties: dict[str, dict[str, Any]]) -> None:
    """Rename types to JSON Schema's, in place; "any" and unknown types become strings, as on the leaderboard."""
    for schema in properties.values():
        if schema.get("type") == "float":
            schema["format"] = "float"
            schema["description"] += " This is a float type value."
        schema["type"] = _JSON_TYPES.get(schema.get("type", "string"), "string")
        nested = schema
        while nested["type"] in ("array", "object"):
            if "properties" in nested:
                _rename_types(nested["properties"])
                break
            if "items" not in nested:
                break
            nested = nested["items"]
            nested["type"] = _JSON_TYPES.get(nested.get("type", "string"), "string")


def _to_case(question: BfclCase) -> BfclSingleTurnCase:
    (turn,) = question.turns
    messages = tuple(Message(message["role"], message["content"]) for message in turn)
    tools = tuple(to_tool(function, question.category) for function in question.functions)
    prompt = Conversation(messages, tools, f"{BFCL} {question.id}")
    expected = tuple(map(_first_choice, question.answers))
    return BfclSingleTurnCase(question.id, question.category, prompt, expected, question)


def _first_choice(answer: dict[str, dict[str, list[Any]]]) -> Call:
    """Make a call of an answer: the first alternative of each parameter except "", which means to omit it."""
    ((name, parameters),) = answer.items()
    given = {key: [value for value in values if value != ""] for key, values in parameters.items()}
    return Call(name, {key: _first(values[0]) for key, values in given.items() if values})


def _first(value: Any) -> Any:
    """Take the first choice of an answer's value, whose objects hold a list of alternatives for each key."""
    if isinstance(value, dict):
        given = {key: [v for v in values if v != ""] if isinstance(values, list) else [values]
                 for key, values in value.items()}  # fmt: skip
        return {key: _first(values[0]) for key, values in given.items() if values}
    return [_first(item) for item in value] if isinstance(value, list) else value
