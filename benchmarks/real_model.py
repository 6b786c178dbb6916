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
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.real_arguments import check_inputs, make_parser, parse_mixture, run_benchmark
from benchmarks.real_measuring import (
    CATEGORIES,
    Subject,
    answers_dir,
    check_answers,
    load_suites,
    measure,
    prompted_as,
)
from benchmarks.real_rows import (
    BenchmarkFilter,
    Mixture,
    Split,
    check_contamination,
    make_no_call_cases,
    mix_rows,
    read_rows,
    split_by_tools,
    to_cases,
    write_rows,
)
from benchmarks.real_summary import format_table, summarise
from fctune.base.errors import CheckpointError, ConfigError, DataError, Interrupted
from fctune.base.files import write_atomically
from fctune.base.launcher_watch import stop_with_parent
from fctune.cli.eval_options import find_suite
from fctune.config.intervals import format_count
from fctune.config.loading import load_config
from fctune.data.chosen_template import open_chosen_template
from fctune.data.conversation import Conversation
from fctune.runs.figures import flatten_config
from fctune.tasks.benchmarks.bfcl.single_turn import find_installed_data
from fctune.tasks.suite import Suite
from fctune.tasks.suite_files import load_suite

NUM_VALIDATION, NUM_TEST = 60, 120
_ROOT = Path(__file__).resolve().parents[1]
_CHOSEN_BY_RUNS = ("parallel.context", "activation_checkpointing.fraction")  # null until a run records its choice


def write_data(arguments: argparse.Namespace, mixture: Mixture) -> None:
    """Write training rows and held-out cases under --out, and print what they share with BFCL.

    Raises:
        DataError: The rows are missing or too few, or they hold questions or tools of BFCL.
    """
    folder = rows_dir(arguments)
    done = folder / "done.json"
    recipe = {"mixture": dataclasses.asdict(mixture), "seal": arguments.seal, "glaive": arguments.glaive}
    if (was := _read_object(done)) is not None:
        if _is_training(arguments) and was["recipe"] != recipe:
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
    described = {"recipe": recipe, "contamination": contamination.describe(), "rows": len(rows)}
    write_atomically(done, json.dumps(described))


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
    benchmark = load_suite(find_suite("bfcl"), categories=CATEGORIES, options={"bfcl_data": str(data_dir)})
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
        ConfigError: Another model or config was trained there.
        CheckpointError: The run failed.
    """
    # The whole list: a config's further sources have not been searched for BFCL.
    sources = json.dumps([{"path": str(rows_dir(arguments) / "train.jsonl")}])
    keys = [f"model.path={model_dir}", f"data.sources={sources}"]
    return train_once(arguments.config, arguments.out / "run", [*keys, *arguments.overrides])


def train_once(config: Path, run: Path, keys: Sequence[str]) -> Path:
    """Train by ``fctune train`` and return the merged export; does nothing if the run has ended well.

    Raises:
        ConfigError: The run that ended there has another config.
        CheckpointError: The run failed.
    """
    export = run / "export" / "merged"
    # Measured below; several runs on one machine would need a port each.
    options = (f"output_dir={run}", "eval.every=0", "telemetry=null")
    if (export / "config.json").is_file() and (_read_object(run / "exit.json") or {}).get("code") == 0:
        _check_config(run, load_config(config, [*options, *keys]).to_dict())
        return export
    code = run_fctune("train", config, "--nproc", "1", *options, *keys)
    if code or not (export / "config.json").is_file():
        raise CheckpointError(
            f"{run}: training ended with code {code}; its own message is above. "
            "Fix that and re-run the same command to resume."
        )
    return export


def _check_config(run: Path, config: dict[str, Any]) -> None:
    """Raise ConfigError if a run has trained with another config."""
    trained = flatten_config((_read_object(run / "run.json") or {}).get("config", {}))
    now = flatten_config(json.loads(json.dumps(config)))
    kept = [key for key in now if key in trained and not (now[key] is None and key in _CHOSEN_BY_RUNS)]
    if changed := [key for key in kept if _place(key, trained[key]) != _place(key, now[key])]:
        key = changed[0]
        more = f" and {format_count(len(changed) - 1, 'more key')}" if len(changed) > 1 else ""
        raise ConfigError(
            f"{run}: was trained with another config: {key}={trained[key]}, not {now[key]}{more}. Pass another --out."
        )


def _place(key: str, value: object) -> object:
    """Return a config's value, with a path as it is from any directory."""
    return (_ROOT / value).resolve() if key.endswith(("path", "output_dir")) and isinstance(value, str) else value


def run_fctune(*arguments: object) -> int:
    """Run a command of fctune and return its exit code; Ctrl-C asks it to end, and waits until it has."""
    command = [sys.executable, "-m", "fctune.cli", *map(str, arguments)]
    # In a process group of its own, it gets one signal from here, not a second one, which ends it at once, from the
    # terminal. After a kill of this process a run saves and ends, so that the next start finds it at rest.
    process = subprocess.Popen(command, cwd=_ROOT, preexec_fn=stop_with_parent(), process_group=0)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        try:
            process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
        raise Interrupted("run the same command to continue") from None


def _read_object(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if there is none, or it is incomplete."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _is_training(arguments: argparse.Namespace) -> bool:
    return arguments.server is None and arguments.only != "before"


def run(arguments: argparse.Namespace) -> str:
    """Do what is missing of the benchmark, and return its table.

    Raises:
        ConfigError: An option is wrong, or results there are of something else.
        DataError: The rows are missing or too few, or they hold questions or tools of BFCL.
        CheckpointError: Training failed.
    """
    mixture = parse_mixture(arguments.mixture)
    model_dir = check_inputs(arguments)
    write_data(arguments, mixture)
    is_served = arguments.server is not None or arguments.vllm is not None
    options = (arguments.categories, arguments.limit or None, arguments.bfcl_data, is_served)
    suites = load_suites(rows_dir(arguments), arguments.split, *options)
    folder = answers_dir(arguments.out, arguments.split)
    for name in ("before", "after"):  # rather than after an hour of training
        check_answers(suites, folder / name, arguments.max_new_tokens, {})
    tuned = arguments.out / "run" / "export" / "merged"
    if _is_training(arguments):
        tuned = train(arguments, model_dir)
    before = after = None
    if arguments.only != "after":
        template = open_chosen_template(arguments.chat_template, "--chat-template ")
        base = prompted_as(model_dir, tuned) if _is_training(arguments) else Subject(model_dir, template)
        before = measure(replace(base, server=arguments.server), suites, folder / "before", arguments)
    if arguments.only != "before":
        after = measure(Subject(tuned, server=arguments.server), suites, folder / "after", arguments)
    summary = summarise(before, after)
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    table = format_table(summary)
    write_atomically(folder / "table.md", table + "\n")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 done, 2 wrong input, 130 interrupted."""
    arguments = make_parser("benchmarks.real_model", __doc__).parse_args(argv)
    return run_benchmark(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
