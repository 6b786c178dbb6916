"""``fctune gate``: compare a fine-tuned model with its base, and block it if it lost something."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fctune.base.errors import ConfigError
from fctune.base.terminal import escape_controls
from fctune.cli import eval_options
from fctune.config.intervals import format_count
from fctune.config.sections.gate import GateConfig
from fctune.config.shipped import resolve_shipped_path

if TYPE_CHECKING:
    from rich.console import Console

    from fctune.apps.gate.report import GateReport

_STYLES = {"worse": "bold red", "undecided": "yellow", "safe": "green"}


def add_commands(commands: Any) -> None:
    """Add ``fctune gate`` to the command-line parser."""
    gate = commands.add_parser(
        "gate",
        help="compare a fine-tuned model with its base, and block it if something got worse",
        description="Ask a fine-tuned model and its base the same cases and judge each line: worse, safe or undecided. "
        "A line that got worse blocks the model: fctune serve and fctune push refuse it.",
        epilog="Exit codes: 0 not blocked, 1 blocked, 2 wrong usage, config or data. The same command resumes.",
    )
    models = "directory, run, adapter, hf:NAME or http(s)://HOST:PORT"
    gate.add_argument("--base", "--base-url", type=resolve_shipped_path, metavar="MODEL", help=f"the base: {models}")
    gate.add_argument("--tuned", type=resolve_shipped_path, metavar="MODEL", help="the result, likewise")
    gate.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory of the report and the answers")
    gate.add_argument(
        "--cases",
        metavar="FILE",
        help="held-out cases in JSONL, or a suite in YAML; default: those of the result's run",
    )
    gate.add_argument(
        "--rows", nargs="+", default=[], metavar="FILE", help="training rows of the result; default: those of its run"
    )
    gate.add_argument(
        "--config",
        dest="run_config",
        metavar="FILE",
        help="run config whose gate section applies; default: that of the result's run; options win",
    )
    gate.add_argument("--thorough", action="store_true", default=None, help="more cases; tolerance 5%%")
    gate.add_argument("--tolerance", metavar="SHARE", help="accepted fall of each line; default: 10%%")
    gate.add_argument("--require-safe", action="store_true", default=None, help="block undecided lines, too")
    gate.add_argument("--benchmarks", metavar="NAMES", help="comma-separated; none: the held-out cases alone")
    gate.add_argument("--max-cases", type=int, metavar="N", help="most cases of a line; default: 200")
    gate.add_argument("--max-tokens", type=int, metavar="N", help="most tokens that both models may generate")
    gate.add_argument("--max-new-tokens", type=int, metavar="N", help="most tokens of an answer; default: 256")
    gate.add_argument(
        "--chat-template",
        choices=("same", "tuned", "own"),
        help="if the templates differ: refuse, ask both with the result's, or each with its own; default: same",
    )
    gate.add_argument("--batch-size", type=int, metavar="N", help="prompts per batch, in process; default: 64")
    gate.add_argument("--base-name", metavar="NAME", help="name of the base on its server; default: the only one")
    gate.add_argument("--tuned-name", metavar="NAME", help="name of the result on its server")
    gate.add_argument("--streamed", action="store_true", default=None, help="servers: also ask with streamed answers")
    gate.add_argument("--guided", action="store_true", default=None, help="servers: also ask with guided decoding")
    gate.add_argument(
        "--base-answers", metavar="DIR", help="earlier gate whose answers of the base are taken over where they fit"
    )
    gate.add_argument("--fresh", action="store_true", help="discard the answers in DIR")
    eval_options.add_benchmark_options(gate)
    gate.set_defaults(run=_gate, command_parser=gate)


def _gate(arguments: argparse.Namespace) -> int:
    if arguments.base is None:
        trained_from = (_read_run(arguments.tuned).get("model") or {}).get("path")
        hint = f"pass --base {shlex.quote(trained_from)}" if trained_from else "to measure it alone, use fctune eval"
        raise ConfigError(f"fctune gate: no --base. A gate compares the result with what it was trained from; {hint}.")
    if arguments.tuned is None:
        arguments.command_parser.error("the following arguments are required: --tuned")
    config = _read_config(arguments)
    from fctune.apps.gate import run_gate  # imports torch

    report = run_gate(
        arguments.base,
        arguments.tuned,
        arguments.out,
        cases=arguments.cases,
        rows=arguments.rows,
        config=config,
        base_name=arguments.base_name,
        tuned_name=arguments.tuned_name,
        options=vars(arguments),
        is_fresh=arguments.fresh,
        log=lambda line: print(escape_controls(f"fctune gate: {line}"), file=sys.stderr, flush=True),
    )
    from fctune.cli.tables import make_console

    print_report(make_console(), report, arguments.out)
    return int(report.is_blocked)


def _read_run(tuned: str | None) -> dict[str, Any]:
    """Return the config of the run that the result is from; empty if it is of none on this machine."""
    from fctune.apps.gate.history import find_history

    history = find_history(tuned) if tuned is not None else None
    return dict(history.config) if history is not None else {}


def _read_config(arguments: argparse.Namespace) -> GateConfig:
    """Return the gate section of --config with the options over it.

    Raises:
        ConfigError: The file or an option is wrong.
    """
    from dataclasses import asdict

    from fctune.config.loading import format_problems, load_config
    from fctune.config.parsing import parse_dataclass

    given = load_config(arguments.run_config).gate if arguments.run_config is not None else None
    values = asdict(given or GateConfig())
    if arguments.run_config is None:  # the section that the run itself had
        values |= _read_run(arguments.tuned).get("gate") or {}
    names = ("thorough", "tolerance", "require_safe", "max_cases", "max_tokens", "max_new_tokens", "batch_size")
    for name in (*names, "chat_template", "cases", "base_answers", "streamed", "guided"):
        if (value := getattr(arguments, name)) is not None:
            values[name] = value
    if arguments.benchmarks is not None:
        values["benchmarks"] = [name for name in arguments.benchmarks.split(",") if name not in ("", "none")]
    problems: list[str] = []
    config: GateConfig | None = parse_dataclass(GateConfig, values, "gate", problems)
    if problems or config is None:
        raise ConfigError(format_problems("fctune gate", problems))
    return config


def print_report(console: Console, report: GateReport, out: Path, has_remedies: bool = True) -> None:
    """Print a gate's report: what is too small first, then a table of the lines, what was not run, and the remedies."""
    from rich.text import Text

    from fctune.apps.gate.lines import format_points
    from fctune.cli.tables import make_table, print_not_run

    for warning in report.warnings:
        console.print(warning, style="yellow", soft_wrap=True, highlight=False)
    columns = ("line", "verdict", "n", "before", "after", "difference (95 %)", "p", "p (Holm)", "smallest fall found")
    table = make_table(f"{report.tuned} against {report.base}", *columns, num_text=2)
    for line in report.lines:
        one, (difference, low, high) = line.comparison, line.interval
        table.add_row(
            line.line.title,
            Text(line.verdict, _STYLES[line.verdict]),
            f"{one.n:,}",
            f"{one.num_right_before / one.n:.1%}",
            f"{one.num_right_after / one.n:.1%}",
            f"{format_points(difference)} ({format_points(low)} to {format_points(high)})",
            f"{one.p_value:.2g}",
            f"{line.p_adjusted:.2g}",
            line.fall_found,
        )
    console.print(table)
    notes: dict[str, list[str]] = {}
    for line in report.lines:
        notes.setdefault(line.line.note, []).append(line.line.name)
    for note, names in notes.items():
        if note:
            console.print(f"{', '.join(names)}: {note}", soft_wrap=True, highlight=False)
    for name, found in report.tables.items():
        measured = make_table(name, *found["columns"], num_text=2)
        for row in found["rows"]:
            measured.add_row(*map(str, row))
        console.print(measured)
    print_not_run(console, report.not_run)
    _print_verdict(console, report)
    files = f"report: {out / 'gate.json'}; page: {out / 'gate.html'}"
    console.print(files, soft_wrap=True, highlight=False)
    if has_remedies:
        for text in report.describe_findings():
            console.print(f"\n{text}", soft_wrap=True, highlight=False)
        for command in report.commands:
            text = f"\nTrain again with these remedies:\n  {command}"
            console.print(text, soft_wrap=True, highlight=False)


def _print_verdict(console: Console, report: GateReport) -> None:
    tolerance = report.settings["tolerance"]
    text = {
        "worse": "worse: a line fell significantly, and by more than {}",
        "undecided": "undecided: no line is worse, but not all are shown to have fallen by less than {}",
        "safe": "safe: every line that ran fell by less than {}",
    }[report.verdict].format(f"{100 * tolerance:g} points")
    if not report.lines:
        text = "undecided: no line ran"
    blocked = f"; {block}" if (block := report.describe_block()) else ""
    more = f"; {format_count(len(report.not_run), 'line')} not run" if report.not_run else ""
    shown = f"{text}{more}{blocked}"
    console.print(shown, style=_STYLES[report.verdict], soft_wrap=True, highlight=False)
