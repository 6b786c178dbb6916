"""``fctune data convert``, ``augment``, ``cases`` and ``synthetic``: commands that write rows."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fctune.base.errors import ConfigError, Interrupted
from fctune.base.terminal import Terminal
from fctune.cli.files import check_replaced, write_file
from fctune.config.conditions import Condition, parse_conditions
from fctune.config.intervals import format_count, parse_share
from fctune.config.parsing import suggest
from fctune.config.sections.data import (
    AUGMENT_KINDS,
    REDACT_KINDS,
    AugmentConfig,
    RedactConfig,
    RedactKind,
    SourceConfig,
)
from fctune.data.sources.row_formats.registry import ROW_FORMATS

if TYPE_CHECKING:
    from fctune.data.sources.selection import Selection

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


def add_selection_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of a command that reads all rows of a source: which of them it leaves out."""
    command.add_argument(
        "--fold",
        choices=("auto", "always", "never"),
        default="auto",
        help="leave out records whose messages are the beginning of another record's; default: auto, in logs",
    )
    command.add_argument(
        "--where",
        type=_to_conditions,
        default=(),
        metavar="CONDITIONS",
        help='keep rows that meet these only, such as "score >= 0.8 and tool == search"; names are columns or keys, or '
        "tool (called), messages, calls, characters",
    )
    command.add_argument(
        "--failed",
        choices=("drop", "keep"),
        default="drop",
        help="answers and runs that the row marks as failed: left out, or read as others; default: %(default)s",
    )
    command.add_argument(
        "--wrong-turns",
        choices=("context", "train"),
        default="context",
        help="turns whose calls all have results marked as errors: kept as context, or trained; default: %(default)s",
    )


def read_selection(arguments: argparse.Namespace) -> Selection:
    """Return the selection that the options of ``add_selection_arguments`` give."""
    from fctune.data.sources.selection import Selection

    return Selection(arguments.where, arguments.failed, arguments.wrong_turns)


def repeat_reading_options(arguments: argparse.Namespace) -> list[str]:
    """Return the options of ``add_format_argument`` and ``add_selection_arguments`` that differ from the defaults."""
    (source,) = list_sources(arguments, ["-"])
    columns = ",".join(f"{own}={name}" for own, name in source.columns.items())
    given = {"--format": source.format, "--columns": columns, "--fold": source.fold, "--where": source.where}
    given |= {"--failed": source.failed, "--wrong-turns": source.wrong_turns}
    usual = {"--format": "auto", "--fold": "auto", "--failed": "drop", "--wrong-turns": "context"}
    return [word for option, value in given.items() if value not in ("", usual.get(option)) for word in (option, value)]


def list_sources(arguments: argparse.Namespace, paths: Sequence[str]) -> list[SourceConfig]:
    """Return the sources of a command with ``add_format_argument`` and ``add_selection_arguments``, as in a config."""
    columns, where = read_columns(arguments), " and ".join(map(str, arguments.where))
    fold, failed, wrong_turns = arguments.fold, arguments.failed, arguments.wrong_turns
    return [
        SourceConfig(
            path=path,
            format=arguments.format,
            columns=columns,
            fold=fold,
            where=where,
            failed=failed,
            wrong_turns=wrong_turns,
        )
        for path in paths
    ]


def _to_conditions(text: str) -> tuple[Condition, ...]:
    try:
        return parse_conditions(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_redact_arguments(command: Any, has_turns: bool = True) -> None:
    """Add ``--redact`` and what belongs to it to a command that writes rows, or tools alone."""
    command.add_argument(
        "--redact",
        type=to_redact_kinds,
        nargs="?",
        const=["secrets"],
        metavar="KIND,...",
        help=f"replace secrets by placeholders: {', '.join(REDACT_KINDS)}; without a kind: secrets",
    )
    command.add_argument(
        "--redact-seed", type=int, default=0, metavar="N", help="seed of the placeholders; default: %(default)s"
    )
    if has_turns:
        command.add_argument(
            "--supervise-redacted",
            action="store_true",
            help="keep the weight of turns with placeholders, which are context otherwise",
        )


def to_redact_kinds(text: str) -> list[RedactKind]:
    """Parse kinds of secrets, separated by commas."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in REDACT_KINDS:
            known = ", ".join(REDACT_KINDS)
            raise argparse.ArgumentTypeError(f"{word}: unknown kind{suggest(word, REDACT_KINDS)} (known: {known})")
    return [kind for kind in REDACT_KINDS if kind in words]


def read_redact(arguments: argparse.Namespace) -> RedactConfig | None:
    """Return what is to be redacted, or None."""
    return None if arguments.redact is None else make_redact_config(arguments, arguments.redact)


def make_redact_config(arguments: argparse.Namespace, kinds: list[RedactKind]) -> RedactConfig:
    """Return the settings of ``--redact-seed`` and ``--supervise-redacted`` for kinds of secrets."""
    is_supervised = getattr(arguments, "supervise_redacted", False)
    return RedactConfig(kinds=kinds, seed=arguments.redact_seed, supervise=is_supervised)


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
    _add_augment(data)
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
    add_selection_arguments(convert)
    convert.add_argument("--max-samples", type=int, metavar="N", help="read at most N rows")
    add_tools_argument(convert)
    convert.add_argument(
        "--drop",
        type=_to_kinds,
        default=[],
        metavar="KIND,...",
        help="leave out rows with these kinds of warnings, as data check names them",
    )
    convert.add_argument("--dedupe", action="store_true", help="leave out rows that repeat an earlier one exactly")
    add_redact_arguments(convert)
    convert.add_argument("--strict", action="store_true", help="write nothing if a row cannot be converted")
    convert.add_argument("--force", action="store_true", help="replace OUT if it exists")
    convert.add_argument("--json", type=Path, metavar="FILE", help="write what changed, and the rows skipped, as JSON")
    convert.set_defaults(run=_convert_data)


def _add_augment(data: Any) -> None:
    augment = data.add_parser("augment", help="write the rows of a source with changed and added ones, as data.augment")
    augment.add_argument("source", metavar="IN", help="file, directory or hf:NAME, as for data check")
    augment.add_argument("out", type=Path, metavar="OUT", help="JSONL file to write, in OpenAI's format")
    add_kinds_argument(augment, "--kinds", is_required=True)
    augment.add_argument(
        "--validation-share",
        type=_to_share,
        default=0.02,
        metavar="X",
        help="data.validation_share of the runs to come, whose held-out rows stay as they are; default: %(default)s",
    )
    add_redact_arguments(augment)
    add_format_argument(augment)
    add_selection_arguments(augment)
    augment.add_argument("--max-samples", type=int, metavar="N", help="read at most N rows")
    add_tools_argument(augment)
    augment.add_argument("--force", action="store_true", help="replace OUT if it exists")
    augment.add_argument("--json", type=Path, metavar="FILE", help="write the counts of each kind as JSON")
    augment.set_defaults(run=_augment_data)


def add_tools_argument(command: argparse.ArgumentParser) -> None:
    """Add the option that gives tools to rows without any; ``read_tool_files`` reads its files."""
    command.add_argument(
        "--tools",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="tools of the rows that have none, as logs of agents do, in any form that rows may have; several files "
        "may be pages of one list",
    )


def add_kinds_argument(command: argparse.ArgumentParser, option: str, is_required: bool = False) -> None:
    """Add an option for kinds of augmentation, and those that choose among rows and tools."""
    command.add_argument(
        option,
        type=_to_augment,
        required=is_required,
        dest="augment",
        metavar="KIND=SHARE,...",
        help=f"kinds of augmentation, such as take_away=10%%,mask_names=30%%; without a share, all rows: "
        f"{', '.join(AUGMENT_KINDS)}",
    )
    command.add_argument(
        "--max-tools",
        type=int,
        default=8,
        metavar="N",
        help="most tools of a row that distract adds to; default: 8",
    )
    command.add_argument("--seed", type=int, default=0, help="seed of the augmentation; default: %(default)s")


def _to_augment(text: str) -> dict[str, float]:
    """Return the share of each kind, from ``KIND=SHARE,...``."""
    shares: dict[str, float] = {}
    for word in text.split(","):
        kind, equals, share = (part.strip() for part in word.partition("="))
        if kind not in AUGMENT_KINDS:
            known = ", ".join(AUGMENT_KINDS)
            raise argparse.ArgumentTypeError(f"{kind}: unknown kind{suggest(kind, AUGMENT_KINDS)} (known: {known})")
        if kind in shares:
            raise argparse.ArgumentTypeError(f"{kind}: is there twice")
        try:
            shares[kind] = parse_share(share) if equals else 1.0
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{word.strip()}: {error}") from None
        if not shares[kind]:
            raise argparse.ArgumentTypeError(f"{word.strip()}: no row would be chosen; leave it out")
    return shares


def _to_share(text: str) -> float:
    try:
        return parse_share(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def read_augment(arguments: argparse.Namespace) -> AugmentConfig | None:
    """Return the augmentation that was asked for, or None.

    Raises:
        ConfigError: --max-tools is too small.
    """
    if arguments.max_tools < 3:
        raise ConfigError(f"--max-tools {arguments.max_tools}: expected 3 or more.")
    if arguments.augment is None:
        return None
    return AugmentConfig(**arguments.augment, max_tools=arguments.max_tools, seed=arguments.seed)


def _to_kinds(text: str) -> list[str]:
    """Parse kinds of warnings, separated by commas."""
    from fctune.data.check.warnings import WARNING_KINDS  # imports the checker
    from fctune.data.sources.defects import DEFECT_KINDS

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
    add_redact_arguments(cases)
    add_format_argument(cases)
    add_selection_arguments(cases)
    cases.add_argument("--max-samples", type=int, metavar="N", help="read at most N rows of each source")
    add_tools_argument(cases)
    cases.add_argument("--force", action="store_true", help="replace files that hold something else")
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
    synthetic.add_argument("--force", action="store_true", help="replace a file that holds something else")
    synthetic.set_defaults(run=_write_synthetic)


def _convert_data(arguments: argparse.Namespace) -> int:
    from fctune.data.conversion import RowsSkippedError, convert_source
    from fctune.data.sources.tool_file import read_tool_files

    _check_out(arguments)
    tools, columns = read_tool_files(arguments.tools), read_columns(arguments)
    console = Terminal()
    try:
        with _writing(arguments.out), console.status("converting") as status:
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
                arguments.fold,
                read_selection(arguments),
                read_redact(arguments),
            )
        is_written = True
    except RowsSkippedError as error:
        report, is_written = error.report, False
    _print_report(console, report.describe(arguments.source, str(arguments.out) if is_written else None))
    _write_counts(arguments, report.to_json())
    return 0 if is_written else 1


def _augment_data(arguments: argparse.Namespace) -> int:
    from fctune.data.augment.augmented_file import augment_source
    from fctune.data.sources.tool_file import read_tool_files

    _check_out(arguments)
    config, columns = read_augment(arguments), read_columns(arguments)
    assert config is not None
    console = Terminal()
    with _writing(arguments.out), console.status("augmenting") as status:
        report = augment_source(
            arguments.source,
            arguments.out,
            config,
            arguments.format,
            arguments.max_samples,
            columns,
            arguments.validation_share,
            arguments.fold,
            lambda counts: status.update(f"{counts.rows:,} rows read, {counts.added:,} added"),
            read_selection(arguments),
            read_redact(arguments),
            read_tool_files(arguments.tools),
        )
    _print_report(console, report.describe(arguments.source, str(arguments.out)))
    _write_counts(arguments, report.to_json())
    return 0


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Make the directory of a file of rows, and say what keeps it from being written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror or error}).") from None
    except KeyboardInterrupt:
        raise Interrupted("nothing was written; run the same command to start over") from None


def _print_report(console: Terminal, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _write_counts(arguments: argparse.Namespace, counts: Mapping[str, Any]) -> None:
    if arguments.json is not None:
        text = json.dumps(counts, indent=2, ensure_ascii=False) + "\n"
        write_file(arguments.json, "--json", lambda: text)


def check_outputs(sources: Sequence[str], outputs: Mapping[str, Path | None]) -> None:
    """Check that the files that a command writes, by option, are none of its sources and differ from each other.

    Raises:
        ConfigError: Two are the same file.
        DataError: A source does not exist.
    """
    from fctune.data.sources.reader import list_files

    if not any(outputs.values()):
        return
    local = [source for source in sources if not source.startswith(("hf:", "synthetic:"))]
    files = {os.path.realpath(file) for source in local for file in list_files(source)}
    written: dict[str, str] = {}
    for option, path in outputs.items():
        if path is None:
            continue
        real = os.path.realpath(path)
        if real in files:
            raise ConfigError(
                f"{option} {path}: is the source itself; choose another file, so that the rows as they were stay."
            )
        if real in written:
            raise ConfigError(f"{option} {path}: is the file of {written[real]} as well; choose another.")
        written[real] = option


def _check_out(arguments: argparse.Namespace) -> None:
    """Check the paths of a command that writes rows before any is read."""
    out: Path = arguments.out
    check_outputs([arguments.source], {"OUT": out, "--json": arguments.json})
    if out.suffix not in (".jsonl", ".ndjson"):
        raise ConfigError(f"{out}: expected a file that ends in .jsonl, one row on each line.")
    if out.is_dir() or (out.exists() and not arguments.force):
        hint = "a directory; name a file" if out.is_dir() else "exists; pass --force to replace it"
        raise ConfigError(f"{out}: {hint}.")


def _make_cases(arguments: argparse.Namespace) -> int:
    from fctune.data.sources.tool_file import read_tool_files
    from fctune.tasks.evaluation.row_cases import (
        RowCase,
        check_benchmark,
        describe_left_out,
        make_row_cases,
        split_cases,
    )

    if not 0 < arguments.test_share < 1:
        raise ConfigError(f"--test-share {arguments.test_share:g}: expected more than 0 and less than 1.")
    check_outputs(arguments.paths, {"--out": arguments.out, "--test": arguments.test})
    columns = read_columns(arguments)
    redact = read_redact(arguments)
    made = make_row_cases(
        arguments.paths,
        arguments.turns,
        arguments.format,
        arguments.max_samples,
        columns,
        arguments.fold,
        read_selection(arguments),
        redact,
        read_tool_files(arguments.tools),
    )
    check_benchmark(made.benchmark, ", ".join(arguments.paths), arguments.force_benchmark)
    mark = {} if made.benchmark is None else {"metadata": {"benchmark": made.benchmark}}

    def write(*outputs: tuple[str, Path, list[RowCase]]) -> None:
        texts = ["".join(json.dumps({**case.row, **mark}) + "\n" for case in cases) for _, _, cases in outputs]
        for (option, path, _), text in zip(outputs, texts, strict=True):
            check_replaced(path, option, text, arguments.force)
        for (option, path, cases), text in zip(outputs, texts, strict=True):
            write_file(path, option, partial(str, text))
            console.print(f"{format_count(len(cases), 'case')} in {path}", soft_wrap=True)

    console = Terminal(highlight=False)
    if arguments.test is None:
        write(("--out", arguments.out, made.cases))
    else:
        split = split_cases(made.cases, arguments.test_share, arguments.seed)
        write(("--out", arguments.out, split.train), ("--test", arguments.test, split.test))
        tools = sorted(split.test_tools)
        more = f" and {len(tools) - _NUM_TOOLS:,} more" if len(tools) > _NUM_TOOLS else ""
        by_tool = f"tools of the test, which no case to learn from offers: {', '.join(tools[:_NUM_TOOLS])}{more}"
        by_question = "split by question, because the rows share their tools: the test has the same tools, but no "
        by_question += "question that is learned from, and none like it"
        console.print(by_tool if tools else by_question, soft_wrap=True)
        if split.num_dropped:
            dropped = format_count(split.num_dropped, "case that mixes", "cases that mix")
            console.print(f"dropped {dropped} training and test tools or questions", soft_wrap=True)
    for counted in describe_left_out(made.left_out):
        console.print(f"skipped {counted}", soft_wrap=True)
    console.print(made.secrets.describe_with_option(redact is not None), soft_wrap=True)
    return 0


def _write_synthetic(arguments: argparse.Namespace) -> int:
    from fctune.data.synthetic import iter_cases, iter_conversations

    if arguments.rows < 1:
        raise ConfigError(f"--rows {arguments.rows}: expected 1 or more.")
    if arguments.split == "cases":
        rows = (case.to_json() for case in iter_cases(arguments.rows, arguments.seed))
    else:
        rows = (c.to_openai() for c in iter_conversations(arguments.split, arguments.rows, arguments.seed))
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    check_replaced(arguments.out, "--out", text, arguments.force)
    write_file(arguments.out, "--out", lambda: text)
    Terminal().print(f"{format_count(arguments.rows, 'row')} in {arguments.out}", soft_wrap=True)
    return 0
