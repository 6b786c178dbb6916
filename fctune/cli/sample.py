"""``fctune sample``: several answers to each case, judged, and rows to train on made of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError
from fctune.cli.eval_options import add_case_and_engine_options, find_suite
from fctune.cli.files import write_file
from fctune.config.intervals import format_count
from fctune.config.parsing import apply_override
from fctune.config.shipped import resolve_shipped_path

_SUMMARY = "Ask each case several times, judge the answers, and write rows and pairs to train on."
_KEEPS = ("best", "shortest", "diverse", "random")


def add_commands(commands: Any) -> None:
    """Add ``fctune sample`` to the command."""
    parser = commands.add_parser("sample", help=_SUMMARY, description=_SUMMARY)
    add_case_and_engine_options(parser)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--num", type=int, default=8, metavar="N", help="answers to each case; default: %(default)s")
    sampling.add_argument(
        "--max-total-tokens", type=int, metavar="N", help="stop once N tokens have been generated, over all runs"
    )
    sampling.add_argument("--max-minutes", type=float, metavar="X", help="stop after X minutes; run again to continue")
    sampling.add_argument(
        "--keep-tokens", action="store_true", help="keep token ids and log-probabilities (in process, and from vLLM)"
    )
    sampling.add_argument(
        "--tokenizer",
        type=resolve_shipped_path,
        metavar="DIR",
        help="model that the token ids are for: a server must encode prompts as it does",
    )
    selection = parser.add_argument_group("rows")
    selection.add_argument("--keep", choices=_KEEPS, default="best", help="answers that become rows; default: best")
    selection.add_argument("--rows-per-case", type=int, default=1, metavar="N", help="default: %(default)s")
    selection.add_argument("--pairs-per-case", type=int, default=4, metavar="N", help="default: %(default)s")
    selection.add_argument(
        "--reward",
        type=_to_weights,
        metavar="PART=WEIGHT,...",
        help="parts of the reward that the summary reports; default: strict=1",
    )
    selection.add_argument(
        "--force-benchmark", action="store_true", help="learn from a benchmark's questions; every output says so"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out", type=Path, metavar="DIR", help="directory of answers, rows and summary; default: runs/sample/MODEL"
    )
    output.add_argument("--fresh", action="store_true", help="discard existing answers and ask again")
    output.add_argument("--html", type=Path, metavar="FILE", help="write a page of the results")
    parser.set_defaults(run=_run, command_parser=parser, temperature=1.0, min_accuracy=None)


def _to_weights(text: str) -> dict[str, Any]:
    weights: dict[str, Any] = {}
    problems: list[str] = []
    for word in text.split(","):
        apply_override(weights, word.strip(), problems)
    if problems:
        raise argparse.ArgumentTypeError(problems[0])
    return weights


def _check(arguments: argparse.Namespace) -> None:
    for option in ("model", "suite"):
        if getattr(arguments, option) is None:
            arguments.command_parser.error(f"the following arguments are required: --{option}")
    for option, least in (("num", 1), ("rows_per_case", 0), ("pairs_per_case", 0)):
        if (given := getattr(arguments, option)) < least:
            raise ConfigError(f"--{option.replace('_', '-')} {given}: expected {least} or more.")
    for option in ("max_total_tokens", "max_minutes"):
        if (limit := getattr(arguments, option)) is not None and limit <= 0:
            raise ConfigError(f"--{option.replace('_', '-')} {limit}: expected more than 0.")
    if arguments.temperature <= 0 and arguments.num > 1:
        raise ConfigError(
            f"--temperature {arguments.temperature:g} with --num {arguments.num}: all answers to a case would be "
            "equal. Pass a temperature above 0, such as 1."
        )
    if arguments.tokenizer is not None and not (arguments.keep_tokens and "://" in arguments.model):
        raise ConfigError("--tokenizer: checks the token ids of a server; pass --keep-tokens and a server's address.")
    find_suite(arguments.suite)


def _run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    from fctune.cli import evaluate
    from fctune.tasks.evaluation.row_cases import check_benchmark
    from fctune.tasks.rewards import BINARY, check_reward
    from fctune.tasks.suite_files import benchmark_of

    arguments.reward = arguments.reward or dict(BINARY)
    check_reward(arguments.reward, "--reward")

    def work(world: Any) -> int:
        suite = evaluate.open_suite(arguments)
        check_benchmark(benchmark_of(suite), f"--cases {arguments.suite}", arguments.force_benchmark)
        _sample(arguments, suite, world)
        return 0

    return evaluate.run_in_world(work)


def _sample(arguments: argparse.Namespace, suite: Any, world: Any) -> None:
    from rich.progress import Progress, TaskID

    from fctune.cli import evaluate
    from fctune.cli.tables import make_console
    from fctune.tasks.evaluation.results import ResultsFile
    from fctune.tasks.sampling.run import Budget, sample_suite, summarise_samples
    from fctune.tasks.suite_files import benchmark_of

    named, files = evaluate.check_model(arguments, world)
    out = arguments.out or evaluate.default_out(arguments, suite.name, "sample")
    rank, world_size = (world.rank, world.world_size) if world else (0, 1)
    results = ResultsFile(out / "answers.jsonl", rank, world_size)
    engine, call_format = evaluate.open_engine(arguments, files, named, world, arguments.keep_tokens)
    if arguments.tokenizer is not None:
        from fctune.data.chat_template import ChatTemplate
        from fctune.engines.server import ServerEngine
        from fctune.models.hub import resolve_model_dir

        assert isinstance(engine, ServerEngine)
        engine.check_tokens(ChatTemplate(resolve_model_dir(arguments.tokenizer)))
    max_seconds = None if arguments.max_minutes is None else 60 * arguments.max_minutes
    console = make_console()
    with Progress(console=console, transient=True) if console.is_terminal and rank == 0 else nullcontext() as progress:
        answers = format_count(arguments.num * len(suite.cases), "answer")
        task = progress.add_task(answers) if progress else TaskID(0)
        rows, settings, timings = sample_suite(
            suite,
            engine,
            call_format,
            results,
            arguments.num,
            max_new_tokens=arguments.max_new_tokens,
            budget=Budget(arguments.max_total_tokens, max_seconds),
            is_fresh=arguments.fresh,
            world=world,
            on_row=lambda row, done, total: progress.update(task, completed=done, total=total) if progress else None,
            settings={"benchmark": benchmark_of(suite), "keeps_tokens": arguments.keep_tokens},
        )
    if rows is None:
        return
    summary = summarise_samples(suite, rows, arguments.num, settings, arguments.reward)
    summary |= {"model": arguments.model, "adapter": arguments.adapter}
    summary["selected"] = _write_rows(arguments, suite, rows, out)
    if timings.num_answers:
        summary["timings"] = timings.to_json()
    results.write_summary(summary)
    _print_summary(console, summary, out)
    if arguments.html is not None:
        from fctune.apps.report.sample_page import write_sample_html

        write_file(arguments.html, "--html", lambda: write_sample_html(summary, suite, rows, arguments.html))
        console.print(f"page: {arguments.html}", soft_wrap=True)


def _write_rows(arguments: argparse.Namespace, suite: Any, rows: Sequence[Any], out: Path) -> dict[str, int]:
    """Write ``sft.jsonl`` and ``pairs.jsonl``; returns the number of rows in each."""
    from fctune.tasks.sampling.selection import group_by_case, iter_selected, select_pairs, select_rows
    from fctune.tasks.suite_files import benchmark_of

    groups, benchmark = group_by_case(rows), benchmark_of(suite)
    chosen = list(
        iter_selected(
            suite.cases,
            groups,
            lambda case, answers: select_rows(case, answers, arguments.keep, arguments.rows_per_case, benchmark),
        )
    )
    pairs = list(
        iter_selected(
            suite.cases,
            groups,
            lambda case, answers: select_pairs(case, answers, arguments.keep, arguments.pairs_per_case, benchmark),
        )
    )
    if arguments.keep != "random":  # over all cases, too, near misses come first
        pairs.sort(key=lambda pair: -pair["metadata"]["closeness"])
    _write_lines(out / "sft.jsonl", chosen)
    _write_lines(out / "pairs.jsonl", pairs)
    return {"rows": len(chosen), "pairs": len(pairs)}


def _write_lines(path: Path, rows: Sequence[Any]) -> None:
    write_file(path, "--out", lambda: "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in rows))


def _print_summary(console: Any, summary: dict[str, Any], out: Path) -> None:
    from fctune.cli.tables import make_table, print_not_run
    from fctune.pages.run_text import format_bounds

    ks = [estimate["k"] for estimate in next(iter(summary["pass_rates"].values()), [])]
    answers, cases = format_count(summary["num_answers"], "answer"), format_count(summary["num_cases"], "case")
    title = f"{answers} of {summary['model']} to {cases}"
    table = make_table(title, "category", "cases", *(f"pass@{k}" for k in ks), "always", "sometimes", "never")
    for name, estimates in summary["pass_rates"].items():
        shares = summary["shares"][name]
        rates = ["-" if one["rate"] is None else f"{one['rate']:.1%} ({format_bounds(one)})" for one in estimates]
        counts = [str(shares[share]) for share in ("always", "sometimes", "never")]
        table.add_row(name, f"{sum(shares.values()):,}", *rates, *counts)
    console.print(table)
    print_not_run(console, summary["not_run"])
    if summary["num_missing"]:
        asked = summary["num_cases"] * summary["num_samples"]
        console.print(
            f"{summary['num_missing']:,} of {asked:,} answers are missing; run the same command to ask for them",
            style="yellow",
            soft_wrap=True,
        )
    if "timings" in summary:
        console.print("judging took {judging_share:.2%} of {total_s:,.1f} s".format(**summary["timings"]))
    selected = summary["selected"]
    rows, pairs = format_count(selected["rows"], "row"), format_count(selected["pairs"], "pair")
    console.print(f"{rows}: {out / 'sft.jsonl'}   {pairs}: {out / 'pairs.jsonl'}", soft_wrap=True)
