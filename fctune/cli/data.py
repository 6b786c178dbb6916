"""``fctune data``: check, show, convert and prepare datasets, and write synthetic ones."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from fctune.cli.files import write_file
from fctune.cli.parser import add_config_arguments, add_template_args_argument
from fctune.config.chat_templates import list_shipped_templates
from fctune.data.sources.reader import list_files
from fctune.data.sources.row_formats.registry import ROW_FORMATS
from fctune.errors import ConfigError, Interrupted
from fctune.models.run_config import load_run_config, resolve_base
from fctune.terminal import Terminal

_FORMAT_HELP = f"row format: auto, {', '.join(ROW_FORMATS)}; default: auto, which detects it"
_NUM_TOOLS = 20  # that are shown


def add_commands(commands: Any) -> None:
    """Add ``fctune data`` to the command."""
    data = commands.add_parser("data", help="check, show, convert and prepare datasets").add_subparsers(
        required=True, metavar="COMMAND"
    )
    check = data.add_parser("check", help="report what a dataset holds, and every row that cannot be used")
    check.add_argument("paths", nargs="+", metavar="PATH", help="file, directory, hf:NAME[:CONFIG][:SPLIT][@REVISION]")
    check.add_argument("--format", default="auto", metavar="NAME", help=_FORMAT_HELP)
    check.add_argument("--max-samples", type=int, metavar="N", help="read at most N rows of each source")
    check.add_argument("--tokenizer", metavar="DIR", help="model directory; count tokens and supervised tokens")
    _add_template_arguments(check)
    check.add_argument(
        "--seq-len", type=int, metavar="N", help="count conversations longer than N tokens; needs --tokenizer"
    )
    check.add_argument(
        "--validation", nargs="+", default=[], metavar="PATH", help="held-out rows to search for overlap"
    )
    check.add_argument(
        "--eval-suite", nargs="+", default=[], metavar="PATH", help="benchmark questions to search for overlap"
    )
    check.add_argument(
        "--on-invalid", choices=("fail", "skip"), default="fail", help="fail: exit 1 if a row cannot be used"
    )
    _add_supervision_arguments(check)
    check.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    check.add_argument("--html", type=Path, metavar="FILE", help="write the report as one self-contained page")
    check.set_defaults(run=_check_data)
    show = data.add_parser("show", help="print a row as the model sees it, supervised tokens in colour or in brackets")
    show.add_argument("path", metavar="PATH", help="file, directory or hf:NAME, as for data check")
    show.add_argument("--row", type=int, default=1, metavar="N", help="number of the row, from 1; default: %(default)s")
    show.add_argument("--tokenizer", metavar="DIR", help="model directory; without it, the conversation is printed")
    _add_template_arguments(show)
    show.add_argument("--format", default="auto", metavar="NAME", help=_FORMAT_HELP)
    _add_supervision_arguments(show)
    show.set_defaults(run=_show_row)
    prepare = data.add_parser("prepare", help="tokenise and pack the rows of a config, as training does at its start")
    add_config_arguments(prepare)
    prepare.set_defaults(run=_prepare_data)
    convert = data.add_parser("convert", help="write the rows of a source as clean rows in OpenAI's format")
    convert.add_argument("source", metavar="IN", help="file, directory or hf:NAME, as for data check")
    convert.add_argument("out", type=Path, metavar="OUT", help="JSONL file to write")
    convert.add_argument(
        "--to", choices=("openai",), default="openai", help="row format to write; default: %(default)s"
    )
    convert.add_argument("--format", default="auto", metavar="NAME", help=_FORMAT_HELP)
    convert.add_argument("--max-samples", type=int, metavar="N", help="read at most N rows")
    convert.add_argument(
        "--tools",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="tools of the rows that have none, in any form that rows may have; several files may be pages of one list",
    )
    convert.add_argument("--strict", action="store_true", help="write nothing if a row cannot be converted")
    convert.add_argument("--force", action="store_true", help="replace OUT if it exists")
    convert.add_argument("--json", type=Path, metavar="FILE", help="write what changed, and the rows skipped, as JSON")
    convert.set_defaults(run=_convert_data)
    cases = data.add_parser("cases", help="turn rows into cases, to sample answers to or to test with")
    cases.add_argument("paths", nargs="+", metavar="ROWS", help="file, directory or hf:NAME, as for data check")
    cases.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSONL file of cases to write")
    cases.add_argument(
        "--turns", choices=("last", "each"), default="last", help="turns that become cases; default: %(default)s"
    )
    cases.add_argument(
        "--test", type=Path, metavar="FILE", help="also write test cases, about tools that no case in --out offers"
    )
    cases.add_argument("--test-share", type=float, default=0.2, metavar="X", help="default: %(default)s")
    cases.add_argument("--seed", type=int, default=0, help="seed of the split; default: %(default)s")
    cases.add_argument("--format", default="auto", metavar="NAME", help=_FORMAT_HELP)
    cases.add_argument("--max-samples", type=int, metavar="N", help="read at most N rows of each source")
    cases.add_argument(
        "--force-benchmark", action="store_true", help="make cases of a benchmark's questions; each then says so"
    )
    cases.set_defaults(run=_make_cases)
    synthetic = data.add_parser("synthetic", help="write rows or held-out cases of the synthetic dataset")
    synthetic.add_argument(
        "split", choices=("train", "varied", "reasoned", "shuffled", "pretrain", "cases"), help="part of the dataset"
    )
    synthetic.add_argument("--rows", type=int, required=True, metavar="N", help="number of rows")
    synthetic.add_argument("--seed", type=int, default=42, help="default: %(default)s")
    synthetic.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSONL file to write")
    synthetic.set_defaults(run=_write_synthetic)


def _add_template_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options that choose how --tokenizer renders conversations, named as the keys of the model section."""
    names = ", ".join(list_shipped_templates())
    command.add_argument(
        "--chat-template", metavar="NAME", help=f"template in place of the model's own: {names}, or a file"
    )


def _read_template(arguments: argparse.Namespace) -> Any:
    from fctune.data.chosen_template import open_chosen_template

    if arguments.chat_template is not None and arguments.tokenizer is None:
        raise ConfigError("--chat-template: needs --tokenizer, the model directory whose tokenizer it is used with.")
    return open_chosen_template(arguments.chat_template, "--chat-template ")


def _add_supervision_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of rendering and supervision, named as the config's keys; all have an effect with --tokenizer."""
    for key, choices, meaning in (
        ("train_on", ("assistant", "last_assistant", "calls"), "supervised turns"),
        ("train_reasoning", ("all", "last", "none"), "supervised reasoning"),
        ("parallel_calls", ("error", "split"), "turns with more calls than the chat template prints"),
        ("content_with_calls", ("error", "drop"), "text next to a call that the chat template does not print"),
        ("special_tokens_in_content", ("fail", "escape", "keep"), "control tokens that a row spells"),
        ("reasoning", ("keep", "keep_printed", "in_content", "drop"), "reasoning of rows"),
        ("thinking", ("auto", "rows", "config"), "what sets the chat template's thinking switch"),
    ):
        option = f"--{key.replace('_', '-')}"
        command.add_argument(option, choices=choices, default=choices[0], help=f"{meaning}; default: %(default)s")
    add_template_args_argument(command)


def _read_supervision(arguments: argparse.Namespace) -> Any:
    from fctune.data.supervision import SupervisionConfig

    keys = [key.name for key in dataclasses.fields(SupervisionConfig) if hasattr(arguments, key.name)]
    return SupervisionConfig(**{key: getattr(arguments, key) for key in keys})


def _check_data(arguments: argparse.Namespace) -> int:
    from fctune.data.chat_template import ChatTemplate
    from fctune.data.check import Encode, check_sources

    if arguments.seq_len is not None and arguments.tokenizer is None:
        raise ConfigError("--seq-len: needs --tokenizer, which tokens are counted with.")
    chosen = _read_template(arguments)
    encode: Encode | None = None
    supervised: set[int] = set()
    template: ChatTemplate | None = None
    if arguments.tokenizer is not None:
        from fctune.data.sources import has_reasoning_rows
        from fctune.models.hub import resolve_model_dir

        model_dir = resolve_model_dir(arguments.tokenizer)
        template = ChatTemplate(model_dir, _read_supervision(arguments), arguments.template_args, chosen)
        sources = [(path, arguments.format) for path in arguments.paths]
        template.resolve_thinking(lambda: has_reasoning_rows(sources, arguments.max_samples))

        def count(conversation: Any) -> tuple[int, int]:
            samples = template.encode(conversation)
            for sample in samples:
                supervised.update(t for t, weight in zip(sample.tokens, sample.weights, strict=True) if weight > 0)
            return sum(len(sample.tokens) for sample in samples), sum(sample.num_supervised for sample in samples)

        encode = count
    console = Terminal()
    with console.status("reading") as status:
        report = check_sources(
            arguments.paths,
            row_format=arguments.format,
            max_samples=arguments.max_samples,
            encode=encode,
            seq_len=arguments.seq_len,
            validation=arguments.validation,
            eval_suites=arguments.eval_suite,
            on_progress=lambda rows: status.update(f"{rows:,} rows read"),
            template=template,
        )
    console.print(report.render_text())
    if template is not None:
        from fctune.models.token_choice import check_tokens

        if note := check_tokens(template.model_dir, supervised):
            console.print(f"warning: {note}", highlight=False, soft_wrap=True)
    if arguments.json is not None:
        write_file(arguments.json, "--json", lambda: json.dumps(report.to_json(), indent=2, ensure_ascii=False) + "\n")
    if arguments.html is not None:
        from fctune.report.data_page import write_data_html

        write_file(arguments.html, "--html", lambda: write_data_html(report, arguments.html))
    return 0 if report.is_usable(arguments.on_invalid) else 1


def _show_row(arguments: argparse.Namespace) -> int:
    if not arguments.path.startswith(("hf:", "synthetic:")):
        list_files(arguments.path)  # before the imports and the tokenizer, which take seconds
    chosen = _read_template(arguments)
    from fctune.data.show import show_conversation, show_row

    console = Terminal(soft_wrap=True, highlight=False)
    if arguments.tokenizer is None:
        renderables = show_conversation(arguments.path, arguments.row, arguments.format)
    else:
        from fctune.models.hub import resolve_model_dir

        renderables = show_row(
            arguments.path,
            arguments.row,
            str(resolve_model_dir(arguments.tokenizer)),
            row_format=arguments.format,
            supervision=_read_supervision(arguments),
            template_args=arguments.template_args,
            chat_template=chosen,
            has_colour=console.color_system is not None and not console.no_color,
        )
    for renderable in renderables:
        console.print(renderable)
    return 0


def _prepare_data(arguments: argparse.Namespace) -> int:
    from fctune.config.cache import prepared_root
    from fctune.data.chosen_template import read_chosen_template
    from fctune.data.prepared_set import describe_counts, prepare

    config = load_run_config(arguments.config, arguments.overrides)
    console = Terminal()
    try:
        with console.status("preparing") as status:
            prepared = prepare(
                config.data,
                resolve_base(config),
                prepared_root(config),
                lambda counts: status.update(f"{counts.rows:,} rows read"),
                config.model.template_args,
                read_chosen_template(config.model),
            )
    except KeyboardInterrupt:
        raise Interrupted("no prepared set was written; run the same command to start over") from None
    for line in describe_counts(prepared):
        console.print(line, highlight=False, soft_wrap=True)
    return 0


def _convert_data(arguments: argparse.Namespace) -> int:
    from fctune.data.conversion import RowsSkippedError, convert_source
    from fctune.data.sources.tool_file import read_tool_files

    _check_out(arguments)
    tools = read_tool_files(arguments.tools)
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
            raise ConfigError(f"{out}: is the source itself; name another file, so that the rows as they were stay.")
    if out.suffix not in (".jsonl", ".ndjson"):
        raise ConfigError(f"{out}: expected a file that ends in .jsonl, one row on each line.")
    if out.is_dir() or (out.exists() and not arguments.force):
        hint = "a directory; name a file" if out.is_dir() else "exists; pass --force to replace it"
        raise ConfigError(f"{out}: {hint}.")


def _make_cases(arguments: argparse.Namespace) -> int:
    from fctune.evaluation.row_cases import RowCase, check_benchmark, make_row_cases, split_by_tool

    if not 0 < arguments.test_share < 1:
        raise ConfigError(f"--test-share {arguments.test_share:g}: expected more than 0 and less than 1.")
    for path in arguments.paths:
        if not path.startswith(("hf:", "synthetic:")):
            for file in list_files(path):
                for option, out in (("--out", arguments.out), ("--test", arguments.test)):
                    if out is not None and out.exists() and out.samefile(file):
                        raise ConfigError(f"{option} {out}: is the source itself; name another file.")
    made = make_row_cases(arguments.paths, arguments.turns, arguments.format, arguments.max_samples)
    check_benchmark(made.benchmark, ", ".join(arguments.paths), arguments.force_benchmark)
    mark = {} if made.benchmark is None else {"metadata": {"benchmark": made.benchmark}}

    def write(option: str, path: Path, cases: list[RowCase]) -> None:
        lines = "".join(json.dumps({**case.row, **mark}, ensure_ascii=True) + "\n" for case in cases)
        write_file(path, option, lambda: lines)
        console.print(f"{len(cases):,} cases in {path}", soft_wrap=True)

    console = Terminal(highlight=False)
    if arguments.test is None:
        write("--out", arguments.out, made.cases)
    else:
        split = split_by_tool(made.cases, arguments.test_share, arguments.seed)
        write("--out", arguments.out, split.train)
        write("--test", arguments.test, split.test)
        tools = sorted(split.test_tools)
        more = f" and {len(tools) - _NUM_TOOLS:,} more" if len(tools) > _NUM_TOOLS else ""
        console.print(f"tools of the test: {', '.join(tools[:_NUM_TOOLS])}{more}", soft_wrap=True, markup=False)
        if split.num_dropped:
            console.print(
                f"{split.num_dropped:,} cases dropped, which mix both sides' tools or questions", soft_wrap=True
            )
    for reason, count in made.left_out.most_common():
        console.print(f"left out: {count:,} {reason}", soft_wrap=True)
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
    Terminal().print(f"{arguments.rows:,} rows in {arguments.out}", soft_wrap=True)
    return 0
