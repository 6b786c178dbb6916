"""The ``fctune`` command: thin over the library; what it prints, the library returns."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fctune.cli import acceptance, data, eval_options, plan, preflight, push, report, score, serve, watch
from fctune.cli.eval_options import apply_options_file
from fctune.errors import CheckpointError, ConfigError, DataError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 done, 1 a failed check, 2 wrong usage, config or input."""
    try:
        arguments = _parse(argv)
        code: int = arguments.run(arguments)
    except (ConfigError, DataError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has seen enough
        return 0
    return code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; of those in more than one place, as ``a=1 --gpu h100 b=2``, argparse takes the first alone."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and not (hasattr(arguments, "overrides") and all("=" in r and not r.startswith("-") for r in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    return apply_options_file(parser, arguments, argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fctune", description="Fine-tune chat models to call functions.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for group in (data, plan, preflight, eval_options, score, report, watch, acceptance, push, serve):
        group.add_commands(commands)
    return parser
