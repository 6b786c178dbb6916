"""One round of learning from verdicts on a real model: sample, judge, train on the verdicts, and measure again.

    python -m benchmarks.real_round --model DIR --seal FILE --glaive FILE --trained DIR [--methods rejection dpo grpo]
        [--questions N] [--num N] [--grpo-steps N] [--vllm PYTHON] [--out DIR] [key=value METHOD:key=value ...]

--trained is the --out of benchmarks.real_model; its trained model is where the round starts. It answers fresh questions
several times, made as its training rows were but with another seed; the verdicts give right answers (rejection) or
preference pairs (dpo), and the model is trained on them. With grpo it answers the questions while it trains.

Each method has a control that takes as many steps without the verdicts: rejection trains any answers, right or wrong;
dpo, pairs of any two different answers; grpo, random rewards.

All models are measured on both shares of benchmarks.real_model: the validation, to choose by (the harmonic mean of the
accuracies where a call is due and where none is), and the test; --split validation leaves out the test. Answers there
are of the first model are used. Each step is skipped when its result is there: after a kill, run the same command
again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.real_arguments import check_inputs, make_parser, run_benchmark
from benchmarks.real_augment import format_arms
from benchmarks.real_measuring import SplitName, Subject, answers_dir, is_measured, load_suites, measure
from benchmarks.real_model import read_sources, run_fctune, train_once
from benchmarks.real_rows import Mixture, mix_rows, write_rows
from benchmarks.real_server import WHOLE_PROMPTS, serve
from benchmarks.real_summary import balance_accuracy, summarise
from fctune.base.errors import CheckpointError, ConfigError, DataError
from fctune.base.files import write_atomically
from fctune.tasks.evaluation.results import read_rows as read_results
from fctune.tasks.judge import Row
from fctune.tasks.sampling.selection import group_by_case, select_pairs, select_rows
from fctune.tasks.suite_files import load_suite

_ROOT = Path(__file__).resolve().parents[1]
_PAIRS_PER_CASE = 2
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
    """How a round learns.

    Attributes:
        config: Name of the shipped config; None: that which trained the model where the round starts.
        rows: File of ``fctune sample`` that it trains on; None: it answers the questions itself.
        keys: Of the config, for any model.
    """

    config: str | None
    rows: str | None
    keys: tuple[str, ...]


CONTROL = "_control"
METHODS = {
    "rejection": Method(None, "sft.jsonl", ("adapter.rank=32", "adapter.alpha=64", "optimizer.lr=2e-4")),
    "dpo": Method("gemma3_270m_dpo", "pairs.jsonl", ("global_batch_size=4", "micro_batch_size=1")),
    "grpo": Method("gemma3_270m_grpo", None, ("micro_batch_size=1", "grpo.prompts_per_step=8", "grpo.group_size=6")),
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
    options += ["--max-new-tokens", arguments.max_new_tokens, "--pairs-per-case", _PAIRS_PER_CASE]
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


def write_control(samples: Path, cases: Path) -> None:
    """Write ``control_sft.jsonl`` and ``control_pairs.jsonl``, with answers chosen whatever their verdicts."""
    groups = group_by_case(read_results(samples / "answers.jsonl"))
    found: dict[str, list[Any]] = {"sft": [], "pairs": []}
    for case in load_suite(cases).cases:
        answers = groups.get(case.id, [])
        found["sft"] += select_rows(case, answers, "random")
        found["pairs"] += select_pairs(case, answers, "random", _PAIRS_PER_CASE)
    for name, rows in found.items():
        write_rows(samples / f"control_{name}.jsonl", rows)


def make_training(
    arguments: argparse.Namespace, name: str, cases: Path, samples: Path | None
) -> tuple[Path, list[str]]:
    """Return the config of a method and its keys, without those of the control's length.

    Args:
        arguments: The command line, checked.
        name: Of ``METHODS``, or that and ``CONTROL``.
        cases: The questions.
        samples: Directory of the rows and pairs; None where no method needs them.

    Raises:
        DataError: The verdicts gave nothing to train on.
    """
    method, is_control = METHODS[name.removesuffix(CONTROL)], name.endswith(CONTROL)
    template = "null" if arguments.chat_template is None else arguments.chat_template
    keys = [f"model.chat_template={template}", "success=null", *method.keys]
    if method.rows is None:
        keys += [f"grpo.cases={cases}", f"grpo.max_new_tokens={arguments.max_new_tokens}"]
        keys += [f"max_steps={arguments.grpo_steps}", "epochs=1000"]
    else:
        assert samples is not None
        rows = samples / (f"control_{method.rows}" if is_control else method.rows)
        if not rows.is_file() or not rows.read_text().strip():
            raise DataError(f"{rows}: no rows. The model was right always or never; sample more, or harder questions.")
        keys += [f"data.sources={json.dumps([{'path': str(rows)}])}", "data.validation_share=0", "validation.every=0"]
    for override in arguments.overrides:
        prefix, colon, rest = override.partition(":")
        if not (colon and prefix in METHODS):
            keys.append(override)
        elif name.removesuffix(CONTROL) == prefix:
            keys.append(rest)
    keys += ["~grpo.reward", "grpo.reward={random: 1}"] if method.rows is None and is_control else []
    config = arguments.config if method.config is None else _ROOT / "configs" / f"{method.config}.yaml"
    return config, keys


def learn(arguments: argparse.Namespace, name: str, start: Path, cases: Path, samples: Path | None) -> Path:
    """Train a method or its control, unless that has ended well, and return the merged export.

    A control takes as many steps as its method did.

    Raises:
        DataError: The verdicts gave nothing to train on.
        CheckpointError: The run failed.
    """
    config, keys = make_training(arguments, name, cases, samples)
    if name.endswith(CONTROL):
        metrics = (arguments.out / name.removesuffix(CONTROL) / "metrics.jsonl").read_text()
        num_steps = max(json.loads(line).get("step", 0) for line in metrics.splitlines())
        keys += [f"max_steps={num_steps}", "epochs=1000"]
    return train_once(config, arguments.out / name, [f"model.path={start}", *keys])


def _run(*arguments: object) -> None:
    if code := run_fctune(*arguments):
        raise CheckpointError(f"fctune {arguments[0]}: ended with code {code}; its own message is above.")


def compare_arms(arms: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """Return the accuracies of all arms, with each method's paired difference to the start and to its control."""
    start = arms["start"]
    found: dict[str, Any] = {"start": summarise(None, start)}
    for name, rows in arms.items():
        if name != "start":
            found[name] = summarise(start, rows)
    for name, rows in arms.items():
        if (control := arms.get(name + CONTROL)) is not None:
            found[f"{name} against its control"] = summarise(control, rows)
    return found


def run(arguments: argparse.Namespace) -> str:
    """Do what is missing of the round, and return its tables.

    Raises:
        ConfigError: An option is wrong, or results there are of something else.
        DataError: The verdicts gave nothing to train on.
        CheckpointError: A step failed.
    """
    if arguments.grpo_steps < 1:
        raise ConfigError(f"--grpo-steps {arguments.grpo_steps}: expected 1 or more.")
    of_methods = [override for override in arguments.overrides if override.partition(":")[0] in METHODS]
    arguments.overrides = [override for override in arguments.overrides if override not in of_methods]
    check_inputs(arguments)  # which reads the config that the model was trained with
    arguments.overrides += of_methods
    start = arguments.trained.resolve() / "run" / "export" / "merged"
    if not (start / "config.json").is_file():
        raise ConfigError(f"--trained {arguments.trained}: no trained model. Run benchmarks.real_model there first.")
    splits: tuple[SplitName, ...] = ("validation",) if arguments.split == "validation" else ("validation", "test")
    options = (arguments.categories, arguments.limit or None, arguments.bfcl_data, arguments.vllm is not None)
    suites = {split: load_suites(arguments.rows or arguments.trained / "data", split, *options) for split in splits}
    cases = write_cases(arguments)
    samples = None
    if any(METHODS[method].rows for method in arguments.methods):
        samples = sample(arguments, start, cases)
        write_control(samples, cases)
    arms: dict[SplitName, dict[str, list[Row]]] = {split: {} for split in splits}
    models = {"start": start}
    for method in arguments.methods:
        models |= dict.fromkeys((method, method + CONTROL), start)
    tables = {}
    for name in models:
        tuned = start if name == "start" else learn(arguments, name, start, cases, samples)
        for split in splits:
            folder = answers_dir(arguments.out, split)
            done = answers_dir(arguments.trained, split) / "after"
            is_known = name == "start" and is_measured(
                suites[split], done, arguments.max_new_tokens, Subject(start).describe()
            )
            answers = done if is_known else folder / name
            arms[split][name] = measure(Subject(tuned), suites[split], answers, arguments)
            found = compare_arms(arms[split])
            accuracies = {arm: {c: one["after"]["strict"] for c, one in found[arm].items()} for arm in arms[split]}
            scores = {arm: balance_accuracy(by_category) for arm, by_category in accuracies.items()}
            described = {
                "questions": arguments.questions,
                "answers": arguments.num,
                "balanced_accuracy": scores,
                "arms": found,
            }
            write_atomically(folder / "round.json", json.dumps(described, indent=2) + "\n")
            listed = ", ".join(f"{arm} {score:.1%}" for arm, score in scores.items())
            tables[split] = f"{split}: balanced accuracy: {listed}\n\n{format_arms(found)}"
            write_atomically(folder / "round.md", tables[split] + "\n")
    best = max(arms["validation"], key=lambda arm: json.loads(
        (answers_dir(arguments.out, "validation") / "round.json").read_text())["balanced_accuracy"][arm])  # fmt: skip
    return "\n\n".join([*tables.values(), f"best on validation: {best}"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the round; 0 done, 2 wrong input, 130 interrupted."""
    parser = make_parser("benchmarks.real_round", __doc__)
    parser.add_argument("--trained", type=Path, required=True, metavar="DIR", help="--out of benchmarks.real_model")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="default: all")
    parser.add_argument("--questions", type=int, default=2000, metavar="N", help="default: %(default)s")
    parser.add_argument("--num", type=int, default=6, metavar="N", help="answers to each; default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="default: %(default)s")
    parser.add_argument("--max-minutes", type=float, metavar="X", help="of sampling; default: until all are answered")
    parser.add_argument("--grpo-steps", type=int, default=50, metavar="N", help="default: %(default)s")
    parser.set_defaults(out=Path("runs/real_round"))
    arguments = parser.parse_intermixed_args(argv)
    arguments.out = arguments.out.resolve()
    return run_benchmark(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
