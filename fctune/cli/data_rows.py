"""``fctune data convert``, ``cases`` and ``synthetic``: commands that write rows."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError, Interrupted
from fctune.base.terminal import Terminal
from fctune.cli.files import write_file
from fctune.config.intervals import format_count
from fctune.config.parsing import suggest
from fctune.data.check.warnings import WARNING_KINDS
from fctune.data.sources.defects import DEFECT_KINDS
from fctune.data.sources.reader import list_files
from fctune.data.sources.row_formats.registry import ROW_FORMATS

_NUM_TOOLS = 20  # that are shown


def add_format_argument(command: argparse.ArgumentParser) -> None:
    """Add ``--format`` and ``--columns`` to a command that reads rows."""
    formats = ", ".join(ROW_FORMATS)
    command.add_argument(
        "--format",
        default="auto",
        metavar="NAME",
        help=f"row format: auto, {formats}; default: auto, which detects it",
    )
    command.add_argument(
        "--columns",
        type=_to_columns,
        action="append",
        default=[],
        metavar="OWN=NAME,...",
        help="the format's name for columns of other names, such as question=query; OWN=ignore leaves one out",
    )


def _to_columns(text: str) -> list[tuple[str, str]]:
    """Return the format's column name for each of the user's, from ``OWN=NAME,...``."""
    pairs = [(own.strip(), name.strip()) for own, _, name in (word.rpartition("=") for word in text.split(","))]
    if not all(own and name for own, name in pairs):
        raise argparse.ArgumentTypeError(f"expected OWN=NAME, such as question=query, got {text!r}")
    return pairs


def read_columns(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the mapping of ``--columns``, which may be given several times.

    Raises:
        ConfigError: A column is mapped twice.
    """
    pairs = [pair for given in arguments.columns for pair in given]
    columns = dict(pairs)
    if len(columns) < len(pairs):
        own = next(own for own, _ in pairs if [name for name, _ in pairs].count(own) > 1)
        raise ConfigError(f"--columns: {own} is mapped twice; map it once.")
    return columns


def add_row_commands(data: Any) -> None:
    """Add the commands to ``fctune data``."""
    _add_convert(data)
    _add_cases(data)
    _add_synthetic(data)


def _add_convert(data: Any) -> None:
    convert = data.add_parser("convert", help="write the rows of a source as clean rows in OpenAI's format")
    convert.add_argument("source", metavar="IN", help="file, directory or hf:NAME, as for data check")
    convert.add_argument("out", type=Path, metavar="OUT", help="JSONL file to write")
    convert.add_argument(
        "--to", choices=("openai",), default="openai", help="row format to write; default: %(default)s"
    )
    add_format_argument(convert)
    convert.add_argument("--max-samples", type=int, metavar="N", help="read at most N rows")
    convert.add_argument(
        "--tools",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="tools of the rows that have none, in any form that rows may have; several files may be pages of one list",
    )
    convert.add_argument(
        "--drop",
        type=_to_kinds,
        default=[],
        metavar="KIND,...",
        help="leave out rows with these kinds of warnings, as data check names them",
    )
    convert.add_argument("--dedupe", action="store_true", help="leave out rows that repeat an earlier one exactly")
    convert.add_argument("--strict", action="store_true", help="write nothing if a row cannot be converted")
    convert.add_argument("--force", action="store_true", help="replace OUT if it exists")
    convert.add_argument("--json", type=Path, metavar="FILE", help="write what changed, and the rows skipped, as JSON")
    convert.set_defaults(run=_convert_data)


def _to_kinds(text: str) -> list[str]:
    """Parse kinds of warnings, separated by commas."""
    kinds = [kind.strip() for kind in text.split(",")]
    for kind in kinds:
        if kind in DEFECT_KINDS:
            raise argparse.ArgumentTypeError(f"{kind}: a defect, whose rows are left out anyway; leave it out here")
        if kind not in WARNING_KINDS:
            known = ", ".join(WARNING_KINDS)
            raise argparse.ArgumentTypeError(f"{kind}: unknown{suggest(kind, WARNING_KINDS)} (known: {known})")
    return kinds


def _add_cases(data: Any) -> None:
    cases = data.add_parser("cases", help="turn rows into cases, to sample answers to or to test with")
    cases.add_argument("paths", nargs="+", metavar="ROWS", help="file, directory or hf:NAME, as for data check")
    cases.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSONL file of cases to write")
    cases.add_argument(
        "--turns", choices=("last", "each"), default="last", help="turns that become cases; default: %(default)s"
    )
    cases.add_argument(
        "--test",
        type=Path,
        metavar="FILE",
        help="also write test cases, about tools that no case in --out offers, or other questions if rows share tools",
    )
    cases.add_argument("--test-share", type=float, default=0.2, metavar="X", help="default: %(default)s")
    cases.add_argument("--seed", type=int, default=0, help="seed of the split; default: %(default)s")
    add_format_argument(cases)
    cases.add_argument("--max-samples", type=int, metavar="N", help="read at most N rows of each source")
    cases.add_argument(
        "--force-benchmark", action="store_true", help="make cases of a benchmark's questions; each then says so"
    )
    cases.set_defaults(run=_make_cases)


def _add_synthetic(data: Any) -> None:
    synthetic = data.add_parser("synthetic", help="write rows or held-out cases of the synthetic dataset")
    synthetic.add_argument(
        "split", choices=("train", "varied", "reasoned", "shuffled", "pretrain", "cases"), help="part of the dataset"
    )
    synthetic.add_argument("--rows", type=int, required=True, metavar="N", help="number of rows")
    synthetic.add_argument("--seed", type=int, default=42, help="default: %(default)s")
    synthetic.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSONL file to write")
    synthetic.set_defaults(run=_write_synthetic)


def _convert_data(arguments: argparse.Namespace) -> int:
    from fctune.data.conversion import RowsSkippedError, convert_source
    from fctune.data.sources.tool_file import read_tool_files

    _check_out(arguments)
    tools, columns = read_tool_files(arguments.tools), read_columns(arguments)
    console = Terminal()
    try:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with console.status("converting") as status:
            report = convert_source(
                arguments.source,
                arguments.out,
                arguments.format,
                arguments.max_samples,
                arguments.strict,
                lambda counts: status.update(f"{counts.rows:,} rows read, {counts.num_skipped:,} skipped"),
                tools,
                columns,
                arguments.drop,
                arguments.dedupe,
            )
        is_written = True
    except RowsSkippedError as error:
        report, is_written = error.report, False
    except OSError as error:
        raise ConfigError(f"{arguments.out}: cannot be written ({error.strerror or error}).") from None
    except KeyboardInterrupt:
        raise Interrupted("nothing was written; run the same command to start over") from None
    for line in report.describe(arguments.source, str(arguments.out) if is_written else None):
        console.print(line, highlight=False, soft_wrap=True, markup=False, emoji=False)
    if arguments.json is not None:
        text = json.dumps(report.to_json(), indent=2, ensure_ascii=False) + "\n"
        write_file(arguments.json, "--json", lambda: text)
    return 0 if is_written else 1


def _check_out(arguments: argparse.Namespace) -> None:
    """Check the paths of a conversion before any row is read."""
    out: Path = arguments.out
    if not arguments.source.startswith(("hf:", "synthetic:")):
        files = list_files(arguments.source)
        if out.exists() and any(Path(file).exists() and out.samefile(file) for file in files):
            raise ConfigError(f"{out}: is the source itself; choose another file, so that the rows as they were stay.")
    if out.suffix not in (".jsonl", ".ndjson"):
        raise ConfigError(f"{out}: expected a file that ends in .jsonl, one row on each line.")
    if out.is_dir() or (out.exists() and not arguments.force):
        hint = "a directory; name a file" if out.is_dir() else "exists; pass --force to replace it"
        raise ConfigError(f"{out}: {hint}.")


def _make_cases(arguments: argparse.Namespace) -> int:
    from fctune.tasks.evaluation.row_cases import (
        RowCase,
        check_benchmark,
        describe_left_out,
        make_row_cases,
        split_cases,
    )

    if not 0 < arguments.test_share < 1:
        raise ConfigError(f"--test-share {arguments.test_share:g}: expected more than 0 and less than 1.")
    for path in arguments.paths:
        if not path.startswith(("hf:", "synthetic:")):
            for file in list_files(path):
                for option, out in (("--out", arguments.out), ("--test", arguments.test)):
                    if out is not None and out.exists() and out.samefile(file):
                        raise ConfigError(f"{option} {out}: is the source itself; choose another file.")
    columns = read_columns(arguments)
    made = make_row_cases(arguments.paths, arguments.turns, arguments.format, arguments.max_samples, columns)
    check_benchmark(made.benchmark, ", ".join(arguments.paths), arguments.force_benchmark)
    mark = {} if made.benchmark is None else {"metadata": {"benchmark": made.benchmark}}

    def write(option: str, path: Path, cases: list[RowCase]) -> None:
        lines = "".join(json.dumps({**case.row, **mark}, ensure_ascii=True) + "\n" for case in cases)
        write_file(path, option, lambda: lines)
        console.print(f"{format_count(len(cases), 'case')} in {path}", soft_wrap=True)

    console = Terminal(highlight=False)
    if arguments.test is None:
        write("--out", arguments.out, made.cases)
    else:
        split = split_cases(made.cases, arguments.test_share, arguments.seed)
        write("--out", arguments.out, split.train)
        write("--test", arguments.test, split.test)
        tools = sorted(split.test_tools)
        more = f" and {len(tools) - _NUM_TOOLS:,} more" if len(tools) > _NUM_TOOLS else ""
        by_tool = f"tools of the test, which no case to learn from offers: {', '.join(tools[:_NUM_TOOLS])}{more}"
        by_question = "split by question, because the rows share their tools: the test has the same tools, but no "
        by_question += "question that is learned from, and none like it"
        console.print(by_tool if tools else by_question, soft_wrap=True, markup=False)
        if split.num_dropped:
            dropped = format_count(split.num_dropped, "case that mixes", "cases that mix")
            console.print(f"dropped {dropped} training and test tools or questions", soft_wrap=True)
    for counted in describe_left_out(made.left_out):
        console.print(f"skipped {counted}", soft_wrap=True)
    return 0


def _write_synthetic(arguments: argparse.Namespace) -> int:
    from fctune.data.synthetic import iter_cases, iter_conversations

    if arguments.rows < 1:
        raise ConfigError(f"--rows {arguments.rows}: expected 1 or more.")
    if arguments.split == "cases":
        rows = (case.to_json() for case in iter_cases(arguments.rows, arguments.seed))
    else:
        rows = (c.to_openai() for c in iter_conversations(arguments.split, arguments.rows, arguments.seed))
    write_file(arguments.out, "--out", lambda: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    Terminal().print(f"{format_count(arguments.rows, 'row')} in {arguments.out}", soft_wrap=True)
    return 0
