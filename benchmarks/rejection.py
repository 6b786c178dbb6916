"""Does a model learn from its own right answers? Rejection sampling on the tiny base, with a control.

    python -m benchmarks.rejection --out DIR [--seeds 42 43 44]

For each seed: rows are split by tool; the tiny base is trained on some of the training rows and stopped early; it
answers other training cases several times; from the early checkpoint, one model is trained on right answers and one on
random answers, equally many. All three are measured on cases whose tools no row has, and compared in pairs (McNemar).
Every stage is kept: run the same command again after an interruption.

Only tried at toy size: how early to stop, and the other defaults, have not been measured.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fctune.calls.metrics import wilson_interval
from fctune.evaluation.paired import compare_rows
from fctune.evaluation.results import read_rows

KEEPS = ("best", "random")


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing of every seed, print the table and write ``rejection.json``."""
    parser = argparse.ArgumentParser(description="Rejection sampling on the tiny base, with a random control.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--rows", type=int, default=8000, help="synthetic rows before the split; default: %(default)s")
    parser.add_argument("--start-steps", type=int, default=200, help="steps of the start; default: %(default)s")
    parser.add_argument("--steps", type=int, default=120, help="steps on sampled rows; default: %(default)s")
    parser.add_argument("--num", type=int, default=4, help="answers to each case; default: %(default)s")
    parser.add_argument("--prompts", type=int, default=500, help="cases to sample; default: %(default)s")
    parser.add_argument("--tests", type=int, default=300, help="test cases; default: %(default)s")
    arguments = parser.parse_args(argv)
    results = [run_seed(arguments, seed) for seed in arguments.seeds]
    (arguments.out / "rejection.json").write_text(json.dumps(results, indent=2) + "\n")
    for line in format_results(results):
        print(line)
    return 0


def run_seed(arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Run the stages of one seed that are not done yet, and return what was measured."""
    folder = arguments.out / f"seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    start_rows, prompts, tests = make_data(arguments, seed, folder)
    start = train(folder / "start", seed, "fctune/assets/tiny_base", start_rows, arguments.start_steps)
    before = evaluate(folder / "start.jsonl", start, tests)
    samples = folder / "samples"
    for keep in KEEPS:
        if not (rows := folder / f"{keep}.jsonl").exists():
            command = ["sample", "--model", str(start), "--cases", str(prompts), "--num", str(arguments.num)]
            fctune(*command, "--max-new-tokens", "128", "--keep", keep, "--seed", str(seed), "--out", str(samples))
            shutil.copyfile(samples / "sft.jsonl", rows)
    # The control has as many rows as there are right answers to learn from.
    num_rows = len((folder / "best.jsonl").read_text().splitlines())
    control = (folder / "random.jsonl").read_text().splitlines(keepends=True)[:num_rows]
    (folder / "random.jsonl").write_text("".join(control))
    found: dict[str, Any] = {"seed": seed, "num_rows": num_rows, "models": {"start": describe(before)}}
    for keep in KEEPS:
        tuned = train(folder / f"tuned_{keep}", seed, str(start), folder / f"{keep}.jsonl", arguments.steps)
        after = evaluate(folder / f"tuned_{keep}.jsonl", tuned, tests)
        compared = {one.category: one for one in compare_rows(before, after)}
        found["models"][keep] = describe(after) | {
            "p_value": {name: one.p_value for name, one in compared.items()},
            "difference": {name: one.difference for name, one in compared.items()},
        }
    summary = json.loads((samples / "answers.summary.json").read_text())
    return found | {"pass_rates": summary["pass_rates"]["all"], "timings": summary.get("timings")}


def make_data(arguments: argparse.Namespace, seed: int, folder: Path) -> tuple[Path, Path, Path]:
    """Write rows for the start, cases to sample and test cases; returns their paths."""
    paths = folder / "start_rows.jsonl", folder / "prompts.jsonl", folder / "tests.jsonl"
    if not all(path.exists() for path in paths):
        train_cases, test_cases = folder / "train_cases.jsonl", folder / "test_cases.jsonl"
        source = f"synthetic:train:{arguments.rows}:{seed}"
        fctune("data", "cases", source, "--out", str(train_cases), "--test", str(test_cases), "--seed", "1")
        lines = train_cases.read_text().splitlines(keepends=True)
        paths[1].write_text("".join(lines[: arguments.prompts]))
        paths[0].write_text("".join(lines[arguments.prompts :]))
        paths[2].write_text("".join(test_cases.read_text().splitlines(keepends=True)[: arguments.tests]))
    return paths


def train(folder: Path, seed: int, base: str, rows: Path, steps: int) -> Path:
    """Train the demo's LoRA from a base on rows; returns the merged model."""
    merged = folder / "export" / "merged"
    if not (merged / "config.json").exists():
        overrides = [
            *(f"seed={seed}", f"output_dir={folder}", f"model.path={base}", f"data.sources.0.path={rows}"),
            *(f"max_steps={steps}", "epochs=100", "parallel.mode=auto", "validation.every=0"),
            *("data.validation_share=0", "data.train_on=last_assistant", "data.special_tokens_in_content=keep"),
        ]
        fctune("train", "tiny_lora", *overrides)
    return merged


def evaluate(out: Path, model: Path, tests: Path) -> list[dict[str, Any]]:
    """Return the rows of a model's greedy answers to the test cases."""
    fctune("eval", "--model", str(model), "--cases", str(tests), "--max-new-tokens", "128", "--out", str(out))
    return read_rows(out)


def describe(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return counts of right answers by category, with those of all."""
    categories = sorted({row["category"] for row in rows})
    counts = {name: [row["verdict"] == "correct" for row in rows if row["category"] == name] for name in categories}
    counts["all"] = [row["verdict"] == "correct" for row in rows]
    return {name: {"right": sum(right), "n": len(right)} for name, right in counts.items()}


def format_results(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table in Markdown: one line a model and category, for each seed."""
    lines = [
        "| seed | trained on | cases | correct | 95 % interval | difference | p |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        for name, model in result["models"].items():
            for category in ("call", "no_call", "all"):
                right, n = model[category]["right"], model[category]["n"]
                low, high = wilson_interval(right, n)
                shown = f"{right / n:.1%} | {low:.1%} - {high:.1%}"
                p_value, difference = (model.get(key, {}).get(category) for key in ("p_value", "difference"))
                change = " | " if p_value is None else f"{difference[0]:+.1%} | {p_value:.2g}"
                lines.append(f"| {result['seed']} | {name} | {category} ({n:,}) | {shown} | {change} |")
    return lines


def fctune(*arguments: str) -> None:
    """Run a command, and end this one with its code if it fails."""
    code = subprocess.run([sys.executable, "-m", "fctune.cli", *arguments], check=False).returncode
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    sys.exit(main())
