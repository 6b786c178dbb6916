"""``fctune data``: check, show and prepare datasets; ``data_rows`` writes them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fctune.base.errors import ConfigError, Interrupted
from fctune.base.terminal import Terminal
from fctune.cli.data_rows import (
    add_format_argument,
    add_kinds_argument,
    add_redact_arguments,
    add_row_commands,
    add_selection_arguments,
    add_tools_argument,
    check_outputs,
    list_sources,
    read_augment,
    read_columns,
    read_redact,
    read_selection,
    repeat_reading_options,
    to_redact_kinds,
)
from fctune.cli.files import write_file
from fctune.cli.generate import add_generate
from fctune.cli.parser import add_config_arguments, add_template_args_argument
from fctune.config.chat_templates import list_shipped_templates
from fctune.config.intervals import format_count
from fctune.config.shipped import resolve_shipped_path
from fctune.models.run_config import load_run_config, resolve_base

if TYPE_CHECKING:
    from rich.console import Console

    from fctune.config.schema import RunConfig
    from fctune.data.chunk_encoder import Counts
    from fctune.data.prepared_set import PreparedSet


def add_commands(commands: Any) -> None:
    """Add ``fctune data`` to the command."""
    data = commands.add_parser("data", help="check, show, convert and prepare datasets").add_subparsers(
        required=True, metavar="COMMAND"
    )
    _add_check(data)
    _add_show(data)
    _add_prepare(data)
    _add_tools(data)
    add_row_commands(data)
    add_generate(data)


def _add_check(data: Any) -> None:
    check = data.add_parser("check", help="report what a dataset holds, and every row that cannot be used")
    check.add_argument("paths", nargs="+", metavar="PATH", help="file, directory, hf:NAME[:CONFIG][:SPLIT][@REVISION]")
    add_format_argument(check)
    add_selection_arguments(check)
    add_tools_argument(check)
    check.add_argument("--max-samples", type=int, metavar="N", help="read at most N rows of each source")
    check.add_argument(
        "--tokenizer",
        type=resolve_shipped_path,
        metavar="DIR",
        help="model directory; count tokens and supervised tokens",
    )
    _add_template_arguments(check)
    check.add_argument(
        "--seq-len",
        type=_to_seq_len,
        metavar="N",
        help="count conversations longer than N tokens; auto: than data.seq_len=auto chooses; needs --tokenizer",
    )
    check.add_argument(
        "--validation", nargs="+", default=[], metavar="PATH", help="held-out rows to search for overlap"
    )
    check.add_argument(
        "--eval-suite", nargs="+", default=[], metavar="PATH", help="benchmark questions to search for overlap"
    )
    check.add_argument(
        "--secrets",
        type=to_redact_kinds,
        default=["secrets"],
        metavar="KIND,...",
        help="texts to warn about: secrets, emails, phones, paths; default: secrets, which are credentials",
    )
    check.add_argument(
        "--on-invalid", choices=("fail", "skip"), default="fail", help="fail: exit 1 if a row cannot be used"
    )
    _add_supervision_arguments(check)
    check.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    check.add_argument("--html", type=Path, metavar="FILE", help="write the report as one self-contained page")
    check.set_defaults(run=_check_data)


def _to_seq_len(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid value: {text!r}; expected a number of tokens, or auto") from None


def _add_show(data: Any) -> None:
    show = data.add_parser("show", help="print a row as the model sees it, supervised tokens in colour or in brackets")
    show.add_argument("path", metavar="PATH", help="file, directory or hf:NAME, as for data check")
    show.add_argument("--row", type=int, default=1, metavar="N", help="number of the row, from 1; default: %(default)s")
    show.add_argument(
        "--tokenizer",
        type=resolve_shipped_path,
        metavar="DIR",
        help="model directory; without it, the conversation is printed",
    )
    _add_template_arguments(show)
    add_format_argument(show)
    add_tools_argument(show)
    add_kinds_argument(show, "--augment")
    _add_supervision_arguments(show)
    show.set_defaults(run=_show_row)


def _add_prepare(data: Any) -> None:
    prepare = data.add_parser("prepare", help="tokenise and pack the rows of a config, as training does at its start")
    add_config_arguments(prepare)
    prepare.set_defaults(run=_prepare_data)


def _add_tools(data: Any) -> None:
    tools = data.add_parser(
        "tools",
        help="write the tools of rows, and draft those of rows that name none, such as sessions, from their calls",
    )
    tools.add_argument("paths", nargs="+", metavar="PATH", help="file, directory or hf:NAME, as for data check")
    tools.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file of tools to write")
    tools.add_argument("--force", action="store_true", help="replace the file if it exists")
    add_redact_arguments(tools, has_turns=False)
    add_format_argument(tools)
    add_selection_arguments(tools)
    tools.set_defaults(run=_draft_tools)


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
        ("special_tokens_in_content", ("fail", "escape", "keep"), "text of special tokens in a row"),
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
    from fctune.data.sources.tool_file import read_tool_files

    if arguments.seq_len is not None and arguments.tokenizer is None:
        raise ConfigError("--seq-len: needs --tokenizer, which tokens are counted with.")
    check_outputs(arguments.paths, {"--json": arguments.json, "--html": arguments.html})
    chosen = _read_template(arguments)
    columns, tools = read_columns(arguments), read_tool_files(arguments.tools)
    encode: Encode | None = None
    seq_len, max_tokens, lengths = arguments.seq_len, 0, None
    supervised: set[int] = set()
    present: set[int] = set()
    template: ChatTemplate | None = None
    if arguments.tokenizer is not None:
        from fctune.data.row_lengths import RowLengths, choose_seq_len, find_longest_row
        from fctune.data.sources import has_reasoning_rows
        from fctune.models.hub import resolve_model_dir
        from fctune.models.sources import read_architecture

        model_dir, lengths = resolve_model_dir(arguments.tokenizer), RowLengths()
        add_length = lengths.add_samples
        if seq_len == "auto":
            max_tokens = read_architecture(model_dir).max_position_embeddings
            seq_len = find_longest_row(max_tokens)  # what it would lose is measured row by row
        template = ChatTemplate(model_dir, _read_supervision(arguments), arguments.template_args, chosen)
        sources = [(path, arguments.format) for path in arguments.paths]
        selection = read_selection(arguments)
        template.resolve_thinking(lambda: has_reasoning_rows(sources, arguments.max_samples, columns, selection))

        def count(conversation: Any) -> tuple[int, int]:
            samples = template.encode(conversation)
            for sample in samples:
                present.update(sample.tokens)
                supervised.update(t for t, weight in zip(sample.tokens, sample.weights, strict=True) if weight > 0)
            add_length(samples)
            return sum(len(sample.tokens) for sample in samples), sum(sample.num_supervised for sample in samples)

        encode = count
    console = Terminal()
    with console.status("reading") as status:
        report = check_sources(
            arguments.paths,
            row_format=arguments.format,
            max_samples=arguments.max_samples,
            encode=encode,
            seq_len=seq_len,
            validation=arguments.validation,
            eval_suites=arguments.eval_suite,
            on_progress=lambda rows: status.update(f"{rows:,} rows read"),
            template=template,
            columns=columns,
            fold=arguments.fold,
            selection=read_selection(arguments),
            secrets=arguments.secrets,
            tools=tools,
        )
    reason = ""
    if max_tokens and report.tokens is not None and lengths is not None and lengths.counts:
        report.tokens.seq_len, reason = choose_seq_len(lengths, max_tokens)
        reason = f"data.seq_len: auto is {report.tokens.seq_len:,} tokens where they fit in memory ({reason})"
    console.print(report.render_text())
    if reason:
        console.print(reason, highlight=False, soft_wrap=True)
    if arguments.json is not None:
        write_file(arguments.json, "--json", lambda: json.dumps(report.to_json(), indent=2, ensure_ascii=False) + "\n")
    if arguments.html is not None:
        from fctune.apps.report.data_page import write_data_html

        write_file(arguments.html, "--html", lambda: write_data_html(report, arguments.html))
    if template is not None:
        from fctune.models.token_choice import check_tokens

        if note := check_tokens(template.model_dir, supervised, present):
            console.print(f"warning: {note}", highlight=False, soft_wrap=True)
    return 0 if report.is_usable(arguments.on_invalid) else 1


def _show_row(arguments: argparse.Namespace) -> int:
    if not arguments.path.startswith(("hf:", "synthetic:")):
        from fctune.data.sources.reader import list_files

        list_files(arguments.path)  # before the imports and the tokenizer, which take seconds
    chosen = _read_template(arguments)
    columns, augment = read_columns(arguments), read_augment(arguments)
    from fctune.data.show import show_conversation, show_row
    from fctune.data.sources.tool_file import read_tool_files

    tools = read_tool_files(arguments.tools)

    console = Terminal(soft_wrap=True, highlight=False)
    if arguments.tokenizer is None:
        renderables = show_conversation(arguments.path, arguments.row, arguments.format, columns, augment, tools)
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
            columns=columns,
            augment=augment,
            tools=tools,
        )
    for renderable in renderables:
        console.print(renderable)
    return 0


def _draft_tools(arguments: argparse.Namespace) -> int:
    from fctune.data.observed_tools import draft_tools
    from fctune.data.secrets import list_counts

    if arguments.out.exists() and not arguments.force:
        raise ConfigError(f"--out {arguments.out}: exists; pass --force to replace it.")
    found = draft_tools(list_sources(arguments, arguments.paths), read_redact(arguments))
    write_file(arguments.out, "--out", lambda: json.dumps(found.tools, indent=2, ensure_ascii=False) + "\n")
    console, names = Terminal(highlight=False), [tool["function"]["name"] for tool in found.tools]
    console.print(f"{format_count(len(names), 'tool')} in {arguments.out}: {', '.join(names)}", soft_wrap=True)
    console.print(found.describe_rows(), soft_wrap=True)
    if found.secrets:
        done = "replaced by placeholders" if found.is_redacted else "--redact replaces them"
        console.print(f"secrets in the tools: {list_counts(found.secrets, ())}; {done}", soft_wrap=True)
    tune = ["fctune", "tune", "--data", *arguments.paths, *repeat_reading_options(arguments)]
    with_tools = shlex.join([*tune, "--tools", str(arguments.out)])
    if found.variants:
        several = [f"{name} {count:,}" for name, count in found.variants.items() if count > 1]
        which = (
            f"of several definitions, that of the most rows ({', '.join(several)})" if several else "each defined once"
        )
        console.print(f"{format_count(len(found.variants), 'tool')} as the rows carry them, {which}", soft_wrap=True)
    if found.drafted:
        console.print(
            f"{format_count(len(found.drafted), 'draft')} from calls: {', '.join(found.drafted)}. Add the descriptions "
            "that the agent had, which the model reads, and correct types and required parameters. Then: "
            f"{with_tools}",
            soft_wrap=True,
        )
    elif found.num_without:
        rows = format_count(found.num_without, "row has", "rows have")
        console.print(f"{rows} calls and no tools; --tools gives them these: {with_tools}", soft_wrap=True)
    else:
        console.print(f"No --tools is needed, as the rows have their tools: {shlex.join(tune)}", soft_wrap=True)
    return 0


def prepare_rows(config: RunConfig, console: Console) -> PreparedSet:
    """Encode and pack a config's rows, or open the set of an earlier time, and show the progress."""
    from fctune.config.cache import prepared_root
    from fctune.data.chosen_template import read_chosen_template
    from fctune.data.prepared_set import prepare

    base = resolve_base(config)
    with console.status("preparing") as status:

        def show(counts: Counts) -> None:
            status.update(f"{counts.rows:,} rows read")

        if not isinstance(config.data.seq_len, int):
            from fctune.parallel.search import prepare_seq_len

            config, note = prepare_seq_len(config, base, show)
            console.print(note, highlight=False, soft_wrap=True)
        return prepare(
            config.data,
            base,
            prepared_root(config),
            show,
            config.model.template_args,
            read_chosen_template(config.model),
        )


def _prepare_data(arguments: argparse.Namespace) -> int:
    from fctune.data.prepared_set import describe_counts

    config = load_run_config(arguments.config, arguments.overrides)
    console = Terminal()
    try:
        prepared = prepare_rows(config, console)
    except KeyboardInterrupt:
        raise Interrupted("no prepared set was written; run the same command to start over") from None
    for line in describe_counts(prepared):
        console.print(line, highlight=False, soft_wrap=True)
    return 0
