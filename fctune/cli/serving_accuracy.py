"""Accuracy as served: a model's answers read by vLLM's and SGLang's own parsers; ``fctune parser-accuracy``.

    python -m eval.serving DIR --suite smoke [--vllm-python PATH] [--sglang-python PATH]
    python -m eval.serving DIR --suite synthetic --results FILE     # answers that eval.tool_calls has written

Where the chat template writes reasoning, the server's reasoning parser takes it out first, as when it serves.

The parsers run without a GPU, each in the Python of its own virtual environment, because vLLM and SGLang pin other
versions of torch and transformers than this project and than each other (FCTUNE_VLLM_PYTHON and FCTUNE_SGLANG_PYTHON
name them too). A parser that does not start is reported with the reason. Tested with vLLM 0.33.0 and SGLang 0.5.23,
installed without their CUDA dependencies.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError, DataError
from fctune.calls.formats.base import SERVERS
from fctune.calls.formats.registry import get_format
from fctune.calls.reasoning.registry import detect_reasoning
from fctune.calls.response_template import find_call_format
from fctune.calls.server_parsers import read_server_parsers
from fctune.cli import evaluate
from fctune.cli.files import write_file
from fctune.cli.tables import format_rate, make_console, make_table
from fctune.config.intervals import format_count
from fctune.data.chat_template import ChatTemplate
from fctune.data.chosen_template import open_chosen_template
from fctune.data.conversation import Conversation, Message
from fctune.engines.model_files import find_model
from fctune.tasks.evaluation.results import read_rows
from fctune.tasks.evaluation.serving import Served, parse_as_served
from fctune.tasks.evaluation.summary import summarise_run
from fctune.tasks.judge import Row
from fctune.tasks.suite import Suite

_GREETING = Conversation((Message("user", "Hello"),))


def run(arguments: argparse.Namespace) -> int:
    """Print the table; 0 done, 1 no server's parser could be run."""
    suite, rows = _answers(arguments)
    files = find_model(arguments.model)
    chosen = open_chosen_template(arguments.chat_template, "--chat-template ")
    template = ChatTemplate(files.tokenizer_dir, template_args=arguments.template_args, chat_template=chosen)
    served, reasons = _serve(arguments, suite, rows, template, files.model_dir)
    if arguments.json is not None:
        _write_json(arguments.json, rows, served)
    console = make_console()
    console.print(_make_table(arguments.model, suite, rows, served))
    for reason in reasons:
        console.print(f"not run: {reason}", soft_wrap=True, highlight=False)
    return 0 if served else 1


def _answers(arguments: argparse.Namespace) -> tuple[Suite, list[Row]]:
    """Return the suite, and the rows of its cases from the file or from the model."""
    suite = evaluate.open_suite(arguments)
    if arguments.results is None:
        rows, *_ = evaluate.ask(arguments, suite)
        return suite, rows or []
    found = {row["id"]: row for row in read_rows(arguments.results)}
    if missing := [case.id for case in suite.cases if case.id not in found]:
        raise DataError(
            f"{arguments.results}: lacks {len(missing):,} of the suite's {format_count(len(suite.cases), 'case')}, "
            f"such as {missing[0]!r}. Pass the --suite, and its options, that the results were made with."
        )
    return suite, [found[case.id] for case in suite.cases]


def _serve(
    arguments: argparse.Namespace, suite: Suite, rows: list[Row], template: ChatTemplate, model_dir: Path
) -> tuple[list[Served], list[str]]:
    call_format = get_format(arguments.format) if arguments.format else find_call_format(template)
    reasoning_format = detect_reasoning(template.source)
    recorded = read_server_parsers(model_dir, template)
    is_open = None
    if reasoning_format is not None:
        is_open = reasoning_format.is_opened_by(template.render(_GREETING, add_generation_prompt=True))
    served, reasons = [], []
    for server in SERVERS:
        parser = getattr(arguments, f"{server}_parser") or call_format.get_server_parser(server)
        if parser is None:
            reasons.append(f"{server}: no parser for {call_format.name}; pass one with --{server}-parser")
            continue
        known = reasoning_format.get_server_parser(server) if reasoning_format is not None else None
        known = known if recorded is None else recorded[server]["reasoning_parser"]
        try:
            one = parse_as_served(
                server,
                suite,
                rows,
                model_dir,
                parser,
                getattr(arguments, f"{server}_python"),
                reasoning_parser=getattr(arguments, f"{server}_reasoning_parser") or known,
                template_args=template.template_args,
                is_open=is_open,
            )
        except ConfigError as error:
            reasons.append(str(error))
        else:
            served.append(one)
    return served, reasons


def _make_table(model: str, suite: Suite, rows: list[Row], served: list[Served]) -> Any:
    names = [f"{one.version} ({one.parser})" for one in served]
    table = make_table(f"accuracy as served: {model} on {suite.name}", "category", "n", "strict", "lenient", *names)
    summary = summarise_run(suite, rows, {})
    readings = [summary["scores"], summary["lenient"], *(one.scores for one in served)]
    for category, scores in summary["scores"].items():
        rates = [reading[category]["rates"]["accuracy"] for reading in readings]
        cells = [format_rate(rate["successes"], rate["n"]) for rate in rates]
        table.add_row(category, f"{scores['n']:,}", *cells, style="bold" if category == "all" else "")
    return table


def _write_json(path: Path, rows: list[Row], served: list[Served]) -> None:
    lines = []
    for row in rows:
        verdicts = {one.version: one.judgements[row["id"]].outcome.verdict for one in served}
        lenient = row["lenient"]["verdict"]
        lines.append(json.dumps({"id": row["id"], "strict": row["verdict"], "lenient": lenient, **verdicts}) + "\n")
    write_file(path, "--json", lambda: "".join(lines))
