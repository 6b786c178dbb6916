"""``fctune data``: datasets are checked, looked at, prepared, made."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fctune.cli.files import write_file
from fctune.cli.parser import add_config_arguments
from fctune.errors import ConfigError
from fctune.models.run_config import load_run_config
from fctune.terminal import Terminal


def add_commands(commands: Any) -> None:
    """Add ``fctune data`` to the command."""
    data = commands.add_parser("data", help="datasets: check them, look at them, prepare them").add_subparsers(
        required=True, metavar="COMMAND"
    )
    check = data.add_parser("check", help="what is in a dataset, and what is wrong with which line")
    check.add_argument("paths", nargs="+", metavar="PATH", help="file, directory, hf:NAME[:CONFIG][:SPLIT][@REVISION]")
    check.add_argument("--format", default="auto", help="row shape; default: found from the rows")
    check.add_argument("--max-samples", type=int, help="read so many rows of each source at most")
    check.add_argument("--tokenizer", help="model directory: count tokens, and what of them is learnt")
    check.add_argument("--seq-len", type=int, help="count conversations over this length; needs --tokenizer")
    check.add_argument("--validation", nargs="+", default=[], metavar="PATH", help="held-out rows: report overlap")
    check.add_argument(
        "--eval-suite", nargs="+", default=[], metavar="PATH", help="benchmark questions: report overlap"
    )
    check.add_argument("--on-invalid", choices=("fail", "skip"), default="fail", help="fail: exit 1 for a bad row")
    check.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    check.add_argument("--html", type=Path, metavar="FILE", help="write the report as one self-contained page")
    check.set_defaults(run=_check_data)
    show = data.add_parser("show", help="one row as the model sees it, what is learnt in colour")
    show.add_argument("path", metavar="PATH")
    show.add_argument("--row", type=int, default=1, help="which row, from 1")
    show.add_argument("--tokenizer", required=True, help="model directory")
    show.add_argument("--format", default="auto")
    show.add_argument("--train-on", choices=("assistant", "last_assistant", "calls"), default="assistant")
    show.add_argument("--parallel-calls", choices=("error", "split"), default="error")
    show.set_defaults(run=_show_row)
    prepare = data.add_parser("prepare", help="write the packed set that training maps")
    add_config_arguments(prepare)
    prepare.set_defaults(run=_prepare_data)
    synthetic = data.add_parser("synthetic", help="write rows, or held-out cases, of the synthetic set")
    synthetic.add_argument("split", choices=("train", "shuffled", "pretrain", "cases"))
    synthetic.add_argument("--rows", type=int, required=True)
    synthetic.add_argument("--seed", type=int, default=42)
    synthetic.add_argument("--out", type=Path, required=True, help="JSONL")
    synthetic.set_defaults(run=_write_synthetic)


def _check_data(arguments: argparse.Namespace) -> int:
    from fctune.data.check import Encode, check_sources

    if arguments.seq_len is not None and arguments.tokenizer is None:
        raise ConfigError("--seq-len: needs --tokenizer, which tokens are counted with.")
    encode: Encode | None = None
    if arguments.tokenizer is not None:
        from fctune.data.chat_template import ChatTemplate

        template = ChatTemplate(arguments.tokenizer)

        def count(conversation: Any) -> tuple[int, int]:
            encoded = template.encode(conversation)
            return len(encoded.tokens), encoded.num_supervised

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
        )
    console.print(report.render_text())
    if arguments.json is not None:
        write_file(arguments.json, "--json", lambda: json.dumps(report.to_json(), indent=2, ensure_ascii=False) + "\n")
    if arguments.html is not None:
        from fctune.report.data_page import write_data_html

        write_file(arguments.html, "--html", lambda: write_data_html(report, arguments.html))
    return 0 if report.is_usable(arguments.on_invalid) else 1


def _show_row(arguments: argparse.Namespace) -> int:
    from fctune.data.show import show_row

    renderables = show_row(
        arguments.path,
        arguments.row,
        arguments.tokenizer,
        row_format=arguments.format,
        train_on=arguments.train_on,
        parallel_calls=arguments.parallel_calls,
    )
    console = Terminal(soft_wrap=True, highlight=False)
    for renderable in renderables:
        console.print(renderable)
    return 0


def _prepare_data(arguments: argparse.Namespace) -> int:
    from fctune.data.prepared_set import describe_counts, prepare, prepared_root
    from fctune.models.hub import resolve_model_dir

    config = load_run_config(arguments.config, arguments.overrides)
    console = Terminal()
    with console.status("preparing") as status:
        prepared = prepare(
            config.data,
            resolve_model_dir(config.model.path),
            prepared_root(config),
            lambda counts: status.update(f"{counts.rows:,} rows read"),
        )
    for line in describe_counts(prepared):
        console.print(line, highlight=False, soft_wrap=True)
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
