"""What metrics cost training: steps with every sink open beside steps with none, in turns, in one run.

    python -m benchmarks.sinks [--seq-len 1024] [--rows 2] [--steps 10] [--pairs 20] [--out FILE]

The tiny base is trained on one rank by the loop itself, so that what is measured of a step costs both halves of a pair
alike. With sinks are metrics.jsonl, the console's line, alerts, W&B (offline), TensorBoard and Prometheus, which a
client asks once a second. The cost of a step is how much longer it took, which counts what the sinks' threads and
processes take from it, and the median of the pairs is reported; beside it, how long the training thread itself was in
the sinks' hands, and the CPU time that this process took more, its sinks' threads counted. A step of a large model
takes seconds and the sinks as long as here, so the share is the most there is of it. Two cores or more, quiet ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.training import ROOT, describe_machine

NUM_WARMUP = 20  # steps before the first pair: wandb starts, memory is touched


class Turns:
    """A sink that hands steps on in every second block of them, and times the steps of each."""

    def __init__(self, sinks: Any, block: int):
        self._sinks, self._block = sinks, block
        self._entered: list[tuple[float, float, bool]] = []
        self.held_s: list[float] = []  # of the training thread, a step that was handed on

    def write(self, metrics: dict[str, Any]) -> None:
        """One step ended."""
        step = metrics["step"]
        is_on = step <= NUM_WARMUP or (step - NUM_WARMUP - 1) // self._block % 2 == 1
        entered = time.perf_counter()
        self._entered.append((entered, time.process_time(), is_on))
        if is_on:
            self._sinks.write(metrics)
            self.held_s.append(time.perf_counter() - entered)

    def close(self) -> None:
        """The sinks are closed by who opened them."""

    def blocks(self) -> list[tuple[bool, float, float]]:
        """Of each block after the warm-up: whether sinks were on; seconds a step, by the clock and of the CPU."""
        found = []
        for start in range(NUM_WARMUP, len(self._entered) - self._block, self._block):
            (clock, cpu, is_on), (clock_after, cpu_after, _) = self._entered[start], self._entered[start + self._block]
            found.append((is_on, (clock_after - clock) / self._block, (cpu_after - cpu) / self._block))
        return found


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The pairs of one run."""
    import torch

    from fctune.config import parse_config
    from fctune.modeling.lora import apply_lora_, init_adapters_
    from fctune.telemetry.sinks import Sinks
    from fctune.training.distributed import start_world, stop_world
    from fctune.training.loop import train
    from fctune.training.run_directory import RunDirectory
    from fctune.training.state import build_base, open_sinks, place_, prepare_data, start_state

    port = _free_port()
    num_steps = NUM_WARMUP + 2 * arguments.pairs * arguments.steps + 1
    problems: list[str] = []
    config = parse_config(_config(arguments, folder, port, num_steps), problems)
    assert config is not None, problems
    assert config.adapter is not None
    world = start_world()
    torch.set_num_threads(1)  # the other core is for the sinks, as a host's are beside a GPU
    directory = RunDirectory(config.output_dir)
    directory.start(config, 1)
    model_dir = Path(config.model.path)
    model = build_base(config, model_dir, world)
    apply_lora_(model, config.adapter)
    prepared = prepare_data(config, model_dir, world)
    place_(model, config, model_dir, world)
    init_adapters_(model, config.seed)
    with open_sinks(config, directory, num_steps, world) as sinks, _asked(port):
        turns = Turns(sinks, arguments.steps)
        train(config, start_state(model, config, num_steps), prepared, num_steps, world, Sinks(turns))
    stop_world()
    blocks = turns.blocks()
    halves = list(zip(blocks[::2], blocks[1::2], strict=True))
    assert all(on[0] and not off[0] for off, on in halves)
    pairs = [(off[1], on[1]) for off, on in halves]
    cpu_s = statistics.median(off[2] for off, _ in halves)
    added_cpu_s = statistics.median(on[2] - off[2] for off, on in halves)
    step_s, added_s = statistics.median(off for off, _ in pairs), statistics.median(on - off for off, on in pairs)
    written = (directory.path / "metrics.jsonl").read_text(encoding="utf-8").count("\n")
    return {
        "step_s": step_s,
        "added_s": added_s,
        "added_share": added_s / step_s,
        "added_cpu_s": added_cpu_s,
        "added_cpu_share": added_cpu_s / cpu_s,
        "held_s": {
            "median": statistics.median(turns.held_s),
            "p99": sorted(turns.held_s)[int(0.99 * len(turns.held_s))],
        },
        "held_share": statistics.median(turns.held_s) / step_s,
        "pairs_s": pairs,
        "steps_written": written,
    }


def _config(arguments: argparse.Namespace, folder: Path, port: int, num_steps: int) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "run"),
        "model": {"path": str(ROOT / "fctune" / "assets" / "tiny_base")},
        "adapter": {"rank": 8, "alpha": 16},
        "data": {
            "sources": [{"path": "synthetic:train:600:1"}],
            "seq_len": arguments.seq_len,
            "validation_share": 0.0,
            "prepared_dir": str(folder / "prepared"),
        },
        "global_batch_size": arguments.rows,
        "micro_batch_size": 1,
        "epochs": 10_000,
        "max_steps": num_steps,
        "validation": {"every_n_steps": 0},
        "log_every_n_steps": 10,
        "telemetry": {
            "wandb": {"project": "benchmark", "mode": "offline"},
            "tensorboard": True,
            "prometheus": {"port": port, "host": "127.0.0.1"},
        },
    }


@contextmanager
def _asked(port: int) -> Iterator[None]:
    """While it lasts, the endpoint is asked every second, as by a server."""
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(1.0):
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as a,
            ):
                a.read()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    """Run the pairs; 0 where the median cost is at most 1 % of a step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=2, help="of a step")
    parser.add_argument("--steps", type=int, default=10, help="of each half of a pair")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(open(os.devnull, "w")):
        os.environ["WANDB_SILENT"] = "true"
        found = run(arguments, Path(folder))
    found |= {
        "arguments": {key: value for key, value in vars(arguments).items() if key != "out"},
        "machine": describe_machine(),
        "versions": {name: version(name) for name in ("torch", "wandb", "tensorboard", "prometheus-client")},
    }
    step_ms, added_ms, held_ms = (1000 * s for s in (found["step_s"], found["added_s"], found["held_s"]["median"]))
    print(
        f"a step {step_ms:.1f} ms; sinks add {added_ms:+.2f} ms ({found['added_share']:+.2%}, median of "
        f"{len(found['pairs_s'])} pairs), of CPU {1000 * found['added_cpu_s']:+.2f} ms; the training thread is held "
        f"{held_ms:.3f} ms ({found['held_share']:.2%})"
    )
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0 if found["added_share"] <= 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())
