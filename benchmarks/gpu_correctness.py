"""Compare losses and gradients of a small model on the GPU with float64 on the CPU, for each attention kernel.

    python -m benchmarks.gpu_correctness

Prints one JSON object; exits 1 if a check fails. Without a GPU the same checks run on the CPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.workload import Shape, write_model
from fctune.models.attention import AttentionKernel, choose_attention_kernel
from fctune.models.base_weights import load_base_
from fctune.models.causal_lm import CausalLM, materialize_
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model, read_architecture
from fctune.parallel.activations import apply_activation_checkpointing_, compile_blocks_

# Every kernel supports a head size of 32.
SHAPE = Shape(vocab=512, layers=2, width=128, heads=4, kv_heads=2, hidden=256)
LENGTHS = ((70, 40, 18), (128,), (9, 100, 19))

# Largest relative error, ||found - true|| / ||true||, that rounding explains; float32 matmuls may be TF32.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 4e-2}


def build(model_dir: Path, dtype: torch.dtype, device: torch.device, kernel: AttentionKernel) -> CausalLM:
    """Build a model and load the directory's weights."""
    model = build_model(read_architecture(model_dir), 256, PrecisionPolicy.uniform(dtype), kernel)
    materialize_(model, device)
    load_base_(model, model_dir)
    return model


def draw_batch() -> dict[str, Tensor]:
    """Draw packed rows of several conversations; a fifth of the positions is supervised."""
    generator = torch.Generator().manual_seed(1)
    shape = (len(LENGTHS), sum(LENGTHS[0]))
    tokens = torch.randint(SHAPE.vocab, shape, generator=generator)
    is_supervised = torch.rand(shape, generator=generator) < 0.2
    labels = torch.where(is_supervised, torch.randint(SHAPE.vocab, shape, generator=generator), -100)
    positions = torch.cat([torch.cat([torch.arange(n) for n in row])[None] for row in LENGTHS])
    return {"tokens": tokens, "labels": labels, "positions": positions}


def losses_and_gradients(model: CausalLM, device: torch.device, is_packed: bool = True) -> tuple[float, Tensor]:
    """Return the summed loss and the flat gradient, with the conversations packed or one per row."""
    model.zero_grad()
    batch = {name: tensor.to(device) for name, tensor in draw_batch().items()}
    total = 0.0
    if is_packed:
        loss = model(**batch, bounds=model.make_bounds(LENGTHS).to(device))
        loss.backward()
        total = float(loss)
    else:
        for row, lengths in enumerate(LENGTHS):
            for start, stop in zip(
                [0, *torch.tensor(lengths).cumsum(0).tolist()], torch.tensor(lengths).cumsum(0), strict=False
            ):
                part = {name: tensor[row : row + 1, start:stop] for name, tensor in batch.items()}
                loss = model(tokens=part["tokens"], labels=part["labels"])
                loss.backward()
                total += loss.item()
    return total, torch.cat([p.grad.flatten().double().cpu() for p in model.parameters() if p.grad is not None])


def relative(found: Tensor, true: Tensor) -> float:
    """Return the relative error; a NaN stays NaN and fails every check."""
    return float((found - true).norm() / true.norm())


def check(model_dir: Path, device: torch.device) -> dict[str, Any]:
    """Run every check; return loss and gradient errors and the tolerance by name."""
    cpu = torch.device("cpu")
    true = losses_and_gradients(build(model_dir, torch.float64, cpu, "per_document"), cpu, is_packed=False)
    capability = torch.cuda.get_device_capability() if device.type == "cuda" else None
    results: dict[str, Any] = {}

    def compare(name: str, model: CausalLM, dtype: torch.dtype, is_packed: bool = True) -> None:
        loss, gradient = losses_and_gradients(model, device, is_packed)
        errors = [abs(loss - true[0]) / abs(true[0]), relative(gradient, true[1])]
        # The tables of rotary embeddings are float32, whose last bit differs between devices.
        tolerance = max(TOLERANCES[dtype], 0.0 if device == cpu else 1e-7)
        results[name] = {"errors": errors, "tolerance": tolerance, "ok": all(e <= tolerance for e in errors)}

    for dtype in TOLERANCES:
        kernel, _ = choose_attention_kernel(device.type, dtype, SHAPE.width // SHAPE.heads, capability)
        kind = str(dtype).removeprefix("torch.")
        compare(f"{kind} unpacked", build(model_dir, dtype, device, kernel), dtype, is_packed=False)
        compare(f"{kind} packed by {kernel}", build(model_dir, dtype, device, kernel), dtype)
        if dtype is torch.bfloat16 and device.type == "cuda":
            compare(f"{kind} packed by flex", build(model_dir, dtype, device, "flex"), dtype)
        model = build(model_dir, dtype, device, kernel)
        from fctune.config.sections.parallel import ActivationCheckpointingConfig

        apply_activation_checkpointing_(model, ActivationCheckpointingConfig(fraction=1.0, policy="op"), device.type)
        compile_blocks_(model)
        compare(f"{kind} packed by {kernel}, compiled and checkpointed", model, dtype)
    return results


def main() -> int:
    """Run the checks and print the result."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), SHAPE, has_weights=True, num_texts=200)
        results = check(Path(folder), device)
    ok = all(one["ok"] for one in results.values())
    print(json.dumps({"ok": ok, "device": str(device), "checks": results}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
