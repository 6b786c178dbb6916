"""Answers to multi-turn cases as calls, and seeded mutations of them."""

from __future__ import annotations

import ast
import copy
import inspect
import random
from collections.abc import Callable
from typing import Any

from fctune.data.conversation import Call
from fctune.tasks.benchmarks.bfcl.cases import BfclCase
from fctune.tasks.benchmarks.bfcl.multi_turn import load_simulators

Turns = list[list[list[Call]]]


def gold_turns(case: BfclCase) -> Turns:
    """The answer as calls, read by Python's own parser; two calls to a step."""
    parameters = {
        name: list(inspect.signature(function).parameters)[1:]
        for simulator in load_simulators().values()
        for name, function in vars(simulator).items()
        if inspect.isfunction(function)
    }

    def read(text: str) -> Call:
        node = ast.parse(text, mode="eval").body
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Name)
        given = dict(zip(parameters[node.func.id], map(ast.literal_eval, node.args), strict=False))
        given |= {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg}
        return Call(node.func.id, given)

    turns = [[read(text) for text in answer] for answer in case.answers]
    return [[calls[place : place + 2] for place in range(0, len(calls), 2)] for calls in turns]


_STRAYS: tuple[Any, ...] = (
    "",
    "x",
    "word (1)",
    "ls ()",
    "a\nls (b)",
    "cd('x')",
    0,
    1,
    -1,
    2.5,
    True,
    None,
    [],
    ["a"],
    {"k": 1},
)


def mutate_turns(case: BfclCase, turns: Turns, rng: random.Random) -> Turns:
    """The answer with up to three changes: dropped, reordered, altered and extra calls, turns and steps."""
    turns = copy.deepcopy(turns)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        filled = [turn for turn in turns if any(turn)]
        if filled:
            rng.choice(_MUTATIONS)(rng.choice(filled), turns, case, rng)
    return turns


def _place(turn: list[list[Call]], rng: random.Random) -> tuple[list[Call], int]:
    step = rng.choice([step for step in turn if step] or [[Call("pwd", {})]])
    return step, rng.randrange(len(step))


def _drop(turn: list[list[Call]], turns: Turns, case: BfclCase, rng: random.Random) -> None:
    step, place = _place(turn, rng)
    del step[place]


def _drop_step(turn: list[list[Call]], turns: Turns, case: BfclCase, rng: random.Random) -> None:
    del turn[rng.randrange(len(turn))]


def _reorder(turn: list[list[Call]], turns: Turns, case: BfclCase, rng: random.Random) -> None:
    calls = [call for step in turn for call in step]
    rng.shuffle(calls)
    turn[:] = [calls]


def _one_step_each(turn: list[list[Call]], turns: Turns, case: BfclCase, rng: random.Random) -> None:
    turn[:] = [[call] for step in turn for call in step] + [[]]


def _swap_turns(turn: list[list[Call]], turns: Turns, case: BfclCase, rng: random.Random) -> None:
    first, second = rng.randrange(len(turns)), rng.randrange(len(turns))
    turns[first], turns[second] = turns[second], turns[first]


def _move_to_other_turn(turn: list[list[Call]], turns: Turns, case: BfclCase, rng: random.Random) -> None:
    step, place = _place(turn, rng)
    if step[place:]:
        rng.choice(turns).append([step.pop(place)])


def _double(turn: list[list[Call]], turns: Turns, case: BfclCase, rng: random.Random) -> None:
    step, place = _place(turn, rng)
    step.insert(rng.randrange(len(step) + 1), copy.deepcopy(step[place]))


def _extra(turn: list[list[Call]], turns: Turns, case: BfclCase, rng: random.Random) -> None:
    """A call of any tool of the case, mostly with arguments of the right names."""
    function = rng.choice(case.functions)
    names = list(function["parameters"]["properties"])
    names = names if rng.random() < 0.8 else [*names[:-1], "unheard_of"]
    step, place = _place(turn, rng)
    step.insert(place, Call(function["name"], {name: rng.choice(_STRAYS) for name in names}))


def _alter(turn: list[list[Call]], turns: Turns, case: BfclCase, rng: random.Random) -> None:
    step, place = _place(turn, rng)
    arguments = step[place].arguments
    if not arguments:
        return
    key = rng.choice(list(arguments))
    value = arguments[key]
    changes: list[Callable[[Any], Any]] = [str, lambda item: [item], lambda item: rng.choice(_STRAYS)]
    if isinstance(value, str):
        changes += [str.upper, str.strip, lambda item: item + " (x)", lambda item: item.replace(" ", "  ")]
    if isinstance(value, (int, float)):
        changes += [float, lambda item: item + 1, lambda item: -item]
    arguments[key] = rng.choice(changes)(value)


def _drop_argument(turn: list[list[Call]], turns: Turns, case: BfclCase, rng: random.Random) -> None:
    step, place = _place(turn, rng)
    if step[place].arguments:
        del step[place].arguments[rng.choice(list(step[place].arguments))]


def _rename(turn: list[list[Call]], turns: Turns, case: BfclCase, rng: random.Random) -> None:
    step, place = _place(turn, rng)
    names = [step[place].name.upper(), "unheard_of", "_load_scenario", rng.choice(case.functions)["name"]]
    step[place] = Call(rng.choice(names), step[place].arguments)


def _cut_turns(turn: list[list[Call]], turns: Turns, case: BfclCase, rng: random.Random) -> None:
    if rng.random() < 0.3:
        turns.pop() if rng.random() < 0.5 else turns.append([])


_MUTATIONS = (
    _drop, _drop_step, _reorder, _one_step_each, _swap_turns, _move_to_other_turn, _double, _extra, _extra,
    _alter, _alter, _drop_argument, _rename, _cut_turns,
)  # fmt: skip
