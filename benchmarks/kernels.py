"""Products, kernels, bytes and microseconds of a compiled step on an H100, counted without a GPU.

    python -m benchmarks.kernels [--json] [--count-only] [--only WORD] [--out benchmarks/results/kernels_DATE.json]

Products and what backward keeps are counted in one block on the meta device, in the sizes of the shipped configs;
graphs and kernels are those of torch's compiler for that block (``benchmarks.compiled_blocks``). Times are those of
``fctune.parallel.speed``, which ``fctune plan`` shows too.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.compiled_blocks import count_compiled_block
from benchmarks.training import ROOT
from fctune.config.schema import RunConfig
from fctune.models.architecture import Architecture
from fctune.models.attention import make_bounds
from fctune.models.lora import apply_lora_
from fctune.models.planned_model import find_architecture
from fctune.models.precision import PrecisionPolicy
from fctune.models.run_config import load_run_config
from fctune.models.sources import build_model
from fctune.parallel.block_memory import count_block_activations

_LORA, _FULL = "configs/llama3_1_8b_lora.yaml", "configs/llama3_1_8b_full.yaml"
_BENCH = ("adapter.rank=16", "adapter.dropout=0")
_LONG_ROWS = ("data.seq_len=8192", "activation_checkpointing.policy=block")
_TOKENS = 512  # of the counted block; everything is by token


@dataclass(frozen=True, slots=True)
class Row:
    """A run: its config, the share of supervised tokens, and the tokens that each token attends to on average."""

    name: str
    config: str
    overrides: tuple[str, ...]
    fraction: float = 0.0
    supervised: float = 0.2
    pairs: float = 143.5  # of the rows of ``benchmarks.gpu``


ROWS = (
    Row("LoRA rank 16, no dropout", _LORA, _BENCH),
    Row("LoRA rank 16, every token supervised, full rows", _LORA, _BENCH, supervised=1.0, pairs=2_048.0),
    Row("LoRA rank 16, float8 base", _LORA, (*_BENCH, "adapter.base=float8")),
    Row("LoRA as shipped (rank 64, dropout 0.1)", _LORA, ()),
    Row("LoRA as shipped, half of the blocks checkpointed", _LORA, (), fraction=0.5),
    Row("full, 8,192 tokens, all blocks checkpointed", _FULL, (*_LONG_ROWS, "precision=bf16"), 1.0),
    Row("full in float8, the same", _FULL, (*_LONG_ROWS, "precision=float8"), 1.0),
)


class Products(TorchDispatchMode):
    """Counts matrix products, and the bytes of thin ones, those with a dimension of at most 512."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operator(*args, **(kwargs or {}))
        if operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            factors = [t for t in args[-2:] if isinstance(t, torch.Tensor)]
            sizes = {size for t in (*factors, out) for size in t.shape} - {self.tokens}
            is_thin = min(sizes) <= 512
            self.counts["thin products" if is_thin else "products"] += 1
            if is_thin:
                self.counts["thin bytes"] += sum(
                    t.numel() * t.element_size() for t in (*factors, out) if self.tokens in t.shape
                )
        elif operator is torch.ops.aten.where.self:
            self.counts["dropouts"] += 1
        return out


def count_block(config: RunConfig, architecture: Architecture) -> dict[str, float]:
    """Return a block's products, forward and backward, and bytes per token: of thin ones, and kept for backward."""
    model = build_model(architecture, config.data.row_tokens, PrecisionPolicy.uniform(torch.bfloat16))
    if config.adapter is not None:
        apply_lora_(model, config.adapter)
    model.train().token_keys.set_rows(torch.empty(1, dtype=torch.int64, device="meta"), _TOKENS)
    hidden = torch.empty(1, _TOKENS, architecture.embed_dim, dtype=torch.bfloat16, device="meta", requires_grad=True)
    positions = torch.empty(1, _TOKENS, dtype=torch.int64, device="meta")
    with Products(_TOKENS) as products:
        out = next(iter(model.blocks))(hidden, mask=make_bounds([[_TOKENS]], "per_document"), input_pos=positions)
        out.sum().backward()
    counts: dict[str, float] = dict(products.counts)
    counts["thin bytes"] = counts.get("thin bytes", 0) / _TOKENS
    return counts | {"kept bytes": count_block_activations(architecture, config, 2).kept}


def estimate(row: Row, config: RunConfig, architecture: Architecture) -> dict[str, float]:
    """Return microseconds per token by kind of kernel, and tokens per second, on an H100."""
    from fctune.base.gpus import find_gpu
    from fctune.models.planned_model import shape_model
    from fctune.parallel.memory import MemoryModel
    from fctune.parallel.speed import count_flops, estimate_kernel_times

    gpu = find_gpu("h100", {})
    memory = MemoryModel(shape_model(config, architecture), config, gpu.memory_bytes, row.supervised)
    flops = count_flops(memory, row.fraction, row.supervised, row.pairs)
    tokens = config.micro_batch_packs * config.data.row_tokens
    times = estimate_kernel_times(memory, gpu, row.fraction, flops, tokens)
    return {name: round(value, 1) for name, value in (asdict(times) | {"total": times.total}).items()} | {
        "tokens_per_s": round(times.tokens_per_s)
    }


def make_table() -> str:
    """Return the table of estimated microseconds per token by kind of kernel."""
    kinds = ("products", "recomputed", "adapters", "fused", "attention", "head", "other")
    lines = [f"| | {' | '.join(kinds)} | tokens/s |", "|---" * (len(kinds) + 2) + "|"]
    for row in ROWS:
        config = load_run_config(ROOT / row.config, ["compile=true", *row.overrides])
        found = estimate(row, config, find_architecture(config.model.path, None, config.model.source)[0])
        cells = [f"{found[kind]:.1f}" if found[kind] else "-" for kind in kinds]
        lines.append(f"| {row.name} | {' | '.join(cells)} | {found['tokens_per_s']:,} |")
    return "\n".join(lines)


def main() -> None:
    """Print the counts and times of all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON line a row")
    parser.add_argument("--count-only", action="store_true", help="no times")
    parser.add_argument("--out", type=Path, help="file for the counts and times of all rows")
    parser.add_argument("--only", default="", metavar="WORD", help="rows whose name has it")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    for row in ROWS:
        if arguments.only not in row.name:
            continue
        config = load_run_config(row.config, ["compile=true", *row.overrides])
        architecture = find_architecture(config.model.path, None, config.model.source)[0]
        found: dict[str, Any] = {"row": row.name, "block": count_block(config, architecture)}
        if row.fraction in (0, 1) and config.precision != "float8":  # others have blocks of these, or are not traced
            checkpointing = replace(config.activation_checkpointing, fraction=row.fraction)
            tried = replace(config, activation_checkpointing=checkpointing)
            found["compiled"] = count_compiled_block(tried, architecture, _TOKENS)
        if not arguments.count_only:
            found["us_per_token"] = estimate(row, config, architecture)
        print(
            json.dumps(found)
            if arguments.json
            else f"{row.name}\n  {found['block']}\n  {found.get('compiled', '')}\n  {found.get('us_per_token', '')}"
        )
        results.append(found)
    if arguments.out:
        versions = {"torch": torch.__version__}
        text = json.dumps({"date": f"{datetime.date.today()}", "versions": versions, "rows": results}, indent=1)
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
