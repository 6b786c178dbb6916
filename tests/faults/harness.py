"""Interrupts runs at a chosen phase and restarts them until they complete.

python -m tests.faults.harness --num-kills 100 --seed 1      # also: make faults N=100 SEED=1
python -m tests.faults.harness --method grpo --num-kills 20  # also: make faults METHOD=grpo N=20
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults.groups import LORA, Fault, run_group

# Phases in which ``soak`` kills a rank, about equally often.
PHASES = ("step", "update", "stage", "write", "publish", "mark", "prune", "read")


def make_shifted_recipe() -> Any:
    """Return a recipe with the data of the next step, as a cursor that is off by one after resuming would."""
    from fctune.config.schema import RunConfig
    from fctune.data.loader import GlobalLoader, GlobalStep
    from fctune.training.planned_run import PreparedRows
    from recipes.lora_fc_distributed import LoRAFunctionCallingRecipe

    class ShiftedLoader(GlobalLoader):
        def step_at(self, step: int) -> GlobalStep:
            return dataclasses.replace(super().step_at(step + 1), step=step)

    class ShiftedRecipe(LoRAFunctionCallingRecipe):
        def open_data(self) -> tuple[RunConfig, PreparedRows]:
            config, rows = super().open_data()
            return config, PreparedRows(ShiftedLoader(rows.prepared, "train", config.global_batch_size, config.seed))

    return ShiftedRecipe


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
    adapter = ("adapter.rank=2", "adapter.dropout=0.1", "adapter.modules=[q_proj,down_proj]") if config == LORA else ()
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
    parser.add_argument("--method", choices=("lora", "grpo"), default="lora", help="default: %(default)s")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.method == "grpo":
            from tests.faults.policy_soak import soak_policies

            return 1 if soak_policies(arguments.num_kills, arguments.seed, Path(folder)) else 0
        return 1 if soak(arguments.num_kills, arguments.seed, Path(folder)) else 0


if __name__ == "__main__":
    sys.exit(main())
