"""The verdict of the Berkeley Function Calling Leaderboard, v4, on multi-turn cases.

The calls of a turn are played on simulated classes - a file system, a car, a broker - and the answer's calls on a
second set of them. After every turn that expects calls, the model has made one, all public attributes of both sets are
equal, and each result of the answer's calls is among the model's results of all turns so far. Neither the order of
calls nor more of them count otherwise.

The classes are those of the ``bfcl-eval`` wheel, where it is installed. Its own checker gives each call to ``eval``,
with all of Python in reach, and keeps the instances for the next time. Here a call is looked up by name among the
public methods of the case's classes and made with keyword arguments, on fresh instances. What follows of it:

- A name that is no tool of the case is an error, which is what the wheel's checker says of all but Python's own
  functions.
- Calls that would take forever are errors: powers and precisions of more than ``MAX_DIGITS`` digits, cases of more than
  ``MAX_TIME_S`` seconds.

Two peculiarities are kept, as they decide verdicts: an argument goes through its Python source text, in which a name
before a bracket loses the space between, and a tool's name there gets its instance's before it.
"""

from __future__ import annotations

import contextlib
import decimal
import functools
import importlib
import inspect
import json
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fctune.calls.bfcl.cases import SIMULATORS, BfclCase
from fctune.calls.bfcl.checker import BfclVerdict
from fctune.data.conversation import Call
from fctune.errors import ConfigError
from fctune.parsing.json_reader import ParseError
from fctune.parsing.python_reader import PythonReader

MAX_DIGITS = 10_000
MAX_TIME_S = 1.0

_PACKAGE = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
_CALLEE = re.compile(r"\b([a-zA-Z_]\w*)\s*(?=\()")

Simulators = Mapping[str, type]


class _TooLongError(BaseException):
    """The time of a case is over; no ``except Exception`` of a simulated class may catch it."""


@functools.cache
def load_simulators() -> Simulators:
    """The simulated classes by name.

    Raises:
        ConfigError: The wheel is not installed, or is not the version that this module knows.
    """
    found: dict[str, type] = {}
    for name, module in SIMULATORS.items():
        try:
            found[name] = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"multi-turn categories need the wheel bfcl-eval ({error}).\n"
                "  Install it without its 6 GB of needs: pip install --no-deps bfcl-eval==2026.3.23"
            ) from None
    return found


def judge_multi_turn(case: BfclCase, turns: Sequence[Sequence[Sequence[Call]]], simulators: Simulators) -> BfclVerdict:
    """The benchmark's verdict on the calls of one multi-turn case.

    Args:
        case: A case of a multi-turn category.
        turns: The model's calls: for each turn of the user its steps, for each step the calls of one answer.
        simulators: What ``load_simulators`` gives.
    """
    if len(turns) != len(case.answers):
        return BfclVerdict(False, f"{len(turns)} turns instead of {len(case.answers)}")
    try:
        with _numbers_kept(), _time_limited(MAX_TIME_S):
            return _judge_turns(case, turns, simulators)
    except _TooLongError:
        return BfclVerdict(False, f"its calls take more than {MAX_TIME_S} s")
    except RecursionError:
        return BfclVerdict(False, "its calls lead to a state that holds itself")


def _judge_turns(case: BfclCase, turns: Sequence[Sequence[Sequence[Call]]], simulators: Simulators) -> BfclVerdict:
    model, expected = World(case, simulators, "model"), World(case, simulators, "expected")
    results: Counter[str] = Counter()
    for number, (steps, answer) in enumerate(zip(turns, case.answers, strict=True), start=1):
        made = [model.make(call) for step in steps for call in step]
        due = [expected.make(expected.read_answer(text)) for text in answer]
        results.update(made)
        if not answer:
            continue
        if not made:
            return BfclVerdict(False, f"turn {number}: no call where one was due")
        if (differing := model.find_difference(expected)) is not None:
            return BfclVerdict(False, f"turn {number}: {differing} is not what the expected calls make of it")
        if missing := Counter(due) - results:
            return BfclVerdict(False, f"turn {number}: no call gave {next(iter(missing))[:200]}")
    return BfclVerdict(True)


class World:
    """Fresh instances of a case's simulated classes, and the tools they offer.

    Args:
        case: A case of a multi-turn category.
        simulators: What ``load_simulators`` gives.
        side: Goes into the names of the instances, which a result may show.
    """

    def __init__(self, case: BfclCase, simulators: Simulators, side: str) -> None:
        self._instances: dict[str, Any] = {}
        self._tools: dict[str, Callable[..., Any]] = {}
        self._owners: dict[str, str] = {}
        for name in case.classes:
            instance = self._instances[name] = simulators[name]()
            if hasattr(instance, "_load_scenario"):
                # Through JSON, as deep a copy as any: the simulators change what they are given.
                scenario = json.loads(json.dumps(case.initial_config.get(name, {})))
                instance._load_scenario(scenario, long_context="long_context" in case.category)
            for tool, function in vars(simulators[name]).items():
                if inspect.isfunction(function) and not tool.startswith("_"):
                    self._tools[tool] = functools.partial(function, instance)
                    self._owners[tool] = re.sub(r"[-./:]", "_", f"{side}_{case.id}_{name}_instance")

    def play(self, calls: Sequence[Call]) -> list[str]:
        """What each call gives, or what went wrong with it, as text.

        Raises:
            TimeoutError: They take longer than a whole case may; the state is not to be used any more.
        """
        try:
            with _numbers_kept(), _time_limited(MAX_TIME_S):
                return [self.make(call) for call in calls]
        except _TooLongError:
            raise TimeoutError(f"its calls take more than {MAX_TIME_S:g} s") from None

    def make(self, call: Call) -> str:
        """Make the call; its result, or what went wrong, as text."""
        try:
            if call.name not in self._tools:
                raise NameError(f"name {call.name[:80]!r} is not defined")
            arguments = {key: self._through_source(value) for key, value in call.arguments.items()}
            _require_bounded(call.name, arguments)
            return _to_text(self._tools[call.name](**arguments))
        except Exception as error:
            return f"Error during execution: {error}"

    def read_answer(self, text: str) -> Call:
        """The call of an answer, whose first argument may stand there without its name."""
        reader = PythonReader(text)
        try:
            return Call(*reader.read_call(0)[0])
        except ParseError:
            name = text.partition("(")[0]
            value, end = reader.read_value(reader.skip_space(len(name) + 1))
            (_, others), _ = PythonReader(f"{name}({text[end:].lstrip(' ,')}").read_call(0)
            return Call(name, {next(iter(inspect.signature(self._tools[name]).parameters)): value, **others})

    def find_difference(self, expected: World) -> str | None:
        """The first public attribute that is not equal in both."""
        for name, instance in expected._instances.items():
            mine = vars(self._instances[name])
            for attribute, value in vars(instance).items():
                if not attribute.startswith("_") and (attribute not in mine or mine[attribute] != value):
                    return f"{name}.{attribute}"
        return None

    def _through_source(self, value: Any) -> Any:
        source = _CALLEE.sub(self._rename, repr(value))
        read, end = PythonReader(source).read_value(0)
        if end != len(source):
            raise ParseError("extra text after the value", end)
        return read

    def _rename(self, found: re.Match[str]) -> str:
        owner = self._owners.get(found[1])
        return found[1] if owner is None else f"{owner}.{found[1]}"


def _to_text(result: Any) -> str:
    if type(result) is str:
        return result
    if type(result) is dict:
        # Some hold what JSON does not have.
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            return json.dumps(result)
    return str(result)


def _require_bounded(name: str, arguments: Mapping[str, Any]) -> None:
    """Raise for arithmetic whose time or memory grows with a value rather than with what was written."""
    for key in ("precision", "decimal_places"):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if abs(int(arguments.get(key, 0))) > MAX_DIGITS:
                raise ArithmeticError(f"{key} of more than {MAX_DIGITS} digits")
    if name == "power":
        base, exponent = arguments.get("base"), arguments.get("exponent")
        if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > 4 * MAX_DIGITS:
            raise ArithmeticError(f"a power of more than {MAX_DIGITS} digits")


@contextlib.contextmanager
def _numbers_kept() -> Iterator[None]:
    """Undo what the simulated calculator does to the precision of the whole process."""
    with decimal.localcontext():
        mpmath = sys.modules.get("mpmath")
        precision = mpmath.mp.prec if mpmath is not None else None
        try:
            yield
        finally:
            if mpmath is not None:
                mpmath.mp.prec = precision


@contextlib.contextmanager
def _time_limited(seconds: float) -> Iterator[None]:
    """Raise ``_TooLongError`` after so many seconds of this process's own time; only the main thread can be stopped.

    Not SIGALRM, which test runners and launchers use for limits of their own.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise _TooLongError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
