"""Count the kernels and bytes of a compiled layer of the families that people tune most, against Llama's.

    python -m benchmarks.kernel_families measure [--only MODEL_TYPE ...] [--out FILE]
    python -m benchmarks.kernel_families page

All families get the sizes of Llama 3.1 8B and adapters on all linears, so that they differ in their code alone;
mixtures of experts have one expert of that size for each token. Nothing is built or run: see
``benchmarks.compiled_blocks``.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.compiled_blocks import count_compiled_layer
from benchmarks.training import ROOT
from fctune.config.sections.adapter import AdapterConfig
from fctune.config.sections.model import ModelSource
from fctune.models.architecture import Architecture

RESULT = ROOT / "benchmarks" / "results" / "kernels_families_2026-11-28.json"
PAGE = ROOT / "docs" / "reference" / "kernels.md"
LIMIT = 10.0  # percent above Llama that need a reason

_SIZES = {
    "vocab_size": 1024,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
_TOKENS = 512  # of the counted layers; everything is by token
_ADAPTER = AdapterConfig(rank=16, alpha=32, dropout=0.0, modules="all-linear")


@dataclass(frozen=True, slots=True)
class Family:
    """A family: what its config sets besides the sizes, and why it differs from Llama, if it does."""

    models: str
    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    source: ModelSource = "auto"


_ROUTED = "routing, tokens sorted by expert; products read the weights of 4 experts"
FAMILIES = (
    Family("Llama 3", "llama"),
    Family("Llama 3, transformers' code", "llama", source="transformers"),
    Family("Qwen2.5, transformers' code", "qwen2", source="transformers"),
    Family("Qwen3", "qwen3", reason="norms of queries and keys"),
    Family("Mistral 7B", "mistral"),
    Family("Ministral 3", "ministral3"),
    Family("Gemma 3", "gemma3_text", reason="two more norms, and norms of queries and keys"),
    Family("Gemma 4", "gemma4_text", reason="as Gemma 3, norms of values, and two linears of per-layer inputs"),
    Family("Phi-4-mini", "phi3", {"pad_token_id": None}, "sums of fused linears are written before they are split"),
    Family("SmolLM3", "smollm3", {"pad_token_id": None}),
    Family("Granite", "granite"),
    Family("OLMo 3", "olmo3"),
    Family(
        "Qwen3-30B-A3B",
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 14_336},
        _ROUTED,
    ),
    Family("gpt-oss", "gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 1}, _ROUTED),
)


def parse_family(family: Family) -> Architecture:
    """Return the architecture of a family at the common sizes."""
    from transformers import AutoConfig

    from fctune.models.sources import parse_architecture

    config = AutoConfig.for_model(family.model_type, **(_SIZES | family.changes))
    return parse_architecture("config.json", config.to_dict(), family.source)


def measure(family: Family) -> dict[str, Any]:
    """Return the counts of a family's layer, or why it cannot be counted."""
    row: dict[str, Any] = {"models": family.models, "model_type": family.model_type, "source": family.source}
    try:
        return row | count_compiled_layer(parse_family(family), _ADAPTER, _TOKENS)
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}


def compare_with_llama(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the counts of forward and backward together, and by how many percent they exceed Llama's."""
    compared: list[dict[str, Any]] = []
    for row in rows:
        if "error" in row:
            compared.append(dict(row))
            continue
        counts = {
            key: row["forward"][key] + row["backward"][key] for key in ("kernels", "kernel bytes", "product bytes")
        }
        counts["all bytes"] = counts["kernel bytes"] + counts.pop("product bytes")
        first = compared[0] if compared else counts
        percent = {f"{key}_percent": 100 * (count / first[key] - 1) for key, count in counts.items()}
        compared.append(dict(row) | counts | percent)
    return compared


def main() -> None:
    """Measure the families, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--only", nargs="*", help="model types")
    measuring.add_argument("--out", type=Path, default=RESULT, help="result file; other rows that it has are kept")
    commands.add_parser("page")
    arguments = parser.parse_args()
    if arguments.command == "page":
        PAGE.write_text(format_page(json.loads(RESULT.read_text(encoding="utf-8"))), encoding="utf-8")
        return
    found: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {"rows": []}
    for family in FAMILIES:
        if arguments.only and family.model_type not in arguments.only:
            continue
        row = measure(family)
        print(json.dumps(row), flush=True)
        rows = [*(other for other in found["rows"] if other["models"] != family.models), row]
        order = [known.models for known in FAMILIES]
        found = {
            "date": f"{datetime.date.today()}",
            "versions": {"torch": torch.__version__},
            "target": "an H100",
            "sizes": _SIZES,
            "tokens": _TOKENS,
            "rank": _ADAPTER.rank,
            "rows": compare_with_llama(sorted(rows, key=lambda row: order.index(row["models"]))),
        }
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def format_page(result: Mapping[str, Any]) -> str:
    """Return docs/reference/kernels.md of a result."""
    sizes, reasons = result["sizes"], {family.models: family.reason for family in FAMILIES}
    lines = []
    for row in result["rows"]:
        start = f"| {row['models']} | `{row['model_type']}` |"
        if "error" in row:
            lines.append(f"{start} not counted | | | | | | {row['error']} |")
            continue
        more = {key: f"{round(row[f'{key}_percent']):+d} %" for key in ("kernels", "kernel bytes", "all bytes")}
        counts = f"{row['forward']['products']} | {row['kernels']} | {more['kernels']} | {row['kernel bytes']:,}"
        lines.append(f"{start} {counts} | {more['kernel bytes']} | {more['all bytes']} | {reasons[row['models']]} |")
    counted = [row for row in result["rows"] if "error" not in row]
    far = {
        what: ", ".join(row["models"] for row in counted if max(row[f"{key}_percent"] for key in keys) > LIMIT)
        for what, keys in (("all", ("all bytes",)), ("kernels", ("kernels", "kernel bytes")))
    }
    summary = (
        f"More than {LIMIT:.0f} % above Llama in all bytes: {far['all']}.\nIn kernels or their bytes: {far['kernels']}."
    )
    return f"""# Kernels of a layer

<!-- numbers of this page: {RESULT.relative_to(ROOT)} -->

Written by `python -m benchmarks.kernel_families` ({result["date"]}, torch {result["versions"]["torch"]}).

Kernels and bytes of a compiled layer with LoRA on all linears, as torch's compiler fuses them for
{result.get("target", "the CPU")}, counted without running them, for the families that people tune most. Each has the
sizes of Llama 3.1 8B (hidden {sizes["hidden_size"]:,}, MLP {sizes["intermediate_size"]:,},
{sizes["num_attention_heads"]} heads of {sizes["head_dim"]}, of keys {sizes["num_key_value_heads"]}), rank
{result["rank"]} and no dropout, so that families differ in their code alone.
Mixtures of experts choose one expert of that size. `fctune plan` estimates times.

- **products**: matrix products of the forward pass. Llama has a product for each linear (7), one for the A matrices of
  all linears that read the same tensor (4), and one for each B (7). Whichever code builds a family, its queries, keys
  and values share the product of their A matrices, as do gate and up; Phi has them in one linear each.
- **kernels, bytes**: of the kernels between products, forward and backward; bytes are for each token. **more** is the
  difference to Llama, and **with products** that of all bytes, including those that products read and write.

Adapters are added to the base's output by the kernel that follows: RoPE, SwiGLU or the residual sum. Accumulating their
product into that output (`addmm`) would move as many bytes in that product instead, and torch would copy the output
first. One product with W and A would save a read of the input, but its last tile would be nearly empty, and A, which
trains, would be in the frozen and sharded weight. Neither is done.

{summary}

| models | `model_type` | products | kernels | more | bytes a token | more | with products | why more |
|---|---|---|---|---|---|---|---|---|
{chr(10).join(lines)}
"""


if __name__ == "__main__":
    main()
