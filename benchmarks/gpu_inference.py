"""Measure reading a model from disk to the device, and generation in this process.

    python -m benchmarks.gpu_inference --model DIR [--toy]

The directory has a config, a tokenizer and, unless an earlier run wrote them, no weights yet: random ones are written
in bfloat16 first. Its files are then in the page cache, so the disk is not measured. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from fctune.data.conversation import Conversation
from fctune.data.synthetic import iter_cases
from fctune.engines.engine import make_prompts


def write_weights(folder: Path, device: torch.device) -> int:
    """Write random weights in bfloat16, unless they are there; returns their bytes."""
    from safetensors.torch import save_file

    from fctune.models.sources import read_architecture

    file = folder / "model.safetensors"
    if not file.exists():
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            shapes = AutoModelForCausalLM.from_config(config).state_dict()
        weights = {
            name: (torch.ones if tensor.dim() == 1 else torch.randn)(tensor.shape, device=device).mul_(0.02).bfloat16()
            for name, tensor in shapes.items()
        }
        save_file({name: tensor.cpu() for name, tensor in weights.items()}, file, metadata={"format": "pt"})
    assert read_architecture(folder).vocab_size
    return file.stat().st_size


def measure_loading(folder: Path, device: torch.device) -> float:
    """Return the seconds of building the model on the device and reading its weights."""
    from fctune.models.base_weights import load_base_
    from fctune.models.causal_lm import materialize_
    from fctune.models.precision import PrecisionPolicy
    from fctune.models.sources import build_model, read_architecture

    _wait(device)
    started = time.perf_counter()
    model = build_model(read_architecture(folder), 4_096, PrecisionPolicy.uniform(torch.bfloat16))
    materialize_(model, device)
    load_base_(model, folder)
    _wait(device)
    return time.perf_counter() - started


def measure_generation(folder: Path, device: torch.device, num_prompts: int, new_tokens: int) -> dict[str, Any]:
    """Return the tokens a second of one batch of prompts, prompts read included; the first batch is a warm-up."""
    from fctune.engines.local import LocalEngine

    engine = LocalEngine(folder, batch_size=num_prompts, device=device)
    engine.model.bfloat16()
    engine.stop_ids = frozenset()  # answers of random weights have any length
    prompts = [Conversation(case.messages, case.tools, case.id) for case in iter_cases(num_prompts, 1)]
    list(engine.answer(make_prompts(prompts, 4)))
    _wait(device)
    started = time.perf_counter()
    list(engine.answer(make_prompts(prompts, new_tokens)))
    _wait(device)
    seconds = time.perf_counter() - started
    return {
        "generated_per_s": round(num_prompts * new_tokens / seconds, 1),
        "prompts": num_prompts,
        "new_tokens": new_tokens,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Measure both and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--toy", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_bytes = write_weights(arguments.model, device)
    seconds = min(measure_loading(arguments.model, device) for _ in range(2))
    found = {"ok": True, "load_s": round(seconds, 2), "load_gb_per_s": round(num_bytes / seconds / 1e9, 2)}
    size = (2, 4) if arguments.toy else (64, 128)
    print(json.dumps(found | measure_generation(arguments.model, device, *size)))


if __name__ == "__main__":
    main()
