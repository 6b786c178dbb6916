"""Accuracy as served: an export's answers through vLLM's and SGLang's own tool-call parsers.

    python -m eval.serving DIR --suite smoke [--vllm-python PATH] [--sglang-python PATH]
    python -m eval.serving DIR --suite synthetic --results FILE     # answers that eval.tool_calls has written

The parsers run in the Python that has them, without a GPU: a virtual environment each, since they pin other versions of
torch and transformers than this project and than one another (FCTUNE_VLLM_PYTHON and FCTUNE_SGLANG_PYTHON name them
too). Which does not start is said, with the reason. Run with vLLM 0.33.0 and SGLang 0.5.23, whose wheels were installed
without their CUDA needs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fctune.calls.formats.base import SERVERS, CallFormat
from fctune.calls.formats.registry import detect_format, get_format
from fctune.cli import evaluate
from fctune.cli.tables import format_rate, make_console, make_table
from fctune.data.chat_template import ChatTemplate
from fctune.errors import ConfigError, DataError
from fctune.evaluation.results import Row, read_rows
from fctune.evaluation.serving import Served, parse_as_served
from fctune.evaluation.suites import Suite
from fctune.generation.model_files import find_model


def run(arguments: argparse.Namespace) -> int:
    """Print the table; 0 done, 1 no server's parser could be run."""
    suite, rows = _answers(arguments)
    files = find_model(arguments.model)
    call_format = get_format(arguments.format) if arguments.format else _detect_format(files.model_dir)
    served, reasons = _serve(arguments, suite, rows, files.model_dir, call_format)
    if arguments.json is not None:
        _write_json(arguments.json, rows, served)
    console = make_console()
    console.print(_table(arguments.model, suite, rows, served))
    for reason in reasons:
        console.print(f"not run: {reason}", soft_wrap=True, highlight=False)
    return 0 if served else 1


def _answers(arguments: argparse.Namespace) -> tuple[Suite, list[Row]]:
    """The suite, and the rows of its cases, from the file or from the model."""
    suite = evaluate.open_suite(arguments)
    if arguments.results is None:
        rows, *_ = evaluate.ask(arguments, suite)
        return suite, rows or []
    found = {row["id"]: row for row in read_rows(arguments.results)}
    if lacking := [case.id for case in suite.cases if case.id not in found]:
        raise DataError(
            f"{arguments.results}: lacks {len(lacking):,} of the suite's {len(suite.cases):,} cases, such as "
            f"{lacking[0]!r}. Name the suite, and its options, that it was made with."
        )
    return suite, [found[case.id] for case in suite.cases]


def _detect_format(model_dir: Path) -> CallFormat:
    return detect_format(ChatTemplate(model_dir).source)


def _serve(
    arguments: argparse.Namespace, suite: Suite, rows: list[Row], model_dir: Path, call_format: CallFormat
) -> tuple[list[Served], list[str]]:
    served, reasons = [], []
    for server in SERVERS:
        parser = getattr(arguments, f"{server}_parser") or call_format.get_server_parser(server)
        if parser is None:
            reasons.append(f"{server}: it has no parser for {call_format.name}; name one with --{server}-parser")
            continue
        try:
            python = getattr(arguments, f"{server}_python")
            served.append(parse_as_served(server, suite, rows, model_dir, parser, python))
        except ConfigError as error:
            reasons.append(str(error))
    return served, reasons


def _table(model: str, suite: Suite, rows: list[Row], served: list[Served]) -> Any:
    names = [f"{one.version} ({one.parser})" for one in served]
    table = make_table(f"accuracy as served: {model} on {suite.name}", "category", "n", "strict", "lenient", *names)
    categories = sorted({row["category"] for row in rows} - {"all"})
    for category in [*categories, *(["all"] if suite.benchmark is None else [])]:
        own = [row for row in rows if category in ("all", row["category"])]
        counts = [
            sum(row["verdict"] == "correct" for row in own),
            sum(row["lenient"]["verdict"] == "correct" for row in own),
            *(sum(one.outcomes[row["id"]].is_correct for row in own) for one in served),
        ]
        style = "bold" if category == "all" else ""
        table.add_row(category, f"{len(own):,}", *(format_rate(count, len(own)) for count in counts), style=style)
    return table


def _write_json(path: Path, rows: list[Row], served: list[Served]) -> None:
    lines = []
    for row in rows:
        verdicts = {one.version: one.outcomes[row["id"]].verdict for one in served}
        lenient = row["lenient"]["verdict"]
        lines.append(json.dumps({"id": row["id"], "strict": row["verdict"], "lenient": lenient, **verdicts}) + "\n")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written ({error.strerror}).") from None
