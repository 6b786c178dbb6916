"""An engine that answers multi-turn cases by a plan, such as the expected calls or these with errors."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fctune.calls.formats.registry import FORMATS
from fctune.data.conversation import Call, Conversation
from fctune.engines.engine import Answer, Prompt
from fctune.tasks.benchmarks import find_suite_files
from fctune.tasks.evaluation.results import ResultsFile, read_rows
from fctune.tasks.evaluation.run import run_suite
from fctune.tasks.suite import Suite
from fctune.tasks.suite_files import load_suite
from fctune.tasks.task import MultiTurnCase

HERMES = FORMATS["hermes"]
BROKEN = "<tool_call>{"
Plan = Callable[[MultiTurnCase, int, int], list[Call] | str]


@functools.cache
def load_multi_turn_suite() -> Suite:
    return load_suite(find_suite_files()["bfcl"], categories=["multi_turn"], has_multi_turn=True)


def sample(every: int = 40, categories: Sequence[str] = ()) -> Suite:
    suite = load_multi_turn_suite().select(categories)
    return suite.with_cases((), suite.multi_turn[::every])


def gold(case: MultiTurnCase, turn: int, step: int) -> list[Call]:
    """The answer, two calls to a step."""
    return list(case.expected[turn][2 * step : 2 * step + 2])


class Player:
    """Says what a plan has for the turn and the step that a prompt has come to."""

    def __init__(self, suite: Suite, plan: Plan = gold, dies_after: int | None = None):
        self.cases = {case.id: case for case in suite.multi_turn}
        self.plan, self.dies_after = plan, dies_after
        self.prompts: list[Conversation] = []
        self.rounds: list[int] = []

    def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        self.rounds.append(len(prompts))
        # Not in the order of the prompts, as engines do.
        for index in reversed(range(len(prompts))):
            if self.dies_after is not None and len(self.prompts) >= self.dies_after:
                raise KeyboardInterrupt
            self.prompts.append(prompts[index].conversation)
            yield self.say(index, prompts[index].conversation)

    def say(self, index: int, prompt: Conversation) -> Answer:
        answer = self.plan(self.cases[prompt.source.split()[-1]], *place_of(prompt))
        return Answer(index, answer if isinstance(answer, str) else HERMES.render(answer) or "Done.")

    def describe(self) -> dict[str, Any]:
        return {"model": "player"}


def place_of(prompt: Conversation) -> tuple[int, int]:
    """The turn and the step, from 0, that a conversation has come to; in all cases the user says one thing a turn."""
    roles = [message.role for message in prompt.messages]
    last = len(roles) - 1 - roles[::-1].index("user")
    return roles.count("user") - 1, roles[last:].count("assistant")


def run(suite: Suite, engine: Any, path: Path, **options: Any) -> list[dict[str, Any]]:
    rows = run_suite(suite, engine, HERMES, ResultsFile(path), **options)
    assert rows is not None
    assert rows == read_rows(path)
    return rows


def stray_plan(case: MultiTurnCase, turn: int, step: int) -> list[Call] | str:
    """The answer with faults: calls that are dropped, wrong, extra or malformed, and turns without end."""
    rng = random.Random(f"{case.id} {turn} {step}")
    fault = random.Random(f"{case.id} {turn}").choice(("", "", "", "", "drop", "extra", "broken", "unknown", "endless"))
    calls = gold(case, turn, step)
    if fault == "drop" and step == 0:
        return calls[1:]
    if fault == "extra" and step <= len(case.expected[turn]) // 2:
        tool = rng.choice(case.turns[turn].tools)
        return [*calls, Call(tool.name, dict.fromkeys(tool.parameters["properties"], rng.choice(("x", 1, None))))]
    if fault == "broken" and step == 1:
        return BROKEN
    if fault == "unknown" and step == 0:
        return [Call("no_such_tool", {"a": 1}), *calls]
    if fault == "endless" and rng.random() < 0.97:
        return calls or [Call(case.turns[turn].tools[0].name, {})]
    return calls
