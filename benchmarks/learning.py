"""Measure what a model learns from verdicts on its own answers: three methods on the tiny base, with random controls.

    python -m benchmarks.learning --out DIR [--methods rejection dpo] [--seeds 0 1 2] [--control] [key=value ...]

For each seed: rows are split by tool; the tiny base is trained on some of the training rows and stopped early; it
answers other training cases several times. From that start, each method trains on the judged answers:

- rejection: supervised on right answers
- dpo: on pairs of a right and a wrong answer
- grpo: from the verdicts on fresh answers, in groups

--control also trains on as many answers chosen at random, on pairs of them, or on random rewards: a method must improve
on its start, and its control must not. All are measured on cases whose tools no training row has, and compared with the
start in pairs (McNemar's exact test). --split validation measures other cases of those tools, for choosing settings;
``key=value`` then overrides keys of the method's config, and --trial names the result.

Every finished part is kept under --out: after an interruption, run the same command again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune.calls.metrics import wilson_interval
from fctune.runs.record import MetricsFile
from fctune.tasks.evaluation.paired import compare_rows
from fctune.tasks.evaluation.results import read_rows

NUM_ROWS = 5500  # before the split by tools, and before those with several tools are left out
NUM_START_ROWS = 2000
NUM_CASES = {"validation": (160, 40), "test": (480, 120)}  # that expect calls, and that expect none
CATEGORIES = ("call", "no_call", "all")


@dataclass(frozen=True)
class Method:
    """A way of learning from verdicts: a shipped config, its overrides, and the function that chooses its data.

    ``choose`` takes the folder of a seed, the command's arguments and whether answers are chosen at random; it returns
    further overrides.
    """

    config: str
    overrides: tuple[str, ...]
    choose: Callable[[Path, argparse.Namespace, bool], list[str]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the missing parts of every seed and method, print the table and write ``SPLIT.json``."""
    parser = make_parser(__doc__, NUM_CASES, start_steps=55)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--control", action="store_true", help="also train without verdicts")
    parser.add_argument("--prompts", type=int, default=800, help="cases to sample; default: %(default)s")
    parser.add_argument("--num", type=int, default=4, help="answers to each case, at most; default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the sampled answers; default: %(default)s")
    arguments = parse_arguments(parser, argv)
    for seed in arguments.seeds:
        run_seed(arguments, seed)
    results = read_results(arguments.out, arguments.split)
    (arguments.out / f"{arguments.split}.json").write_text(json.dumps(results, indent=2) + "\n")
    print("\n".join(format_results(results)))
    return 0


def make_parser(description: str | None, splits: Iterable[str], start_steps: int) -> argparse.ArgumentParser:
    """Return a parser of the options of any benchmark that trains from a start with several seeds."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--split", choices=splits, default="test", help="what to measure; default: %(default)s")
    parser.add_argument("--trial", default="", metavar="NAME", help="name of a result with other settings")
    steps = "steps of the start; default: %(default)s"
    parser.add_argument("--start-steps", type=int, default=start_steps, help=steps)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the config")
    return parser


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; ends with a message if settings are overridden without a name, or the reverse."""
    arguments = parser.parse_intermixed_args(argv)
    if bool(arguments.overrides) != bool(arguments.trial):
        parser.error("key=value and --trial go together: a result with other settings needs its own name.")
    return arguments


def run_seed(arguments: argparse.Namespace, seed: int) -> None:
    """Run the parts of one seed that are not done yet; each model's result is in ``SPLIT/MODEL.json``."""
    folder = arguments.out / f"seed{seed}"
    make_data(folder, seed, arguments.prompts)
    overrides = [f"data.sources.0.path={folder / 'start_rows.jsonl'}", f"max_steps={arguments.start_steps}"]
    start = train(folder / "start", seed, "fctune/assets/tiny_base", "tiny_lora", [*SUPERVISED, *overrides])
    measure(folder, start, arguments.split, seed)
    for name in arguments.methods:
        for is_control in (False, True)[: 1 + arguments.control]:
            method = METHODS[name]
            overrides = [*method.overrides, *method.choose(folder, arguments, is_control), *arguments.overrides]
            label = "-".join(filter(None, (name, arguments.trial, "control" if is_control else "")))
            tuned = train(folder / label, seed, str(start), method.config, overrides)
            measure(folder, tuned, arguments.split, seed)


def make_data(folder: Path, seed: int, num_prompts: int) -> None:
    """Write rows for the start, cases to sample, and cases of each split, whose tools no row has."""
    files = [folder / f"{name}.jsonl" for name in ("start_rows", "prompts", *NUM_CASES)]
    if all(file.exists() for file in files):
        return
    folder.mkdir(parents=True, exist_ok=True)
    train_cases, test_cases = folder / "train_cases.jsonl", folder / "test_cases.jsonl"
    source = f"synthetic:varied:{NUM_ROWS}:{seed}"
    fctune("data", "cases", source, "--out", str(train_cases), "--test", str(test_cases), "--seed", "1", "--force")
    lines = read_single(train_cases)
    contents = [lines[:NUM_START_ROWS], lines[NUM_START_ROWS:][:num_prompts]]
    rest: dict[str, list[str]] = {"call": [], "no_call": []}
    for line in read_single(test_cases):
        rest[json.loads(line)["kind"]].append(line)
    for num_calls, num_others in NUM_CASES.values():
        contents.append(rest["call"][:num_calls] + rest["no_call"][:num_others])
        rest = {"call": rest["call"][num_calls:], "no_call": rest["no_call"][num_others:]}
    for file, content in zip(files, contents, strict=True):
        file.write_text("".join(content))


def read_single(cases: Path) -> list[str]:
    """Return the lines of cases that offer one tool: a model this small chooses between several by chance."""
    return [line for line in cases.read_text().splitlines(keepends=True) if len(json.loads(line)["tools"]) == 1]


def sample(folder: Path, arguments: argparse.Namespace, keep: str, name: str) -> tuple[Path, Path]:
    """Ask the start each prompt several times, unless that is done; returns the chosen answers as rows and as pairs."""
    files = folder / f"{name}.jsonl", folder / f"{name}_pairs.jsonl"
    if not all(file.exists() for file in files):
        samples = folder / "samples"
        command = ["sample", "--model", str(folder / "start" / "export" / "merged"), "--num", str(arguments.num)]
        command += ["--temperature", str(arguments.temperature), "--keep-tokens"]
        command += ["--cases", str(folder / "prompts.jsonl"), "--max-new-tokens", "128", "--batch-size", "256"]
        fctune(*command, "--keep", keep, "--out", str(samples), "--html", f"{samples}.html")
        for written, file in zip(("sft", "pairs"), files, strict=True):
            file.write_text((samples / f"{written}.jsonl").read_text())
    return files


def choose_rows(folder: Path, arguments: argparse.Namespace, is_control: bool) -> list[str]:
    """Choose the rows of right answers; for the control as many of answers chosen at random."""
    right, _ = sample(folder, arguments, "best", "right")
    if not is_control:
        return [f"data.sources.0.path={right}"]
    others, _ = sample(folder, arguments, "random", "random")
    lines = others.read_text().splitlines(keepends=True)
    others.write_text("".join(lines[: len(right.read_text().splitlines())]))
    return [f"data.sources.0.path={others}"]


def choose_pairs(folder: Path, arguments: argparse.Namespace, is_control: bool) -> list[str]:
    """Choose the pairs of right and wrong answers; for the control as many of two answers each, chosen at random.

    Pairs where no call is due are few, because the start answers most of these cases right. They are repeated until
    they have the share that such cases have in the test: otherwise almost every pair prefers a call.
    """
    prompts = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    kinds = {case["id"]: case["kind"] for case in prompts}
    lines = split_by_kind(sample(folder, arguments, "best", "right")[1], kinds)
    if is_control:
        others = split_by_kind(sample(folder, arguments, "random", "random")[1], kinds)
        lines = {kind: others[kind][: len(content)] for kind, content in lines.items()}
    num_calls, num_others = NUM_CASES["test"]
    sources = []
    for kind, content in lines.items():
        if content:
            file = folder / f"{'random_' if is_control else ''}pairs_{kind}.jsonl"
            file.write_text("".join(content))
            times = max(1.0, len(lines["call"]) / len(content) * num_others / num_calls) if kind == "no_call" else 1.0
            sources.append({"path": str(file), "weight": round(times, 2)})
    return [f"data.sources={json.dumps(sources)}"]


def split_by_kind(pairs: Path, kinds: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the lines of a file of pairs by the kind of their case."""
    lines: dict[str, list[str]] = {"call": [], "no_call": []}
    for line in pairs.read_text().splitlines(keepends=True):
        lines[kinds[json.loads(line)["metadata"]["case"]]].append(line)
    return lines


def choose_reward(folder: Path, arguments: argparse.Namespace, is_control: bool) -> list[str]:
    """Choose the strict verdict as the reward of answers to the prompts, or a random one for the control."""
    del arguments
    return [f"grpo.cases={folder / 'prompts.jsonl'}", f"grpo.reward={{{'random' if is_control else 'strict'}: 1.0}}"]


SUPERVISED = ("data.train_on=last_assistant",)
METHODS = {
    "rejection": Method("tiny_lora", (*SUPERVISED, "optimizer.lr=2e-3", "max_steps=100"), choose_rows),
    "dpo": Method(
        "tiny_dpo",
        ("max_steps=100", "global_batch_size=2", "optimizer.lr=2e-3", "preference.sft_weight=10.0"),
        choose_pairs,
    ),
    "grpo": Method(
        "tiny_grpo",
        (
            *("max_steps=50", "optimizer.lr=2e-3", "lr_scheduler.name=cosine", "lr_scheduler.warmup=5"),
            *("grpo.prompts_per_step=16", "grpo.category_shares={no_call: 0.25}", "grpo.temperature=0.7"),
            *("grpo.max_new_tokens=72", "grpo.mask_cut=false", "grpo.max_refills=1", "grpo.generation_batch_size=256"),
        ),
        choose_reward,
    ),
}


def train(folder: Path, seed: int, base: str, config: str, overrides: Sequence[str]) -> Path:
    """Train a LoRA adapter from a base, unless that is done; returns the merged model."""
    merged = folder / "export" / "merged"
    settings = [f"seed={seed}", f"model.path={base}", *overrides]
    record = folder / "settings.json"
    if record.exists() and json.loads(record.read_text())["settings"] != settings:
        raise SystemExit(f"{folder} was trained with different settings: pass another --trial or --out.")
    if not (merged / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        described = json.dumps({"config": config, "settings": settings}) + "\n"
        record.write_text(described)
        fctune(
            *("train", config, f"output_dir={folder}", *settings, "epochs=100", "parallel.mode=auto"),
            *("validation.every=0", "data.validation_share=0", "data.special_tokens_in_content=keep"),
        )
        record.write_text(described)  # again: a run that died before its first checkpoint is moved away with it
    return merged


def measure(folder: Path, model: Path, split: str, seed: int, asked: Sequence[str] = ()) -> None:
    """Measure a model on a split, and compare it with the start.

    Args:
        folder: Folder of the seed.
        model: The merged model.
        split: Name of the cases, and of the folder of their results.
        seed: Named in the result.
        asked: Options that name the cases and the limits of answers; empty: the split's file of cases.
    """
    name = model.parent.parent.name
    out = folder / split / f"{name}.json"
    if out.exists():
        return
    answers = out.with_suffix(".jsonl")
    asked = asked or ("--cases", str(folder / f"{split}.jsonl"), "--max-new-tokens", "128")
    fctune("eval", "--model", str(model), *asked, "--batch-size", "256", "--out", str(answers))
    found = {one.category: one for one in compare_rows(read_rows(out.with_name("start.jsonl")), read_rows(answers))}
    result: dict[str, Any] = {"seed": seed, "model": name}
    result |= json.loads((model.parent.parent / "settings.json").read_text())
    result["categories"] = {
        category: {
            "n": one.n,
            "right_before": one.num_right_before,
            "right": one.num_right_after,
            "turned_right": len(one.turned_right),
            "turned_wrong": len(one.turned_wrong),
            "difference": one.difference,
            "p_value": one.p_value,
        }
        for category, one in found.items()
    }
    if shares := read_time_shares(model.parent.parent):
        result["time_shares"] = shares
    out.write_text(json.dumps(result, indent=2) + "\n")


def read_time_shares(run: Path) -> dict[str, float]:
    """Return the shares of the steps' time in which a reinforcement run generated and judged; {} of another run."""
    metrics = MetricsFile(run / "metrics.jsonl")
    metrics.update()
    generating, judging, all_s = (metrics.total(f"{name}_time_s") for name in ("generation", "judging", "step"))
    if generating is None or judging is None or all_s is None:
        return {}
    return {"generation": (generating - judging) / all_s, "judging": judging / all_s}


def read_results(out: Path, split: str) -> list[dict[str, Any]]:
    """Return the results of all models that were measured on a split, by model and seed; paths there start with DIR."""
    files = [file for file in out.glob(f"seed*/{split}/*.json") if file.suffixes == [".json"]]
    results = [json.loads(file.read_text().replace(str(out.resolve()), "DIR")) for file in files]
    results = [result for result in results if "categories" in result]
    return sorted(results, key=lambda result: (result["model"] != "start", result["model"], result["seed"]))


def format_results(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table in Markdown: a line for each model, seed and category."""
    lines = [
        "| model | seed | cases | correct | 95 % interval | change | 95 % interval | p |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        for category in CATEGORIES:
            found = result["categories"][category]
            low, high = wilson_interval(found["right"], found["n"])
            line = f"| {result['model']} | {result['seed']} | {category} ({found['n']}) "
            line += f"| {found['right'] / found['n']:.1%} | {low:.1%} to {high:.1%} | "
            if result["model"] != "start":
                change, lowest, highest = found["difference"]
                line += f"{change:+.1%} | {lowest:+.1%} to {highest:+.1%} | {found['p_value']:.2g} |"
            else:
                line += "| | |"
            lines.append(line)
    return lines


def fctune(*arguments: str) -> None:
    """Run a command, and end this one with its code if it fails."""
    code = subprocess.run([sys.executable, "-m", "fctune.cli", *arguments], check=False).returncode
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    sys.exit(main())
