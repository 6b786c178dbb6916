"""Learn the tools of a real MCP server from the state that calls leave in it: before, after, and a control.

    python -m benchmarks.mcp_learning --out DIR [--seeds 0 1 2] [--split test] [--results FILE] [key=value ...]

For each seed, the tiny base trains on synthetic rows and is stopped early: the start. GRPO then asks it to work in a
greenhouse: the tools, in no row, of a server made with the official package (``mcp_learning_server.py``). A task is
solved if the server's state at its end is exactly the expected one. The control takes the same steps with random
rewards. All are measured on tasks with other beds, numbers and wordings, and compared with the start in
pairs (McNemar's exact test). --split validation measures other tasks, for choosing settings; ``key=value`` then
overrides keys of the config, and --trial names the result.

Every finished part is kept under --out: after an interruption, run the same command again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning import SUPERVISED, make_parser, measure, parse_arguments, read_results, train
from benchmarks.training import describe_machine
from fctune.calls.metrics import wilson_interval
from fctune.data.synthetic.words import make_word

START_ROWS = "synthetic:varied:4000"
NUM_TASKS = {"train": 240, "validation": 90, "test": 240}
TOOLS = ("water",)
SERVER_PROCESSES = 8
# What each side asks for, by tool. The tests' wordings are in neither of the others.
WORDINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "train": {
        "water": (
            "Water bed {bed} with {number} liters.",
            "Please give {number} liters of water to the bed {bed}.",
            "The plants in {bed} are dry, water them with {number} liters",
            "irrigate {bed} with {number} liters of water",
            "Can you pour {number} liters on bed {bed}?",
        ),
    },
    "validation": {
        "water": ("I want {number} liters of water on {bed}.", "Let bed {bed} have {number} liters of water."),
    },
    "test": {
        "water": (
            "Could {bed} get {number} liters of water now?",
            "Water the plants of bed {bed}: {number} liters",
            "{number} liters of water are due on bed {bed}.",
        ),
    },
}
LIMITS = ("--max-new-tokens", "72", "--dialogue", '{"max_turns": 2}')
SETTINGS = (
    *("max_steps=30", "optimizer.lr=1e-3", "lr_scheduler.name=cosine", "lr_scheduler.warmup=3"),
    *("grpo.prompts_per_step=8", "grpo.temperature=0.7", "grpo.max_new_tokens=72", "grpo.dialogue.max_turns=2"),
    *("grpo.mask_cut=false", "grpo.max_refills=1", "grpo.generation_batch_size=256"),
)
REWARDS = {"grpo": "solved", "control": "random"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the missing parts of every seed, print the table and write the results."""
    parser = make_parser(__doc__, ("validation", "test"), start_steps=50)
    parser.add_argument("--tasks", type=int, metavar="N", help="tasks of each side, at most; default: all")
    parser.add_argument("--results", type=Path, help="file of the results")
    arguments = parse_arguments(parser, argv)
    for seed in arguments.seeds:
        run_seed(arguments, seed)
    results = read_results(arguments.out, arguments.split)
    print("\n".join(format_results(results)))
    if arguments.results is not None:
        record: dict[str, Any] = {"date": datetime.date.today().isoformat(), "machine": describe_machine()}
        record |= {"command": "python -m benchmarks.mcp_learning --out DIR", arguments.split: results}
        arguments.results.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def run_seed(arguments: argparse.Namespace, seed: int) -> None:
    """Run the parts of one seed that are not done yet; each model's result is in ``SPLIT/MODEL.json``."""
    folder, split = (arguments.out / f"seed{seed}").resolve(), arguments.split
    folder.mkdir(parents=True, exist_ok=True)
    files = write_tasks(folder, seed, arguments.tasks)
    asked = ("--suite", f"mcp:{files[split]}", *LIMITS)
    sources = [f"data.sources.0.path={START_ROWS}:{seed}", f"max_steps={arguments.start_steps}"]
    start = train(folder / "start", seed, "fctune/assets/tiny_base", "tiny_lora", [*SUPERVISED, *sources])
    measure(folder, start, split, seed, asked)
    for name, part in REWARDS.items():
        overrides = [*SETTINGS, f"grpo.cases=mcp:{files['train']}", f"grpo.reward={{{part}: 1.0}}"]
        label = "-".join(filter(None, (name, arguments.trial)))
        tuned = train(folder / label, seed, str(start), "tiny_grpo", [*overrides, *arguments.overrides])
        measure(folder, tuned, split, seed, asked)


def write_tasks(folder: Path, seed: int, num_tasks: int | None = None) -> dict[str, Path]:
    """Write a file of tasks for training, validation and the test, unless that is done; returns their paths."""
    server = Path(__file__).with_name("mcp_learning_server.py")
    head: dict[str, Any] = {"server": f"stdio: {shlex.join([sys.executable, str(server)])}"}
    head |= {"tools": list(TOOLS), "reset": {"tool": "clear_beds"}, "concurrency": SERVER_PROCESSES}
    files = {side: folder / f"{side}_tasks.yaml" for side in NUM_TASKS}
    sides = make_tasks(seed)
    for side, file in files.items():
        if not file.exists():
            file.write_text(json.dumps(head | {"tasks": sides[side][:num_tasks]}, indent=1) + "\n")  # JSON is YAML
    return files


def make_tasks(seed: int) -> dict[str, list[dict[str, Any]]]:
    """Return the tasks of each side, whose beds, numbers and wordings are in no other side."""
    rng, used, sides = random.Random(seed), set[str](), dict[str, list[dict[str, Any]]]()
    for offset, (side, number) in enumerate(NUM_TASKS.items()):
        sides[side] = []
        while len(sides[side]) < number:
            bed = make_word(rng, 2, 3).capitalize()
            if bed in used:
                continue
            used.add(bed)
            tool = TOOLS[len(sides[side]) % len(TOOLS)]
            amount = 3 * rng.randint(1, 32) + offset
            wording = rng.choice(WORDINGS[side][tool])
            task: dict[str, Any] = {"question": wording.format(bed=bed, number=amount), "category": tool}
            task["split"] = "train" if side == "train" else "test"
            task["calls"] = [{"tool": tool, "arguments": {"bed": bed, "liters": amount}}]
            task["check"] = {"tool": "report_beds", "result": {bed: {"liters": amount}}}
            sides[side].append(task)
    return sides


def format_results(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table in Markdown: a line for each tuned model and seed, next to its start."""
    starts = {result["seed"]: result["categories"]["all"] for result in results if result["model"] == "start"}
    lines = [
        "| trained on | seed | cases | before | after | 95 % interval | change | 95 % interval | p |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        if result["model"] == "start":
            continue
        found, before = result["categories"]["all"], starts[result["seed"]]
        low, high = wilson_interval(found["right"], found["n"])
        change, lowest, highest = found["difference"]
        lines.append(
            f"| {result['model']} | {result['seed']} | {found['n']} | {before['right'] / before['n']:.1%} "
            f"| {found['right'] / found['n']:.1%} | {low:.1%} to {high:.1%} "
            f"| {change:+.1%} | {lowest:+.1%} to {highest:+.1%} | {found['p_value']:.2g} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
