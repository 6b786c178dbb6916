"""Multi-turn verdicts agree with the wheel's own checker on answers and mutations of them."""

from __future__ import annotations

import copy
import decimal
import random
import threading
import time

import pytest

from fctune.base.errors import ConfigError
from fctune.data.conversation import Call
from fctune.tasks.benchmarks.bfcl.cases import MULTI_TURN, SIMULATORS, BfclCase, read_bfcl
from fctune.tasks.benchmarks.bfcl.checker import BfclVerdict
from fctune.tasks.benchmarks.bfcl.multi_turn import (
    MAX_TIME_S,
    _time_limit,
    _TimeLimitError,
    check_multi_turn,
    load_simulators,
)
from tests.tasks.benchmarks.bfcl.bfcl_wheel import (
    SHARED_DIRECTORIES,
    data_dir,
    needs_wheel,
    official_multi_turn_checker,
)
from tests.tasks.benchmarks.bfcl.turn_mutations import Turns, gold_turns, mutate_turns


def cases(category: str) -> list[BfclCase]:
    return read_bfcl(data_dir(), category)


def verdict_on(case: BfclCase, turns: Turns) -> BfclVerdict:
    return check_multi_turn(case, turns, load_simulators())


@pytest.mark.thorough
@needs_wheel
def test_all_800_answers_replay_to_the_official_verdict() -> None:
    official = official_multi_turn_checker()
    num_cases = 0
    for category in MULTI_TURN:
        for case in cases(category):
            turns = gold_turns(case)
            assert verdict_on(case, turns) == BfclVerdict(True), case.id
            assert official(case, turns) is True, case.id
            num_cases += 1
    assert num_cases == 800


@pytest.mark.sample(2)
@needs_wheel
@pytest.mark.parametrize("num_mutations", [1, pytest.param(5, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("category", MULTI_TURN)
def test_mutated_answers_get_the_official_verdict(category: str, num_mutations: int) -> None:
    official = official_multi_turn_checker()
    rng = random.Random(category)
    num_valid = total = 0
    for case in cases(category):
        for _ in range(num_mutations):
            turns = mutate_turns(case, gold_turns(case), rng)
            expected = official(case, turns)
            verdict = verdict_on(case, turns)
            assert verdict.valid == (expected is True), (case.id, turns, verdict, expected)
            num_valid += verdict.valid
            total += 1
    # The mutations are worth something only if both verdicts are common.
    assert 0.15 < num_valid / total < 0.8


@needs_wheel
def test_a_bracket_in_a_string_reads_the_same_as_in_the_wheel() -> None:
    """The wheel rewrites ``word (`` to ``word(`` inside of strings, and puts an instance's name before a tool's."""
    official = official_multi_turn_checker()
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
        assert verdict_on(case, turns).valid == (official(case, turns) is True), (written, expected)


@needs_wheel
def test_the_reason_says_which_turn_and_what() -> None:
    case = cases("multi_turn_base")[0]
    turns = gold_turns(case)
    assert verdict_on(case, turns[:-1]).reason == "3 turns instead of 4"
    assert verdict_on(case, [turns[0], [], *turns[2:]]).reason == "turn 2: no call where one was due"
    assert verdict_on(case, [[[Call("pwd", {})]], *turns[1:]]).reason.startswith(
        "turn 1: GorillaFileSystem.root differs"
    )
    reason = verdict_on(case, [turns[0], [[Call("cd", {"folder": "temp"})]], *turns[2:]]).reason
    assert reason.startswith("turn 2: no call returned")
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
    first = verdict_on(case, turns)
    assert (decimal.getcontext().prec, mpmath.mp.dps) == before
    assert verdict_on(case, turns) == first
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
    assert not verdict_on(case, [[calls]]).valid
    assert time.process_time() - begun < 5 * MAX_TIME_S


def test_what_other_threads_compute_does_not_count() -> None:
    done = threading.Event()

    def compute() -> None:
        while not done.is_set():
            sum(range(1_000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        with _time_limit(0.1):
            time.sleep(1.0)
        with pytest.raises(_TimeLimitError), _time_limit(0.1):
            for _ in range(10**9):  # ends by itself some day
                pass
    finally:
        done.set()
        thread.join()


def test_without_the_wheel_the_error_gives_the_command_that_installs_it(without_wheel: None) -> None:
    with pytest.raises(ConfigError, match="pip install --no-deps bfcl-eval"):
        load_simulators()


@needs_wheel
def test_every_tool_described_is_one_that_can_be_called() -> None:
    simulators = load_simulators()
    assert set(simulators) == set(SIMULATORS)
    for case in cases("multi_turn_base"):
        tools = {name for simulator in case.classes for name in vars(simulators[simulator])}
        assert {function["name"] for function in case.functions} <= tools
