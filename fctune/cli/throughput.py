"""Measure inference speed: time to first token, tokens per second, memory; ``fctune throughput``.

    python -m eval.throughput --model BASE --model TUNED [--model http://HOST:PORT] [--widths 1,8,32]

A width is the batch size in this process, or the requests in flight at a server. Every answer is --new-tokens long, if
the server supports it. Models take turns in --rounds rounds after a warm-up, and the round of median speed is shown;
all models are loaded at once. --served-model names the model of the servers, FCTUNE_API_KEY holds their key.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fctune.base.errors import ConfigError
from fctune.cli import evaluate
from fctune.cli.eval_options import parse_eval_arguments
from fctune.cli.files import write_file
from fctune.cli.tables import make_console, make_table
from fctune.config.intervals import format_count
from fctune.config.loading import read_environment
from fctune.data.conversation import Conversation
from fctune.engines.model_files import find_model, is_server
from fctune.engines.server import ServerEngine

if TYPE_CHECKING:
    from fctune.tasks.evaluation.throughput import Speed


def run(arguments: argparse.Namespace) -> int:
    """Measure the models and print the table; returns 0."""
    if min(arguments.rounds, arguments.new_tokens) < 1:
        raise ConfigError("--rounds and --new-tokens: expected 1 or more.")
    prompts = _prompts(arguments)
    named = [(model, width) for model in arguments.model for width in arguments.widths]
    from fctune.tasks.evaluation.throughput import measure_rounds

    measures = [measure for model in arguments.model for measure in _make_measures(arguments, model, prompts)]
    console = make_console()
    with console.status("measuring") as status:
        speeds = measure_rounds(
            measures,
            arguments.rounds,
            lambda index, speed: status.update(f"{named[index][0]}, {named[index][1]} at a time"),
        )
    if arguments.json is not None:
        _write_json(arguments.json, named, speeds)
    console.print(_make_table(named, speeds, arguments.new_tokens))
    return 0


def _prompts(arguments: argparse.Namespace) -> list[Conversation]:
    suite = evaluate.open_suite(parse_eval_arguments(["--model", arguments.model[0], "--suite", arguments.suite]))
    num_prompts = arguments.num_prompts or max(arguments.widths)
    return [suite.cases[index % len(suite.cases)].prompt for index in range(num_prompts)]


def _make_measures(arguments: argparse.Namespace, model: str, prompts: list[Conversation]) -> list[Callable[[], Speed]]:
    from fctune.engines.local import LocalEngine
    from fctune.tasks.evaluation.throughput import measure_endpoint, measure_in_process

    if is_server(model):
        server = ServerEngine(model, arguments.served_model, read_environment().get("FCTUNE_API_KEY") or None)
        return [_bind(measure_endpoint, server, prompts, width, arguments.new_tokens) for width in arguments.widths]
    engine = LocalEngine(*find_model(model))
    return [_bind(measure_in_process, engine, prompts, width, arguments.new_tokens) for width in arguments.widths]


def _bind(measure: Callable[..., Speed], *values: object) -> Callable[[], Speed]:
    return lambda: measure(*values)


def _make_table(named: list[tuple[str, int]], speeds: list[Speed], num_new_tokens: int) -> object:
    import torch

    threads = format_count(torch.get_num_threads(), "thread")
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {threads}"
    columns = ("model", "at a time", "first token", "p95", "tokens/s", "decoding, per prompt", "memory")
    table = make_table(f"throughput, {format_count(num_new_tokens, 'new token')} ({where})", *columns)
    for (model, width), speed in zip(named, speeds, strict=True):
        memory = "-" if speed.memory_bytes is None else f"{speed.memory_bytes / 2**30:.2f} GiB"
        table.add_row(
            model,
            f"{width:,}",
            f"{1000 * speed.first_s:,.1f} ms",
            f"{1000 * speed.first_p95_s:,.1f} ms",
            f"{speed.tokens_per_s:,.1f}",
            "-" if speed.decode_per_s is None else f"{speed.decode_per_s:,.1f}/s",
            memory,
        )
    return table


def _write_json(path: Path, named: list[tuple[str, int]], speeds: list[Speed]) -> None:
    rows = [
        {"model": model, **asdict(speed), "tokens_per_s": speed.tokens_per_s}
        for (model, _), speed in zip(named, speeds, strict=True)
    ]
    write_file(path, "--json", lambda: json.dumps(rows, indent=2) + "\n")
