"""Interrupts runs at a chosen phase and restarts them until they complete.

    python -m tests.faults.harness --num-kills 100 --seed 1      # also: make faults N=100 SEED=1

Every group of ranks is forked from a server that has imported everything. A fault happens on one rank in one phase; the
other ranks are killed when one dies, as torchrun does.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from tests.ranks import be_rank, context, find_port

Kind = Literal["kill", "raise", "hang", "enospc", "term", "term_soon", "term_twice"]

LORA, FULL = "configs/tiny_lora.yaml", "configs/tiny_full.yaml"

# Phases in which ``soak`` kills a rank, about equally often.
PHASES = ("step", "update", "stage", "write", "publish", "mark", "prune", "read")


@dataclasses.dataclass(frozen=True)
class Fault:
    """Fault of a ``kind`` on ``rank``, when ``phase`` begins for the ``count``-th time in that process."""

    kind: Kind
    phase: str
    rank: int
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Ended:
    """End of a group of ranks: exit codes by rank, whether the fault happened, and the output of all ranks."""

    codes: tuple[int | None, ...]
    fired: bool
    output: str


def run_group(
    argv: list[str], world_size: int, fault: Fault | None = None, is_shifted: bool = False, grace_s: float = 0.3
) -> Ended:
    """Run a config's recipe on ranks of this machine until it completes or a rank dies.

    The other ranks are killed ``grace_s`` after a rank dies; torchrun does not notice at once either.
    """
    port = find_port()
    with tempfile.TemporaryDirectory() as folder:
        processes: list[BaseProcess] = [
            context.Process(target=_rank, args=(argv, rank, world_size, port, folder, fault, is_shifted))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        started = time.monotonic()
        while any(process.is_alive() for process in processes):
            time.sleep(0.02)
            died = [process for process in processes if not process.is_alive() and process.exitcode not in (0, 75)]
            if died or time.monotonic() - started > 180:
                for process in processes:
                    process.join(grace_s)
                    process.kill()
        codes = []
        for process in processes:
            process.join()
            codes.append(process.exitcode)
        output = "".join(Path(folder, f"{rank}.out").read_text() for rank in range(world_size))
        return Ended(tuple(codes), Path(folder, "fired").exists(), output)


def _rank(
    argv: list[str], rank: int, world_size: int, port: int, folder: str, fault: Fault | None, is_shifted: bool
) -> None:
    be_rank(rank, world_size, port)
    output = os.open(f"{folder}/{rank}.out", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import torch

    from fctune.checkpoint import fault_hooks
    from fctune.data.loader import GlobalLoader, GlobalStep
    from fctune.training.entry import run_recipe
    from recipes.full_fc_distributed import FullFunctionCallingRecipe
    from recipes.lora_fc_distributed import LoRAFunctionCallingRecipe

    class ShiftedLoader(GlobalLoader):
        """Returns the data of the next step, as a cursor that is off by one after resuming would."""

        def step_at(self, step: int) -> GlobalStep:
            return dataclasses.replace(super().step_at(step + 1), step=step)

    class ShiftedRecipe(LoRAFunctionCallingRecipe):
        def build_loader(self) -> GlobalLoader:
            return ShiftedLoader(self.prepared, "train", self.config.global_batch_size, self.config.seed)

    recipe: Any = FullFunctionCallingRecipe if FULL in argv else LoRAFunctionCallingRecipe
    recipe = ShiftedRecipe if is_shifted else recipe
    torch.set_num_threads(1)
    if fault is not None and fault.rank == rank:
        seen = Counter[str]()

        def listen(phase: str, name: str) -> None:
            seen[phase] += 1
            if phase == fault.phase and seen[phase] == fault.count:
                Path(folder, "fired").touch()
                _do(fault)

        fault_hooks.listen(listen)
    sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
    code = run_recipe(recipe, argv)
    sys.stdout.flush()
    os._exit(code)


def _do(fault: Fault) -> None:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "raise":
        raise RuntimeError("an injected fault")
    if fault.kind == "hang":
        time.sleep(1000)
    if fault.kind == "enospc":
        raise OSError(errno.ENOSPC, "No space left on device")
    if fault.kind == "term_soon":
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return
    os.kill(os.getpid(), signal.SIGTERM)
    if fault.kind == "term_twice":
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def final_weights(run: Path) -> dict[str, Any]:
    """Return the exported weights of a run."""
    from safetensors.torch import load_file

    return dict(load_file(run / "export" / "merged" / "model.safetensors"))


def differences(run: Path, reference: Path, tolerance: float) -> list[str]:
    """List differences from an uninterrupted run: samples, losses, weights and leftover files."""
    mine, theirs = read_metrics(run), read_metrics(reference)
    found = []
    if [m["step"] for m in mine] != [m["step"] for m in theirs]:
        found.append(f"steps {[m['step'] for m in mine]}")
    for one, other in zip(mine, theirs, strict=False):
        if one["data_digest"] != other["data_digest"]:
            found.append(f"step {one['step']}: different samples")
        for key in ("loss", "grad_norm", "lr"):
            if not math.isclose(one[key], other[key], rel_tol=tolerance, abs_tol=0.0):
                found.append(f"step {one['step']}: {key} {one[key]!r} and {other[key]!r}")
    weights, expected = final_weights(run), final_weights(reference)
    for name, weight in weights.items():
        gap = float((weight - expected[name]).abs().max())
        if gap > tolerance * max(1.0, float(expected[name].abs().max())):
            found.append(f"{name}: off by {gap}")
    left = [p.name for p in (run / "checkpoints").iterdir() if p.name.startswith(".")]
    if left:
        found.append(f"left behind: {left}")
    return found


def arguments_for(run: Path, model: Path, rows: Path, *overrides: str, config: str = LORA) -> list[str]:
    """Return the command line of 12 steps in float64, in which any number of ranks agrees to 1e-9."""
    adapter = ("adapter.rank=2", "adapter.dropout=0.1") if config == LORA else ()
    return [
        *("--config", config, f"output_dir={run}", f"model.path={model}", "precision=fp64"),
        *(f"data.sources.0.path={rows}", "data.seq_len=512", "data.validation_share=0", "max_steps=12", "epochs=99"),
        *("global_batch_size=4", "micro_batch_size=1", "seed=3", *adapter),
        *("checkpoint.every=2", "checkpoint.elastic_every=5", "checkpoint.keep_last=2"),
        *overrides,
    ]


def make_inputs(folder: Path) -> tuple[Path, Path]:
    """Write a model directory with random weights, and a file of rows; returns both paths."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from fctune.data.synthetic import iter_conversations
    from tests.conftest import TINY_BASE

    config = json.loads((TINY_BASE / "config.json").read_text())
    model, rows = folder / "model", folder / "rows.jsonl"
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 16}
    LlamaForCausalLM(LlamaConfig(**(config | sizes))).save_pretrained(model)
    for file in TINY_BASE.glob("tokenizer*"):
        shutil.copyfile(file, model / file.name)
    rows.write_text("".join(json.dumps(c.to_openai()) + "\n" for c in iter_conversations("train", 60, 1)))
    return model, rows


def soak(num_kills: int, seed: int, folder: Path) -> int:
    """Kill runs at random until ``num_kills`` faults have happened; returns the number of wrong runs."""
    rng = random.Random(seed)
    model, rows = make_inputs(folder)
    reference = folder / "reference"
    assert run_group(arguments_for(reference, model, rows), 1).codes == (0,)
    done = Counter[str]()
    wrong = trial = 0
    while sum(done.values()) < num_kills:
        trial += 1
        run = folder / f"run-{trial}"
        while True:
            world_size = rng.choice((1, 2, 3, 4))
            has_checkpoint = any(run.glob("checkpoints/checkpoint-*/_SUCCESS"))
            reachable = [phase for phase in PHASES if has_checkpoint or phase != "read"]
            least = min(reachable, key=lambda phase: (done[phase], rng.random()))
            fault = Fault(
                "kill", least, rng.randrange(world_size), rng.randint(1, 3 if least in ("step", "update") else 2)
            )
            if least in ("publish", "mark", "prune"):
                fault = dataclasses.replace(fault, rank=0)  # the rank that does it
            is_last = sum(done.values()) >= num_kills or rng.random() < 0.15
            ended = run_group(arguments_for(run, model, rows), world_size, None if is_last else fault)
            if ended.fired:
                done[least] += 1
                print(
                    f"kill {sum(done.values())}: run {trial}, {world_size} ranks, rank {fault.rank}, {least}",
                    flush=True,
                )
            if all(code == 0 for code in ended.codes):
                break
            if not ended.fired:
                print(f"run {trial} ended without a fault: {ended.codes}\n{ended.output[-3000:]}")
                return wrong + 1
        found = differences(run, reference, 1e-9)
        wrong += bool(found)
        resumed = [r["step"] for r in json.loads((run / "run.json").read_text()).get("resumed", [])]
        print(f"run {trial}: resumed after {resumed}; {'; '.join(found) or 'as uninterrupted'}", flush=True)
        shutil.rmtree(run)
        for moved in folder.glob(f"run-{trial}.*"):
            shutil.rmtree(moved)
    print(f"{sum(done.values())} kills in {trial} runs: {dict(done)}; {wrong} runs were wrong")
    return wrong


def main() -> int:
    """Run ``soak`` from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--num-kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return 1 if soak(arguments.num_kills, arguments.seed, Path(folder)) else 0


if __name__ == "__main__":
    sys.exit(main())
