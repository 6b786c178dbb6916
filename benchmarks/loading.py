"""Measure the time and the memory of loading a base on several ranks, against transformers' from_pretrained.

    python -m benchmarks.loading [--millions 600] [--ranks 1 2 4] [--repeats 3] [--mode fsdp] [--alone] [--out FILE]

The base is a random mixture of experts (Qwen3's, bfloat16) that stores every expert by itself, in files of 500 MB. Each
rank is a process with gloo, sharded by FSDP; with ``--mode ddp``, each holds everything, and ranks read it together
unless ``--alone``. Peak memory is the anonymous memory of a process (RssAnon) over that
before loading, sampled every 2 ms: pages of the mapped files, which the system may drop, are not in it. Files are
read once before, so the disk is not measured. Medians over the repeats, of the slowest and largest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open

MIB = 1024**2


def write_base(folder: Path, millions: int) -> None:
    """Write a random mixture of experts with about this many million parameters."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    per_layer = 32 * 3 * 1024 * 384 + 4 * 1024 * 1024
    config = Qwen3MoeConfig(
        vocab_size=32_000,
        hidden_size=1024,
        moe_intermediate_size=384,
        num_hidden_layers=max(1, round((millions * 1e6 - 2 * 32_000 * 1024) / per_layer)),
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=4,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="500MB")


class PeakMemory:
    """Samples the anonymous memory of this process; a context manager."""

    def __enter__(self) -> PeakMemory:
        self.before = self.peak = _anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        self.peak = max(self.peak, _anonymous_bytes())

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, _anonymous_bytes())


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def load_sharded(folder: Path, mode: Literal["fsdp", "ddp"], is_alone: bool) -> dict[str, float]:
    """Load on this rank; returns seconds, and MiB of the shards, of the peak and read from the files."""
    from fctune.base.distributed import init_distributed, shutdown_distributed
    from fctune.config.sections.parallel import ParallelConfig
    from fctune.models.base_weights import load_base_
    from fctune.models.causal_lm import materialize_
    from fctune.models.precision import PrecisionPolicy
    from fctune.models.sources import build_model, read_architecture
    from fctune.parallel.layout import Hardware, choose_parallel_layout
    from fctune.parallel.sharding import shard_

    world = init_distributed()
    torch.set_num_threads(1)
    model = build_model(read_architecture(folder), 128, PrecisionPolicy.uniform(torch.bfloat16))
    hardware = Hardware("cpu", world.world_size, world.world_size)
    config = ParallelConfig(mode=mode if world.world_size > 1 else "auto")
    layout = choose_parallel_layout(config, hardware, False, lambda _: None)  # type: ignore[arg-type, return-value]
    shard_(model, layout, config, hardware)
    num_read = 0

    class CountingSlice:
        def __init__(self, stored: Any):
            self.stored = stored

        def __getitem__(self, region: Any) -> torch.Tensor:
            nonlocal num_read
            part: torch.Tensor = self.stored[region]
            num_read += part.numel() * part.element_size()
            return part

    class CountingFile:
        def __init__(self, *arguments: Any, **options: Any):
            self.file = safe_open(*arguments, **options)

        def __enter__(self) -> CountingFile:
            self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.file.__exit__(*error)

        def get_slice(self, name: str) -> CountingSlice:
            return CountingSlice(self.file.get_slice(name))

    with PeakMemory() as memory:
        started = time.perf_counter()
        materialize_(model, world.device)
        load_base_(model, folder, CountingFile, None if is_alone else world)
        seconds = time.perf_counter() - started
    held = sum((p.to_local() if hasattr(p, "to_local") else p).numel() * p.element_size() for p in model.parameters())
    shutdown_distributed()
    return _result(seconds, held, memory, num_read)


def load_transformers(folder: Path) -> dict[str, float]:
    """Load the complete model with transformers in this process; see ``load_sharded``."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    with PeakMemory() as memory:
        started = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        seconds = time.perf_counter() - started
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    return _result(seconds, held, memory, held)


def _result(seconds: float, held: int, memory: PeakMemory, num_read: int) -> dict[str, float]:
    peak = (memory.peak - memory.before) / MIB
    return {"seconds": seconds, "held_mib": held / MIB, "peak_mib": peak, "read_mib": num_read / MIB}


def run_processes(folder: Path, num_ranks: int | None, options: Sequence[str]) -> dict[str, float]:
    """Load in new processes, one with transformers if ``num_ranks`` is None; returns the largest of each figure."""
    command = [sys.executable, "-m", "benchmarks.loading", "--folder", str(folder), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if num_ranks is None:
        commands = [(command, environment)]
    else:
        port = str(29_600 + os.getpid() % 300)
        ranks = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        commands = [
            (command, environment | ranks | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(num_ranks)
        ]
    processes = [
        subprocess.Popen(arguments, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for arguments, variables in commands
    ]
    figures = []
    for process in processes:
        out, error = process.communicate()
        if process.returncode:
            raise RuntimeError(error)
        figures.append(json.loads(out.splitlines()[-1]))
    return {key: max(one[key] for one in figures) for key in figures[0]}


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=600)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mode", choices=("fsdp", "ddp"), default="fsdp")
    parser.add_argument("--alone", action="store_true", help="each rank reads what it holds, though others do, too")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        if "RANK" in os.environ:
            print(json.dumps(load_sharded(arguments.folder, arguments.mode, arguments.alone)))
        else:
            print(json.dumps(load_transformers(arguments.folder)))
        return
    options = ["--mode", arguments.mode, *(["--alone"] if arguments.alone else [])]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_base(folder, arguments.millions)
        num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        ways: dict[str, int | None] = {f"{n} ranks": n for n in arguments.ranks} | {"transformers": None}
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(arguments.repeats):
            for way, num_ranks in ways.items():
                runs[way].append(run_processes(folder, num_ranks, options))
    results = {
        way: {key: statistics.median(run[key] for run in found) for key in found[0]} for way, found in runs.items()
    }
    print(
        f"base of {num_bytes / MIB:,.0f} MiB, {platform.processor() or platform.machine()}, torch {torch.__version__}"
    )
    print(f"{'':14}{'seconds':>9}{'held':>9}{'peak':>9}{'read':>9}  MiB")
    for way, row in results.items():
        figures = "".join(f"{row[key]:9,.0f}" for key in ("held_mib", "peak_mib", "read_mib"))
        print(f"{way:14}{row['seconds']:9.2f}{figures}")
    if arguments.out is not None:
        facts = {"torch": torch.__version__, "transformers": version("transformers"), "base_mib": num_bytes / MIB}
        arguments.out.write_text(json.dumps(facts | {"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
