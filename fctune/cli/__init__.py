# PYTHON_ARGCOMPLETE_OK
"""The ``fctune`` command. Commands parse arguments and print; the library does the work.

Modules of this package import nothing heavy at the top, so that ``--help`` and wrong usage are answered at once.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence

from fctune import __version__
from fctune.base.errors import CheckpointError, ConfigError, DataError
from fctune.base.launcher_watch import protect_imports
from fctune.base.terminal import escape_controls
from fctune.cli import (
    acceptance,
    chat,
    clean,
    config,
    data,
    eval_options,
    export,
    gate,
    plan,
    preflight,
    proxy,
    push,
    report,
    sample,
    score,
    serve,
    sweep,
    train,
    tune,
    watch,
)
from fctune.cli.parser import Parser, report_interrupt, resolve_config_arguments
from fctune.config.loading import read_environment


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0: done; 1: failed check or run; 2: wrong usage, config or input; 74: run that its disk has no room for; 75: run
    stopped; 130: ended by Ctrl-C.
    """
    is_own_process = argv is None
    if is_own_process:
        protect_imports()
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["served"]:  # the name of this command until version 0.1
        argv[0] = "parser-accuracy"
    parser = make_parser()
    if "_ARGCOMPLETE" in read_environment():  # set by the shell while it completes a command line
        import argcomplete

        argcomplete.autocomplete(parser)
    try:
        arguments = _parse(parser, argv)
        code: int = arguments.run(arguments)
    except (ConfigError, DataError, CheckpointError) as error:
        print(escape_controls(str(error)), file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        return report_interrupt(interrupt)
    except BrokenPipeError:  # the reader of our output has closed it
        return 0
    finally:
        if is_own_process:
            gc.freeze()  # the interpreter's last collection takes a second of CPU once torch is imported
    return code


def make_parser() -> Parser:
    """Build the parser of every command."""
    parser = Parser(prog="fctune", description="Fine-tune chat models to call functions.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    groups = (
        tune,
        train,
        sweep,
        config,
        data,
        plan,
        preflight,
        eval_options,
        gate,
        score,
        sample,
        chat,
        report,
        watch,
        acceptance,
        push,
        export,
        serve,
        proxy,
        clean,
    )
    for group in groups:
        group.add_commands(commands)
    return parser


def _parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    arguments, rest = parser.parse_known_args(argv)
    if hasattr(arguments, "overrides"):
        resolve_config_arguments(arguments, rest, argv)
    elif hasattr(arguments, "settings"):
        tune.sort_words(arguments, rest)
    elif rest:
        getattr(arguments, "command_parser", parser).report_unknown(rest)
    return eval_options.apply_options_file(parser, arguments, argv)
