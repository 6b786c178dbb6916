"""Fine-tune a real model on real rows, and measure it before and after on BFCL and on tools that it has never seen.

    python -m benchmarks.real_model --model DIR|hf:NAME --seal FILE --glaive FILE [--out DIR] [key=value ...]

The rows are Seal-Tools (fairyshine/Seal-Tools) and Glaive (glaiveai/glaive-function-calling-v2), in any row format that
fctune reads, and this project's synthetic set; see benchmarks/real_rows.py. A check prints that no question and no tool
of BFCL is in them. ``key=value`` overrides keys of the config. Each step writes its result under --out and is skipped
when it is there: after a kill, the same command resumes.

--split validation measures a fifth of BFCL's cases and a second set of unseen tools, for choosing between settings;
--split test measures the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks.real_arguments import check_inputs, make_parser, parse_mixture
from benchmarks.real_rows import (
    BenchmarkFilter,
    Mixture,
    Split,
    check_contamination,
    in_share,
    make_no_call_cases,
    mix_rows,
    read_rows,
    split_by_tools,
    to_cases,
    write_rows,
)
from benchmarks.real_server import end_with_parent, link_with_template, serve
from benchmarks.real_summary import format_table, read_answers, summarise
from fctune.calls.formats.base import CallFormat
from fctune.calls.formats.registry import detect_format
from fctune.cli.eval_options import find_suite
from fctune.data.chosen_template import ChosenTemplate, open_chosen_template
from fctune.data.conversation import Conversation
from fctune.errors import CheckpointError, ConfigError, DataError
from fctune.evaluation.bfcl import find_installed_data
from fctune.evaluation.judging import Row
from fctune.evaluation.results import ResultsFile
from fctune.evaluation.results import read_rows as read_results
from fctune.evaluation.run import run_suite
from fctune.evaluation.suites import Suite, load_suite
from fctune.generation.endpoint import EndpointEngine
from fctune.generation.engine import Engine
from fctune.generation.http_client import RetryPolicy

CATEGORIES = (
    *("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_irrelevance"),
)
UNSEEN = "unseen_tools"
VALIDATION_SHARE = 0.2
NUM_VALIDATION, NUM_TEST = 60, 120
SplitName = Literal["validation", "test"]
_ROOT = Path(__file__).resolve().parents[1]
_CONCURRENCY = 16
_ANSWER_LIMIT_S = 1800.0  # a server that shares two cores is slow; an answer that comes late counts


def write_data(arguments: argparse.Namespace, mixture: Mixture) -> None:
    """Write training rows and held-out cases under --out, and print what they share with BFCL.

    Raises:
        DataError: The rows are missing or too few, or they hold questions or tools of BFCL.
    """
    folder = rows_dir(arguments)
    done = folder / "done.json"
    recipe = {"mixture": dataclasses.asdict(mixture), "seal": arguments.seal, "glaive": arguments.glaive}
    if done.is_file():
        was = json.loads(done.read_text())
        is_trained_on = arguments.server is None and arguments.only != "before"
        if is_trained_on and was["recipe"] != recipe:
            raise ConfigError(
                f"{folder}: contains rows of a different mixture or different sources. Pass another --out."
            )
        print(was["contamination"], flush=True)
        return
    sources = read_sources(arguments)
    rows = mix_rows(sources.split.train, sources.glaive, mixture, sources.allowed.allows)
    write_rows(folder / "train.jsonl", (row.to_openai() for row in rows))
    _write_cases(folder, sources.split)
    contamination = check_contamination(folder / "train.jsonl", sources.questions, sources.benchmark.cases)
    print(contamination.describe(), flush=True)
    if contamination.num_found_questions or contamination.found_tools:
        raise DataError(f"{folder / 'train.jsonl'}: contains a part of BFCL, see above. Nothing was trained.")
    done.write_text(json.dumps({"recipe": recipe, "contamination": contamination.describe(), "rows": len(rows)}))


class Sources(NamedTuple):
    """Source rows, and the benchmark to keep out of the training rows."""

    split: Split
    glaive: list[Conversation]
    benchmark: Suite
    questions: list[Path]
    allowed: BenchmarkFilter


def read_sources(arguments: argparse.Namespace) -> Sources:
    """Read Seal-Tools, Glaive and BFCL.

    Raises:
        DataError: The rows are missing or too few.
    """
    seal, glaive = read_rows(arguments.seal), read_rows(arguments.glaive)
    split = split_by_tools(seal, NUM_VALIDATION, NUM_TEST)
    data_dir = Path(arguments.bfcl_data) if arguments.bfcl_data else find_installed_data()
    benchmark = load_suite(find_suite("bfcl"), categories=CATEGORIES, bfcl_data=str(data_dir))
    questions = [data_dir / f"BFCL_v4_{category}.json" for category in CATEGORIES]
    return Sources(split, glaive, benchmark, questions, BenchmarkFilter(questions, benchmark.cases))


def rows_dir(arguments: argparse.Namespace) -> Path:
    """Return the directory of training rows and held-out cases."""
    return Path(arguments.rows or arguments.out / "data")


def _write_cases(folder: Path, split: Split) -> None:
    others = [tool for row in split.train for tool in row.tools]
    write_rows(folder / "test.jsonl", to_cases(split.test, "unseen_tools"))
    no_call = make_no_call_cases(split.validation, others)
    write_rows(
        folder / "validation.jsonl", [*to_cases(split.validation, "unseen_tools"), *to_cases(no_call, "no_call")]
    )


def train(arguments: argparse.Namespace, model_dir: Path) -> Path:
    """Train on the rows under --out, unless that has ended well, and return the merged export.

    Raises:
        CheckpointError: The run failed.
    """
    keys = [f"model.path={model_dir}", f"data.sources.0.path={rows_dir(arguments) / 'train.jsonl'}"]
    return train_once(arguments.config, arguments.out / "run", [*keys, *arguments.overrides])


def train_once(config: Path, run: Path, keys: Sequence[str]) -> Path:
    """Train by ``fctune train`` and return the merged export; does nothing if the run has ended well.

    Raises:
        CheckpointError: The run failed.
    """
    export = run / "export" / "merged"
    if not (export / "config.json").is_file() or not _has_ended_well(run):
        # Measured below; several runs on one machine would need a port each.
        options = ("--nproc", "1", f"output_dir={run}", "eval.every=0", "telemetry=null")
        code = run_fctune("train", config, *options, *keys)
        if code or not (export / "config.json").is_file():
            raise CheckpointError(
                f"{run}: training ended with code {code}; its own message is above. "
                "Fix that and re-run the same command to resume."
            )
    return export


def run_fctune(*arguments: object) -> int:
    """Run a command of fctune and return its exit code."""
    command = [sys.executable, "-m", "fctune.cli", *map(str, arguments)]
    # After a kill of this process a run saves and ends, so that the next start finds it at rest.
    return subprocess.run(command, cwd=_ROOT, preexec_fn=end_with_parent).returncode


def _has_ended_well(run: Path) -> bool:
    try:
        return bool(json.loads((run / "exit.json").read_text())["code"] == 0)
    except (OSError, ValueError, KeyError):
        return False


def load_suites(
    folder: Path,
    split: SplitName,
    categories: Sequence[str] = (),
    limit: int | None = None,
    bfcl_data: str | None = None,
    has_plain_names: bool = False,
) -> list[Suite]:
    """Load the cases to measure, in order: BFCL's categories, unseen tools, and for the test the smoke suite.

    Args:
        folder: Where ``write_data`` wrote the cases.
        split: Validation or test.
        categories: Names of what to measure; empty: everything.
        limit: Largest number of cases of each category.
        bfcl_data: The benchmark's data; None: that of the installed wheel.
        has_plain_names: Write underscores for dots in BFCL's names, as servers' protocols require.

    Raises:
        ConfigError: A category does not exist.
    """
    known = (*CATEGORIES, UNSEEN, "smoke")
    if unknown := [name for name in categories if name not in known]:
        raise ConfigError(f"--categories {unknown[0]}: expected {', '.join(known)}.")
    is_validation = split == "validation"
    suites = []
    for name in categories or known:
        if name == "smoke":
            suites += [] if is_validation else [load_suite(find_suite("smoke"))]
        elif name == UNSEEN:
            cases = load_suite(folder / f"{split}.jsonl").cases
            suites.append(Suite(UNSEEN, cases).select(limit=limit))
        else:
            full = load_suite(
                find_suite("bfcl"), categories=[name], bfcl_data=bfcl_data, has_plain_names=has_plain_names
            )
            share = tuple(case for case in full.cases if in_share(case.id, VALIDATION_SHARE) == is_validation)
            suites.append(Suite(name, share, full.benchmark).select(limit=limit))
    return suites


def measure(
    model_dir: Path, suites: Sequence[Suite], out: Path, template: ChosenTemplate | None, arguments: argparse.Namespace
) -> list[Row]:
    """Ask a model all cases and return the rows; answers that are there already are kept."""
    if not is_measured(suites, out, arguments.max_new_tokens):
        if arguments.server is not None:
            _ask(suites, out, _connect(arguments.server), None, arguments)
        elif arguments.vllm is not None:
            served = link_with_template(model_dir, template, out / "served")
            log = out / f"{out.name}.log"
            with serve(served, arguments.vllm, arguments.vllm_options, arguments.port, log) as url:
                _ask(suites, out, _connect(url), None, arguments)
        else:
            from fctune.generation.in_process import InProcessEngine

            engine = InProcessEngine(model_dir, batch_size=arguments.batch_size, chat_template=template)
            _ask(suites, out, engine, detect_format(engine.template.source), arguments)
    return read_answers(out, [suite.name for suite in suites])


def is_measured(suites: Sequence[Suite], out: Path, max_new_tokens: int) -> bool:
    """Return True if every case has its answer, so that no model needs to be loaded."""
    for suite in suites:
        try:
            settings = json.loads((out / f"{suite.name}.settings.json").read_text())
            rows = read_results(out / f"{suite.name}.jsonl")
        except (OSError, ValueError, DataError):
            return False
        expected = (suite.digest(), max_new_tokens)
        if (settings["cases_digest"], settings["max_new_tokens"]) != expected or len(rows) < len(suite.all_cases):
            return False
        if any(row.get("error") is not None for row in rows):
            return False
    return True


def _connect(url: str) -> EndpointEngine:
    return EndpointEngine(url, concurrency=_CONCURRENCY, retry_policy=RetryPolicy(timeout_s=_ANSWER_LIMIT_S))


def _ask(
    suites: Sequence[Suite],
    out: Path,
    engine: Engine,
    call_format: CallFormat | None,
    arguments: argparse.Namespace,
) -> None:
    for suite in suites:
        started = time.perf_counter()
        results = ResultsFile(out / f"{suite.name}.jsonl")
        found = run_suite(suite, engine, call_format, results, max_new_tokens=arguments.max_new_tokens)
        assert found is not None
        if num_missing := sum(row.get("error") is not None for row in found):
            raise ConfigError(
                f"{results.path}: {num_missing} of {len(found)} cases have no answer; the server did not give one. "
                "Re-run the same command to retry them."
            )
        print(f"{out.name}: {suite.name}: {len(found):,} cases in {time.perf_counter() - started:.0f} s", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 done, 2 wrong input."""
    arguments = make_parser("benchmarks.real_model", __doc__).parse_args(argv)
    try:
        mixture = parse_mixture(arguments.mixture)
        model_dir = check_inputs(arguments)
        write_data(arguments, mixture)
        is_trained = arguments.only != "before"
        tuned = train(arguments, model_dir) if is_trained and arguments.server is None else None
        is_served = arguments.server is not None or arguments.vllm is not None
        options = (arguments.categories, arguments.limit or None, arguments.bfcl_data, is_served)
        suites = load_suites(rows_dir(arguments), arguments.split, *options)
        folder = arguments.out / arguments.split
        before = after = None
        if arguments.only != "after":
            template = open_chosen_template(arguments.chat_template, "--chat-template ")
            before = measure(model_dir, suites, folder / "before", template, arguments)
        if is_trained:
            after = measure(tuned or model_dir, suites, folder / "after", None, arguments)
    except (ConfigError, DataError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return 2
    summary = summarise(before, after)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    table = format_table(summary)
    (folder / "table.md").write_text(table + "\n")
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
