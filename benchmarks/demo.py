"""Time `make demo` in a clean clone, and write benchmarks/results/demo.json and the table of docs/start.md.

    python -m benchmarks.demo [--python python3.12]

The clone holds the last commit, and nothing of this checkout's environment: setting up is timed, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.training import describe_machine
from fctune.calls.metrics import wilson_interval

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "demo.json"
PAGE = ROOT / "docs" / "start.md"
# Lines of the page that enclose the table.
_BEGIN, _END = "<!-- written by python -m benchmarks.demo -->", "<!-- end of the demo's table -->"
_NAMES = {
    "choice": "one call, several tools on offer",
    "multi_turn": "multi-turn",
    "no_call": "no call needed",
    "parallel": "parallel calls",
    "single": "single tool",
}


def measure(clone: Path, python: str) -> dict[str, Any]:
    """Run the demo in a clean clone; returns the seconds of its parts and its accuracy before and after."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    environment = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    seconds = {}
    for target in ("setup", "demo"):
        started = time.perf_counter()
        subprocess.run(["make", target, f"PYTHON={python}"], cwd=clone, env=environment, check=True)
        seconds[f"{target}_s"] = round(time.perf_counter() - started, 1)
    results = [str(clone / "runs" / "demo" / name) for name in ("base.jsonl", "tuned.jsonl")]
    compared = clone / "compared.json"
    command = [str(clone / ".venv" / "bin" / "fctune"), "compare", *results, "--json", str(compared)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    categories = json.loads(compared.read_text(encoding="utf-8"))
    return {**seconds, "categories": {name: describe_accuracies(counts) for name, counts in categories.items()}}


def describe_accuracies(counts: dict[str, Any]) -> dict[str, Any]:
    """Return the counts of a category that was compared, with its accuracies and their 95 % intervals in percent."""
    described: dict[str, Any] = {"n": counts["n"]}
    for when in ("before", "after"):
        right = counts[f"num_right_{when}"]
        low, high = wilson_interval(right, counts["n"])
        percents = [round(100 * share, 1) for share in (right / counts["n"], low, high)]
        described[when] = {"num_right": right, **dict(zip(("percent", "low", "high"), percents, strict=True))}
    return described


def format_table(result: dict[str, Any]) -> str:
    """Return the page's table, with the lines that enclose it."""
    lines = [_BEGIN, "", "| | cases | before | after |", "|---|---|---|---|"]
    for name, found in result["categories"].items():
        if name != "all":
            before, after = (f"{found[when]['percent']} %" for when in ("before", "after"))
            lines.append(f"| {_NAMES.get(name, name)} | {found['n']} | {before} | {after} |")
    total = result["categories"]["all"]
    before, after = (
        f"**{total[when]['percent']} %** ({total[when]['low']} - {total[when]['high']})" for when in ("before", "after")
    )
    return "\n".join([*lines, f"| **all** | **{total['n']}** | {before} | {after} |", "", _END])


def main() -> None:
    """Run the demo and write its result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="python3", help="Python that the clone's environment is made with")
    arguments = parser.parse_args()
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder) / "fctune", arguments.python)
    result = {
        "command": "python -m benchmarks.demo",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "machine": describe_machine(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        **measured,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    PAGE.write_text(before + format_table(result) + rest.partition(_END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
