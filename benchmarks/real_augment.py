"""Measure the effect of each kind of ``data.augment`` on a real model, one by one and together.

    python -m benchmarks.real_augment --model DIR --seal FILE --glaive FILE [--shares KIND=SHARE ...] [--steps N]
        [--arms NAME ...] [--out DIR] [key=value ...]

Each arm trains the same model on the same rows for the same number of steps: ``none`` as they are, each kind alone, and
``all`` of them. The rows are Seal-Tools' own and Glaive's, without what benchmarks.real_model makes of them. The cases
are those of benchmarks.real_model, and its questions for unseen tools without the tool (``unseen_no_call``): a gain in
refusals is seen next to what it costs. Every arm is compared with ``none``, case by case. Each step is skipped when its
result is there: after a kill, run the same command again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.real_arguments import check_inputs, make_parser, run_benchmark
from benchmarks.real_measuring import UNSEEN, Subject, answers_dir, load_suites, measure, prompted_as
from benchmarks.real_model import read_sources, rows_dir, train_once
from benchmarks.real_rows import Mixture, check_contamination, make_no_call_cases, mix_rows, to_cases, write_rows
from benchmarks.real_summary import summarise
from fctune.base.errors import ConfigError, DataError
from fctune.base.files import write_atomically
from fctune.config.intervals import parse_share
from fctune.config.sections.data import AUGMENT_KINDS

SHARES = {
    "distract": 0.5,
    "mask_names": 0.3,
    "paraphrase": 0.3,
    "shuffle_tools": 1.0,
    "take_away": 0.2,
    "ask": 0.15,
    "repeat": 0.2,
}
ARMS = ("none", *AUGMENT_KINDS, "all")
NO_CALL = "unseen_no_call"
_MADE_KINDS = [field.name for field in dataclasses.fields(Mixture) if field.name not in ("seed", "renamed_share")]


def write_data(arguments: argparse.Namespace) -> None:
    """Write training rows and cases, unless they are there.

    Raises:
        DataError: The rows are missing or too few, or they hold questions or tools of BFCL.
    """
    folder = rows_dir(arguments)
    if (folder / "done.json").is_file():
        return
    sources = read_sources(arguments, folder)
    mixture = Mixture(**dict.fromkeys(_MADE_KINDS, 0) | {"seal_copies": 1, "glaive": arguments.num_glaive})
    mixture = dataclasses.replace(mixture, renamed_share=0.0)
    rows = mix_rows(sources.split.train, sources.glaive, mixture, sources.allowed.allows)
    write_rows(folder / "train.jsonl", (row.to_openai() for row in rows))
    others = [tool for row in sources.split.train for tool in row.tools]
    for name, held in (("validation", sources.split.validation), ("test", sources.split.test)):
        no_call = make_no_call_cases(held, others)
        write_rows(folder / f"{name}.jsonl", [*to_cases(held, UNSEEN), *to_cases(no_call, NO_CALL)])
    found = check_contamination(folder / "train.jsonl", sources.questions, sources.benchmark.cases)
    if found.num_found_questions or found.found_tools:
        raise DataError(f"{folder / 'train.jsonl'}: {found.describe()}. Nothing was trained.")
    write_atomically(folder / "done.json", json.dumps({"rows": len(rows), "contamination": found.describe()}))


def make_augment(arm: str, shares: dict[str, float]) -> dict[str, float] | None:
    """Return ``data.augment`` of an arm; None for the rows as they are."""
    return None if arm == "none" else shares if arm == "all" else {arm: shares[arm]}


def train_arm(arguments: argparse.Namespace, arm: str, shares: dict[str, float], model_dir: Path) -> Path:
    """Train an arm, unless that has ended well, and return the merged export.

    Raises:
        ConfigError: Another config was trained there.
        CheckpointError: The run failed.
    """
    sources = json.dumps([{"path": str(rows_dir(arguments) / "train.jsonl")}])
    keys = [f"model.path={model_dir}", f"data.sources={sources}", f"max_steps={arguments.steps}", "success=null"]
    keys.append("epochs=1000")  # the steps end the run
    keys.append(f"data.augment={json.dumps(make_augment(arm, shares))}")
    return train_once(arguments.config, arguments.out / arm, [*keys, *arguments.overrides])


def format_arms(summaries: dict[str, dict[str, Any]]) -> str:
    """Return the accuracies of all arms as a Markdown table, with the paired difference to ``none``."""
    arms = list(summaries)
    categories = list(dict.fromkeys(category for summary in summaries.values() for category in summary))
    lines = [f"| | cases | {' | '.join(arms)} |", f"|---|---|{'---|' * len(arms)}"]
    for category in categories:
        found = {arm: summaries[arm][category] for arm in arms if category in summaries[arm]}
        cells = [_format_arm(found.get(arm)) for arm in arms]
        lines.append(f"| {category} | {next(iter(found.values()))['n']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _format_arm(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    text = "{strict:.0%} ({low:.0%} - {high:.0%})".format(**found["after"])
    return f"{text}, {found['difference'][0]:+.0%}, p = {found['p']:.1g}" if "difference" in found else text


def run(arguments: argparse.Namespace) -> str:
    """Do what is missing of the benchmark, and return its table.

    Raises:
        ConfigError: An option is wrong, or results there are of something else.
        DataError: The rows are missing or too few, or they hold questions or tools of BFCL.
        CheckpointError: A training failed.
    """
    shares = parse_shares(arguments.shares)
    if unknown := [arm for arm in arguments.arms if arm not in ARMS]:
        raise ConfigError(f"--arms {unknown[0]}: expected {', '.join(ARMS)}.")
    if arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps}: expected 1 or more.")
    model_dir = check_inputs(arguments)
    write_data(arguments)
    options = (arguments.categories, arguments.limit or None, arguments.bfcl_data, arguments.vllm is not None)
    suites = load_suites(rows_dir(arguments), arguments.split, *options)
    folder = answers_dir(arguments.out, arguments.split)
    summaries: dict[str, dict[str, Any]] = {}
    reference = None
    for arm in dict.fromkeys(("none", *arguments.arms)):  # the others are compared with it
        tuned = train_arm(arguments, arm, shares, model_dir)
        if arm == "none":
            summaries["base"] = summarise(
                None, measure(prompted_as(model_dir, tuned), suites, folder / "base", arguments)
            )
        rows = measure(Subject(tuned), suites, folder / arm, arguments)
        summaries[arm] = summarise(reference, rows)
        reference = reference or rows
        described = {"shares": shares, "steps": arguments.steps, "arms": summaries}
        write_atomically(folder / "arms.json", json.dumps(described, indent=2) + "\n")
    table = format_arms(summaries)
    write_atomically(folder / "arms.md", table + "\n")
    return table


def parse_shares(pairs: Sequence[str]) -> dict[str, float]:
    """Return the shares with the named ones changed.

    Raises:
        ConfigError: A name is not a kind of augmentation, or its value not a share.
    """
    changes = {}
    for pair in pairs:
        kind, _, share = pair.partition("=")
        try:
            changes[kind] = parse_share(share)
        except ValueError as error:
            raise ConfigError(f"--shares {pair}: {error}.") from None
        if kind not in SHARES or not changes[kind]:
            raise ConfigError(f"--shares {pair}: expected KIND=SHARE above 0 with one of {', '.join(SHARES)}.")
    return SHARES | changes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 done, 2 wrong input, 130 interrupted."""
    parser = make_parser("benchmarks.real_augment", __doc__)
    parser.add_argument("--shares", nargs="*", default=[], metavar="KIND=SHARE", help="in place of the defaults")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), metavar="NAME", help=f"default: {' '.join(ARMS)}")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="of each arm; default: %(default)s")
    parser.add_argument("--num-glaive", type=int, default=120, metavar="N", help="Glaive rows; default: %(default)s")
    parser.set_defaults(out=Path("runs/real_augment"), limit=50)
    arguments = parser.parse_intermixed_args(argv)
    arguments.out = arguments.out.resolve()
    return run_benchmark(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
