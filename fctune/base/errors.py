"""Errors caused by a user's input; any other exception is a defect of this project."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """Invalid config or usage: unknown key, wrong value, missing file, impossible combination."""


class DataError(ValueError):
    """Invalid dataset, row, chat template or tokenizer."""


class CheckpointError(ValueError):
    """Weights or a checkpoint that cannot be read, written or resumed from."""


class DiskError(CheckpointError):
    """A disk that is full, gone or read-only, so that weights cannot be written."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during work that reports what it kept."""


def one_line(error: object, max_chars: int | None = None) -> str:
    """Return the message of a library's error as one line of at most ``max_chars``, to be part of a sentence."""
    return " ".join(str(error).split())[:max_chars]


class ConfigProblems:
    """Config errors of several checks, to be reported together in the order in which they were found."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def collect(self, action: Callable[[], T]) -> T | None:
        """Return the result of ``action``, or None if it raises a ConfigError, which is kept."""
        try:
            return action()
        except ConfigError as error:
            self._found.append(str(error))
            return None

    def add(self, problem: str) -> None:
        """Add a problem to those that ``raise_all`` reports."""
        self._found.append(problem)

    def raise_all(self) -> None:
        """Raise what was found.

        Raises:
            ConfigError: With each problem on lines of its own.
        """
        if self._found:
            raise ConfigError("\n".join(self._found))
