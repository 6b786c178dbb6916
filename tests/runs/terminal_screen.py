"""Model of a terminal's screen, enough for what rich writes to show progress."""

from __future__ import annotations

import io
import re

_TOKENS = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n])")


class TerminalScreen(io.StringIO):
    """Standard output on a terminal of some width; ``lines`` is what a reader sees."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        """Return the lines on the screen, without trailing blanks and empty lines at the end."""
        rows, row, column = [[]], 0, 0  # type: list[list[str]], int, int
        for argument, command, control, symbol in _TOKENS.findall(self.getvalue()):
            if symbol:
                if column == self._width:
                    row, column = row + 1, 0
                rows += [[] for _ in range(row + 1 - len(rows))]
                rows[row] += " " * (column + 1 - len(rows[row]))
                rows[row][column] = symbol
                column += 1
            elif control == "\r":
                column = 0
            elif control == "\n":
                row, column = row + 1, 0
                rows += [[] for _ in range(row + 1 - len(rows))]
            elif command == "K":
                assert argument == "2", argument
                rows[row] = []
            elif command == "A":
                row = max(0, row - int(argument or 1))
            else:
                assert command in "mhl", command  # colours, cursor shown or hidden
        return "\n".join("".join(one).rstrip() for one in rows).rstrip().split("\n")
