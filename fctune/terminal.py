"""Console of the commands, and tables that are never folded."""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.table import Table


class Terminal(Console):
    """A console that survives a closed pipe (``| head``): the command finishes its work and keeps its exit code.

    Rich's own console would exit with 1, which means a failed check.
    """

    def on_broken_pipe(self) -> None:
        """Discard all further output."""
        self.quiet = True
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)


def print_full_width(console: Console, table: Table) -> None:
    """Print a table at its full width, even beyond the console's, so that figures are never broken over two lines."""
    width = console.measure(table, options=console.options.update(width=1000)).maximum
    type(console)(file=console.file, width=max(width, console.width), highlight=False).print(table)
