"""Console of the commands, log lines on a terminal, and tables that are never folded."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

# What a terminal obeys instead of showing: C0 except tab and line feed, DEL, C1, changes of text direction; and half
# surrogate pairs, which cannot be written to it.
_CONTROL = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")


def escape_controls(text: str) -> str:
    """Write out the control characters of text from rows, tools, models or servers, as escapes of Python."""
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


class Terminal(Console):
    """A console that survives a closed pipe (``| head``) and shows control characters instead of sending them.

    After a closed pipe, the command finishes its work and keeps its exit code; rich's own console would exit with 1,
    which means a failed check. Control characters in any text, table or panel are written out: they come from data.
    For the same reason, ``[brackets]`` and ``:colons:`` are not read as rich's markup and emoji; set styles with
    ``style`` or a ``Text``.
    """

    def __init__(self, *, markup: bool = False, emoji: bool = False, **options: Any):
        super().__init__(markup=markup, emoji=emoji, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render with control characters in the text written out; rich's own styles and cursor moves remain."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escape_controls(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Discard all further output."""
        self.quiet = True
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)


class LogHandler(logging.Handler):
    """Writer of log lines to standard output that keeps them apart from a progress line.

    The stream is looked up for each line: rich replaces ``sys.stdout`` while it shows progress and prints above it.
    A process that shares the terminal with the one that shows progress erases that line first; it is redrawn below.

    Args:
        erases_line: The progress line on this terminal is drawn by another process.
    """

    def __init__(self, erases_line: bool) -> None:
        super().__init__()
        self._erases_line = erases_line
        self.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record in a single write, so that lines of several processes stay apart.

        Control characters in it, which may come from rows, are written out.
        """
        try:
            erase = "\r\x1b[2K" if self._erases_line and sys.stdout.isatty() else ""
            sys.stdout.write(f"{erase}{escape_controls(self.format(record))}\n")
            sys.stdout.flush()
        except Exception:  # as in the handlers of the standard library: logging never ends a run
            self.handleError(record)


class Heartbeat:
    """Logs a line at regular intervals during a block, however long a step of it takes.

    Args:
        log: Called with each line, in a thread of its own.
        describe: Returns the line.
        interval_s: Seconds between two lines.
    """

    def __init__(self, log: Callable[[str], None], describe: Callable[[], str], interval_s: float = 30.0):
        self._log, self._describe, self._interval_s = log, describe, interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._log(self._describe())


def print_full_width(console: Console, table: Table) -> None:
    """Print a table at its full width, even beyond the console's, so that figures are never broken over two lines."""
    width = console.measure(table, options=console.options.update(width=1000)).maximum
    type(console)(file=console.file, width=max(width, console.width), highlight=False).print(table)
