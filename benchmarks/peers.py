"""Compare LoRA on the CPU with a plain loop of transformers and PEFT, and with TRL, at the shape of a real model.

    python -m benchmarks.peers [--shape qwen2_0_5b] [--layers 6] [--threads 1] [--pairs 2] [--out FILE]

All tools train the same rows with the same adapter, in bfloat16, or in float32 on processors that emulate bfloat16, one
packed row of 2,048 tokens a step. They take turns, each in a process of its own. Besides the time, the CPU time of the
process is reported, which other processes of the machine lengthen less. The model has random weights; ``--layers``
gives it fewer blocks, for a short run.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.job import Job
from benchmarks.training import PACKAGES, RESULTS, describe_machine, measure
from benchmarks.workload import SHAPES, Shape, write_model, write_rows
from fctune.models.precision import is_emulated

TOOLS = ("fctune", "plain", "trl")
SEQ_LEN = 2_048


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over the runs of a tool."""
    return {
        "tokens_per_s": statistics.median(run["real"] / run["seconds"] for run in runs),
        "tokens_per_cpu_s": statistics.median(run["real"] / run["cpu_s"] for run in runs),
        "peak_mib": statistics.median(run["peak_mib"] for run in runs),
        "losses": runs[0]["losses"],
    }


def shorten(shape: Shape, num_layers: int | None) -> Shape:
    """Return the shape with fewer blocks, the last ones of the kinds that it has."""
    if num_layers is None:
        return shape
    config = tuple((key, value[-num_layers:] if key == "layer_types" else value) for key, value in shape.config)
    return dataclasses.replace(shape, layers=num_layers, config=config)


def main() -> None:
    """Run the comparison, print its table and write the results after each pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2_0_5b", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="blocks of the model (default: those of the shape)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=2, help="runs of each tool, in turns")
    parser.add_argument("--steps", type=int, default=3, help="steps of a run; the first is a warm-up")
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--folder", type=Path, help="directory for the model and rows (default: temporary)")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/peers_DATE.json")
    options = parser.parse_args()
    shape = shorten(SHAPES[options.shape], options.layers)
    out = options.out or RESULTS / f"peers_{datetime.date.today():%Y-%m-%d}.json"
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "rows" / "counts.json").exists():
            from fctune.data.synthetic import iter_conversations

            write_model(folder / "model", shape, has_weights=True)
            write_rows(folder / "rows", folder / "model", iter_conversations("train", 400, 1), SEQ_LEN)
        paths = {"model_dir": str(folder / "model"), "rows_dir": str(folder / "rows")}
        dtype = "fp32" if is_emulated(torch.bfloat16) else "bf16"
        common = {"seq_len": SEQ_LEN, "rows_a_step": 1, "dtype": dtype, "threads": options.threads}
        job = Job(tool="fctune", **paths, **common, steps=options.steps)  # type: ignore[arg-type]
        runs: dict[str, list[dict[str, Any]]] = {tool: [] for tool in options.tools}
        for _ in range(options.pairs):
            for tool in options.tools:
                found = measure(job.replace(tool=tool), timeout_s=3600)
                if "error" in found:
                    raise SystemExit(f"{tool}: {found['error']}")
                runs[tool].append(found)
                one = summarise([found])
                print(
                    f"{tool:8} {one['tokens_per_s']:7.1f} tokens/s {one['tokens_per_cpu_s']:7.1f} tokens/CPU s "
                    f"{one['peak_mib']:7,.0f} MiB peak   losses {' '.join(f'{loss:.4f}' for loss in one['losses'])}",
                    flush=True,
                )
            report = {
                "date": f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
                "machine": describe_machine(),
                "versions": {name: version(name) for name in PACKAGES},
                "shape": options.shape,
                "layers": shape.layers,
                "threads": options.threads,
                "dtype": dtype,
                "summary": {tool: summarise(of_tool) for tool, of_tool in runs.items()},
                "runs": runs,
            }
            out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
