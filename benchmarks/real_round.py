"""One round of learning from verdicts on a real model: sample, judge, train on the verdicts, and measure again.

    python -m benchmarks.real_round --model DIR --seal FILE --glaive FILE --trained DIR [--method dpo] [--out DIR]

--trained is the --out of benchmarks.real_model; its trained model is where the round starts. It answers fresh questions
several times, made as its training rows were but with another seed; the verdicts give preference pairs (dpo) or right
answers (rejection), and the model is trained on them. Both models are measured on the cases of benchmarks.real_model,
whose own answers of the first are used where it has them. Each step is skipped when its result is there: after a kill,
run the same command again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.real_arguments import check_inputs, make_parser, run_benchmark
from benchmarks.real_measuring import Subject, answers_dir, is_measured, load_suites, measure
from benchmarks.real_model import read_sources, run_fctune, train_once
from benchmarks.real_rows import Mixture, mix_rows, write_rows
from benchmarks.real_server import WHOLE_PROMPTS, serve
from benchmarks.real_summary import format_table, summarise
from fctune.base.errors import CheckpointError, ConfigError, DataError
from fctune.base.files import write_atomically

_ROOT = Path(__file__).resolve().parents[1]
# Of 2,000 questions; none is Seal-Tools' own, which the model was trained on.
_SHARES = {
    "natural": 350,
    "no_call": 300,
    "described": 250,
    "parallel": 350,
    "listed": 100,
    "joined": 150,
    "quantities": 500,
}


class Method(NamedTuple):
    """How a round learns: the config, the file of ``fctune sample`` that it trains on, and keys of the config."""

    config: str
    rows: str
    keys: tuple[str, ...] = ()


METHODS = {
    "dpo": Method("gemma3_270m_dpo.yaml", "pairs.jsonl"),
    "rejection": Method(
        "gemma3_270m_lora.yaml",
        "sft.jsonl",
        ("adapter.rank=32", "adapter.alpha=64", "optimizer.lr=2e-4", "success.trainable_parameters=null"),
    ),
}


def write_cases(arguments: argparse.Namespace) -> Path:
    """Write the questions to sample, unless they are there, and return their file."""
    file: Path = arguments.out / "cases.jsonl"
    if not file.is_file():
        sources = read_sources(arguments, arguments.rows or arguments.trained / "data")
        counts = {kind: max(1, share * arguments.questions // 2000) for kind, share in _SHARES.items()}
        mixture = replace(Mixture(seal_copies=0, glaive=0, dialogues=0, synthetic=0, seed=77), **counts)
        rows = mix_rows(sources.split.train, sources.glaive, mixture, sources.allowed.allows)
        write_rows(arguments.out / "questions.jsonl", (row.to_openai() for row in rows))
        _run("data", "cases", arguments.out / "questions.jsonl", "--out", file)
    return file


def sample(arguments: argparse.Namespace, model_dir: Path, cases: Path) -> Path:
    """Sample and judge answers, as far as they are missing, and return the directory of the rows and pairs."""
    out: Path = arguments.out / "samples"
    options = ["--num", arguments.num, "--temperature", arguments.temperature, "--batch-size", arguments.batch_size]
    options += ["--max-new-tokens", arguments.max_new_tokens, "--pairs-per-case", 2]
    options += ["--max-minutes", arguments.max_minutes] if arguments.max_minutes else []
    if _is_sampled(out, arguments.num):
        return out
    if arguments.vllm is None:
        _run("sample", "--model", model_dir, "--cases", cases, "--out", out, *options)
    else:
        vllm_options = f"{arguments.vllm_options} {WHOLE_PROMPTS}"
        with serve(model_dir, arguments.vllm, vllm_options, arguments.port, arguments.out / "start.log") as url:
            _run("sample", "--model", url, "--cases", cases, "--out", out, *options)
    return out


def _is_sampled(samples: Path, num_samples: int) -> bool:
    """Return True if every question has its answers, so that no model needs to be loaded."""
    try:
        summary = json.loads((samples / "answers.summary.json").read_text())
    except (OSError, ValueError):
        return False
    return bool(summary["num_samples"] == num_samples and not summary["num_missing"])


def learn(arguments: argparse.Namespace, model_dir: Path, samples: Path) -> Path:
    """Train on the verdicts, unless that has ended well, and return the merged export.

    Raises:
        DataError: The verdicts gave nothing to train on.
        CheckpointError: The run failed.
    """
    method = METHODS[arguments.method]
    rows = samples / method.rows
    if not rows.is_file() or not rows.read_text().strip():
        raise DataError(f"{rows}: no rows. The model was right always or never; sample more, or harder questions.")
    keys = [f"model.path={model_dir}", f"data.sources.0.path={rows}", *method.keys, *arguments.overrides]
    return train_once(_ROOT / "configs" / method.config, arguments.out / arguments.method, keys)


def _run(*arguments: object) -> None:
    if code := run_fctune(*arguments):
        raise CheckpointError(f"fctune {arguments[0]}: ended with code {code}; its own message is above.")


def run(arguments: argparse.Namespace) -> str:
    """Do what is missing of the round, and return its table.

    Raises:
        ConfigError: An option is wrong, or results there are of something else.
        DataError: The verdicts gave nothing to train on.
        CheckpointError: A step failed.
    """
    check_inputs(arguments)
    start = arguments.trained.resolve() / "run" / "export" / "merged"
    if not (start / "config.json").is_file():
        raise ConfigError(f"--trained {arguments.trained}: no trained model. Run benchmarks.real_model there first.")
    is_served = arguments.vllm is not None
    tuned = learn(arguments, start, sample(arguments, start, write_cases(arguments)))
    options = (arguments.categories, arguments.limit or None, arguments.bfcl_data, is_served)
    suites = load_suites(arguments.rows or arguments.trained / "data", arguments.split, *options)
    folder = answers_dir(arguments.out, arguments.split)
    done = answers_dir(arguments.trained, arguments.split) / "after"
    is_known = is_measured(suites, done, arguments.max_new_tokens, Subject(start).describe())
    before = measure(Subject(start), suites, done if is_known else folder / "before", arguments)
    after = measure(Subject(tuned), suites, folder / arguments.method, arguments)
    summary = summarise(before, after)
    write_atomically(folder / f"{arguments.method}.json", json.dumps(summary, indent=2) + "\n")
    return format_table(summary)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the round; 0 done, 2 wrong input, 130 interrupted."""
    parser = make_parser("benchmarks.real_round", __doc__)
    parser.add_argument("--trained", type=Path, required=True, metavar="DIR", help="--out of benchmarks.real_model")
    parser.add_argument("--method", choices=METHODS, default="dpo", help="default: %(default)s")
    parser.add_argument("--questions", type=int, default=2000, metavar="N", help="default: %(default)s")
    parser.add_argument("--num", type=int, default=6, metavar="N", help="answers to each; default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="default: %(default)s")
    parser.add_argument("--max-minutes", type=float, metavar="X", help="of sampling; default: until all are answered")
    parser.set_defaults(out=Path("runs/real_round"))
    arguments = parser.parse_intermixed_args(argv)
    arguments.out = arguments.out.resolve()
    return run_benchmark(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
