"""Compare a model built by torchtune with the same one built by transformers: time of a training step, in pairs.

    python -m benchmarks.sources [--pairs 12] [--device cpu] [--out benchmarks/results/sources_DATE.json]

Both have the same random weights and take the same packed batch, forward and backward, one right after the other in one
process; the one that goes first changes from pair to pair. The ratio of a pair is transformers' time over torchtune's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from fctune.config.sections.adapter import AdapterConfig
from fctune.models.causal_lm import CausalLM, materialize_
from fctune.models.lora import apply_lora_, copy_full_, init_adapters_
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model, parse_architecture
from fctune.training.host_memory import reuse_freed_memory

LENGTHS = (201, 96, 133, 312, 150, 132)
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "attention_bias": False},
    "qwen2": {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0},
}
SOURCES = ("torchtune", "transformers")


def build(family: str, source: Any, has_adapter: bool, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Build a model with random weights, which are the same for both sources."""
    architecture = parse_architecture("config.json", SIZES | FAMILIES[family], source)
    model = build_model(architecture, sum(LENGTHS), PrecisionPolicy.uniform(dtype))
    if has_adapter:
        apply_lora_(model, AdapterConfig(rank=16, alpha=32))
    materialize_(model, device)
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(sum(map(ord, architecture.to_hf_name(name))))
        stored = torch.randn(parameter.shape, generator=generator) * (0.02 if parameter.dim() > 1 else 0.1)
        copy_full_(parameter.data, architecture.from_hf_layout(name, stored + (parameter.dim() == 1)))
    if has_adapter:
        init_adapters_(model, 0)
    return model.train()


def time_step(model: CausalLM, batch: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds of a forward and backward, and the loss."""
    # On a CPU, the time of this process alone, which other processes do not lengthen.
    clock = time.process_time if batch["tokens"].device.type == "cpu" else time.perf_counter
    started = clock()
    loss = model(**batch)
    loss.backward()
    value = float(loss.detach())
    seconds = clock() - started
    model.zero_grad(set_to_none=True)
    return seconds, value


def compare(family: str, has_adapter: bool, num_pairs: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Time the steps of both sources in pairs."""
    models = {source: build(family, source, has_adapter, dtype, device) for source in SOURCES}
    tokens = torch.randint(0, SIZES["vocab_size"], (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    labels = torch.where(torch.arange(sum(LENGTHS)) % 4 == 0, tokens.roll(-1, 1), -100)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    inputs = {"tokens": tokens, "labels": labels, "positions": positions}
    batch: dict[str, Any] = {name: tensor.to(device) for name, tensor in inputs.items()}
    batch["bounds"] = models["torchtune"].make_bounds([LENGTHS]).to(device)
    losses = {source: [time_step(models[source], batch)[1] for _ in range(2)][-1] for source in SOURCES}
    seconds: dict[str, list[float]] = {source: [] for source in SOURCES}
    for pair in range(num_pairs):
        for source in SOURCES if pair % 2 == 0 else reversed(SOURCES):
            seconds[source].append(time_step(models[source], batch)[0])
    ratios = [other / one for one, other in zip(*(seconds[source] for source in SOURCES), strict=True)]
    return {
        "family": family,
        "trains": "LoRA" if has_adapter else "all weights",
        "median_s": {source: statistics.median(seconds[source]) for source in SOURCES},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "losses": losses,
    }


def main() -> None:
    """Run the comparison and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12, help="pairs of steps to time")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="dtype of weights")
    parser.add_argument("--out", type=Path, help="file for the results")
    options = parser.parse_args()
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    if device.type == "cpu":
        reuse_freed_memory()  # as runs do
    rows = []
    print(f"{'family':8} {'trains':12} {'torchtune':>10} {'transformers':>13} {'ratio':>7}   losses")
    for family in FAMILIES:
        for has_adapter in (True, False):
            row = compare(family, has_adapter, options.pairs, dtype, device)
            rows.append(row)
            one, other = (row["median_s"][source] for source in SOURCES)
            losses = " ".join(f"{loss:.4f}" for loss in row["losses"].values())
            print(
                f"{family:8} {row['trains']:12} {one:9.3f}s {other:12.3f}s {row['ratio']:7.3f}   {losses}", flush=True
            )
    if options.out is not None:
        result = {
            "date": datetime.date.today().isoformat(),
            "hardware": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "dtype": options.dtype,
            "rows": rows,
        }
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
