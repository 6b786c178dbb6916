"""Measure the gate: harm that it must stop, its false alarms on one model's own noise, and its power.

    python -m benchmarks.gate --out DIR [--parts harm pairs simulate] [--pairs 20] [--result FILE]
        [--model DIR --rows FILE --held-out FILE [key=value ...]]

- harm: ``fctune tune`` trains a model on those of its rows that call, and gates the result. As long as the gate stops
  it, the command that it printed trains again, at most three times. The first result must be stopped, and the last one
  pass. The model is the demo's (`fctune train tiny_lora`) with synthetic rows, unless one is named with its rows.
- pairs: two samples of the base, with different seeds, are gated as base and result, so each alarm is a false one.
- simulate: 1,000 gates with the accuracy and the flips of each line that the pairs had; unchanged, and with a true
  fall on one line.

Every finished part is kept under --out: after an interruption, run the same command again.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.training import describe_machine, keep
from fctune.apps.gate.cases import pair_held_out
from fctune.apps.gate.lines import LEVEL, JudgedLine, Line, judge_lines
from fctune.apps.gate.models import GateModel
from fctune.apps.gate.outcomes import make_lines
from fctune.apps.gate.plan import Plan
from fctune.calls.metrics import wilson_interval
from fctune.config.sections.gate import GateConfig
from fctune.data.synthetic import iter_cases
from fctune.engines.opening import find_files
from fctune.tasks.evaluation.paired import PairedOutcome
from fctune.tasks.suite_files import load_suite

ROOT = Path(__file__).resolve().parents[1]
NUM_ROWS, NUM_CASES = 3000, 200
DEMO_SETTINGS = ("max_steps=80", "validation.every=0", "data.seq_len=512", "lr_scheduler.warmup=5")
MAX_HARMFUL_ROWS = 900
MAX_NEW_TOKENS = 96
MAX_ROUNDS = 3
NUM_GATES = 1000
FALLS = (0.10, 0.15, 0.20, 0.30)
TEMPERATURE = 0.7
PARTS = ("harm", "pairs", "simulate")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the missing parts, print what they found, and write the result file; 1 if harm was not told from its cure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--pairs", type=int, default=20, metavar="N")
    parser.add_argument("--cases", type=int, default=60, metavar="N", help="most cases of a line; default: 60")
    parser.add_argument("--model", metavar="DIR", help="model that harm is done to; default: the demo's")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="its training rows")
    parser.add_argument("--held-out", type=Path, metavar="FILE", help="its held-out cases")
    parser.add_argument("--result", type=Path, metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config keys of the harmful training")
    arguments = parser.parse_intermixed_args(argv)
    own = (arguments.model, arguments.rows, arguments.held_out)
    if None in own and any(own):
        parser.error("--model, --rows and --held-out go together")
    folder: Path = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    if "harm" in arguments.parts:
        found["harm"] = keep(folder / "harm.json", lambda: measure_harm(arguments))
    if "pairs" in arguments.parts:
        found["pairs"] = keep(folder / "pairs.json", lambda: measure_pairs(folder, arguments.pairs, arguments.cases))
    if "simulate" in arguments.parts:
        pairs = json.loads((folder / "pairs.json").read_text(encoding="utf-8"))
        found["simulate"] = keep(folder / "simulate.json", lambda: simulate(pairs["flips"]))
    print(json.dumps(found, indent=2))
    if arguments.result is not None:
        command = "python -m benchmarks.gate --out DIR"
        machine = {key: value for key, value in describe_machine().items() if key != "load_at_end"}
        described = {"date": time.strftime("%Y-%m-%d"), "command": command, "machine": machine, **found}
        arguments.result.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    harm = found.get("harm")
    return int(harm is not None and (not harm["harmful"]["is_blocked"] or harm["mended"][-1]["is_blocked"]))


def measure_harm(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tune on rows that all call; then follow the printed commands until a result passes."""
    folder: Path = arguments.out
    model, rows, cases, settings = arguments.model, arguments.rows, arguments.held_out, list(arguments.overrides)
    if model is None:
        model, cases, rows = str(find_base(folder)), write_cases(folder), folder / "rows.jsonl"
        run(["data", "synthetic", "train", "--rows", str(NUM_ROWS), "--seed", "7", "--out", str(rows), "--force"])
        settings = [*DEMO_SETTINGS, *settings]
    harmful = folder / "calls_only.jsonl"
    lines = [line for line in rows.read_text(encoding="utf-8").splitlines() if '"tool_calls"' in line]
    lines = lines[:MAX_HARMFUL_ROWS]
    harmful.write_text("\n".join(lines) + "\n", encoding="utf-8")
    gate = f"gate={{benchmarks: [], max_cases: {arguments.cases}, max_new_tokens: {MAX_NEW_TOKENS}}}"
    words = ["tune", "--model", model, "--data", str(harmful), "--cases", str(cases), "--out", str(folder / "harmful")]
    report = tune([*words, gate, *settings])
    found: dict[str, Any] = {"rows": len(lines), "harmful": shorten(report), "mended": []}
    while report["is_blocked"] and report["commands"] and len(found["mended"]) < MAX_ROUNDS:
        (command,) = report["commands"]
        report = tune(shlex.split(command)[1:])
        shown = command
        for place, name in ((folder.resolve(), "DIR"), (folder, "DIR"), (model, "MODEL"), (cases, "CASES")):
            shown = shown.replace(str(place), name)
        found["mended"].append({"command": shown, **shorten(report)})
    return found


def tune(words: Sequence[str]) -> dict[str, Any]:
    """Run ``fctune tune``; returns the report of its gate."""
    run(words, codes=(0, 1))
    out = Path(words[words.index("--out") + 1])
    report: dict[str, Any] = json.loads((out / "gate" / "gate.json").read_text(encoding="utf-8"))
    return report


def find_base(folder: Path) -> Path:
    """Return the model of the demo, trained once."""
    if not (folder / "start" / "export" / "merged").is_dir():
        run(["train", "tiny_lora", "--nproc", "1", f"output_dir={folder / 'start'}"])
    return folder / "start" / "export" / "merged"


def shorten(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report's verdict with the numbers and the findings of its lines."""
    keys = ("verdict", "n", "num_right_before", "num_right_after", "low", "high", "p_holm")
    lines = {line["name"]: {key: line[key] for key in keys} for line in report["lines"]}
    findings = {line["name"]: [one["finding"] for one in line["remedies"]] for line in report["lines"]}
    return {
        "verdict": report["verdict"],
        "is_blocked": report["is_blocked"],
        "lines": lines,
        "remedies": {name: found for name, found in findings.items() if found},
        "not_run": report["not_run"],
    }


def measure_pairs(folder: Path, num_pairs: int, num_cases: int) -> dict[str, Any]:
    """Sample the base twice for each pair, and gate one sample against the other."""
    held_out = pair_held_out(load_suite(write_cases(folder)), num_cases)
    plan = Plan(held_out=held_out)
    model = str(find_base(folder))
    config = GateConfig(max_new_tokens=MAX_NEW_TOKENS, temperature=TEMPERATURE)
    flips: dict[str, Counter[str]] = {}
    alarms: list[dict[str, Any]] = []
    significant = Counter[str]()
    for number in range(num_pairs):
        rows = []
        for seed in (2 * number, 2 * number + 1):
            sampled = GateModel(f"seed{seed}", model, find_files(model))
            answers = sampled.ask(held_out.suite, replace(config, seed=seed), folder / "pairs", False, print)
            rows.append({held_out.suite.name: answers})
            sampled.close()
        lines, _, _ = make_lines(plan, *rows)
        judged = judge_lines(lines, config.accepted_fall)
        for one in judged:
            count = flips.setdefault(one.line.name, Counter())
            count["n"] += one.comparison.n
            count["right_before"] += one.comparison.num_right_before
            count["changed"] += len(one.comparison.turned_right) + len(one.comparison.turned_wrong)
            significant["changed" if one.comparison.p_value < LEVEL else "same"] += 1
        if worse := [one.line.name for one in judged if one.verdict == "worse"]:
            alarms.append({"pair": number, "lines": worse})
    return {
        "temperature": TEMPERATURE,
        "alarms": describe_rate(len(alarms), num_pairs),
        "alarmed": alarms,
        "lines_with_p_below_level": describe_rate(significant["changed"], sum(significant.values())),
        "flips": {name: dict(count) for name, count in flips.items()},
    }


def simulate(flips: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Simulate gates whose lines have the measured accuracy and flips, in both sizes."""
    found = {}
    for name, config in (("quick", GateConfig()), ("thorough", GateConfig(thorough=True))):
        rng = random.Random(0)
        unchanged = [simulate_gate(flips, config, rng) for _ in range(NUM_GATES)]
        lines = [line for judged in unchanged for line in judged]
        found[name] = {
            "tolerance": config.accepted_fall,
            "cases_on_a_line": config.line_size,
            "level": LEVEL,
            "false_alarms": describe_rate(count_worse(unchanged), NUM_GATES),
            "lines_with_p_below_level": describe_rate(sum(x.comparison.p_value < LEVEL for x in lines), len(lines)),
            "lines_safe": describe_rate(sum(line.verdict == "safe" for line in lines), len(lines)),
            "power_by_fall": {
                f"{fall:.0%}": describe_rate(
                    count_worse([simulate_gate(flips, config, rng, fall) for _ in range(NUM_GATES // 5)]),
                    NUM_GATES // 5,
                )
                for fall in FALLS
            },
            "smallest_fall": median_smallest_fall(unchanged),
        }
    return found


def simulate_gate(
    flips: dict[str, dict[str, int]], config: GateConfig, rng: random.Random, fall: float = 0.0
) -> list[JudgedLine]:
    """Return the judged lines of one gate; ``fall`` is the true fall of the first line."""
    lines = []
    for number, (name, count) in enumerate(flips.items()):
        flip = count["changed"] / count["n"] / 2
        lost = fall if number == 0 else 0.0
        right = min(1 - flip, max(count["right_before"] / count["n"], lost + flip))
        outcomes = []
        for item in range(config.line_size):
            draw = rng.random()
            # Turned wrong, turned right, wrong in both, right in both.
            before = draw < flip + lost or draw >= 2 * flip + lost + max(0.0, 1 - right - flip)
            after = flip + lost <= draw and (draw < 2 * flip + lost or before)
            outcomes.append(PairedOutcome(str(item), before, after))
        lines.append(Line(name, name, outcomes))
    return judge_lines(lines, config.accepted_fall)


def count_worse(gates: Sequence[Sequence[JudgedLine]]) -> int:
    """Return the number of gates with a line that is worse."""
    return sum(any(line.verdict == "worse" for line in judged) for judged in gates)


def median_smallest_fall(gates: Sequence[Sequence[JudgedLine]]) -> float | None:
    """Return the median of the smallest falls that the first line finds."""
    falls = sorted(judged[0].smallest_fall or 1.0 for judged in gates)
    return falls[len(falls) // 2]


def describe_rate(successes: int, n: int) -> dict[str, Any]:
    """Return a count with its share and the 95 % Wilson interval."""
    low, high = wilson_interval(successes, n)
    return {"count": successes, "n": n, "share": round(successes / n, 4), "low": round(low, 4), "high": round(high, 4)}


def write_cases(folder: Path) -> Path:
    """Write the held-out cases of the synthetic set."""
    path = folder / "cases.jsonl"
    if not path.exists():
        rows = (json.dumps(case.to_json()) for case in iter_cases(NUM_CASES, 9))
        path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def run(words: Sequence[str], codes: Sequence[int] = (0,)) -> None:
    """Run ``fctune`` and stop if it ends with another code."""
    done = subprocess.run([sys.executable, "-m", "fctune.cli", *words], cwd=ROOT)
    if done.returncode not in codes:
        raise SystemExit(f"fctune {shlex.join(words)} ended with {done.returncode}")


if __name__ == "__main__":
    raise SystemExit(main())
