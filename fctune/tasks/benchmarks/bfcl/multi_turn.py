"""The verdict of the Berkeley Function Calling Leaderboard, v4, on multi-turn cases.

The calls of a turn are made on simulated classes - a file system, a car, a broker - and the answer's calls on a second
set of instances. A case is valid if, after every turn that expects calls, the model has made at least one call, all
public attributes of both sets are equal, and each result of the answer's calls is among the model's results of all
turns so far. The order of calls and additional calls do not matter otherwise.

The classes are those of the ``bfcl-eval`` wheel, if it is installed. Its own checker passes each call to ``eval``, with
all of Python in reach, and reuses the instances. Here a call is looked up by name among the public methods of the
case's classes and made with keyword arguments, on fresh instances. Consequences:

- A name that is not a tool of the case is an error, as it is to the wheel's checker for all but Python's own functions.
- Calls that would take forever are errors: powers and precisions of more than ``MAX_DIGITS`` digits, cases of more than
  ``MAX_TIME_S`` seconds.

Two peculiarities are kept because they decide verdicts: an argument goes through its Python source text, in which a
name before a bracket loses the space between, and a tool's name there is prefixed with its instance's.
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
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fctune.base.errors import ConfigError
from fctune.base.json_reader import ParseError
from fctune.base.python_reader import PythonReader
from fctune.config.intervals import format_count
from fctune.data.conversation import Call
from fctune.tasks.benchmarks.bfcl.cases import SIMULATORS, BfclCase
from fctune.tasks.benchmarks.bfcl.checker import BfclVerdict

MAX_DIGITS = 10_000
MAX_TIME_S = 1.0
_SHORTEST_TIMER_S = 0.001  # zero would end the timer

_PACKAGE = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
_CALLEE = re.compile(r"\b([a-zA-Z_]\w*)\s*(?=\()")

SimulatedClasses = Mapping[str, type]


class _TimeLimitError(BaseException):
    """A case's time limit has passed; not an ``Exception``, so that no simulated class catches it."""


def load_simulators() -> SimulatedClasses:
    """Load the simulated classes by name.

    Raises:
        ConfigError: The wheel is not installed, or not in a version that this module knows.
    """
    found: dict[str, type] = {}
    for name, module in SIMULATORS.items():
        try:
            found[name] = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"multi-turn categories need the wheel bfcl-eval ({error}).\n"
                "  Install it without its 6 GB of dependencies: pip install --no-deps bfcl-eval==2026.3.23"
            ) from None
    return found


def check_multi_turn(
    case: BfclCase, turns: Sequence[Sequence[Sequence[Call]]], classes: SimulatedClasses
) -> BfclVerdict:
    """Return the benchmark's verdict on the calls of one multi-turn case.

    Args:
        case: A case of a multi-turn category.
        turns: The model's calls: for each turn of the user its steps, for each step the calls of one answer.
        classes: The simulated classes, from ``load_simulators``.
    """
    if len(turns) != len(case.answers):
        return BfclVerdict(False, f"{format_count(len(turns), 'turn')} instead of {len(case.answers)}")
    try:
        with _precision_restored(), _time_limit(MAX_TIME_S):
            return _check_turns(case, turns, classes)
    except _TimeLimitError:
        return BfclVerdict(False, f"its calls take more than {MAX_TIME_S} s")
    except RecursionError:
        return BfclVerdict(False, "its calls lead to a state that contains itself")


def _check_turns(case: BfclCase, turns: Sequence[Sequence[Sequence[Call]]], classes: SimulatedClasses) -> BfclVerdict:
    model, expected = SimulatedTools(case, classes, "model"), SimulatedTools(case, classes, "expected")
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
            return BfclVerdict(False, f"turn {number}: {differing} differs from its value after the expected calls")
        if missing := Counter(due) - results:
            return BfclVerdict(False, f"turn {number}: no call returned {next(iter(missing))[:200]}")
    return BfclVerdict(True)


class SimulatedTools:
    """Fresh instances of a case's simulated classes, and the tools they offer.

    Args:
        case: A case of a multi-turn category.
        classes: The simulated classes, from ``load_simulators``.
        side: Part of the instances' names, which a result may show.
        max_time_s: CPU seconds that one ``play`` may take.
    """

    def __init__(self, case: BfclCase, classes: SimulatedClasses, side: str, max_time_s: float = MAX_TIME_S) -> None:
        self._max_time_s = max_time_s
        self._instances: dict[str, Any] = {}
        self._tools: dict[str, Callable[..., Any]] = {}
        self._owners: dict[str, str] = {}
        for name in case.classes:
            instance = self._instances[name] = classes[name]()
            if hasattr(instance, "_load_scenario"):
                # A deep copy through JSON: the simulators change what they are given.
                scenario = json.loads(json.dumps(case.initial_config.get(name, {})))
                instance._load_scenario(scenario, long_context="long_context" in case.category)
            for tool, function in vars(classes[name]).items():
                if inspect.isfunction(function) and not tool.startswith("_"):
                    self._tools[tool] = functools.partial(function, instance)
                    self._owners[tool] = re.sub(r"[-./:]", "_", f"{side}_{case.id}_{name}_instance")

    def play(self, calls: Sequence[Call]) -> list[str]:
        """Make the calls and return each one's result, or its error, as text.

        Raises:
            TimeoutError: The calls take longer than a complete case may; the state must not be used any more.
        """
        try:
            with _precision_restored(), _time_limit(self._max_time_s):
                return [self.make(call) for call in calls]
        except _TimeLimitError:
            raise TimeoutError(f"its calls take more than {self._max_time_s:g} s") from None

    def make(self, call: Call) -> str:
        """Make one call and return its result, or its error, as text."""
        try:
            if call.name not in self._tools:
                raise NameError(f"name {call.name[:80]!r} is not defined")
            arguments = {key: self._through_source(value) for key, value in call.arguments.items()}
            _require_bounded(call.name, arguments)
            return _to_text(self._tools[call.name](**arguments))
        except Exception as error:
            return f"Error during execution: {error}"

    def read_answer(self, text: str) -> Call:
        """Read a call from an answer; its first argument may be positional."""
        reader = PythonReader(text)
        try:
            return Call(*reader.read_call(0)[0])
        except ParseError:
            name = text.partition("(")[0]
            value, end = reader.read_value(reader.skip_space(len(name) + 1))
            (_, others), _ = PythonReader(f"{name}({text[end:].lstrip(' ,')}").read_call(0)
            return Call(name, {next(iter(inspect.signature(self._tools[name]).parameters)): value, **others})

    def find_difference(self, expected: SimulatedTools) -> str | None:
        """Return the first public attribute whose value differs."""
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
        # Some hold values that JSON lacks.
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            return json.dumps(result)
    return str(result)


def _require_bounded(name: str, arguments: Mapping[str, Any]) -> None:
    """Raise for arithmetic whose time or memory grows with a value rather than with the text of the call."""
    for key in ("precision", "decimal_places"):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if abs(int(arguments.get(key, 0))) > MAX_DIGITS:
                raise ArithmeticError(f"{key} of more than {MAX_DIGITS} digits")
    if name == "power":
        base, exponent = arguments.get("base"), arguments.get("exponent")
        if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > 4 * MAX_DIGITS:
            raise ArithmeticError(f"a power of more than {MAX_DIGITS} digits")


@contextlib.contextmanager
def _precision_restored() -> Iterator[None]:
    """Restore the process's numeric precision, which the simulated calculator changes."""
    with decimal.localcontext():
        mpmath = sys.modules.get("mpmath")
        precision = mpmath.mp.prec if mpmath is not None else None
        try:
            yield
        finally:
            if mpmath is not None:
                mpmath.mp.prec = precision


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise ``_TimeLimitError`` after that much CPU time of the main thread, the only one that can be interrupted.

    The timer counts the time of all threads, such as those that read other answers meanwhile, so it is set again for
    what the main thread has left. SIGALRM is left to test runners and launchers, which use it for their own limits.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    began = time.thread_time()

    def stop(*_: Any) -> None:
        left = seconds - (time.thread_time() - began)
        if left <= 0:
            raise _TimeLimitError
        signal.setitimer(signal.ITIMER_VIRTUAL, max(left, _SHORTEST_TIMER_S))

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
