"""What commands print on, and how tables stay whole on it."""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.table import Table


class Terminal(Console):
    """A console whose reader may leave, as ``| head`` does: the command goes on unheard, to its own exit code.

    It still writes the files that it was asked for; rich would end it here, with 1, which says that a check failed.
    """

    def on_broken_pipe(self) -> None:
        """Print no more."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def print_whole(console: Console, table: Table) -> None:
    """As wide as it is, wherever it goes: figures broken over two lines cannot be compared."""
    width = console.measure(table, options=console.options.update(width=1000)).maximum
    type(console)(file=console.file, width=max(width, console.width), highlight=False).print(table)
