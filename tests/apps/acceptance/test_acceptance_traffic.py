"""The shipped acceptance run's training step is as fast as its own thresholds expect of a healthy H100."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fctune.apps.acceptance.config import AcceptanceConfig, load_acceptance
from fctune.apps.acceptance.training import load_run
from fctune.config.schema import RunConfig
from fctune.models.attention import choose_attention_kernel, make_bounds
from fctune.models.lora import apply_lora_
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import read_architecture
from fctune.parallel.activations import apply_activation_checkpointing_
from tests.conftest import ROOT

CONFIG = ROOT / "configs" / "acceptance_2x8_h100.yaml"
FLOPS, BYTES = 620e12, 2.8e12  # that products and memory-bound kernels reach on an H100, by the second


class Traffic(TorchDispatchMode):
    """Counts the kernels of a run without data, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.num_kernels = self.num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view and function is not torch.ops.aten.detach.default:
            self.num_kernels += 1
            tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
            self.num_bytes += sum(t.numel() * t.element_size() for t in tensors)
        return result


def estimate_rate(run: RunConfig, model_dir: Path) -> float:
    """Return tokens a second by the products and traffic of two blocks, of which one is checkpointed, on no device."""
    assert run.adapter is not None
    kernel, _ = choose_attention_kernel("cuda", torch.bfloat16, 128, (9, 0))
    architecture = read_architecture(model_dir)
    model = architecture.build_model(run.data.seq_len, PrecisionPolicy.uniform(torch.bfloat16), kernel)
    apply_lora_(model, run.adapter)
    apply_activation_checkpointing_(model, run.activation_checkpointing, "cuda")
    rows, length = run.micro_batch_size, run.data.seq_len
    hidden = torch.empty(rows, length, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    positions = torch.empty(rows, length, dtype=torch.int64, device="meta")
    model.token_keys.set_rows(positions[:, 0], length)
    bounds = make_bounds([[length]] * rows, kernel).to(torch.device("meta"))
    out = hidden
    with Traffic() as traffic, FlopCounterMode(display=False) as flops:
        for block in list(model.train().blocks)[:2]:
            out = block(out, mask=bounds, input_pos=positions)
        out.sum().backward()
    seconds = 16 * (flops.get_total_flops() / FLOPS + traffic.num_bytes / BYTES)
    return rows * length / seconds


@pytest.fixture
def config() -> AcceptanceConfig:
    return load_acceptance(CONFIG)


def test_the_uncompiled_step_is_estimated_well_above_its_threshold(config: AcceptanceConfig, tmp_path: Path) -> None:
    assert config.training is not None
    run, model_dir = load_run(config.training, tmp_path)
    assert run.adapter is not None
    assert not run.compile
    limit = config.thresholds["training_node_tokens_per_s"].warn
    assert limit is not None
    rate = estimate_rate(run, model_dir)
    assert rate > 1.2 * limit
    run.adapter.dropout = 0.1
    assert limit < estimate_rate(run, model_dir) < 9 / 10 * rate
