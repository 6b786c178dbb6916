"""The progress line keeps step, loss and time left at any width, and log lines never mix with it."""

from __future__ import annotations

import io
import logging
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from fctune.base.terminal import LogHandler
from fctune.runs import sinks
from fctune.runs.sinks import ConsoleSink
from tests.runs.terminal_screen import TerminalScreen

WIDTHS = [60, 80, 100, 130, 200]


def metrics_of(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 1.2345, "lr": 3.7e-4, "grad_norm": 0.513, "tokens_per_s": 123_456.0}


@pytest.fixture
def open_screen(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], TerminalScreen]:
    def build(width: int) -> TerminalScreen:
        screen = TerminalScreen(width)
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "xterm-256color")
        return screen

    return build


@pytest.fixture
def log(request: pytest.FixtureRequest) -> Callable[[str, bool], None]:
    def write(message: str, is_other_rank: bool = False) -> None:
        record = logging.LogRecord("fctune", logging.INFO, "", 0, message, None, None)
        LogHandler(erases_line=is_other_rank).handle(record)

    return write


@pytest.mark.parametrize("width", WIDTHS)
def test_step_loss_and_time_left_are_shown_at_every_width(
    width: int, open_screen: Callable[[int], TerminalScreen]
) -> None:
    screen = open_screen(width)
    sink = ConsoleSink(Console(width=width), 12_000, 50)
    for step in range(8_001, 8_010):
        sink.write(metrics_of(step))
    sink._progress.refresh()  # type: ignore[union-attr]
    (line,) = screen.lines
    assert "step 8009/12000  loss 1.2345  " in line
    assert " left" in line
    assert len(line) < width
    assert ("grad_norm 0.513" in line) == (width >= 130)
    sink.close()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("is_other_rank", [False, True])
def test_log_lines_stand_alone_and_nothing_of_the_progress_is_left_behind(
    width: int, is_other_rank: bool, open_screen: Callable[[int], TerminalScreen], log: Callable[[str, bool], None]
) -> None:
    screen = open_screen(width)
    own_stdout = sys.stdout
    sink = ConsoleSink(Console(width=width), 12_000, 50)
    redirected = sys.stdout
    for step in (1, 2, 3):
        sink.write(metrics_of(step))
        sink._progress.refresh()  # type: ignore[union-attr]
        sys.stdout = own_stdout if is_other_rank else redirected  # another process writes straight to the terminal
        log(f"alert {step}", is_other_rank)
        sys.stdout = redirected
        sink._progress.refresh()  # type: ignore[union-attr]
        assert len([line for line in screen.lines if " left" in line]) == 1
    sink.close()
    kept, last = screen.lines[:3], "".join(screen.lines[3:])
    assert [line[8:] for line in kept] == ["  alert 1", "  alert 2", "  alert 3"]
    assert last == "step 3/12000  loss 1.2345  lr 3.70e-04  grad_norm 0.513  123,456 tokens/s"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the clock of the console, which stands at ``now``."""
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(sinks, "time", clock)
    return clock


def test_a_pipe_gets_plain_lines_with_the_time_left(clock: SimpleNamespace) -> None:
    pipe = io.StringIO()
    sink = ConsoleSink(Console(file=pipe), 100, 50)
    for step in range(11, 101):  # resumed after step 10
        sink.write(metrics_of(step))
        clock.now += 90
    sink.close()
    figures = "loss 1.2345  lr 3.70e-04  grad_norm 0.513  123,456 tokens/s"
    assert pipe.getvalue() == f"step 50/100  {figures}  1:15:00 left\nstep 100/100  {figures}\n"


def test_slow_steps_have_a_time_left_on_a_terminal_too(
    open_screen: Callable[[int], TerminalScreen], clock: SimpleNamespace
) -> None:
    screen = open_screen(100)
    sink = ConsoleSink(Console(width=100), 12_000, 50)
    for step in (1, 2, 3):
        sink.write(metrics_of(step))
        clock.now += 120
    sink._progress.refresh()  # type: ignore[union-attr]
    (line,) = screen.lines
    assert "16 days, 15:54:00 left" in line
    sink.close()


def test_preference_and_reinforcement_runs_show_what_they_learn_from() -> None:
    pipe = io.StringIO()
    sink = ConsoleSink(Console(file=pipe), 100, 1)
    sink.write(metrics_of(1) | {"reward_accuracy": 0.75, "reward_margin": 0.1234})
    sink.write(metrics_of(2) | {"reward_mean": 0.5, "pass_rate": 0.25})
    sink.write(metrics_of(3) | {"reward_mean": None, "pass_rate": math.nan})
    pairs, rollouts, nothing = pipe.getvalue().splitlines()
    assert "loss 1.2345  accuracy 75.0%  margin 0.123  lr" in pairs
    assert "loss 1.2345  reward 0.500  pass_rate 25.0%  lr" in rollouts
    assert "loss 1.2345  lr" in nothing
