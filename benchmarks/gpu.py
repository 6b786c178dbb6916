"""Every GPU benchmark in one command: correctness, then speed, memory, saves, loading, generation and acceptance.

    python -m benchmarks.gpu [--out benchmarks/results/gpu.json] [--rows correctness,lora_8b,...] [--again] [--toy]

Rows run in order of importance, each in separate processes with a time limit, until ``--minutes`` are over. Each is
added to the results and their page, docs/reference/gpu-results.md, when it ends, and so is each setting of a row with
several and each failing test. The next run skips complete rows, so the command can be repeated until all are there.

The models have the shapes of Llama-3.1-8B, Llama-3.2-3B and other public models, and random weights drawn on the
device; the training data is this project's synthetic set, packed. Models other than Llama train by their shipped
configs. LoRA runs on one GPU, full fine-tuning on all. ``--toy`` runs every row on toy models for a few steps, on the
CPU if there is no GPU.

Token counts exclude padding. FLOPs per token are counted as other projects do: 6N when all weights train and 4N over a
frozen base (N with embeddings, without adapters; of experts, those that a token chooses), and the same plus 12 x layers
x width x seq_len for attention, as in torchtitan. About a fifth of the tokens of function-calling rows are supervised,
and this project computes logits for those only; ``lora_8b_dense`` uses rows in which nearly every token is supervised,
like those behind other projects' published figures.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_report import PAGE, render
from benchmarks.gpu_rows import Bench, Report, Row
from benchmarks.training import PACKAGES, RESULTS, describe_machine


def main() -> None:
    """Run the requested rows, print one line for each and add it to the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", help="names, comma-separated; default: all")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json", help="results to add to")
    parser.add_argument("--page", type=Path, help="page to write after each row (default: the one in docs)")
    parser.add_argument("--again", action="store_true", help="run rows again that succeeded")
    parser.add_argument("--minutes", type=float, default=30, help="start no row after as many minutes")
    parser.add_argument("--limit", type=float, default=math.inf, help="most seconds for a row (default: its own limit)")
    parser.add_argument("--folder", type=Path, help="directory for models and rows, kept (default: temporary)")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--list", action="store_true", help="print the names and their limits in seconds")
    arguments = parser.parse_args()
    ends = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments.folder or Path(folder), arguments.toy)
        rows = bench.rows()
        if arguments.list:
            print("\n".join(f"{name:<28} {limit:>4.0f}" for name, (limit, _) in rows.items()))
            return
        shown = PAGE if arguments.page is None and arguments.out == RESULTS / "gpu.json" else arguments.page
        results = Results(arguments.out, shown)
        names = arguments.rows.split(",") if arguments.rows else list(rows)
        if unknown := [name for name in names if name not in rows]:
            raise SystemExit(f"no such row: {', '.join(unknown)} (known: {', '.join(rows)})")
        names = [name for name in names if arguments.again or not results.is_current(name)]
        bench.passed_tests = [] if arguments.again else results.passed_tests()
        common = describe_run() | {"toy": arguments.toy, "row_s": 0}

        def run(name: str) -> bool:
            full = min(rows[name][0], arguments.limit)
            limit = min(full, ends - time.monotonic())
            if limit < max(20, full / 4):  # a shorter row may still end in time
                print(f"{name:<28} not started: {arguments.minutes:g} minutes are over", flush=True)
                return False
            line = run_row(rows[name][1], limit, lambda line: results.add(name, line | common)) | {"toy": arguments.toy}
            # Others may have failed for lack of time; tests say which of them ended.
            if line["ok"] or limit == full or "passed" in line:
                results.add(name, line)
            print(format_line(name, line), flush=True)
            return bool(line["ok"])

        with ThreadPoolExecutor(2 if arguments.toy else 1) as pool:  # toy rows measure nothing
            done = list(pool.map(run, names))
    raise SystemExit(not all(done))


class Results:
    """The file of results: the last line of each row, by name; and the page that shows them, if it has a path."""

    def __init__(self, file: Path, page: Path | None = None):
        self._file, self._page, self._lock = file, page, threading.Lock()
        self._rows: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def has(self, name: str) -> bool:
        """Return whether a row succeeded."""
        return name in self._rows and bool(self._rows[name]["ok"])

    def is_current(self, name: str) -> bool:
        """Return whether a row succeeded, lacked nothing, and bears no note that the code has changed since."""
        return self.has(name) and not {"note", "not_run"} & self._rows[name].keys()

    def passed_tests(self) -> list[str]:
        """Return the names of the tests that passed in earlier runs."""
        passed: list[str] = self._rows.get("tests", {}).get("passed", [])
        return passed

    def add(self, name: str, line: dict[str, Any]) -> None:
        """Add a row, or replace it; a failure does not replace a success."""
        with self._lock:
            if not line["ok"] and self.has(name):
                return
            self._rows[name] = line
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part = self._file.with_suffix(".part")
            part.write_text(json.dumps(self._rows, indent=1) + "\n", encoding="utf-8")
            part.replace(self._file)
            if self._page is not None:
                self._page.write_text(render(self._rows), encoding="utf-8")


def run_row(row: Row, limit: float, report: Report) -> dict[str, Any]:
    """Run a row within a limit; the result says when, on what device and with which versions."""
    started = time.perf_counter()
    found = row(limit, report)
    return found | {"row_s": round(time.perf_counter() - started, 1)} | describe_run()


def describe_run() -> dict[str, Any]:
    """Return the time, the device and the versions of the packages."""
    date = f"{datetime.datetime.now():%Y-%m-%d %H:%M}"
    return {"date": date, "device": describe_gpu(), "versions": _versions()}


def format_line(name: str, line: dict[str, Any]) -> str:
    """Format a result as one line for the terminal."""
    if line.get("failed"):
        names = ", ".join(test["test"].rpartition("::")[2] for test in line["failed"])
        return f"{name:<28} {len(line['failed'])} FAILED, {len(line['passed'])} passed: {names}"
    if "not_run" in line and "tokens_per_s" not in line:
        return f"{name:<28} not run: {line['not_run']}"
    if not line["ok"]:
        tried = line.get("tried") or [line]
        why = str(tried[-1].get("error") or tried[-1].get("output") or tried[-1]).strip().splitlines()[-1][:160]
        return f"{name:<28} FAILED in {line['row_s']:.0f} s: {why}"
    shown = {k: v for k, v in line.items() if k.startswith(("tokens_per", "peak", "added", "load_", "generated"))}
    lacks = f"  not run: {line['not_run']}" if "not_run" in line else ""
    return f"{name:<28} {line['row_s']:>5.0f} s  " + "  ".join(f"{k} {v:,}" for k, v in shown.items()) + lacks


def describe_gpu() -> dict[str, Any]:
    """Return the GPU's name, memory and CUDA version, and the host."""
    if not torch.cuda.is_available():
        return describe_machine()
    properties = torch.cuda.get_device_properties(0)
    gib = round(properties.total_memory / 2**30, 1)
    return {"gpu": properties.name, "gib": gib, "cuda": torch.version.cuda, "host": describe_machine()}


def _versions() -> dict[str, str]:
    found = {}
    for name in (*PACKAGES, "triton", "liger-kernel", "flash-linear-attention"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


if __name__ == "__main__":
    main()
