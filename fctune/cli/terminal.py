"""What commands print on."""

from __future__ import annotations

import os
import sys

from rich.console import Console


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
