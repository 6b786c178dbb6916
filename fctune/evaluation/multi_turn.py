"""The multi-turn categories of the Berkeley Function Calling Leaderboard: what is said, tools that answer, the verdict.

What comes in which order is that of the wheel's own loop over models with tool calling of their own ("FC"), against
which the tests hold it. Where a function is held out and comes later ("miss_func"), the turn in which it comes has no
question but the wheel's own sentence, and the function stands last among the tools, without the word on its language.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune.calls.bfcl.cases import BfclCase, read_bfcl
from fctune.calls.bfcl.multi_turn import World, judge_multi_turn, load_simulators
from fctune.calls.formats.base import Parsed
from fctune.calls.metrics import Outcome, Verdict, judge
from fctune.data.conversation import Call, Message, Tool
from fctune.errors import ConfigError

_TURN = re.compile(r"turn (\d+): ")


@dataclass(frozen=True, slots=True)
class Turn:
    """What opens a turn: the user's messages, and the tools that are on offer from here on."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]


@dataclass(frozen=True)
class MultiTurnCase:
    """A conversation in which the user speaks in several turns and the tools answer.

    In each turn the model is asked until it calls no more. With calls in more than ``max_steps`` answers of one turn
    the conversation ends there.
    """

    id: str
    category: str
    turns: tuple[Turn, ...]
    max_steps: int
    question: BfclCase

    @functools.cached_property
    def expected(self) -> tuple[tuple[Call, ...], ...]:
        """The calls that are due in each turn."""
        world = World(self.question, load_simulators(), "expected")
        return tuple(tuple(map(world.read_answer, answer)) for answer in self.question.answers)

    def start(self) -> World:
        """The tools in their initial state."""
        return World(self.question, load_simulators(), "model")

    def judge(self, turns: Sequence[Sequence[Parsed]]) -> tuple[Outcome, dict[str, Any]]:
        """The outcome of a conversation, and under ``bfcl`` the benchmark's verdict.

        What the benchmark finds wrong names the error class: that of the turn at which its checker stops. Counts of
        calls and arguments are sums over turns. The benchmark takes malformed for no call; here it is never right.

        Args:
            turns: What the model's answers said, step by step in each turn; fewer turns where it was stopped.
        """
        calls = [[() if step.malformed else step.calls for step in turn] for turn in turns]
        official = judge_multi_turn(self.question, calls, load_simulators())
        outcomes = []
        for place, due in enumerate(self.expected):
            steps = turns[place] if place < len(turns) else ()
            said = Parsed(
                tuple(call for step in steps for call in step.calls),
                tuple(stretch for step in steps for stretch in step.malformed),
            )
            outcomes.append(judge(due, said, self.turns[place].tools))
        is_typed = len(turns) == len(outcomes) and all(outcome.is_correct for outcome in outcomes)
        verdict = self._classify(official.valid, official.reason, len(turns), outcomes)
        differences = [f"BFCL: {official.reason}"] if official.reason else []
        if verdict != "correct":
            differences += [f"turn {n}: {line}" for n, one in enumerate(outcomes, start=1) for line in one.differences]
        whole = Outcome(
            verdict,
            num_expected=sum(one.num_expected for one in outcomes),
            num_called=sum(one.num_called for one in outcomes),
            num_malformed=sum(one.num_malformed for one in outcomes),
            num_names_matched=sum(one.num_names_matched for one in outcomes),
            num_arguments_expected=sum(one.num_arguments_expected for one in outcomes),
            num_arguments_called=sum(one.num_arguments_called for one in outcomes),
            num_arguments_matched=sum(one.num_arguments_matched for one in outcomes),
            num_schema_valid=sum(one.num_schema_valid or 0 for one in outcomes),
            differences=tuple(differences),
        )
        typed = "correct" if is_typed else next((o.verdict for o in outcomes if not o.is_correct), "wrong_count")
        return whole, {"bfcl": {"valid": official.valid, "reason": official.reason, "typed": typed}}

    def _classify(self, is_valid: bool, reason: str, num_turns: int, outcomes: Sequence[Outcome]) -> Verdict:
        if any(outcome.num_malformed for outcome in outcomes):
            return "malformed"
        if is_valid:
            return "correct"
        found = _TURN.match(reason)
        last = int(found[1]) if found else max(1, num_turns)
        if not outcomes[last - 1].is_correct:
            return outcomes[last - 1].verdict
        # The turn's own calls are right: one before it left another state.
        return next((one.verdict for one in outcomes[:last] if not one.is_correct), "wrong_count")


def open_multi_turn(
    data_dir: Path, categories: Sequence[str], to_tool: Callable[..., Tool]
) -> tuple[tuple[MultiTurnCase, ...], dict[str, str]]:
    """The cases of multi-turn categories, and the categories that cannot be run with the reason.

    Args:
        data_dir: The wheel's data directory.
        categories: Of the multi-turn ones.
        to_tool: Makes a function of a category the tool that a model is shown, with or without the word on its
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
            cases.append(MultiTurnCase(question.id, category, turns, max_steps, question))
    return tuple(cases), {}


def _read_turns(question: BfclCase, sentence: str, to_tool: Callable[..., Tool]) -> tuple[Turn, ...]:
    held_out = question.held_out
    functions = {function["name"]: function for function in question.functions}
    later = {name for names in held_out.values() for name in names}
    tools = [to_tool(function, question.category) for name, function in functions.items() if name not in later]
    turns = []
    for place, said in enumerate(question.turns):
        messages = tuple(Message(message["role"], message["content"]) for message in said)
        if place in held_out:
            come = [functions[name] for name in held_out[place] if name in functions]
            tools = tools + [to_tool(function, question.category, has_hint=False) for function in come]
            messages = (Message("user", sentence),)
        turns.append(Turn(messages, tuple(tools)))
    return tuple(turns)
