"""Cases of the Berkeley Function Calling Leaderboard, v4, read from the data directory of the ``bfcl-eval`` wheel.

None of its data is copied into this project; its licence is Apache-2.0.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError, DataError
from fctune.data.conversation import Tool

NAME = "bfcl"
TITLE = "BFCL v4"

RELEVANCE = ("irrelevance", "live_irrelevance", "live_relevance")
SINGLE_TURN = (
    "simple_python",
    "simple_java",
    "simple_javascript",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
    *RELEVANCE,
)
MULTI_TURN = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
CATEGORIES = (*SINGLE_TURN, *MULTI_TURN)

# The simulated classes of the multi-turn categories: the module of each, and the file that describes its tools.
SIMULATORS = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}


@dataclass(frozen=True, slots=True)
class BfclCase:
    """One question of the leaderboard.

    ``turns`` holds the messages of each turn in OpenAI's shape; single-turn cases have one. ``answers`` holds the
    expected calls with their alternatives, or, in multi-turn cases, a list of calls in Python syntax for each turn; it
    is empty in relevance and irrelevance. ``classes`` and ``initial_config`` name the simulated classes of a multi-turn
    case and their initial state; ``held_out`` the functions that are only offered from a later turn on, by its index.
    """

    id: str
    category: str
    turns: tuple[list[dict[str, Any]], ...]
    functions: tuple[dict[str, Any], ...]
    answers: tuple[Any, ...] = ()
    classes: tuple[str, ...] = ()
    initial_config: dict[str, Any] = field(default_factory=dict)
    held_out: dict[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The functions as tools, with the benchmark's own types."""
        return tuple(map(Tool, self.functions))

    def without_dots(self) -> BfclCase:
        """Rename functions ``a.b`` to ``a_b``, for models that cannot write dots; multi-turn cases have none."""
        functions = tuple({**function, "name": function["name"].replace(".", "_")} for function in self.functions)
        if self.classes:
            return self
        answers = tuple({name.replace(".", "_"): value for name, value in answer.items()} for answer in self.answers)
        return replace(self, functions=functions, answers=answers)


def category_of(case_id: str) -> str:
    """Return the category that a case's id names, whether or not the case exists."""
    return case_id.rpartition("_")[0]


def read_bfcl(data_dir: str | Path, category: str) -> list[BfclCase]:
    """Read the cases of one category, in the order of its file.

    Args:
        data_dir: The wheel's ``bfcl_eval/data``.
        category: One of ``CATEGORIES``.

    Raises:
        ConfigError: The category does not exist or is not scored here.
        DataError: The files are missing or do not have the wheel's layout.
    """
    if category not in CATEGORIES:
        raise ConfigError(
            f"{category}: not a category of the leaderboard that can be scored.\n"
            f"  Expected one of {', '.join(CATEGORIES)}."
        )
    directory = Path(data_dir)
    questions = _read_rows(directory / f"BFCL_v4_{category}.json")
    answers: list[dict[str, Any]] = [{"id": question.get("id"), "ground_truth": ()} for question in questions]
    if category not in RELEVANCE:
        answers = _read_rows(directory / "possible_answer" / f"BFCL_v4_{category}.json")
    functions = _read_functions(directory) if category in MULTI_TURN else {}
    try:
        if [question["id"] for question in questions] != [answer["id"] for answer in answers]:
            raise DataError(
                f"{directory}: the questions and answers of {category} have different ids. Reinstall bfcl-eval."
            )
        return [
            _case(question, answer["ground_truth"], category, functions)
            for question, answer in zip(questions, answers, strict=True)
        ]
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{directory}: the rows of {category} do not have the leaderboard's shape ({error!r}).\n"
            "  Pass the data directory of the bfcl-eval wheel: site-packages/bfcl_eval/data."
        ) from None


def _case(
    question: dict[str, Any], answers: list[Any], category: str, functions: dict[str, list[dict[str, Any]]]
) -> BfclCase:
    classes = tuple(question["involved_classes"]) if category in MULTI_TURN else ()
    # The wheel also offers what the data names as ``excluded_function``: it never reads that key.
    offered = [function for name in classes for function in functions[name]]
    return BfclCase(
        id=question["id"],
        category=category,
        turns=tuple(question["question"]),
        functions=tuple(offered if classes else question["function"]),
        answers=tuple(answers),
        classes=classes,
        initial_config=question["initial_config"] if classes else {},
        held_out={int(turn): tuple(names) for turn, names in question.get("missed_function", {}).items()},
    )


def _read_functions(directory: Path) -> dict[str, list[dict[str, Any]]]:
    return {name: _read_rows(directory / "multi_turn_func_doc" / f"{file}.json") for name, file in SIMULATORS.items()}


def _read_rows(path: Path) -> list[dict[str, Any]]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}). Pass the data directory of the bfcl-eval wheel: "
            "site-packages/bfcl_eval/data."
        ) from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON Lines ({error}).") from None
    if not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: expected every row to be an object. Pass the wheel's bfcl_eval/data.")
    return rows
