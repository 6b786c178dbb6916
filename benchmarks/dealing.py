"""Simulate how long ranks wait for the slowest one if rows are dealt by tokens, as before, and by cost.

    python -m benchmarks.dealing [--out benchmarks/results/dealing.json]

Rows are packed from conversations of random lengths, the same in every run. A row of Llama 3.1 8B's LoRA costs what
``fctune plan`` estimates; rows of 32k and more recompute their activations. Results are the slowest rank's cost divided
by the mean, averaged over the steps of an epoch: with one wait a step, as gradients are exchanged by DDP, and with one
wait for each micro-batch, as FSDP gathers weights.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fctune.config.loading import load_config
from fctune.data.loader import RowCost, deal_rows
from fctune.data.packing import pack_best_fit
from fctune.models.planned_model import find_architecture, shape_model
from fctune.parallel.memory import MemoryModel
from fctune.parallel.speed import estimate_row_cost

ROOT = Path(__file__).parents[1]
MODEL = "hf:meta-llama/Llama-3.1-8B"


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations with log-normal lengths, and the batches that they train in."""

    name: str
    seq_len: int
    log_mean: float
    log_deviation: float
    shortest: int
    conversations: int
    ranks: int
    rows_per_step: int
    micro_batch_size: int
    fraction: float  # of the blocks that are checkpointed


WORKLOADS = (
    Workload("chat", 4_096, 6.4, 0.7, 64, 100_000, 16, 128, 2, 0.0),
    Workload("traces", 32_768, 8.8, 1.1, 256, 30_000, 16, 32, 1, 1.0),
    Workload("traces", 32_768, 8.8, 1.1, 256, 30_000, 16, 64, 1, 1.0),
    Workload("long traces", 131_072, 9.5, 1.2, 512, 20_000, 16, 64, 1, 1.0),
    Workload("long traces, one row a rank", 131_072, 9.5, 1.2, 512, 20_000, 16, 16, 1, 1.0),
)


def deal_by_tokens(tokens: list[int], num_ranks: int) -> list[list[int]]:
    """Return the rows of each rank as they were dealt before: in order of tokens, in turns."""
    rows = sorted(range(len(tokens)), key=lambda row: (-tokens[row], row))
    return [rows[rank::num_ranks] for rank in range(num_ranks)]


def simulate(workload: Workload) -> dict[str, Any]:
    """Return how much longer the slowest rank takes than the mean, by way of dealing and kind of wait."""
    overrides = [f"model.path={MODEL}", f"data.seq_len={workload.seq_len}"]
    config = load_config(ROOT / "configs" / "llama3_1_8b_lora.yaml", overrides)
    architecture, _, _ = find_architecture(MODEL)
    cost = estimate_row_cost(MemoryModel(shape_model(config, architecture), config, None), workload.fraction)
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(workload.log_mean, workload.log_deviation, workload.conversations)
    lengths = np.clip(drawn.astype(np.int64), workload.shortest, workload.seq_len)
    packs = pack_best_fit(lengths, workload.seq_len)
    tokens = [int(lengths[pack].sum()) for pack in packs]
    costs = [_add_cost(lengths[pack], workload.seq_len, cost) for pack in packs]
    order = rng.permutation(len(packs))
    found: dict[str, list[float]] = {}
    for start in range(0, len(order) - workload.rows_per_step + 1, workload.rows_per_step):
        step = order[start : start + workload.rows_per_step].tolist()
        of_step = [costs[pack] for pack in step]
        ways = {
            "by tokens": deal_by_tokens([tokens[pack] for pack in step], workload.ranks),
            "by cost": deal_rows(of_step, workload.ranks),
        }
        mean = sum(of_step) / workload.ranks
        for way, shares in ways.items():
            size = workload.micro_batch_size
            found.setdefault(f"{way}, wait per step", []).append(_find_slowest(of_step, shares) / mean)
            parts = ([share[at : at + size] for share in shares] for at in range(0, len(shares[0]), size))
            waits = sum(_find_slowest(of_step, part) for part in parts)
            found.setdefault(f"{way}, wait per micro-batch", []).append(waits / mean)
    return {
        **asdict(workload),
        "packs": len(packs),
        "filled": round(sum(tokens) / len(packs) / workload.seq_len, 3),
        "cost_in_picoseconds": asdict(cost),
        "slowest_to_mean": {way: round(math.fsum(values) / len(values), 3) for way, values in found.items()},
    }


def _add_cost(lengths: np.ndarray, seq_len: int, cost: RowCost) -> int:
    documents: list[int] = [*lengths.tolist(), seq_len - int(lengths.sum())]
    return cost.position * seq_len + cost.pair * sum(length * (length + 1) // 2 for length in documents)


def _find_slowest(costs: list[int], shares: list[list[int]]) -> int:
    return max(sum(costs[row] for row in share) for share in shares)


def main() -> None:
    """Simulate all workloads, print a line each and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = []
    for workload in WORKLOADS:
        results.append(simulate(workload))
        print(workload.name, workload.seq_len, workload.rows_per_step, results[-1]["slowest_to_mean"], flush=True)
    if arguments.out:
        text = json.dumps({"date": f"{datetime.date.today()}", "model": MODEL, "workloads": results}, indent=1)
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
