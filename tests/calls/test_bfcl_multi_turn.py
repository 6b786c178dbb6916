"""Multi-turn verdicts are the leaderboard's: against the wheel's own checker, run beside ours on mutated answers."""

from __future__ import annotations

import ast
import copy
import decimal
import inspect
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from fctune.calls.bfcl import multi_turn as bfcl_multi_turn
from fctune.calls.bfcl.cases import MULTI_TURN, SIMULATORS, BfclCase, read_bfcl
from fctune.calls.bfcl.checker import BfclVerdict
from fctune.calls.bfcl.multi_turn import judge_multi_turn, load_simulators
from fctune.data.conversation import Call
from fctune.errors import ConfigError
from tests.calls.bfcl_wheel import SHARED_DIRECTORIES, data_dir, needs_wheel, official_multi_turn_checker

Turns = list[list[list[Call]]]


def cases(category: str) -> list[BfclCase]:
    return read_bfcl(data_dir(), category)


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


def judge(case: BfclCase, turns: Turns) -> BfclVerdict:
    return judge_multi_turn(case, turns, load_simulators())


@needs_wheel
def test_all_800_answers_replay_to_the_official_verdict() -> None:
    check = official_multi_turn_checker()
    num_cases = 0
    for category in MULTI_TURN:
        for case in cases(category):
            turns = gold_turns(case)
            assert judge(case, turns) == BfclVerdict(True), case.id
            assert check(case, turns) is True, case.id
            num_cases += 1
    assert num_cases == 800


@needs_wheel
@pytest.mark.parametrize("category", MULTI_TURN)
def test_mutated_answers_get_the_official_verdict(category: str) -> None:
    check = official_multi_turn_checker()
    rng = random.Random(category)
    num_valid = total = 0
    for case in cases(category):
        for _ in range(5):
            turns = mutate(case, gold_turns(case), rng)
            official = check(case, turns)
            verdict = judge(case, turns)
            assert verdict.valid == (official is True), (case.id, turns, verdict, official)
            num_valid += verdict.valid
            total += 1
    # The mutations are worth something only if both verdicts are common.
    assert 0.15 < num_valid / total < 0.8


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


def mutate(case: BfclCase, turns: Turns, rng: random.Random) -> Turns:
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


@needs_wheel
def test_a_bracket_in_a_string_is_read_as_the_wheel_reads_it() -> None:
    """The wheel rewrites ``word (`` to ``word(`` inside of strings, and puts an instance's name before a tool's."""
    check = official_multi_turn_checker()
    content = {"content": "", "file_name": "a.txt"}
    config = {"GorillaFileSystem": {"root": {"r": {"type": "directory", "contents": {}}}}}
    touch = "touch(file_name='a.txt')"
    for written, expected in [
        ("hello (world)", "hello (world)"),
        ("hello (world)", "hello(world)"),
        ("hello(world)", "hello (world)"),
        ("hello  (world)", "hello world"),
        ("see ls ()", "see ls ()"),
        ("a\nhello (", "a\nhello ("),
        ('it\'s ("x")', 'it\'s("x")'),
    ]:
        answers = ([touch, f"echo(content={expected!r}, file_name='a.txt')"],)
        case = BfclCase("multi_turn_base_9999", "multi_turn_base", (), (), answers, ("GorillaFileSystem",), config)
        turns = [[[Call("touch", {"file_name": "a.txt"}), Call("echo", {**content, "content": written})]]]
        assert judge(case, turns).valid == (check(case, turns) is True), (written, expected)


@needs_wheel
def test_the_reason_says_which_turn_and_what() -> None:
    case = cases("multi_turn_base")[0]
    turns = gold_turns(case)
    assert judge(case, turns[:-1]).reason == "3 turns instead of 4"
    assert judge(case, [turns[0], [], *turns[2:]]).reason == "turn 2: no call where one was due"
    assert judge(case, [[[Call("pwd", {})]], *turns[1:]]).reason.startswith("turn 1: GorillaFileSystem.root is not")
    reason = judge(case, [turns[0], [[Call("cd", {"folder": "temp"})]], *turns[2:]]).reason
    assert reason.startswith("turn 2: no call gave")
    assert "budget analysis" in reason


@needs_wheel
def test_a_case_leaves_nothing_behind() -> None:
    case = next(case for case in cases("multi_turn_base") if "MathAPI" in case.classes)
    turns = gold_turns(case)
    given = copy.deepcopy(turns)
    turns[0][0].append(Call("square_root", {"number": 2, "precision": 3}))
    turns[0][0].append(Call("logarithm", {"value": 2, "base": 3, "precision": 3}))
    import mpmath

    before = decimal.getcontext().prec, mpmath.mp.dps
    first = judge(case, turns)
    assert (decimal.getcontext().prec, mpmath.mp.dps) == before
    assert judge(case, turns) == first
    turns[0][0] = turns[0][0][:-2]
    assert turns == given


@needs_wheel
@pytest.mark.parametrize(
    "calls",
    [
        [Call("power", {"base": 10, "exponent": 10**12})],
        [Call("round_number", {"number": 5, "decimal_places": -(10**12)})],
        [Call("square_root", {"number": 2, "precision": 10**12})],
        [Call("logarithm", {"value": 2, "base": 3, "precision": "1000000000000"})],
        [*SHARED_DIRECTORIES, Call("find", {})],
        [Call("echo", {"content": "x" * 5_000_000})],
        [Call("__import__", {"name": "os"}), Call("__class__", {}), Call("_load_scenario", {"scenario": {}})],
        [Call("eval", {"source": "1"}), Call("cd", {"self": 1}), Call("cd", {"folder": {"a": [1]}})],
        [Call("mkdir", {"dir_name=1, x": 2}), Call("pwd (", {}), Call("", {})],
    ],
)
def test_hostile_calls_are_answered_in_time(calls: list[Call]) -> None:
    config = {"GorillaFileSystem": {"root": {"r": {"type": "directory", "contents": {}}}}}
    classes = ("GorillaFileSystem", "MathAPI")
    case = BfclCase("multi_turn_base_9999", "multi_turn_base", (), (), (["mkdir(dir_name='z')"],), classes, config)
    begun = time.process_time()
    assert not judge(case, [[calls]]).valid
    assert time.process_time() - begun < 5 * bfcl_multi_turn.MAX_TIME_S


def test_without_the_wheel_the_reason_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfcl_multi_turn, "_PACKAGE", "no_such_package_at_all")
    with pytest.raises(ConfigError, match="pip install --no-deps bfcl-eval"):
        load_simulators.__wrapped__()


@needs_wheel
def test_every_tool_described_is_one_that_can_be_called() -> None:
    simulators = load_simulators()
    assert set(simulators) == set(SIMULATORS)
    for case in cases("multi_turn_base"):
        tools = {name for simulator in case.classes for name in vars(simulators[simulator])}
        assert {function["name"] for function in case.functions} <= tools
