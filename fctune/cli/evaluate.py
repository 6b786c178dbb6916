"""Measure whether a model calls the right function with the right arguments.

    python -m eval.tool_calls --model MODEL --suite smoke|synthetic|bfcl|FILE [--out FILE]
    torchrun --nproc_per_node 8 -m eval.tool_calls --model MODEL --suite bfcl
    tune run --nproc_per_node 8 eval/tool_calls --config FILE

MODEL is a Hugging Face directory, a run's output directory, an adapter's, hf:NAME, or the address of a server that
speaks OpenAI's chat completions (its key in FCTUNE_API_KEY). Answers are read in the wire format of the model's chat
template, strictly and as serving engines read, and compared with the expected calls: names and typed arguments,
order-free. BFCL's multi-turn cases are played: the calls are made on the benchmark's simulated classes, by name from an
allow-list, until the model calls no more. Nothing that a model wrote is ever run.

Every case is written to --out as it finishes; the same command again goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress, TaskID

from fctune.calls.formats.base import CallFormat
from fctune.calls.formats.registry import FORMATS, detect_format, get_format
from fctune.cli.eval_options import find_suite
from fctune.cli.tables import make_console, make_score_table
from fctune.config.loading import read_environment
from fctune.distributed import World, init_distributed, run_on_all_ranks, shutdown_distributed
from fctune.errors import CheckpointError, ConfigError, DataError
from fctune.evaluation.dialogue import summarise_run
from fctune.evaluation.proposals import write_proposals
from fctune.evaluation.results import ResultsFile, Row
from fctune.evaluation.run import describe_run, run_suite
from fctune.evaluation.suites import Suite, benchmark_of, load_suite
from fctune.generation.endpoint import EndpointEngine
from fctune.generation.engine import Engine, Sampling
from fctune.generation.http_client import RetryPolicy
from fctune.generation.in_process import InProcessEngine
from fctune.generation.model_files import find_model

T = TypeVar("T")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate a model; 0 done, 1 below --min-accuracy or with unanswered cases, 2 wrong usage or input."""
    world = None
    try:
        world = init_distributed() if int(read_environment().get("WORLD_SIZE", "1")) > 1 else None
        code = _run(arguments, world)
    except (ConfigError, DataError, CheckpointError) as error:
        if world is None or world.is_main:  # every rank raises it
            print(error, file=sys.stderr)
        return 2
    if world is not None:
        shutdown_distributed()
    return code


def _run(arguments: argparse.Namespace, world: World | None) -> int:
    suite = open_suite(arguments, has_multi_turn=True)
    if arguments.propose is not None and (name := benchmark_of(suite)) is not None:
        raise ConfigError(
            f"--propose: {suite.name} is a benchmark ({name}). Rows made from its failures would be trained on, and it "
            "would measure nothing any more. Propose from a suite of your own."
        )
    rows, settings, results = ask(arguments, suite, world)
    if rows is None:
        return 0
    summary = {"model": arguments.model, "adapter": arguments.adapter, **summarise_run(suite, rows, settings)}
    results.write_summary(summary)
    console = make_console()
    console.print(make_score_table(arguments.model, summary))
    _report(arguments, console, suite, rows, summary, results)
    return _judge_run(arguments, console, summary)


def ask(
    arguments: argparse.Namespace, suite: Suite, world: World | None = None
) -> tuple[list[Row] | None, dict[str, Any], ResultsFile]:
    """The rows of all cases, on the first process, what they were made with, and the file they are in."""
    if _is_server(arguments) and world is not None:
        raise ConfigError(f"--model {arguments.model}: a server is asked by one process; raise --concurrency instead.")
    engine, call_format = _on_every_rank(world, lambda: _open_engine(arguments, world))
    place = (world.rank, world.world_size) if world else (0, 1)
    results = ResultsFile(arguments.out or _default_out(arguments, suite), *place)
    console = make_console()
    show = console.is_terminal and place[0] == 0
    with Progress(console=console, transient=True) if show else nullcontext() as progress:
        task = progress.add_task(f"{len(suite.all_cases):,} cases") if progress else TaskID(0)
        rows = run_suite(
            suite,
            engine,
            call_format,
            results,
            max_new_tokens=arguments.max_new_tokens,
            # So that a server has others to answer while a step waits for its slowest.
            num_at_once=4 * arguments.concurrency if _is_server(arguments) else arguments.batch_size,
            is_fresh=arguments.fresh,
            world=world,
            on_row=lambda row, done, total: progress.update(task, completed=done, total=total) if progress else None,
        )
    return rows, describe_run(suite, engine, call_format, arguments.max_new_tokens), results


def _is_server(arguments: argparse.Namespace) -> bool:
    return bool(arguments.model.startswith(("http://", "https://")))


def open_suite(arguments: argparse.Namespace, has_multi_turn: bool = False) -> Suite:
    """The suite that is named, by the name of one that comes with fctune or by its path."""
    suite = load_suite(
        find_suite(arguments.suite),
        seed=arguments.seed,
        num_cases=arguments.num_cases,
        categories=arguments.categories,
        bfcl_data=arguments.bfcl_data,
        has_plain_names=_is_server(arguments) and arguments.format is None,
        has_multi_turn=has_multi_turn,
    ).select(limit=arguments.limit)
    if arguments.min_accuracy is not None and suite.benchmark is not None:
        raise ConfigError(f"--min-accuracy: {suite.benchmark} has no accuracy over all its categories.")
    return suite


def _open_engine(arguments: argparse.Namespace, world: World | None) -> tuple[Engine, CallFormat | None]:
    """Who answers, and the format its text is read in; None: the server reads the calls itself."""
    named = get_format(arguments.format) if arguments.format else None
    sampling = Sampling(arguments.temperature, arguments.seed or 0)
    if _is_server(arguments):
        retry_policy = RetryPolicy(max_attempts=arguments.attempts, timeout_s=arguments.timeout)
        return EndpointEngine(
            arguments.model,
            arguments.served_model,
            read_environment().get("FCTUNE_API_KEY") or None,
            arguments.concurrency,
            sampling,
            arguments.request,
            retry_policy,
        ), named
    files = find_model(arguments.model, arguments.adapter)
    device = world.device if world else None
    engine = InProcessEngine(files.model_dir, files.adapter_dir, arguments.batch_size, sampling, device)
    return engine, named or detect_format(engine.template.source)


def _on_every_rank(world: World | None, action: Callable[[], T]) -> T:
    """What ``action`` returns here, once it has worked on every rank."""
    return action() if world is None else run_on_all_ranks(action)


def _default_out(arguments: argparse.Namespace, suite: Suite) -> Path:
    name = str(arguments.model).split("://")[-1].strip("/").replace(":", "_").replace("/", "_")
    return Path("runs") / "eval" / (name + ("_adapter" if arguments.adapter else "")) / f"{suite.name}.jsonl"


def _report(
    arguments: argparse.Namespace,
    console: Console,
    suite: Suite,
    rows: list[Row],
    summary: dict[str, Any],
    results: ResultsFile,
) -> None:
    for reason in dict.fromkeys(suite.not_run.values()):
        names = [category for category, why in suite.not_run.items() if why == reason]
        console.print(f"not run: {', '.join(names)} ({reason})", soft_wrap=True, highlight=False)
    console.print(f"each case: {results.path}", soft_wrap=True)
    if arguments.html is not None:
        from fctune.report.eval_page import write_eval_html

        _write("--html", arguments.html, lambda path: write_eval_html(summary, rows, path))
        console.print(f"page: {arguments.html}", soft_wrap=True)
    if arguments.propose is not None:
        count = _write("--propose", arguments.propose, lambda path: write_proposals(suite, rows, path))
        console.print(f"{count:,} drafts, not reviewed: {arguments.propose}", soft_wrap=True)
    if summary["settings"]["format"] == "served" and not any(row["calls"] for row in rows):
        told = [name for name, f in FORMATS.items() if any(f.parse(row["answer"]).calls for row in rows)]
        if told:
            console.print(
                f"The server sent no call, but text that reads as calls in {', '.join(told)}: "
                f"pass --format {told[0]}, or start it with its tool-call parser.",
                style="yellow",
                soft_wrap=True,
            )


def _write(option: str, path: Path, write: Any) -> Any:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write(path)
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written ({error.strerror}).") from None


def _judge_run(arguments: argparse.Namespace, console: Console, summary: dict[str, Any]) -> int:
    code = 0
    if lost := summary["num_no_answer"]:
        again = "; run the same command again to ask them anew" if _is_server(arguments) else ""
        said = f"{lost:,} of {summary['num_cases']:,} cases have no answer and count as wrong{again}"
        console.print(said, style="bold red", soft_wrap=True)
        code = 1 if _is_server(arguments) else 0
    if arguments.min_accuracy is not None:
        accuracy = summary["scores"]["all"]["rates"]["accuracy"]["rate"]
        if accuracy < arguments.min_accuracy:
            console.print(
                f"accuracy {accuracy:.1%} is under the {arguments.min_accuracy:.0%} asked for", style="bold red"
            )
            code = 1
    return code
