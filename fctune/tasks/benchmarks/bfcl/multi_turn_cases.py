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

from fctune.base.errors import ConfigError
from fctune.calls.formats.base import Parsed
from fctune.calls.judge import BenchmarkVerdict, ErrorKind, Judgement, Outcome, describe_malformed, judge, judge_failure
from fctune.data.conversation import Call, Message, Tool
from fctune.tasks.benchmarks.bfcl.cases import NAME, BfclCase, read_bfcl
from fctune.tasks.benchmarks.bfcl.multi_turn import (
    MAX_TIME_S,
    SimulatedTools,
    check_multi_turn,
    load_simulators,
)
from fctune.tasks.task import MultiTurnCase, Turn


@dataclass(frozen=True)
class BfclMultiTurnCase(MultiTurnCase):
    """A conversation of the leaderboard; the calls of one answer may take ``max_time_s`` CPU seconds."""

    question: BfclCase
    max_time_s: float = MAX_TIME_S
    benchmark_name: ClassVar[str] = NAME

    @functools.cached_property
    def expected(self) -> tuple[tuple[Call, ...], ...]:
        """Expected calls of each turn, read from the benchmark's answers."""
        simulated = SimulatedTools(self.question, load_simulators(), "expected")
        return tuple(tuple(map(simulated.read_answer, answer)) for answer in self.question.answers)

    def judge(
        self,
        turns: Sequence[Sequence[Parsed]],
        stopped: str | None = None,
        is_unanswered: bool = False,
        decoded: Sequence[Sequence[Parsed]] | None = None,
    ) -> Judgement:
        """Judge the model's answers, given as the steps of each turn.

        The kind of error is that of the first turn whose calls are not the expected ones. Counts of calls and arguments
        are sums over turns.

        Args:
            turns: The steps of each turn; fewer turns if the conversation was stopped.
            stopped: Why the conversation was stopped early; None if it was not.
            is_unanswered: The conversation was stopped because the model could not answer.
            decoded: The steps as the leaderboard decodes them; see ``Reading.decoded``. None: as read.
        """
        calls = [[() if step.malformed else step.calls for step in turn] for turn in decoded or turns]
        checked = check_multi_turn(self.question, calls, load_simulators())
        judged = [
            judge(
                due,
                Parsed(
                    tuple(call for step in steps for call in step.calls),
                    tuple(stretch for step in steps for stretch in step.malformed),
                ),
                tools,
            )
            for due, tools, steps in zip(
                self.expected, [turn.tools for turn in self.turns], [*turns, *([()] * len(self.expected))], strict=False
            )
        ]
        outcomes = [one.outcome for one in judged]
        verdict: ErrorKind = next((one.verdict for one in outcomes if not one.is_correct), "correct")
        malformed = _first_malformed(turns)
        if malformed:
            verdict = "malformed"
        elif is_unanswered:
            verdict = "no_answer"
        elif verdict == "correct" and (stopped is not None or len(turns) != len(self.expected)):
            # The wheel judges a conversation that it stops in the last turn like any other; here one that would never
            # end is wrong.
            verdict = "wrong_count"
        differences = [stopped] if stopped is not None else []
        if checked.reason:
            differences.append(f"BFCL: {checked.reason}")
        if verdict != "correct":
            differences += [f"turn {n}: {line}" for n, one in enumerate(judged, start=1) for line in one.differences]
        return Judgement(
            _add_outcomes(verdict, outcomes),
            "" if checked.valid else stopped or malformed or checked.reason,
            tuple(differences),
            BenchmarkVerdict(checked.valid, checked.reason),
        )

    def judge_failure(self, reason: str) -> Judgement:
        """Judge a conversation that came to no end."""
        failure = judge_failure(sum(map(len, self.expected)), reason)
        return failure._replace(benchmark=BenchmarkVerdict(False, reason))

    def open_tools(self) -> SimulatedTools:
        """Create the tools in their initial state."""
        return SimulatedTools(self.question, load_simulators(), "model", self.max_time_s)

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


def _first_malformed(turns: Sequence[Sequence[Parsed]]) -> str:
    for number, steps in enumerate(turns, start=1):
        for step in steps:
            if step.malformed:
                return f"turn {number}: {describe_malformed(step.malformed[0])}"
    return ""


def _add_outcomes(verdict: ErrorKind, outcomes: Sequence[Outcome]) -> Outcome:
    counts = zip(*(outcome[1:] for outcome in outcomes), strict=True)
    return Outcome(verdict, *(sum(int(count or 0) for count in column) for column in counts))
