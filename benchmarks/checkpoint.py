"""What a save costs training: this project's asynchronous and synchronous saves, and torchtune's, of the same state.

    python benchmarks/checkpoint.py [--parameters 500] [--steps 16] [--saves 4] [--out FILE]

A model of the given million parameters (float32, AdamW: 12 bytes a parameter on the disk) takes steps of some seconds.
The stall of a save is the wall time of a run with saves, less that of a run without, divided by the saves: it counts
the steps that writing makes slower. Every file is flushed (fsync); torchtune's checkpointer does not flush its files,
so they are flushed after it, within its time. Runs take turns, and medians are reported.
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
WAYS = ("none", "async", "sync", "torchtune")


class Layers(nn.Module):
    """Square linears: a state of the wanted size whose step does not take minutes."""

    def __init__(self, num_millions: int, width: int = 4096):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(width, width, bias=False) for _ in range(round(num_millions * 1e6 / width**2))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through all of them."""
        for layer in self.layers:
            x = x + layer(x) * 0.01
        return x


def run(way: str, num_millions: int, num_steps: int, num_saves: int, folder: Path) -> dict[str, Any]:
    """One run in this process."""
    from fctune.checkpoint.saver import Saver
    from fctune.checkpoint.sharded import read_shards_, write_shards
    from fctune.checkpoint.snapshot import collect_tensors
    from fctune.checkpoint.store import CheckpointStore
    from fctune.training.distributed import start_world, stop_world

    world = start_world()
    torch.manual_seed(0)
    model = Layers(num_millions)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(512, 4096)
    store = CheckpointStore(folder, keep_last=1)
    saver = Saver(store, world, is_async=way == "async")
    every = num_steps // num_saves

    def step() -> None:
        model(x).pow(2).mean().backward()
        saver.wait_staged()
        optimizer.step()
        optimizer.zero_grad()

    step()
    if way in ("async", "sync"):  # the buffers are made once a run
        saver.start("sharded", 0, collect_tensors(model, optimizer), {}, lambda f, t, _, g: write_shards(f, t, g))
        saver.finish()
    before = _peak_mib()
    started = time.perf_counter()
    save_s: list[float] = []
    for number in range(1, num_steps + 1):
        step()
        if number % every == 0 and way != "none":
            began = time.perf_counter()
            if way == "torchtune":
                _save_torchtune(model, optimizer, folder, number)
            else:
                tensors = collect_tensors(model, optimizer)
                saver.start("sharded", number, tensors, {}, lambda f, t, _, g: write_shards(f, t, g))
            save_s.append(time.perf_counter() - began)
    wall = time.perf_counter() - started
    result = saver.finish()
    found: dict[str, Any] = {"wall_s": wall, "call_s": statistics.median(save_s) if save_s else 0.0}
    found["peak_growth_mib"] = _peak_mib() - before
    if result is not None and result.checkpoint is not None:
        found |= {"write_s": result.seconds, "bytes": result.num_bytes}
        tensors = collect_tensors(model, optimizer)
        began = time.perf_counter()
        read_shards_(result.checkpoint.path, tensors)
        found["read_s"] = time.perf_counter() - began
    saver.close()
    stop_world()
    return found


def _save_torchtune(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, number: int) -> None:
    """What torchtune's full recipe does at an epoch's end, with its own checkpointer."""
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
    """Our layers under names that torchtune knows how to convert: the MLP's and attention's square weights."""
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
    """Take turns and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parameters", type=int, default=500, help="millions")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; default: a temporary directory")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        found = run(arguments.one, arguments.parameters, arguments.steps, arguments.saves, arguments.folder)
        print(json.dumps(found))
        return
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(arguments.repeats):
        for way in WAYS:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                command = [sys.executable, __file__, "--one", way, "--folder", folder]
                command += [f"--{key}={getattr(arguments, key)}" for key in ("parameters", "steps", "saves")]
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(f"{way} failed:\n{done.stderr[-3000:]}")
                runs[way].append(json.loads(done.stdout.strip().splitlines()[-1]))
                print(way, done.stdout.strip().splitlines()[-1], flush=True)
    base = statistics.median(r["wall_s"] for r in runs["none"])
    stalls = {
        way: statistics.median((r["wall_s"] - base) / arguments.saves for r in runs[way])
        for way in WAYS
        if way != "none"
    }
    report = {
        "stall_s": {way: round(stall, 3) for way, stall in stalls.items()},
        "async_of_sync": round(stalls["async"] / stalls["sync"], 3),
        "async_of_torchtune": round(stalls["async"] / stalls["torchtune"], 3),
        "runs": runs,
        "arguments": {k: getattr(arguments, k) for k in ("parameters", "steps", "saves", "repeats")},
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "versions": {name: version(name) for name in ("torch", "torchtune", "safetensors")},
    }
    print(json.dumps({k: report[k] for k in ("stall_s", "async_of_sync", "async_of_torchtune")}, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
