"""The bfcl-eval wheel, if it is installed: its data, and its checker imported without its dependencies.

The wheel's dependencies take 6 GB; its checker only needs a table of models, which is stubbed.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fctune.data.conversation import Call, Tool
from fctune.tasks.benchmarks.bfcl.cases import BfclCase

PYTHON_CATEGORIES = (
    "simple_python",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
)
SOURCE_CATEGORIES = ("simple_java", "simple_javascript")

# Directories that share what they hold: 2 ** 60 paths.
SHARED_DIRECTORIES = [
    call
    for _ in range(60)
    for call in (
        Call("mkdir", {"dir_name": "a"}),
        Call("cp", {"source": "a", "destination": "b"}),
        Call("mkdir", {"dir_name": "c"}),
        Call("mv", {"source": "a", "destination": "c"}),
        Call("mv", {"source": "b", "destination": "c"}),
        Call("mv", {"source": "c", "destination": "a"}),
    )
]

needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec("bfcl_eval") is None,
    reason="bfcl-eval is not installed: pip install --no-deps bfcl-eval==2026.3.23",
)


@dataclass(frozen=True)
class Case:
    id: str
    category: str
    functions: list[dict[str, Any]]
    answers: list[dict[str, dict[str, list[Any]]]]

    @property
    def tools(self) -> tuple[Tool, ...]:
        return tuple(Tool(function) for function in self.functions)


def data_dir() -> Path:
    spec = importlib.util.find_spec("bfcl_eval")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "data"


@functools.cache
def load_cases(category: str) -> tuple[Case, ...]:
    questions = _rows(data_dir() / f"BFCL_v4_{category}.json")
    answers = _rows(data_dir() / "possible_answer" / f"BFCL_v4_{category}.json")
    pairs = list(zip(questions, answers, strict=True))
    assert all(question["id"] == answer["id"] for question, answer in pairs)
    return tuple(Case(q["id"], category, q["function"], a["ground_truth"]) for q, a in pairs)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def python_cases() -> Iterator[Case]:
    for category in PYTHON_CATEGORIES:
        yield from load_cases(category)


def gold_calls(case: Case, rank: int = 0) -> list[Call]:
    """Return the answer as calls, with the alternative of that rank, or the last; ``""`` means omitted."""
    calls = []
    for answer in case.answers:
        ((name, parameters),) = answer.items()
        arguments = {}
        for parameter, alternatives in parameters.items():
            given = [value for value in alternatives if value != ""]
            if given:
                arguments[parameter] = _value(given[min(rank, len(given) - 1)])
        calls.append(Call(name, arguments))
    return calls


def _value(alternative: Any) -> Any:
    """A value from an answer, in which objects hold a list of alternatives for each key."""
    if isinstance(alternative, dict):
        found = {}
        for key, values in alternative.items():
            given = [value for value in values if value != ""] if isinstance(values, list) else [values]
            if given:
                found[key] = _value(given[0])
        return found
    if isinstance(alternative, list):
        return [_value(item) for item in alternative]
    return alternative


@functools.cache
def official_checker() -> Callable[[Case, list[Call]], bool | None]:
    """Return a function that gives the wheel's verdict on calls, or None if its checker raises."""
    table = types.ModuleType("bfcl_eval.constants.model_config")
    table.MODEL_CONFIG_MAPPING = {  # type: ignore[attr-defined]
        "keeps-dots": types.SimpleNamespace(underscore_to_dot=False),
    }
    sys.modules.setdefault("bfcl_eval.constants.model_config", table)
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker

    languages = {"simple_java": Language.JAVA, "simple_javascript": Language.JAVASCRIPT}

    def check(case: Case, calls: list[Call]) -> bool | None:
        language = languages.get(case.category, Language.PYTHON)
        output = [{call.name: call.arguments} for call in calls]
        try:
            verdict = ast_checker(case.functions, output, case.answers, language, case.category, "keeps-dots")
        except Exception:
            return None
        return bool(verdict["valid"])

    return check


@functools.cache
def official_served_checker() -> Callable[[Case, list[dict[str, Any]]], bool]:
    """Return a function that gives the wheel's verdict on calls as a server sends them, with arguments as JSON text.

    They are decoded as ``OpenAICompletionsHandler.decode_ast`` does, whose module needs the clients of every provider,
    and judged as ``eval_runner`` does. Calls that cannot be decoded are wrong, except that they are an abstention.
    """
    from bfcl_eval.utils import is_empty_output, is_function_calling_format_output

    check = official_checker()

    def check_served(case: Case, sent: list[dict[str, Any]]) -> bool:
        try:
            decoded = [{call["name"]: json.loads(call["arguments"])} for call in sent]
        except Exception:
            decoded = []
        if "relevance" in case.category:
            return bool(is_empty_output(decoded)) == ("irrelevance" in case.category)
        if not is_function_calling_format_output(decoded):
            return False
        calls = [Call(name, arguments) for call in decoded for name, arguments in call.items()]
        return check(case, calls) is True

    return check_served


@functools.cache
def official_multi_turn_checker() -> Callable[[BfclCase, list[list[list[Call]]]], bool | None]:
    """The wheel's verdict on the calls of a multi-turn case; None where its checker raises.

    It gives calls to ``eval`` and keeps its instances in its module: each verdict gets a name of its own, and what was
    kept under it is removed.
    """
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker, multi_turn_utils
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import is_empty_execute_response

    numbers = itertools.count()

    def check(case: BfclCase, turns: list[list[list[Call]]]) -> bool | None:
        if len(turns) != len(case.answers):
            return False  # as the wheel's runner does before it asks the checker
        steps = [[[_as_source(call) for call in step] for step in turn] for turn in turns]
        steps = [[step for step in turn if not is_empty_execute_response(step)] for turn in steps]
        entry = {"id": case.id, "initial_config": case.initial_config, "involved_classes": list(case.classes)}
        try:
            verdict = multi_turn_checker.multi_turn_checker(
                steps, [list(answer) for answer in case.answers], entry, case.category, f"run{next(numbers)}"
            )
        except Exception:
            return None
        finally:
            kept = [name for name in vars(multi_turn_utils) if name.endswith("_instance")]
            for name in kept:
                delattr(multi_turn_utils, name)
        return bool(verdict["valid"])

    return check


def _as_source(call: Call) -> str:
    """Write a call as the wheel's handlers of function-calling models do for its checker."""
    return f"{call.name}({','.join(f'{key}={value!r}' for key, value in call.arguments.items())})"
