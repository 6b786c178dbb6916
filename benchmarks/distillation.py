"""Distill a better tiny model into a worse one, beside supervised training on as many answers of the same cases.

    python -m benchmarks.distillation --out DIR [--seeds 0 1 2] [--steps 40] [--split test] [--results FILE]

For each seed, a teacher trains on synthetic rows for longer than the start of all students. Every student then takes
the same number of steps on the same number of answers: ``supervised`` on the rows of the cases, ``on_policy`` on its
own answers by the reverse divergence from the teacher, ``mixture`` on half of each by the Jensen-Shannon divergence
(GKD), and ``rows`` on the rows by the forward divergence. All are measured on cases whose tools no row has. Parts that
are done are not repeated. The table gives each student's tokens, because own answers differ in length from rows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning import NUM_CASES, make_data, measure, read_results, train
from benchmarks.training import describe_machine
from fctune.calls.metrics import wilson_interval
from fctune.runs.record import MetricsFile

SUPERVISED = ("data.train_on=last_assistant",)
ANSWERS = 16  # of a step
NUM_PROMPTS = 800


def list_students(folder: Path, teacher: Path) -> dict[str, list[str]]:
    """Return the overrides of each student's distillation; none for the one that is supervised."""
    rows, cases = folder / "prompt_rows.jsonl", folder / "prompts.jsonl"
    own, kept = [f"distill.cases={cases}"], [f"data.sources=[{{path: {rows}}}]", *SUPERVISED]
    base = [f"distill.teacher={teacher}", f"distill.answers_per_step={ANSWERS}", "distill.max_new_tokens=72"]
    base += ["distill.generation_batch_size=256"]
    return {
        "supervised": [],
        "on_policy": [*base, *own],
        "mixture": [*base, *own, *kept, "distill.on_policy_share=0.5", "distill.beta=0.5"],
        "rows": [*base, *kept, "distill.on_policy_share=0", "distill.beta=0"],
    }


def write_config(folder: Path) -> str:
    """Write the config of the students that are distilled, and return its path."""
    path = folder / "distill.yaml"
    base = Path("configs/tiny_grpo.yaml").resolve()
    path.write_text(f"extends: {base}\ngrpo: null\ndistill: {{}}\n")
    return str(path)


def run_seed(out: Path, seed: int, steps: int, teacher_steps: int, split: str) -> None:
    """Train and measure the start, the teacher and the students of a seed."""
    folder = out / f"seed{seed}"
    make_data(folder, seed, NUM_PROMPTS)
    rows = folder / "prompt_rows.jsonl"
    if not rows.exists():
        rows.write_text((folder / "prompts.jsonl").read_text())  # a case is a row that ends with its answer
    sources = [*SUPERVISED, f"data.sources.0.path={folder / 'start_rows.jsonl'}"]
    base = "fctune/assets/tiny_base"
    start = train(folder / "start", seed, base, "tiny_lora", [*sources, "max_steps=55"])
    teacher = train(folder / "teacher", seed, base, "tiny_lora", [*sources, f"max_steps={teacher_steps}"])
    for model in (start, teacher):
        measure(folder, model, split, seed)
    schedule = ["optimizer.lr=2e-3", "lr_scheduler.name=cosine", "lr_scheduler.warmup=5", f"max_steps={steps}"]
    for name, options in list_students(folder, teacher).items():
        config = write_config(folder)
        if name == "supervised":
            config, options = "tiny_lora", [*SUPERVISED, f"data.sources.0.path={rows}", "data.packed=false"]
            options += [f"global_batch_size={ANSWERS}"]
        measure(folder, train(folder / name, seed, str(start), config, [*schedule, *options]), split, seed)


def read_students(out: Path, split: str) -> list[dict[str, Any]]:
    """Return the result of each model and seed, with the tokens that it was trained on."""
    results = read_results(out, split)
    for result in results:
        metrics = MetricsFile(out / f"seed{result['seed']}" / result["model"] / "metrics.jsonl")
        metrics.update()
        result["tokens_supervised"] = metrics.total("tokens_supervised")
    return results


def format_results(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table in Markdown: right answers of each model and seed, with the supervised tokens."""
    lines = ["| model | seed | supervised tokens | correct | 95 % interval |", "|---|---|---|---|---|"]
    for result in sorted(results, key=lambda one: (one["model"], one["seed"])):
        found = result["categories"]["all"]
        low, high = wilson_interval(found["right"], found["n"])
        tokens = result["tokens_supervised"]
        line = f"| {result['model']} | {result['seed']} | {'' if tokens is None else f'{tokens:,.0f}'} "
        lines.append(line + f"| {found['right'] / found['n']:.1%} | {low:.1%} to {high:.1%} |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run the missing parts of every seed, print the table and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40, help="of each student; default: %(default)s")
    parser.add_argument("--teacher-steps", type=int, default=400, help="default: %(default)s")
    parser.add_argument("--split", choices=NUM_CASES, default="test", help="cases to measure; default: %(default)s")
    parser.add_argument("--results", type=Path, help="file of the results")
    arguments = parser.parse_args(argv)
    for seed in arguments.seeds:
        run_seed(arguments.out, seed, arguments.steps, arguments.teacher_steps, arguments.split)
    results = read_students(arguments.out, arguments.split)
    print("\n".join(format_results(results)))
    if arguments.results is not None:
        record: dict[str, Any] = {"date": datetime.date.today().isoformat(), "machine": describe_machine()}
        record |= {"steps": arguments.steps, "teacher_steps": arguments.teacher_steps, arguments.split: results}
        arguments.results.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
