"""Multi-turn cases of the Berkeley Function Calling Leaderboard: the turns, the simulated tools and the judgement.

The order of messages is that of the wheel's own loop over models with native tool calling ("FC"), which the tests
compare it with. If a function is held out until a later turn ("miss_func"), that turn has no question but the wheel's
own sentence, and the function comes last among the tools, without the note on its language.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fctune.calls.formats.base import Parsed
from fctune.calls.judge import Judgement
from fctune.data.conversation import Call, Message, Tool
from fctune.errors import ConfigError
from fctune.evaluation.benchmarks.bfcl.cases import NAME, BfclCase, read_bfcl
from fctune.evaluation.benchmarks.bfcl.judge import MultiTurnJudge
from fctune.evaluation.benchmarks.bfcl.multi_turn import MAX_TIME_S, SimulatedTools, load_simulators
from fctune.evaluation.cases import MultiTurnCase, Turn


@dataclass(frozen=True)
class BfclMultiTurnCase(MultiTurnCase):
    """A conversation of the leaderboard; the calls of one answer may take ``max_time_s`` CPU seconds."""

    question: BfclCase
    max_time_s: float = MAX_TIME_S
    benchmark_name: ClassVar[str] = NAME

    @functools.cached_property
    def _judge(self) -> MultiTurnJudge:
        return MultiTurnJudge(self.question, [turn.tools for turn in self.turns])

    @property
    def expected(self) -> tuple[tuple[Call, ...], ...]:
        """The calls that are due in each turn."""
        return self._judge.expected

    def start(self) -> SimulatedTools:
        """Create the tools in their initial state."""
        return SimulatedTools(self.question, load_simulators(), "model", self.max_time_s)

    def judge(
        self,
        turns: Sequence[Sequence[Parsed]],
        stopped: str | None = None,
        is_unanswered: bool = False,
        decoded: Sequence[Sequence[Parsed]] | None = None,
    ) -> Judgement:
        """Judge one reading of a conversation; see ``MultiTurnJudge.judge``."""
        return self._judge.judge(turns, stopped, is_unanswered, decoded)

    def judge_failure(self, reason: str) -> Judgement:
        """Judge a conversation that ended without an answer."""
        return self._judge.judge_failure(reason)

    def describe(self) -> list[Any]:
        """Return the answers, and the simulated classes with their initial state."""
        return [self.question.answers, self.question.initial_config, self.question.classes]


def open_multi_turn(
    data_dir: Path, categories: Sequence[str], to_tool: Callable[..., Tool]
) -> tuple[tuple[MultiTurnCase, ...], dict[str, str]]:
    """Load the cases of multi-turn categories, and the reason for each category that cannot be run.

    Args:
        data_dir: The wheel's data directory.
        categories: Multi-turn categories.
        to_tool: Converts a function of a category to the tool that a model is shown, with or without the note on its
            language.
    """
    if not categories:
        return (), {}
    try:
        load_simulators()
        texts = importlib.import_module("bfcl_eval.constants.default_prompts")
        sentence: str = texts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC
        max_steps: int = texts.MAXIMUM_STEP_LIMIT
    except ConfigError as error:
        return (), dict.fromkeys(categories, str(error).split("\n")[0])
    except (ImportError, AttributeError) as error:
        return (), dict.fromkeys(categories, f"needs the wheel bfcl-eval 2026.3.23 ({error})")
    cases = []
    for category in categories:
        for question in read_bfcl(data_dir, category):
            turns = _read_turns(question, sentence, to_tool)
            cases.append(BfclMultiTurnCase(question.id, category, turns, max_steps, question))
    return tuple(cases), {}


def _read_turns(question: BfclCase, sentence: str, to_tool: Callable[..., Tool]) -> tuple[Turn, ...]:
    held_out = question.held_out
    functions = {function["name"]: function for function in question.functions}
    later = {name for names in held_out.values() for name in names}
    tools = [to_tool(function, question.category) for name, function in functions.items() if name not in later]
    turns = []
    for number, opening in enumerate(question.turns):
        messages = tuple(Message(message["role"], message["content"]) for message in opening)
        if number in held_out:
            added = [functions[name] for name in held_out[number] if name in functions]
            tools = tools + [to_tool(function, question.category, has_hint=False) for function in added]
            messages = (Message("user", sentence),)
        turns.append(Turn(messages, tuple(tools)))
    return tuple(turns)
