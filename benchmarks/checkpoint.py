"""Measure the training time lost to a save: fctune's asynchronous and synchronous saves, and torchtune's.

    python benchmarks/checkpoint.py [--parameters 500] [--steps 6] [--pairs 5] [--threads 1] [--out FILE]

A model of the given million parameters (float32, AdamW: 12 bytes a parameter on the disk) takes steps of some seconds.
Each process alternates between ``--steps`` steps without a save and as many with one. The stall of a save is the
difference, which includes steps slowed down by writing; the median over the pairs is reported, so slow drifts of the
machine cancel. Steps compute on ``--threads`` cores, by default one less than available, because the CPU is not fully
used when a GPU computes. Every file is flushed (fsync); torchtune's checkpointer does not flush its files, so they are
flushed after it, within its time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("async", "sync", "torchtune")


class Layers(nn.Module):
    """Square linears with a state of the requested size and a step of some seconds."""

    def __init__(self, num_millions: int, width: int = 4096):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(width, width, bias=False) for _ in range(round(num_millions * 1e6 / width**2))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply all layers with residual connections."""
        for layer in self.layers:
            x = x + layer(x) * 0.01
        return x


def run(way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the pairs of one way to save, in this process."""
    from fctune.base.distributed import init_distributed, shutdown_distributed
    from fctune.checkpoint.saver import Saver
    from fctune.checkpoint.sharded import read_shards_, write_shards
    from fctune.checkpoint.store import CheckpointStore
    from fctune.checkpoint.tensors import collect_tensors

    world = init_distributed()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = Layers(arguments.parameters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(arguments.rows, 4096)
    store = CheckpointStore(arguments.folder, keep_last=1)
    saver = Saver(store, world, is_async=way == "async")

    def save(number: int) -> None:
        if way == "torchtune":
            _save_torchtune(model, optimizer, arguments.folder, number)
        else:
            tensors = collect_tensors(model, optimizer)
            saver.start("sharded", number, tensors, {}, lambda f, t, _, g: write_shards(f, t, g))

    def take_steps(number: int | None = None) -> float:
        """Return the seconds of the steps, after starting save ``number`` and including the wait for it."""
        started = time.perf_counter()
        if number is not None:
            save(number)
        for _ in range(arguments.steps):
            model(x).pow(2).mean().backward()
            saver.wait_staged()
            optimizer.step()
            optimizer.zero_grad()
        stepped = time.perf_counter() - started
        saver.finish()
        late_s.append(time.perf_counter() - started - stepped)
        return time.perf_counter() - started

    late_s: list[float] = []
    take_steps()
    before = _peak_mib()
    take_steps(0)  # allocates the buffers, once per run
    growth = _peak_mib() - before
    pairs = [(take_steps(), take_steps(number)) for number in range(1, arguments.pairs + 1)]
    found: dict[str, Any] = {"pairs_s": pairs, "stall_s": [with_save - without for without, with_save in pairs]}
    found |= {"step_s": statistics.median(without for without, _ in pairs) / arguments.steps}
    found |= {"not_done_within_the_steps_s": max(late_s[2:]), "peak_growth_mib": growth}
    result = saver.finish()
    if result is not None and result.checkpoint is not None:
        found |= {"write_s": result.seconds, "bytes": result.num_bytes}
        found["write_gb_per_s"] = result.num_bytes / result.seconds / 1e9
        tensors = collect_tensors(model, optimizer)
        began = time.perf_counter()
        read_shards_(result.checkpoint.path, tensors)
        found["read_s"] = time.perf_counter() - began
    saver.close()
    shutdown_distributed()
    return found


def _save_torchtune(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, number: int) -> None:
    """Save as torchtune's full recipe does at the end of an epoch."""
    from torchtune.training import FullModelHFCheckpointer

    base = folder / "base"
    base.mkdir(exist_ok=True)
    (base / "config.json").write_text(
        json.dumps({"num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 4096})
    )
    if not (base / "model.safetensors").exists():
        from safetensors.torch import save_file

        save_file({"x": torch.zeros(1)}, base / "model.safetensors")
    checkpointer = FullModelHFCheckpointer(
        checkpoint_dir=str(base),
        checkpoint_files=["model.safetensors"],
        model_type="LLAMA3",
        output_dir=str(folder / "out"),
    )
    names = _torchtune_names(model)
    checkpointer._weight_map = dict.fromkeys((hf for hf, _ in names.values()), "0001")
    state = {ours: model.state_dict()[name] for name, (_, ours) in names.items()}
    checkpointer.save_checkpoint(
        {
            "model": state,
            "optimizer": optimizer.state_dict(),
            "seed": 0,
            "epochs_run": number,
            "max_steps_per_epoch": -1,
            "total_epochs": 10**9,
        },
        epoch=number,
        intermediate_checkpoint=True,
    )
    for file in (folder / "out").rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    shutil.rmtree(folder / "out" / f"epoch_{number - 1}", ignore_errors=True)


def _torchtune_names(model: nn.Module) -> dict[str, tuple[str, str]]:
    """Map our layers to names that torchtune converts: square weights of the MLP and attention."""
    parts = (("self_attn.o_proj", "attn.output_proj"), ("mlp.gate_proj", "mlp.w1"), ("mlp.down_proj", "mlp.w2"))
    names = {}
    for number, (name, _) in enumerate(model.named_parameters()):
        block, part = divmod(number, len(parts))
        theirs, ours = parts[part]
        names[name] = (f"model.layers.{block}.{theirs}.weight", f"layers.{block}.{ours}.weight")
    return names


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure each way in a separate process and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parameters", type=int, default=500, help="millions")
    parser.add_argument("--steps", type=int, default=6, help="steps of each half of a pair")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=32, help="rows of the batch, which set the time of a step")
    parser.add_argument(
        "--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1), help="threads of a step"
    )
    parser.add_argument("--folder", type=Path, help="directory for checkpoints (default: temporary)")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(run(arguments.one, arguments)))
        return
    options = {key: getattr(arguments, key) for key in ("parameters", "steps", "pairs", "rows", "threads")}
    runs: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            command = [sys.executable, __file__, "--one", way, "--folder", folder]
            command += [f"--{key}={value}" for key, value in options.items()]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{way} failed:\n{done.stderr[-3000:]}")
            runs[way] = json.loads(done.stdout.strip().splitlines()[-1])
            print(way, json.dumps(runs[way]), flush=True)
    stalls = {way: statistics.median(found["stall_s"]) for way, found in runs.items()}
    report = {
        "stall_s": {way: round(stall, 3) for way, stall in stalls.items()},
        "async_of_sync": round(stalls["async"] / stalls["sync"], 3),
        "async_of_torchtune": round(stalls["async"] / stalls["torchtune"], 3),
        "runs": runs,
        "arguments": options,
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "versions": {name: version(name) for name in ("torch", "torchtune", "safetensors")},
    }
    print(json.dumps({k: report[k] for k in ("stall_s", "async_of_sync", "async_of_torchtune")}, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
