"""Planned memory traffic of eager blocks compared with the reads and writes of each operator of a real block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.planner import FusedNorm
from fctune.apps.plan.speed import BytesMoved, count_block_bytes
from fctune.models.architecture import Architecture
from fctune.models.attention import make_bounds
from fctune.models.causal_lm import materialize_
from fctune.models.lora import apply_lora_
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import read_architecture
from fctune.models.torchtune import layers
from tests.apps.plan.sample_plans import WIDE, parse_small_config

TOKENS, RANK, WIDTH = 512, 4, 2


class Counter(TorchDispatchMode):
    """Adds up the bytes that operators read and write, without products, attention, views and weight casts."""

    total = 0

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        inputs = [t for t in tree_leaves((arguments, options or {})) if isinstance(t, torch.Tensor)]
        result = operator(*arguments, **(options or {}))
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        owned = {t.untyped_storage().data_ptr() for t in inputs}
        is_view = all(t.untyped_storage().data_ptr() in owned for t in outputs)
        name = str(operator)
        is_cast = any(RANK in t.shape for t in inputs) and "_to_copy" in name
        # Once per step, whatever the number of tokens.
        is_weight = is_cast or all(TOKENS not in t.shape for t in inputs + outputs)
        if (
            not is_view
            and not is_weight
            and not any(part in name for part in ("mm.", "attend_per_document", "empty", "zeros"))
        ):
            self.total += sum(t.numel() * t.element_size() for t in inputs + outputs)
        return result


def measure_block(model_dir: Path, raw: dict[str, Any]) -> BytesMoved:
    """Measure one real block per token, without norms, for which CUDA's kernel is missing here."""
    config = parse_small_config(raw | {"model": {"path": str(model_dir)}, "precision": "bf16"})
    model = read_architecture(model_dir).build_model(2048, PrecisionPolicy.uniform(torch.bfloat16))
    if config.adapter is not None:
        apply_lora_(model, config.adapter)
    materialize_(model, torch.device("cpu"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.token_keys.set_rows(torch.zeros(1, dtype=torch.int64), TOKENS)
    hidden = torch.randn(1, TOKENS, model.architecture.embed_dim, dtype=torch.bfloat16, requires_grad=True)
    positions, bounds = torch.arange(TOKENS)[None], make_bounds(((TOKENS,),), "per_document")
    with Counter() as forward:
        out = next(iter(model.blocks))(hidden, mask=bounds, input_pos=positions)
    with Counter() as backward:
        out.backward(torch.ones_like(out))
    return BytesMoved(forward.total / TOKENS, backward.total / TOKENS)


def plan_block(a: Architecture, model_dir: Path, raw: dict[str, Any]) -> BytesMoved:
    """Return the planned traffic of kernels between products, without norms and ``addmm``, which is a product here."""
    config = parse_small_config(raw | {"model": {"path": str(model_dir)}, "precision": "bf16"})
    _, moved = count_block_bytes(a, a.largest_block, config, WIDTH)
    norms = a.embed_dim * WIDTH
    added = 3 * WIDTH * sum(one.out_dim for one in a.largest_block.linears) if config.adapter is not None else 0
    return BytesMoved(moved.forward - 4 * norms - added, moved.backward - 6 * norms)


@pytest.mark.parametrize(
    "adapter", [None, {"rank": RANK}, {"rank": RANK, "dropout": 0.1}, {"rank": RANK, "dora": True}], ids=str
)
def test_eager_blocks_move_the_planned_bytes(
    adapter: dict[str, Any] | None, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "rms_norm", lambda x, weight, eps: FusedNorm.apply(x, weight))
    raw = {} if adapter is None else {"adapter": adapter}
    model_dir = make_model("llama", **WIDE)
    real, formula = measure_block(model_dir, raw), plan_block(read_architecture(model_dir), model_dir, raw)
    assert formula.forward == pytest.approx(real.forward, rel=0.03)
    assert formula.backward == pytest.approx(real.backward, rel=0.03)


def test_compiled_blocks_move_less_than_eager_ones(make_model: Callable[..., Path]) -> None:
    model_dir = make_model("llama", **WIDE)
    a, raw = read_architecture(model_dir), {"model": {"path": str(model_dir)}, "precision": "bf16"}

    def moved(**changes: Any) -> float:
        return count_block_bytes(a, a.largest_block, parse_small_config(raw | changes), WIDTH)[1].total

    for changes in ({}, {"adapter": {"rank": 4}}, {"adapter": {"rank": 4, "dropout": 0.1, "dora": True}}):
        assert moved(compile=True, **changes) < moved(**changes)
    assert moved(compile=True) < moved(compile=True, adapter={"rank": 4})
