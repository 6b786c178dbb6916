"""Cost of the metrics sinks: steps with all sinks compared with steps without any, alternating in one run.

    python -m benchmarks.sinks [--seq-len 1024] [--rows 4] [--steps 10] [--pairs 40] [--line] [--out FILE]

The tiny base is trained on one rank by the loop itself, so that what is measured of a step costs both halves of a pair
alike; all steps are of the same number of rows, in one epoch. With sinks are metrics.jsonl, the progress bar (with
``--line`` the lines of an output that is not a terminal), alerts, W&B (offline), TensorBoard and Prometheus, which a
client asks once a second. Which half of a pair comes first changes from pair to pair, so that a machine that gets
slower favours none. The cost of a step is how much longer it took, the mean of the pairs and its 95 % interval, which
counts what the sinks' threads and processes take from it; in addition, how long the training thread itself was in the
sinks' hands, and the CPU time of each other thread, with sinks and without. A step of a large model takes seconds and
the sinks as long as here, so the share is the most there is of it. Two cores or more, quiet ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.training import ROOT, describe_machine

CONVERSATION_TOKENS = 180  # fewer than a synthetic one has on average
_CLIENT = """
import sys, time, urllib.request
while True:
    time.sleep(1.0)
    try:
        urllib.request.urlopen(sys.argv[1], timeout=5).read()
    except OSError:
        pass
"""
NUM_SETTLING = 6  # untimed steps of each half: what the half before left to the sinks' threads is written by then
NUM_WARMUP = 20  # steps before the first pair: wandb starts, memory is touched


class Times(NamedTuple):
    """Seconds so far, or per step."""

    clock: float
    training_cpu: float  # of the thread that trains
    threads_cpu: float  # of all other threads of this process
    services_cpu: float  # of wandb's process

    @classmethod
    def now(cls) -> Times:
        """Return the current times; call it on the training thread."""
        own = time.thread_time()
        services = 0.0
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                services += sum(child.cpu_times()[:2]) if child.name().startswith("wandb") else 0.0
        return cls(time.perf_counter(), own, time.process_time() - own, services)

    def a_step_since(self, before: Times, num_steps: int) -> Times:
        """Return the times per step since ``before``."""
        return Times(*((after - start) / num_steps for after, start in zip(self, before, strict=True)))


class Turns:
    """Sink that forwards steps in one half of each pair of blocks, and times the steps of both.

    Args:
        sinks: Where steps go.
        block: Steps of a half that are timed, after some that are not.
        accompany: Context to run while steps are forwarded, for work that does not depend on steps.
    """

    def __init__(self, sinks: Any, block: int, accompany: Callable[[], contextlib.AbstractContextManager[Any]]):
        self._sinks, self._num_timed, self._accompany = sinks, block, accompany
        self._block = NUM_SETTLING + block
        self._stack = ExitStack()
        self._shown: Any = self._stack.enter_context(accompany())
        self.halves: list[tuple[bool, Times]] = []  # whether sinks were on, and the step's times
        self._begun: Times | None = None  # where the timed steps of this half began
        self._is_on = True
        self.held_s: list[float] = []  # of the training thread, a step that was handed on

    def write(self, metrics: dict[str, Any]) -> None:
        """Record the end of a step, forwarding it in the half with sinks."""
        since = metrics["step"] - NUM_WARMUP - 1
        pair, half = divmod(max(0, since) // self._block, 2)
        is_on = since < 0 or (pair + half) % 2 == 1
        if since >= 0 and since % self._block == 0:
            self._turn(is_on)
        elif since > 0 and since % self._block == NUM_SETTLING:
            self._begun = Times.now()
        entered = time.perf_counter()
        if is_on:
            self._sinks.write(metrics)
            self._shown.write(metrics)
            self.held_s.append(time.perf_counter() - entered)

    def close(self) -> None:
        """Close what ``accompany`` opened; the sinks belong to the caller."""
        self._stack.close()

    def _turn(self, is_on: bool) -> None:
        if self._begun is not None:
            self.halves.append((self._is_on, Times.now().a_step_since(self._begun, self._num_timed)))
        self._stack.close()
        self._is_on = is_on
        if is_on:
            self._shown = self._stack.enter_context(self._accompany())


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all pairs and return their summary."""
    import torch
    from rich.console import Console

    from fctune.base.distributed import init_distributed, shutdown_distributed
    from fctune.config.loading import parse_config
    from fctune.models.lora import apply_lora_, init_adapters_
    from fctune.runs.directory import RunDirectory
    from fctune.runs.sinks import ConsoleSink, SinkGroup
    from fctune.training.loop import build_loader, train
    from fctune.training.setup import build_base, open_sinks, prepare_data, shard_and_load_, start_state

    port = _free_port()
    num_steps = NUM_WARMUP + 2 * arguments.pairs * (NUM_SETTLING + arguments.steps) + 1  # one ends the last half
    problems: list[str] = []
    config = parse_config(_config(arguments, folder, port, num_steps), problems)
    assert config is not None, problems
    assert config.adapter is not None
    world = init_distributed()
    torch.set_num_threads(1)  # the other core is for the sinks, like a GPU host's cores
    directory = RunDirectory(config.output_dir)
    directory.start(config, 1)
    model_dir = Path(config.model.path)
    model = build_base(config, model_dir, world)
    apply_lora_(model, config.adapter)
    prepared = prepare_data(config, model_dir, None, world)
    assert prepared.num_packs("train") >= num_steps * arguments.rows, "a step at an epoch's end has fewer rows"
    gradient_sync = shard_and_load_(model, config, model_dir, world)
    init_adapters_(model, config.seed)

    @contextmanager
    def accompany() -> Iterator[ConsoleSink]:
        with open(os.devnull, "w") as nowhere, _scraped(port):
            shown = ConsoleSink(
                Console(file=nowhere, force_terminal=not arguments.line), num_steps, config.log_every_n_steps
            )
            yield shown
            shown.close()

    with open_sinks(config, directory, num_steps, world) as sinks:
        turns = Turns(sinks, arguments.steps, accompany)
        state = start_state(model, config, num_steps, gradient_sync)
        train(config, state, build_loader(config, prepared), num_steps, world, SinkGroup(turns))
        turns.close()
    shutdown_distributed()
    halves = turns.halves
    pairs = [
        (second, first) if is_on else (first, second)
        for (is_on, first), (_, second) in zip(halves[::2], halves[1::2], strict=True)
    ]
    written = (directory.path / "metrics.jsonl").read_text(encoding="utf-8").count("\n")
    return _summary(pairs, turns.held_s) | {"steps_written": written}


def _summary(pairs: list[tuple[Times, Times]], held_s: list[float]) -> dict[str, Any]:
    """Return the time that sinks add to a step, with the 95 % interval of the mean over pairs."""
    added = [with_sinks.clock - without.clock for without, with_sinks in pairs]
    step_s, added_s = statistics.mean(without.clock for without, _ in pairs), statistics.mean(added)
    margin_s = 1.96 * statistics.stdev(added) / math.sqrt(len(added))
    return {
        "step_s": step_s,
        "added_s": added_s,
        "added_interval_s": [added_s - margin_s, added_s + margin_s],
        "added_share": added_s / step_s,
        "added_interval": [(added_s - margin_s) / step_s, (added_s + margin_s) / step_s],
        "cpu_s": {
            kind: {
                name: statistics.mean(getattr(pair[index], name) for pair in pairs)
                for name in ("training_cpu", "threads_cpu", "services_cpu")
            }
            for index, kind in enumerate(("without", "with"))
        },
        "held_s": {"median": statistics.median(held_s), "p99": sorted(held_s)[int(0.99 * len(held_s))]},
        "held_share": statistics.median(held_s) / step_s,
        "pairs_s": [[without.clock, with_sinks.clock] for without, with_sinks in pairs],
    }


def _config(arguments: argparse.Namespace, folder: Path, port: int, num_steps: int) -> dict[str, Any]:
    num_conversations = math.ceil(num_steps * arguments.rows * arguments.seq_len / CONVERSATION_TOKENS)
    return {
        "output_dir": str(folder / "run"),
        "model": {"path": str(ROOT / "fctune" / "assets" / "tiny_base")},
        "adapter": {"rank": 8, "alpha": 16},
        "data": {
            "sources": [{"path": f"synthetic:train:{num_conversations}:1"}],
            "seq_len": arguments.seq_len,
            "validation_share": 0.0,
            "prepared_dir": str(folder / "prepared"),
        },
        "global_batch_size": arguments.rows,
        "micro_batch_size": 1,
        "epochs": 10_000,
        "max_steps": num_steps,
        "validation": {"every": 0},
        "log_every_n_steps": 10,
        "telemetry": {
            "wandb": {"project": "benchmark", "mode": "offline"},
            "tensorboard": True,
            "prometheus": {"port": port, "host": "127.0.0.1"},
        },
    }


@contextmanager
def _scraped(port: int) -> Iterator[None]:
    """Scrape the endpoint every second from another process while the context is open."""
    client = subprocess.Popen([sys.executable, "-c", _CLIENT, f"http://127.0.0.1:{port}/metrics"])
    try:
        yield
    finally:
        client.kill()
        client.wait()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    """Run the benchmark; exit 0 if the mean cost is at most 1 % of a step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=4, help="of a step")
    parser.add_argument("--steps", type=int, default=10, help="timed, of each half of a pair")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--line", action="store_true", help="a line every 10 steps in place of the progress bar")
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
    low, high = found["added_interval"]
    others = {kind: 1000 * (cpu["threads_cpu"] + cpu["services_cpu"]) for kind, cpu in found["cpu_s"].items()}
    print(
        f"step {step_ms:.1f} ms; sinks add {added_ms:+.2f} ms ({found['added_share']:+.2%}; "
        f"95 % interval {low:+.2%} to {high:+.2%}, {len(found['pairs_s'])} pairs); the training thread is held "
        f"{held_ms:.3f} ms ({found['held_share']:.2%}); CPU of other threads and processes {others['with']:.2f} ms a "
        f"step, without sinks {others['without']:.2f} ms"
    )
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0 if found["added_share"] <= 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())
