"""Argument parsing shared by all commands: suggestions for typos, configs and ``key=value`` overrides."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import yaml

from fctune.config.parsing import apply_override, parse_yaml, suggest
from fctune.config.sections.model import find_template_args_problems

INTERRUPTED = 128 + signal.SIGINT


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that suggests the nearest subcommand, choice or option."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            close = suggest(str(value), known)
            raise argparse.ArgumentError(action, f"unknown: {value}{close} (known: {', '.join(known)})")

    def report_unknown(self, words: Iterable[str]) -> NoReturn:
        """Exit with code 2, naming arguments that no option or positional takes."""
        options = [name for name in self._option_string_actions if name.startswith("--")]
        shown = [f"{word}{suggest(word.partition('=')[0], options)}" for word in words]
        self.error(f"unrecognized arguments: {' '.join(shown)}")


def report_interrupt(interrupt: KeyboardInterrupt) -> int:
    """Report Ctrl-C in one line; returns the exit code, that of a process ended by SIGINT in a shell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process is ending; a second Ctrl-C would only add a traceback
    print(f"\ninterrupted: {interrupt}" if str(interrupt) else "\ninterrupted", file=sys.stderr)
    return INTERRUPTED


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``CONFIG`` (also ``--config``) and ``key=value`` overrides of it."""
    config = parser.add_argument(
        "config", nargs="?", metavar="CONFIG", help="YAML file, or the name of a shipped config; also as --config"
    )
    config.completer = _complete_configs  # type: ignore[attr-defined]
    option = parser.add_argument("--config", dest="config_option", metavar="CONFIG", help=argparse.SUPPRESS)
    option.completer = _complete_configs  # type: ignore[attr-defined]
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="config overrides; ~key drops one (fctune config schema)"
    )
    parser.set_defaults(command_parser=parser)


def add_template_args_argument(parser: argparse._ActionsContainer) -> None:
    """Add ``--template-args``, parsed to a dict; None without it."""
    parser.add_argument(
        "--template-args",
        type=_to_template_args,
        metavar="NAME=VALUE,...",
        help="switches of the chat template, such as enable_thinking=false; override those recorded with it",
    )


def _to_template_args(text: str) -> dict[str, Any]:
    """Parse ``NAME=VALUE,...`` with values in YAML, or an object in JSON."""
    problems: list[str] = []
    switches: Any = {}
    if text.lstrip().startswith("{"):
        try:
            switches = parse_yaml(text)
        except yaml.YAMLError:
            problems.append(f"{text}: not JSON")
    else:
        for word in text.split(","):
            apply_override(switches, word.strip(), problems)
    problems = problems or find_template_args_problems(switches, "it")
    if problems:
        raise argparse.ArgumentTypeError(problems[0].removeprefix("it: ").removeprefix("it."))
    return dict(switches)


def resolve_config_arguments(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    """Sort the words of a command with a config into ``config`` and ``overrides``, in any order on the command line.

    Args:
        arguments: Parsed arguments, changed in place.
        rest: Words that argparse left over, such as overrides after an option.
    """
    words = [*([arguments.config] if arguments.config is not None else []), *arguments.overrides, *rest]
    overrides = [word for word in words if _is_override(word)]
    others = [word for word in words if not _is_override(word)]
    arguments.config = arguments.config_option
    if arguments.config is None and others and not others[0].startswith("-"):
        arguments.config = others.pop(0)
    if others:
        arguments.command_parser.report_unknown([word for word in others if word.startswith("-")] or others)
    if arguments.config is None:
        arguments.command_parser.error("the following arguments are required: CONFIG")
    arguments.overrides = overrides


def _is_override(word: str) -> bool:
    return word.startswith("~") or ("=" in word and not word.startswith("-"))


def _complete_configs(**_: Any) -> list[str]:
    from fctune.config.shipped import list_shipped_configs

    return [path.stem for path in list_shipped_configs()]
