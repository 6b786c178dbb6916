"""Fine-tune a real model on real rows, and measure it before and after on BFCL and on tools that it has never seen.

    python -m benchmarks.real_model --model DIR|hf:NAME --seal FILE --glaive FILE [--public-sets DIR] [--full]
        [--out DIR] [key=value ...]

The config, the mixture of rows and the number of cases follow from the model (``SETTINGS``). The rows are Seal-Tools
(fairyshine/Seal-Tools) and Glaive (glaiveai/glaive-function-calling-v2), in any row format that fctune reads, and this
project's synthetic set; see benchmarks/real_rows.py. A check prints that no question and no tool of BFCL is in them.
``key=value`` overrides keys of the config. Each step writes its result under --out and is skipped when it is there:
after a kill, the same command resumes.

A base with a chat template of its own is measured twice: with the trained model's template, and by the prompt that BFCL
has for models without tool calls. The trained model is compared with the better of both, category by category.

--full measures everything, for as many hours as it takes: all test cases, IFEval, 50 dialogues of BFCL, and 100 cases
with the second engine. Each part has a result file, OUT/full/PART.json, written when the part is done.

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
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

from benchmarks.real_arguments import check_inputs, make_parser, parse_mixture, run_benchmark
from benchmarks.real_measuring import (
    CATEGORIES,
    UNSEEN,
    Subject,
    answers_dir,
    check_answers,
    has_own_template,
    load_suites,
    measure,
    prompted_as,
)
from benchmarks.real_public_rows import read_public_rows
from benchmarks.real_public_sets import PUBLIC_CATEGORIES, write_public_sets
from benchmarks.real_rows import (
    BenchmarkFilter,
    Contamination,
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
from benchmarks.real_server import DEFAULT_OPTIONS, LONG_OPTIONS
from benchmarks.real_summary import HEADS, PROMPTED, format_pairs, format_table, summarise, summarise_pairs
from benchmarks.training import describe_machine
from fctune.apps.gate.cases import choose_cases
from fctune.base.errors import CheckpointError, ConfigError, DataError, Interrupted
from fctune.base.files import write_atomically
from fctune.base.launcher_watch import stop_with_parent
from fctune.calls.metrics import rate
from fctune.cli.eval_options import find_suite
from fctune.config.intervals import format_count
from fctune.config.loading import load_config
from fctune.data.chosen_template import open_chosen_template
from fctune.data.conversation import Conversation
from fctune.runs.figures import flatten_config
from fctune.tasks.benchmarks.bfcl.single_turn import Mode, find_installed_data
from fctune.tasks.judge import Row, is_valid
from fctune.tasks.suite import Suite
from fctune.tasks.suite_files import load_suite

NUM_VALIDATION, NUM_TEST = 60, 120
NUM_DIALOGUES, NUM_SECOND_ENGINE = 50, 100
PARTS = ("test", "public_sets", "ifeval", "multi_turn", "second_engine")
_ROOT = Path(__file__).resolve().parents[1]
# Null until a run records its choice.
_CHOSEN_BY_RUNS = ("parallel.context", "activation_checkpointing.fraction", "activation_checkpointing.mlp_tiles")


def write_data(arguments: argparse.Namespace, mixture: Mixture) -> None:
    """Write training rows and held-out cases under --out, and print what they share with the benchmarks.

    Raises:
        DataError: The rows are missing or too few, or they hold questions or tools of BFCL or of a public set.
    """
    folder = rows_dir(arguments)
    if arguments.public_sets is not None:
        write_public_sets(arguments.public_sets, folder)
    _write_rows(arguments, mixture, folder)
    if arguments.public_sets is not None:  # rows that were written without the option were not filtered
        files = find_public_files(folder)
        cases = [case for file in files for case in load_suite(file).cases]
        _require_clean(check_contamination(folder / "train.jsonl", files, cases, "the public sets"), folder)


def _write_rows(arguments: argparse.Namespace, mixture: Mixture, folder: Path) -> None:
    done = folder / "done.json"
    recipe = {"mixture": dataclasses.asdict(mixture), "seal": arguments.seal, "glaive": arguments.glaive}
    recipe |= {"public": str(arguments.public_rows)} if mixture.public or mixture.guided else {}
    if (was := _read_object(done)) is not None:
        if _is_training(arguments) and was["recipe"] != recipe:
            raise ConfigError(
                f"{folder}: contains rows of a different mixture or different sources. Pass another --out."
            )
        print(was["contamination"], flush=True)
        return
    sources = read_sources(arguments, folder)
    public, guided = read_public_rows(arguments.public_rows, mixture.public, mixture.guided)
    rows = mix_rows(sources.split.train, sources.glaive, mixture, sources.allowed.allows, public, guided)
    write_rows(folder / "train.jsonl", (row.to_openai() for row in rows))
    _write_cases(folder, sources.split)
    contamination = check_contamination(folder / "train.jsonl", sources.questions, sources.benchmark.cases)
    _require_clean(contamination, folder)
    described = {"recipe": recipe, "contamination": contamination.describe(), "rows": len(rows)}
    write_atomically(done, json.dumps(described))


def _require_clean(contamination: Contamination, folder: Path) -> None:
    print(contamination.describe(), flush=True)
    if contamination.num_found_questions or contamination.found_tools:
        raise DataError(f"{folder / 'train.jsonl'}: contains a part of a benchmark, see above. Nothing was trained.")


class Sources(NamedTuple):
    """Source rows, BFCL with its files of questions, and the filter that keeps the benchmarks out of training rows."""

    split: Split
    glaive: list[Conversation]
    benchmark: Suite
    questions: list[Path]
    allowed: BenchmarkFilter


def read_sources(arguments: argparse.Namespace, folder: Path) -> Sources:
    """Read Seal-Tools, Glaive and BFCL.

    Args:
        arguments: The command line.
        folder: Where cases of public sets are, which no row may contain, either.

    Raises:
        DataError: The rows are missing or too few.
    """
    seal, glaive = read_rows(arguments.seal), read_rows(arguments.glaive)
    split = split_by_tools(seal, NUM_VALIDATION, NUM_TEST)
    data_dir = Path(arguments.bfcl_data) if arguments.bfcl_data else find_installed_data()
    benchmark = load_suite(find_suite("bfcl"), categories=CATEGORIES, options={"bfcl_data": str(data_dir)})
    questions = [data_dir / f"BFCL_v4_{category}.json" for category in CATEGORIES]
    public = find_public_files(folder)
    cases = [*benchmark.cases, *(case for file in public for case in load_suite(file).cases)]
    return Sources(split, glaive, benchmark, questions, BenchmarkFilter([*questions, *public], cases))


def find_public_files(folder: Path) -> list[Path]:
    """Return the files with the cases of public sets that were written to a folder of rows."""
    return [path for category in PUBLIC_CATEGORIES if (path := folder / f"{category}.jsonl").is_file()]


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
    return run_module("fctune.cli", *arguments)


def run_module(module: str, *arguments: object) -> int:
    """Run a module in a process that ends with this one, and return its exit code, as ``run_fctune`` does."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
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
    """Do what is missing of the benchmark, and return its tables.

    Raises:
        ConfigError: An option is wrong, or results there are of something else.
        DataError: The rows are missing or too few, or they hold questions or tools of BFCL.
        CheckpointError: Training failed.
    """
    if arguments.full and (arguments.only or arguments.split != "test" or arguments.server):
        raise ConfigError("--full: measures both models on the test; leave out --only, --split and --server.")
    model_dir = check_inputs(arguments)
    write_data(arguments, parse_mixture(arguments.mixture))
    parts = load_parts(arguments) if arguments.full else []
    is_served = arguments.server is not None or arguments.vllm is not None
    options = (arguments.categories, arguments.limit or None, arguments.bfcl_data, is_served)
    suites = load_suites(rows_dir(arguments), arguments.split, *options)
    folder = answers_dir(arguments.out, arguments.split)
    for name in ("before", "after") if not parts else ():  # rather than after an hour of training
        check_answers(suites, folder / name, arguments.max_new_tokens, {})
    tuned = arguments.out / "run" / "export" / "merged"
    if _is_training(arguments):
        tuned = train(arguments, model_dir)
    template = open_chosen_template(arguments.chat_template, "--chat-template ")
    base = prompted_as(model_dir, tuned) if _is_training(arguments) else Subject(model_dir, template)
    base, trained = replace(base, server=arguments.server), Subject(tuned, server=arguments.server)
    if parts:
        return "\n\n".join(measure_part(part, base, trained, arguments) for part in parts)
    before = prompted = after = None
    if arguments.only != "after":
        before = measure(base, suites, folder / "before", arguments)
        if has_own_template(model_dir):
            asked = load_suites(rows_dir(arguments), arguments.split, *options, mode="prompt")
            prompted = measure(base, asked, folder / PROMPTED, arguments)
    if arguments.only != "before":
        after = measure(trained, suites, folder / "after", arguments)
    return write_tables(folder, before, prompted, after)


def write_tables(folder: Path, before: list[Row] | None, prompted: list[Row] | None, after: list[Row] | None) -> str:
    """Write ``summary.json``, ``pairs.json`` and ``table.md``, and return the tables."""
    summary = summarise(before, after, prompted)
    pairs = {name: summarise_pairs(rows) for name, rows in zip(HEADS, (before, prompted, after), strict=True) if rows}
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    write_atomically(folder / "pairs.json", json.dumps(pairs, indent=2) + "\n")
    table = "\n\n".join(filter(None, (format_table(summary), format_pairs(pairs))))
    write_atomically(folder / "table.md", table + "\n")
    return table


class Part(NamedTuple):
    """A part of ``--full``: its cases, and the same cases in BFCL's prompt, if they are asked so as well."""

    name: str
    suites: list[Suite]
    prompted: list[Suite]


def load_parts(arguments: argparse.Namespace) -> list[Part]:
    """Load the cases of the parts to run, so that what is missing is known before hours of work.

    Raises:
        ConfigError: A part needs an option that is not there.
        DataError: The prompts of IFEval are missing.
    """
    needs = {"public_sets": "public_sets", "second_engine": "vllm"}
    for name in arguments.parts:
        if name in needs and getattr(arguments, needs[name]) is None:
            option = f"--{needs[name].replace('_', '-')}"
            raise ConfigError(f"--full: the part {name} needs {option}. Pass it, or name other --parts.")
    return [_load_part(name, arguments) for name in arguments.parts]


def _load_part(name: str, arguments: argparse.Namespace) -> Part:
    folder, data, is_served = rows_dir(arguments), arguments.bfcl_data, arguments.vllm is not None
    if name == "ifeval":
        return Part(name, [load_suite(find_suite("ifeval"), options={"ifeval_data": arguments.ifeval_data})], [])
    if name == "multi_turn":
        full = load_suite(
            find_suite("bfcl"),
            categories=["multi_turn_base"],
            options={"bfcl_data": data},
            has_plain_names=is_served,
            has_multi_turn=True,
        )
        dialogues = choose_cases(full.multi_turn, [case.id for case in full.multi_turn], NUM_DIALOGUES)
        return Part(name, [Suite("multi_turn_base", (), full.benchmark, multi_turn=tuple(dialogues))], [])
    if name == "second_engine":  # both engines with the names that servers allow
        suites = load_suites(folder, "test", CATEGORIES, None, data, has_plain_names=True)
        cases = [case for suite in suites for case in suite.cases]
        chosen = choose_cases(cases, [case.id for case in cases], NUM_SECOND_ENGINE)
        return Part(name, [Suite(name, tuple(chosen), suites[0].benchmark)], [])
    categories = PUBLIC_CATEGORIES if name == "public_sets" else (*CATEGORIES, UNSEEN)
    suites, prompted = (load_suites(folder, "test", categories, None, data, is_served, mode) for mode in get_args(Mode))
    return Part(name, suites, prompted)


def measure_part(part: Part, base: Subject, trained: Subject, arguments: argparse.Namespace) -> str:
    """Measure a part as far as answers are missing, write ``OUT/full/PART.json``, and return its table."""
    folder = arguments.out / "full" / part.name
    asked = argparse.Namespace(**vars(arguments))
    if part.name == "multi_turn" and arguments.vllm_options == DEFAULT_OPTIONS:
        asked.vllm_options = LONG_OPTIONS
    found: dict[str, Any] = {}
    if part.name == "second_engine":
        asked.vllm = None
        here = measure(trained, part.suites, folder / "in_process", asked)
        there = measure(trained, part.suites, folder / "served", arguments)
        table = f"second engine: {_describe_engines(here, there, found)}"
    else:
        before = measure(base, part.suites, folder / "before", asked)
        is_prompted = bool(part.prompted) and has_own_template(base.model_dir)
        prompted = measure(base, part.prompted, folder / PROMPTED, asked) if is_prompted else None
        after = measure(trained, part.suites, folder / "after", asked)
        table = write_tables(folder, before, prompted, after)
        found |= {key: json.loads((folder / f"{key}.json").read_text()) for key in ("summary", "pairs")}
    machine = {key: value for key, value in describe_machine().items() if key != "load_at_end"}
    described = {
        "part": part.name,
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m benchmarks.real_model --full",
        "machine": machine,
        "base": base.describe(),
        "trained": trained.describe(),
        "cases_digests": {suite.name: suite.digest() for suite in part.suites},
        **found,
    }
    write_atomically(arguments.out / "full" / f"{part.name}.json", json.dumps(described, indent=2) + "\n")
    return f"{part.name}\n\n{table}"


def _describe_engines(here: Sequence[Row], there: Sequence[Row], found: dict[str, Any]) -> str:
    """Compare the answers of both engines to the same cases; adds the numbers to ``found``."""
    right, other = ({row["id"]: is_valid(row) for row in rows} for rows in (here, there))
    differ = sorted(name for name, is_right in right.items() if other[name] != is_right)
    found |= {"in_process": rate(sum(right.values()), len(right)), "served": rate(sum(other.values()), len(other))}
    found |= {"n": len(right), "verdicts_differ": differ}
    return f"{len(differ)} of {len(right)} verdicts differ between in process and vLLM"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 done, 2 wrong input, 130 interrupted."""
    parser = make_parser("benchmarks.real_model", __doc__)
    parser.add_argument("--full", action="store_true", help="measure everything, part by part")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME", help="of --full")
    parser.add_argument("--ifeval-data", metavar="FILE", help="the prompts of IFEval; default: its set on the hub")
    arguments = parser.parse_args(argv)
    return run_benchmark(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
