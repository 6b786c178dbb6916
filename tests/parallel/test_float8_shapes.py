"""Batches have shapes that CUDA's float8 kernels accept, in forward and in backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fctune.config.sections.adapter import AdapterConfig
from fctune.config.sections.data import DataConfig, SourceConfig
from fctune.data.loader import GlobalLoader
from fctune.data.prepared_set import prepare
from fctune.models.base_weights import load_base_
from fctune.models.causal_lm import materialize_
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model, read_architecture
from fctune.models.transformers import state_layers
from fctune.parallel.activations import use_float8_matmuls_
from fctune.training.prefetch import make_inputs
from tests.cuda_shape_rules import CudaShapeRules
from tests.models.hybrid_samples import save_hybrid
from tests.models.model_samples import load_model


def run_epoch(model: Any, prepared: Any, has_full_batches: bool) -> CudaShapeRules:
    """Run forward and backward for both ranks' batches of the last step of an epoch, under CUDA's rules."""
    loader = GlobalLoader(prepared, "train", 4, 1, has_full_batches=has_full_batches)
    device, step = torch.device("cpu"), loader.step_at(loader.steps_per_epoch)
    with CudaShapeRules() as rules:
        for rank in range(2):
            for batch in loader.micro_batches(step, rank, 2, 1):
                model(**make_inputs(batch, model.make_bounds).arguments(device)).backward()
    return rules


@pytest.mark.sample(3)
@pytest.mark.parametrize("is_packed", [False, True], ids=["unpacked", "packed"])
@pytest.mark.parametrize("has_full_batches", [False, True])
@pytest.mark.parametrize("kind", ["products", "base"])
def test_every_float8_product_of_an_epoch_end_fits_cuda(
    kind: str, has_full_batches: bool, is_packed: bool, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = make_model("llama", hidden_size=128, intermediate_size=256)
    adapter = AdapterConfig(rank=4, alpha=8, base="float8") if kind == "base" else None
    model = load_model(path, adapter, torch.bfloat16).train()
    if kind == "products":
        use_float8_matmuls_(model)
    options: dict[str, Any] = {"seq_len": 256, "overlong": "drop", "packed": is_packed, "validation_share": 0.0}
    for rows in range(20, 40):
        config = DataConfig(sources=[SourceConfig(path=f"synthetic:train:{rows}:3")], **options)
        prepared = prepare(config, path, tmp_path)
        if prepared.num_packs("train") % 4 == 1:
            break
    assert prepared.num_packs("train") % 4 == 1, "rank 1 has no pack in the last step"
    rules = run_epoch(model, prepared, has_full_batches)
    num_linears = 2 * 2 * 7  # of both ranks, blocks
    # A frozen base has no product for the weight's gradient, and none for the input of the first block's q, k and v.
    assert len(rules.shapes) == (3 * num_linears if kind == "products" else 2 * num_linears - 2 * 3)


def test_every_float8_product_of_a_hybrid_fits_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_layers, "keeps_kernels", lambda x: False)  # as on CUDA
    path = save_hybrid("lfm2", tmp_path, hidden_size=64, intermediate_size=96, block_auto_adjust_ff_dim=False)
    model = build_model(read_architecture(path), 64, PrecisionPolicy(torch.bfloat16, torch.bfloat16, True))
    use_float8_matmuls_(model)
    materialize_(model, torch.device("cpu"))
    load_base_(model, path)
    tokens, lengths = torch.randint(3, 96, (2, 64)), [[5, 17, 3, 39], [20, 20, 21, 3]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    with CudaShapeRules() as rules:
        model(tokens, positions, model.make_bounds(lengths), labels=tokens).backward()
    assert len(rules.shapes) > 3 * 12  # three products of each linear, more where conversations are computed in stacks


def test_the_rules_refuse_a_product_over_two_tokens() -> None:
    factor = torch.zeros(32, 2, dtype=torch.float8_e4m3fn)
    one = torch.ones(())
    with CudaShapeRules(), pytest.raises(RuntimeError, match="divisible by 16"):
        torch._scaled_mm(factor, factor.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
