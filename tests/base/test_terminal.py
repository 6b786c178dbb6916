"""Text from data never controls the terminal."""

from __future__ import annotations

import io
import logging
import threading
import time

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fctune.base.terminal import Heartbeat, LogHandler, Terminal, escape_controls, print_full_width
from fctune.cli import main

HOSTILE = "a\x1b[2J\x1b]0;title\x07\x9b31m\r\x00\x7f\u202eb"


def test_control_characters_are_written_out_and_other_text_is_kept() -> None:
    assert escape_controls("tab\tline\nGröße 東京 😀") == "tab\tline\nGröße 東京 😀"
    assert escape_controls("\x1b[31m\x9b\u202e\ud800") == r"\x1b[31m\x9b\u202e\ud800"


@pytest.mark.parametrize("is_wide", [False, True])
def test_a_terminal_shows_control_characters_in_text_tables_and_panels(is_wide: bool) -> None:
    out = io.StringIO()
    terminal = Terminal(file=out, width=60, force_terminal=True, color_system=None)
    table = Table("name", title=HOSTILE)
    table.add_row(HOSTILE)
    for renderable in (HOSTILE, Text(HOSTILE), Panel(HOSTILE), table):
        if is_wide and isinstance(renderable, Table):
            print_full_width(terminal, renderable)
        else:
            terminal.print(renderable, markup=False, highlight=False)
    assert r"\x1b[2J" in out.getvalue()
    assert escape_controls(out.getvalue()) == out.getvalue()


@pytest.mark.parametrize("text", ["[refund] simple", "GET [/orders]", "say :smile:", r"a \[bold] b"])
def test_brackets_and_colons_of_data_are_shown_as_they_are(text: str) -> None:
    out = io.StringIO()
    terminal = Terminal(file=out, width=60, force_terminal=True, color_system=None)
    table = Table(text)
    table.add_row(text)
    terminal.print(text)
    terminal.print(Panel(text))
    terminal.print(table)
    print_full_width(terminal, table)
    assert out.getvalue().count(text) == 6


def test_styles_of_ours_still_reach_the_terminal() -> None:
    out = io.StringIO()
    Terminal(file=out, force_terminal=True, color_system="standard").print("red", style="red")
    assert out.getvalue() == "\x1b[31mred\x1b[0m\n"


def test_an_error_that_quotes_data_has_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", "no/such\x1b[31m.jsonl"]) == 2
    error = capsys.readouterr().err
    assert r"such\x1b[31m" in error
    assert "\x1b" not in error


def test_a_log_line_of_a_run_has_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    LogHandler(erases_line=False).emit(logging.LogRecord("run", logging.INFO, __file__, 1, "row %s", (HOSTILE,), None))
    line = capsys.readouterr().out
    assert r"row a\x1b[2J" in line
    assert escape_controls(line) == line


def test_a_heartbeat_logs_during_a_long_step_and_ends_with_it() -> None:
    said, has_logged = list[str](), threading.Event()

    def log(line: str) -> None:
        said.append(line)
        if len(said) == 3:
            has_logged.set()

    with Heartbeat(log, lambda: f"line {len(said)}", interval_s=0.01):
        assert has_logged.wait(30)
    number = len(said)
    assert said == [f"line {i}" for i in range(number)]
    time.sleep(0.1)
    assert len(said) == number
