"""The ``fctune`` command: thin over the library; what it prints, the library returns."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fctune.cli import acceptance, data, plan, preflight, push, report, score, serve, watch
from fctune.errors import CheckpointError, ConfigError, DataError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 done, 1 a failed check, 2 wrong usage, config or input."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except (ConfigError, DataError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has seen enough
        return 0
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fctune", description="Fine-tune chat models to call functions.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for group in (data, plan, preflight, score, report, watch, acceptance, push, serve):
        group.add_commands(commands)
    return parser
