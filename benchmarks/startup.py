"""Measure the user CPU time of ``--help``, of answers to wrong input, and of ``fctune data show``.

    python -m benchmarks.startup [--runs 5] [--only WORDS] [--checkout DIR [--python PATH]] [--out FILE]

``--checkout`` measures another checkout too, alternating with this one run by run, for a comparison on the same machine
at the same time. ``--only`` measures the commands whose names contain its words and keeps the other results of the
file. User CPU time covers the process and its children (os.wait4), and is little affected by other work on
the machine; the median of the runs is reported. Limits: 1 s for help, 2 s for wrong input, 4 s for a row, 5 s for
a plan and 6 s for one that tries other numbers of nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

CLI = ["-m", "fctune.cli"]
TUNE = ["-m", "torchtune._cli.tune", "run", "recipes/lora_fc_distributed", "--config"]
TINY = "configs/tiny_lora.yaml"
BASE = "fctune/assets/tiny_base"

_WRONG_INPUT = {
    "plan, wrong path": [*CLI, "plan", "--config", "no/such.yaml"],
    "plan, wrong key": [*CLI, "plan", "--config", TINY, "epoch=1"],
    "plan, wrong optimizer argument": [*CLI, "plan", "--config", TINY, "optimizer.lrr=1"],
    "preflight, wrong key": [*CLI, "preflight", "--config", TINY, "epoch=1"],
    "data check, wrong path": [*CLI, "data", "check", "no/such.jsonl"],
    "data show, wrong path": [*CLI, "data", "show", "no/such.jsonl", "--tokenizer", BASE],
    "data prepare, wrong key": [*CLI, "data", "prepare", "--config", TINY, "epoch=1"],
    "report, wrong path": [*CLI, "report", "no/such"],
    "eval.tool_calls, wrong model": ["-m", "eval.tool_calls", "--model", "no/such", "--suite", "smoke"],
    "eval.tool_calls, wrong suite": ["-m", "eval.tool_calls", "--model", BASE, "--suite", "no_such"],
    "eval.compare, wrong path": ["-m", "eval.compare", "no/such", "no/such"],
    "eval.validate, wrong path": ["-m", "eval.validate", "no/such"],
    "eval.throughput, wrong path": ["-m", "eval.throughput", "--model", "no/such"],
    "eval.serving, wrong path": ["-m", "eval.serving", "no/such"],
}
# What a plan takes depends on the library that builds the model, and on its layers.
_PLANNED = {
    "": "llama3_1_8b_lora",
    ", QLoRA": "llama3_2_1b_qlora",
    ", transformers": "qwen3_0_6b_lora",
    ", experts": "qwen3_30b_a3b_lora",
    ", layers of several kinds": "gemma4_e4b_lora",
}
_HELP = ("", "data show", "data check", "plan", "preflight", "score bfcl", "report", "watch")
_HELP_OF_NEW_COMMANDS = ("train", "eval", "compare", "validate", "config check")


@dataclass(frozen=True, slots=True)
class Command:
    """A command to measure: arguments of Python, here and in the checkout that is compared with."""

    limit_s: float
    arguments: list[str]
    before: list[str] | None  # None: the other checkout has no such command


def make_commands() -> dict[str, Command]:
    """Return the commands by the name that results give them."""
    commands: dict[str, Command] = {}
    for words in (*_HELP, *_HELP_OF_NEW_COMMANDS):
        arguments = [*CLI, *words.split(), "--help"]
        before = None if words in _HELP_OF_NEW_COMMANDS else arguments
        commands[" ".join(["fctune", *arguments[len(CLI) :]])] = Command(1.0, arguments, before)
    for name in ("tool_calls", "compare", "validate", "throughput", "serving"):
        arguments = ["-m", f"eval.{name}", "--help"]
        commands[f"eval.{name} --help"] = Command(1.0, arguments, arguments)
    for name, arguments in _WRONG_INPUT.items():
        commands[name] = Command(2.0, arguments, arguments)
    for name, rest in (("wrong path", ["no/such.yaml"]), ("wrong key", [TINY, "epoch=1"])):
        commands[f"train, {name}"] = Command(2.0, [*CLI, "train", *rest], [*TUNE, *rest])
    show = [*CLI, "data", "show", "synthetic:train:1:1", "--row", "1", "--tokenizer", BASE]
    commands["data show of one row"] = Command(4.0, show, show)
    for kind, config in _PLANNED.items():
        for name, more, limit_s in (("plan", [], 5.0), ("plan, other numbers of nodes", ["--search"], 6.0)):
            plan = [*CLI, "plan", f"configs/{config}.yaml", *more]
            commands[f"{name}{kind}"] = Command(limit_s, plan, plan)
    return commands


def measure_user_s(python: str, arguments: list[str], checkout: Path) -> float:
    """Run a command in a checkout; returns its user CPU time in seconds, that of its children included."""
    keep = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment = keep | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen([python, *arguments], cwd=checkout, env=environment, stdout=nowhere, stderr=nowhere)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime


def measure(
    commands: dict[str, Command], runs: int, other: tuple[str, Path] | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure every command ``runs`` times, after one run that fills the file cache; yields each with its name."""
    for name, command in commands.items():
        here: list[float] = []
        there: list[float] = []
        for _ in range(runs + 1):
            if other is not None and command.before is not None:
                there.append(measure_user_s(other[0], command.before, other[1]))
            here.append(measure_user_s(sys.executable, command.arguments, ROOT))
        median = statistics.median(here[1:])
        found: dict[str, Any] = {"limit_s": command.limit_s, "median_s": round(median, 3), "runs_s": _round(here[1:])}
        if there:
            found |= {
                "before_median_s": round(statistics.median(there[1:]), 3),
                "before_runs_s": _round(there[1:]),
            }
        before = f"{found.get('before_median_s', float('nan')):6.2f} s -> " if other is not None else ""
        late = "" if median < command.limit_s else "  OVER THE LIMIT"
        print(f"{name:54} {before}{median:5.2f} s  (limit {command.limit_s:g} s){late}", flush=True)
        yield name, found


def _round(values: list[float]) -> list[float]:
    return [round(value, 3) for value in values]


def main() -> int:
    """Measure, print and write the results; returns 1 if a command is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", default="", metavar="WORDS", help="part of the names to measure")
    parser.add_argument("--checkout", type=Path, metavar="DIR", help="another checkout to compare with")
    parser.add_argument("--python", default=sys.executable, help="its Python; default: this one")
    parser.add_argument("--out", type=Path, default=ROOT / f"benchmarks/results/startup_{time.strftime('%F')}.json")
    arguments = parser.parse_args()
    other = None if arguments.checkout is None else (arguments.python, arguments.checkout.resolve())
    commands = {name: one for name, one in make_commands().items() if arguments.only in name}
    cpu = next(
        (line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ""
    )
    machine: dict[str, Any] = {"cpu": cpu, "cores": os.cpu_count(), "platform": platform.platform()}
    machine |= {"python": platform.python_version()}
    machine |= {name: version(name) for name in ("torch", "transformers", "datasets")}
    result: dict[str, Any] = {"unit": "user CPU seconds", "machine": machine, "commands": {}}
    if arguments.only and arguments.out.exists():
        result["commands"] = json.loads(arguments.out.read_text(encoding="utf-8"))["commands"]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    is_late = False
    for name, found in measure(commands, arguments.runs, other):
        result["commands"][name] = found | {"load": round(os.getloadavg()[0], 1)}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        is_late = is_late or found["median_s"] >= found["limit_s"]
    return 1 if is_late else 0


if __name__ == "__main__":
    sys.exit(main())
