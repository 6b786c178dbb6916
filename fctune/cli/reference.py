"""Write the generated pages of the documentation: every config key, key of a sweep, command and metric.

python -m fctune.cli.reference [DIR]      # default: docs/reference
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from fctune.apps.sweep.spec import SweepConfig
from fctune.cli import make_parser
from fctune.config.reference import render_config_reference, render_sections
from fctune.runs.names import METRICS


def main() -> int:
    """Write every generated page into the directory named on the command line."""
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/reference")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.md").write_text(render_config_reference(), encoding="utf-8")
    (directory / "sweep.md").write_text(render_sweep_reference(), encoding="utf-8")
    (directory / "commands.md").write_text(render_command_reference(), encoding="utf-8")
    (directory / "metrics.md").write_text(render_metric_reference(), encoding="utf-8")
    return 0


def render_sweep_reference() -> str:
    """Return ``docs/reference/sweep.md``: every key of a sweep's file."""
    lines = [
        "# Keys of a sweep",
        "",
        "Every key of the file that [`fctune sweep`](../sweeps.md) reads.",
        "",
        "Generated from `fctune/apps/sweep/spec.py` by `make reference`.",
        *render_sections(SweepConfig),
    ]
    return "\n".join(lines) + "\n"


def render_metric_reference() -> str:
    """Return ``docs/reference/metrics.md``: every metric with its unit and meaning."""
    lines = [
        "# Metrics",
        "",
        "Metrics of a run, as `metrics.jsonl`, W&B and TensorBoard name them, with their Prometheus names.",
        "",
        "Generated from `fctune/runs/names.py` by `make reference`.",
        "",
        "| metric | unit | meaning | counted over | Prometheus |",
        "|---|---|---|---|---|",
    ]
    for metric in METRICS:
        prometheus = "" if metric.kind == "text" else f"`{metric.prometheus}`"
        lines.append(f"| `{metric.name}` | {metric.unit} | {metric.description} | {metric.convention} | {prometheus} |")
    return "\n".join(lines) + "\n"


def render_command_reference() -> str:
    """Return ``docs/reference/commands.md``: usage and options of every command."""
    lines = [
        "# Commands",
        "",
        "Exit codes: 0 done, 1 failed check or run, 2 wrong usage, config or input, 74 full or hanging disk, "
        "75 run stopped and saved, 76 failed GPU, node or network, 130 ended by Ctrl-C, which says what was kept.",
        "",
        'Shell completion: `eval "$(register-python-argcomplete fctune)"` in `~/.bashrc` or `~/.zshrc`.',
        "",
        "`python -m eval.tool_calls`, `compare`, `validate`, `throughput` and `serving` are `fctune eval`, `compare`,",
        "`validate`, `throughput` and `parser-accuracy`.",
        "",
        "Generated from the argument parser by `make reference`.",
    ]
    for name, summary, parser in _commands(make_parser(), "fctune"):
        lines += ["", f"## `{name}`", "", _sentence(parser.description or summary), "", "```console"]
        lines += [f"$ {_usage(name, parser)}", "```"]
        rows = [row for action in parser._actions if (row := _row(action)) is not None]
        if rows:
            lines += ["", "| argument | meaning |", "|---|---|", *rows]
        if parser.epilog:
            lines += ["", parser.epilog]
    return "\n".join(lines) + "\n"


def _commands(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Yield the name, summary and parser of every command that runs something."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for word, child in action.choices.items():
                if any(isinstance(inner, argparse._SubParsersAction) for inner in child._actions):
                    yield from _commands(child, f"{name} {word}")
                else:
                    yield f"{name} {word}", summaries.get(word, ""), child


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _usage(name: str, parser: argparse.ArgumentParser) -> str:
    words = [name]
    for action in parser._actions:
        if not action.option_strings and not isinstance(action, argparse._SubParsersAction):
            shown = _metavar(action)
            words.append({"?": f"[{shown}]", "*": f"[{shown} ...]", "+": f"{shown} ..."}.get(str(action.nargs), shown))
        elif action.required:
            words.append(f"{action.option_strings[0]} {_metavar(action)}")
    has_options = any(_row(action) is not None for action in parser._actions if action.option_strings)
    return " ".join([*words, *(["[options]"] if has_options else [])])


def _metavar(action: argparse.Action) -> str:
    if action.metavar is not None:
        return str(action.metavar)
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper() if action.option_strings else action.dest


def _row(action: argparse.Action) -> str | None:
    if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction | argparse._VersionAction):
        return None
    names = ", ".join(action.option_strings) or _metavar(action)
    value = f" {_metavar(action)}" if action.option_strings and action.nargs != 0 else ""
    cells = (f"`{names}{value}`", (action.help or "") % vars(action))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    sys.exit(main())
