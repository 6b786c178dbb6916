"""Measure how fast models answer: time to the first token, tokens a second, memory.

    python -m eval.throughput --model BASE --model TUNED [--model http://HOST:PORT] [--widths 1,8,32]

A width is the batch in this process and the requests in flight at a server. Every answer is made --new-tokens long
(servers are asked to). Models are measured in turn, --rounds times after a round of warming up, and the round of median
speed is shown; all models are held at once. --served-model names the model of the servers, FCTUNE_API_KEY holds a key.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from fctune.cli import evaluate
from fctune.cli.eval_options import parse_eval_arguments
from fctune.cli.files import write_file
from fctune.cli.tables import make_console, make_table
from fctune.config.loading import read_environment
from fctune.data.conversation import Conversation
from fctune.errors import ConfigError
from fctune.evaluation.throughput import Speed, measure_endpoint, measure_in_process, measure_rounds
from fctune.generation.endpoint import EndpointEngine
from fctune.generation.in_process import InProcessEngine
from fctune.generation.model_files import find_model


def run(arguments: argparse.Namespace) -> int:
    """Measure the models and print the table; returns 0."""
    if min(arguments.rounds, arguments.new_tokens) < 1:
        raise ConfigError("--rounds and --new-tokens: expected 1 or more.")
    prompts = _prompts(arguments)
    named = [(model, width) for model in arguments.model for width in arguments.widths]
    measures = [measure for model in arguments.model for measure in _measures(arguments, model, prompts)]
    console = make_console()
    with console.status("measuring") as status:
        speeds = measure_rounds(
            measures,
            arguments.rounds,
            lambda place, speed: status.update(f"{named[place][0]}, {named[place][1]} at a time"),
        )
    if arguments.json is not None:
        _write_json(arguments.json, named, speeds)
    console.print(_table(named, speeds, arguments.new_tokens))
    return 0


def _prompts(arguments: argparse.Namespace) -> list[Conversation]:
    suite = evaluate.open_suite(parse_eval_arguments(["--model", arguments.model[0], "--suite", arguments.suite]))
    wanted = arguments.num_prompts or max(arguments.widths)
    return [suite.cases[place % len(suite.cases)].prompt for place in range(wanted)]


def _measures(arguments: argparse.Namespace, model: str, prompts: list[Conversation]) -> list[Callable[[], Speed]]:
    if model.startswith(("http://", "https://")):
        server = EndpointEngine(model, arguments.served_model, read_environment().get("FCTUNE_API_KEY") or None)
        return [_bind(measure_endpoint, server, prompts, width, arguments.new_tokens) for width in arguments.widths]
    engine = InProcessEngine(*find_model(model))
    return [_bind(measure_in_process, engine, prompts, width, arguments.new_tokens) for width in arguments.widths]


def _bind(measure: Callable[..., Speed], *values: object) -> Callable[[], Speed]:
    return lambda: measure(*values)


def _table(named: list[tuple[str, int]], speeds: list[Speed], num_new_tokens: int) -> object:
    threads = f"{torch.get_num_threads()} thread{'' if torch.get_num_threads() == 1 else 's'}"
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {threads}"
    columns = ("model", "at a time", "first token", "95 %", "tokens/s", "of one, after the first", "memory")
    table = make_table(f"throughput, {num_new_tokens} new tokens ({where})", *columns)
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
