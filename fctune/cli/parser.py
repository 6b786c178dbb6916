"""Argument parsing shared by all commands: suggestions for typos, configs and ``key=value`` overrides."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import yaml

from fctune.config.components import allow_components
from fctune.config.key_hints import find_key
from fctune.config.loading import find_local_copy
from fctune.config.parsing import apply_override, suggest
from fctune.config.sections.data import DATA_SUFFIXES
from fctune.config.sections.model import find_template_args_problems
from fctune.config.shipped import find_shipped_config, list_shipped_configs
from fctune.config.yaml_text import dump_yaml, parse_yaml

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
        shown = [f"{word}{suggest(word.partition('=')[0], self.option_names)}" for word in words]
        self.error(f"unrecognized arguments: {' '.join(shown)}")

    @property
    def option_names(self) -> list[str]:
        """Names of the options that start with two dashes."""
        return [name for name in self._option_string_actions if name.startswith("--")]


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
    parser.add_argument(
        "--data",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="train on these rows instead of the config's data.sources: files, directories or hf:NAME, as there",
    )
    add_allow_component_argument(parser)
    parser.set_defaults(command_parser=parser)


def add_allow_component_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--allow-component``, which takes effect while the command line is parsed, before any config is read."""
    parser.add_argument(
        "--allow-component",
        action=_AllowComponent,
        metavar="NAME",
        help="a package or component that the config may name as _component_, and whose code may be executed, such as "
        "my_package.MyOptimizer; repeatable; also FCTUNE_ALLOW_COMPONENTS",
    )


class _AllowComponent(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        allow_components([values])


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


def resolve_config_arguments(arguments: argparse.Namespace, rest: Sequence[str], typed: Sequence[str]) -> None:
    """Sort the words of a command with a config into ``config`` and ``overrides``, in any order on the command line.

    The files of ``--data`` become the first override; a shipped config's name becomes the file of this directory that
    ``fctune config cp`` made of it, if there is one, which is said.

    Args:
        arguments: Parsed arguments, changed in place.
        rest: Words that argparse left over, such as overrides after an option.
        typed: All words of the command line.
    """
    files = [word for word in arguments.data if not is_override(word)]
    words = [*([arguments.config] if arguments.config is not None else []), *arguments.overrides, *rest]
    overrides = [word for word in (*arguments.data, *words) if is_override(word)]
    others = [word for word in words if not is_override(word)]
    arguments.config = arguments.config_option
    if arguments.config is None and others and not others[0].startswith("-") and not _is_rows(others[0]):
        arguments.config = others.pop(0)
    if arguments.config is None and not others:  # CONFIG after the files of --data
        named = [word for word in files if word.endswith((".yaml", ".yml")) or find_shipped_config(word)]
        arguments.config = next((word for word in named if not os.path.isdir(word)), None)
        files = [word for word in files if word != arguments.config]
    if others:
        _report_words(arguments.command_parser, others, typed)
    if arguments.config is None:
        arguments.command_parser.error("the following arguments are required: CONFIG")
    if arguments.data and not files:
        arguments.command_parser.error("argument --data: expected at least one FILE")
    sources = [f"data.sources={dump_yaml([{'path': path} for path in files])}"] if files else []
    arguments.overrides = [*sources, *overrides]
    if (local := find_local_copy(arguments.config)) is not None:
        print(f"{arguments.config}: using {local} in this directory, not the shipped config", file=sys.stderr)
        arguments.config = str(local)


def _report_words(parser: Parser, words: Sequence[str], typed: Sequence[str]) -> NoReturn:
    """Exit with code 2, with the config key or option that words without a meaning are probably meant for."""
    options = [word for word in words if word.startswith("-")]
    remedies = []
    for option in options:
        name, equals, value = option.lstrip("-").partition("=")
        key = find_key(name)
        if key is None:
            remedies.append(f"unrecognized arguments: {option}{suggest(f'--{name}', parser.option_names)}")
            continue
        following = typed[typed.index(option) + 1 :] if option in typed and not equals else []
        value = value or next((word for word in following[:1] if not word.startswith("-")), "VALUE")
        remedies.append(f"{option}: config keys take no dashes; write {key if ' ' in key else f'{key}={value}'}")
    rows = [word for word in words if _is_rows(word)]
    if rows:
        remedies.append(f"to train on {' and '.join(rows)}, write CONFIG --data {' '.join(rows)}")
    if remedies:
        parser.error("; ".join(remedies))
    parser.report_unknown(words)


def _is_rows(word: str) -> bool:
    """Return True for a word that names rows rather than a config."""
    return word.startswith(("hf:", "synthetic:")) or word.lower().endswith(DATA_SUFFIXES)


def is_override(word: str) -> bool:
    """Return True for a word that sets or drops a key of a config."""
    return word.startswith("~") or ("=" in word and not word.startswith("-") and not os.path.exists(word))


def _complete_configs(**_: Any) -> list[str]:
    return [path.stem for path in list_shipped_configs()]
