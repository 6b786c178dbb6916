"""Close the loop from tools without rows to a judged model, measured with requests that were written by hand.

    python -m benchmarks.generate.server --port 8123 &
    python -m benchmarks.generate.loop --model DIR --teacher http://HOST/v1 --out DIR [--num 240]
        [--result FILE] [key=value ...]

``fctune data generate`` has the teacher reword drafted requests to the tools of the MCP server and word the answers;
the tools that only look something up are really called. ``fctune tune`` trains the model on the rows and asks it and
its base the requests of ``held_out.yaml``, which were written before any row. Each step resumes. With ``--rows
benchmarks/generate/rows_2026-11-27.jsonl.gz``, the rows are those that Qwen2.5-Coder-0.5B-Instruct worded on that day.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.demo import describe_accuracies
from benchmarks.generate.server import READ_ONLY, SUITE
from benchmarks.training import describe_machine

_BLOCKED = 1
_LINE_KEYS = ("verdict", "n", "num_right_before", "num_right_after", "p")


def generate(arguments: argparse.Namespace, rows: Path) -> None:
    """Generate the rows, unless they are there."""
    options = ["--requests", "drafted", "--votes", "0", "--answers", "json", "--max-tools", "6"]
    options += ["--max-new-tokens", "200", "--timeout", "900", "--seed", "1", "--num", str(arguments.num)]
    options += ["--execute", ",".join(sorted(READ_ONLY)), "--held-out", os.path.relpath(SUITE)]
    servers = ["--tools", arguments.tools, "--teacher", arguments.teacher]
    run(["data", "generate", *servers, *options, "--out", str(rows), "--html", str(rows.with_suffix(".html"))])


def run(command: Sequence[str], allowed: Sequence[int] = (0,)) -> None:
    """Run a command of fctune.

    Raises:
        SystemExit: It fails.
    """
    code = subprocess.run([sys.executable, "-m", "fctune.cli", *command]).returncode
    if code not in allowed:
        sys.exit(code)


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing of the loop, print its table, and write the result if a file is named."""
    parser = argparse.ArgumentParser(description="From tools to a judged model")
    parser.add_argument("--model", required=True, metavar="DIR", help="model to train")
    rows_from = parser.add_mutually_exclusive_group(required=True)
    rows_from.add_argument("--teacher", metavar="URL", help="server that rewords and answers")
    rows_from.add_argument("--rows", type=Path, metavar="FILE", help="rows that were generated before")
    parser.add_argument("--tools", default="http://127.0.0.1:8123/mcp", metavar="URL", help="default: %(default)s")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--num", type=int, default=240, metavar="N", help="rows; default: %(default)s")
    parser.add_argument("--result", type=Path, metavar="FILE", help="JSON file to write")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config keys of the training")
    arguments = parser.parse_intermixed_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = arguments.out / "rows.jsonl"
    if arguments.rows is None:
        generate(arguments, rows)
    rows = arguments.rows or rows
    tuned = arguments.out / "tune"
    started = time.perf_counter()
    command = ["tune", "--model", arguments.model, "--data", str(rows), "--out", str(tuned)]
    command += ["--cases", os.path.relpath(SUITE)]
    run([*command, *arguments.overrides], allowed=(0, _BLOCKED))
    seconds = time.perf_counter() - started
    compared = arguments.out / "compared.json"
    answers = [str(tuned / "gate" / f"{name}.held_out.jsonl") for name in ("base", "tuned")]
    run(["compare", *answers, "--json", str(compared)])
    generated: dict[str, Any] = {"file": str(rows)}
    if arguments.rows is None:
        summary = json.loads((rows.with_suffix(".generate") / "log.summary.json").read_text(encoding="utf-8"))
        generated = {name: summary[name] for name in ("asked", "kept", "dropped", "usage")}
    kinds = json.loads(compared.read_text(encoding="utf-8"))
    gate = json.loads((tuned / "gate" / "gate.json").read_text(encoding="utf-8"))
    source = f"--num {arguments.num}" if arguments.rows is None else f"--rows {os.path.relpath(rows)}"
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "command": f"python -m benchmarks.generate.loop {source} {' '.join(arguments.overrides)}".strip(),
        "rows": generated,
        "tune_s": round(seconds, 1),
        "kinds": {name: describe_accuracies(counts) for name, counts in kinds.items()},
        "gate": {line["name"]: {key: line[key] for key in _LINE_KEYS} for line in gate["lines"]},
    }
    if arguments.result is not None:
        arguments.result.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
