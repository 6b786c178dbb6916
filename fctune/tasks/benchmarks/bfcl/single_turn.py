"""The categories of the Berkeley Function Calling Leaderboard as evaluation cases.

In the mode "tools" each question goes to the model as its messages, with its functions as tools, the way the
leaderboard asks models with native tool calling ("FC"). In the mode "prompt" the leaderboard's own system prompt
describes the functions and asks for calls in Python's syntax. Functions are changed as it changes them, which the tests
compare with its own code: JSON Schema types, a note on the language, Java and JavaScript values as strings.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import importlib.util
import json
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from fctune.base.errors import ConfigError
from fctune.calls.formats.base import Parsed
from fctune.calls.judge import BenchmarkVerdict, Judgement, describe_malformed, judge_failure
from fctune.calls.matching import describe_differences
from fctune.config.parsing import suggest
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.tasks.benchmarks.bfcl.answer_key import AnswerKey
from fctune.tasks.benchmarks.bfcl.cases import MULTI_TURN, NAME, SINGLE_TURN, TITLE, BfclCase, read_bfcl
from fctune.tasks.benchmarks.bfcl.checker import CallChecker, language_of
from fctune.tasks.benchmarks.bfcl.multi_turn_cases import open_multi_turn
from fctune.tasks.benchmarks.bfcl.overall import AGENTIC
from fctune.tasks.benchmarks.bfcl.prompt_answers import join_tuples
from fctune.tasks.task import Case, MultiTurnCase

Mode = Literal["tools", "prompt"]
"""How a model is given the functions: as native tools, or in the leaderboard's own system prompt."""

_NOT_RUN = {
    **dict.fromkeys(AGENTIC, "needs a memory or network access between turns"),
    "format_sensitivity": "prompts for other call formats than the model's own",
}
_GROUPS = {
    "single_turn": SINGLE_TURN,
    "live": tuple(name for name in SINGLE_TURN if name.startswith("live_")),
    "non_live": tuple(name for name in SINGLE_TURN if not name.startswith("live_")),
    "multi_turn": MULTI_TURN,
    "agentic": AGENTIC,
}
_NOT_PROMPTED = {
    **dict.fromkeys(("simple_java", "simple_javascript"), "prompt mode reads answers in Python's syntax only"),
    **dict.fromkeys(MULTI_TURN, "prompt mode asks for one turn only"),
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
    benchmark_name: ClassVar[str] = NAME

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


@dataclass(frozen=True)
class BfclPromptCase(BfclSingleTurnCase):
    """A question asked by the leaderboard's own prompt; answers are read as ``BfclAnswer`` reads them."""

    def judge(self, parsed: Parsed, decoded: Parsed | None = None) -> Judgement:
        """Judge an answer: the benchmark distinguishes tuples from lists, the strict typed match does not."""
        types = {
            (function["name"], key): schema.get("type")
            for function in self.question.functions
            for key, schema in function["parameters"]["properties"].items()
        }
        official = [
            {
                key: join_tuples(value, is_tuple=True) if types.get((call.name, key)) == "tuple" else value
                for key, value in call.arguments.items()
            }
            for call in parsed.calls
        ]
        plain = tuple(Call(call.name, join_tuples(call.arguments), call.id) for call in parsed.calls)
        calls = tuple(
            Call(call.name, arguments, call.id) for call, arguments in zip(parsed.calls, official, strict=True)
        )
        return super().judge(parsed._replace(calls=plain), parsed._replace(calls=calls))


def resolve_categories(names: Sequence[str], mode: Mode = "tools") -> tuple[list[str], dict[str, str]]:
    """Expand groups of categories: return the categories to run, in order, and those that cannot be, with the reason.

    Args:
        names: Categories, or ``single_turn``, ``live``, ``non_live``, ``multi_turn``, ``agentic``.
        mode: How the model is given the functions.

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
    reasons = {**_NOT_RUN, **(_NOT_PROMPTED if mode == "prompt" else {})}
    runnable = [category for category in (*SINGLE_TURN, *MULTI_TURN) if category in named and category not in reasons]
    return runnable, {category: reason for category, reason in reasons.items() if category in named}


def load_category(
    data_dir: Path, category: str, has_plain_names: bool, mode: Mode = "tools"
) -> tuple[tuple[Case, ...], tuple[MultiTurnCase, ...], dict[str, str]]:
    """Load one category: its single-turn cases, its multi-turn cases, and the reason if it cannot be run.

    Args:
        data_dir: The wheel's data directory.
        category: A single- or multi-turn category.
        has_plain_names: Write underscores for the dots in functions' names.
        mode: How the model is given the functions.

    Raises:
        ConfigError: The prompt of the mode "prompt" needs the installed wheel.
    """
    if category in MULTI_TURN:
        return (), *open_multi_turn(data_dir, [category], to_tool)
    questions = read_bfcl(data_dir, category)
    if mode == "prompt":
        prompt = read_system_prompt()
        return tuple(_to_prompt_case(question, prompt) for question in questions), (), {}
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


def find_release(data_dir: str | Path) -> str | None:
    """Return the package and version that a data directory belongs to, such as ``bfcl-eval 2026.3.23``, or None."""
    site = str(Path(data_dir).resolve().parent.parent)
    found = next(iter(importlib.metadata.distributions(name="bfcl-eval", path=[site])), None)
    return None if found is None else f"bfcl-eval {found.version}"


def read_system_prompt() -> Callable[[Sequence[dict[str, Any]]], str]:
    """Return the function that writes the leaderboard's default system prompt for some functions.

    Its text is the installed wheel's.

    Raises:
        ConfigError: The wheel is not installed, or its default prompt has another form.
    """
    try:
        texts = importlib.import_module("bfcl_eval.constants.default_prompts")
        form = dict(urllib.parse.parse_qsl(texts.DEFAULT_SYSTEM_PROMPT_FORMAT))
        style = texts.PROMPT_STYLE_TEMPLATES[form["style"]]
        template: str = texts.PROMPT_TEMPLATE_MAPPING[form["prompt_fmt"]]
        call_format = style["tool_call_no_tag"].format(
            output_format=texts.OUTPUT_FORMAT_MAPPING["python"], param_types=texts.PARAM_TYPE_MAPPING["python"]
        )
        known = {"ret_fmt": "python", "tool_call_tag": "False", "func_doc_fmt": "json"}
    except (ImportError, AttributeError, KeyError):
        form, known = {}, {"ret_fmt": "python"}
    if not known.items() <= form.items():
        raise ConfigError(
            "bfcl: the mode prompt needs the prompt of the wheel. pip install --no-deps bfcl-eval==2026.3.23, "
            "or leave out --bfcl-mode prompt."
        )

    def write(functions: Sequence[dict[str, Any]]) -> str:
        documents = json.dumps(functions, indent=4)
        return template.format(
            persona=style["persona"],
            task=style["task"],
            tool_call_format=call_format,
            multiturn_behavior=style["multiturn_behavior"],
            available_tools=style["available_tools"].format(format=form["func_doc_fmt"], functions=documents),
        )

    return write


def to_function_document(function: dict[str, Any], category: str, has_hint: bool = True) -> dict[str, Any]:
    """Return a function as the leaderboard describes it: its own types, with a note on the language.

    Values in Java and JavaScript are strings.
    """
    function = copy.deepcopy(function)
    language = language_of(category)
    if has_hint:
        function["description"] += f" Note that the provided function is in {_LANGUAGES[language]} syntax."
    if language != "python":
        for schema in function["parameters"]["properties"].values():
            _describe_as_source(schema, "Java" if language == "java" else "JavaScript")
    return function


def to_tool(function: dict[str, Any], category: str, has_hint: bool = True) -> Tool:
    """Convert a function of the benchmark to the tool shown to a model: in JSON Schema, with a note on its language."""
    function = to_function_document(function, category, has_hint)
    function["parameters"]["type"] = "object"
    _rename_types(function["parameters"]["properties"])
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
    prompt = Conversation(messages, tools, f"{TITLE} {question.id}")
    expected = tuple(map(_first_choice, question.answers))
    return BfclSingleTurnCase(question.id, question.category, prompt, expected, question)


def _to_prompt_case(question: BfclCase, write_prompt: Callable[[Sequence[dict[str, Any]]], str]) -> BfclPromptCase:
    """Make a case whose functions are in a system message, before the question's own system message if it has one."""
    (turn,) = question.turns
    system = write_prompt([to_function_document(function, question.category) for function in question.functions])
    if turn[0]["role"] == "system":
        system, turn = f"{system}\n\n{turn[0]['content']}", turn[1:]
    messages = (Message("system", system), *(Message(message["role"], message["content"]) for message in turn))
    expected = tuple(map(_first_choice, question.answers))
    prompt = Conversation(messages, (), f"{TITLE} {question.id}")
    return BfclPromptCase(question.id, question.category, prompt, expected, question)


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


_VALID = BenchmarkVerdict(True, "")


class SingleTurnJudge:
    """Judges answers to one single-turn case; prepared once for many answers."""

    def __init__(self, case: BfclCase) -> None:
        self._checker = CallChecker(case.category, case.functions, case.answers)
        self._key = AnswerKey(case)

    def judge(self, parsed: Parsed, decoded: Parsed | None = None) -> Judgement:
        """Judge the calls of one answer; ``Judgement.differences`` stays empty, as listing them takes most time.

        Args:
            parsed: The answer as read.
            decoded: The answer as the leaderboard decodes it; see ``Reading.decoded``. None: as read.
        """
        decoded = decoded or parsed
        checked = self._checker.check(() if decoded.malformed else decoded.calls)
        outcome = self._key.judge(parsed, checked.is_exact)
        if checked.valid and not checked.reason:
            return Judgement(outcome, "", (), _VALID)
        reason = describe_malformed(decoded.malformed[0]) if decoded.malformed and not checked.valid else checked.reason
        return Judgement(outcome, reason, (), BenchmarkVerdict(checked.valid, checked.reason))

    def judge_failure(self, reason: str) -> Judgement:
        """Judge a case without an answer."""
        failure = judge_failure(self._key.num_expected, reason)
        return failure._replace(benchmark=BenchmarkVerdict(False, reason))
