"""Times by kind of kernel: their counts, and an H100's measured step."""

from __future__ import annotations

import pytest

from benchmarks.kernels import ROWS, Row, count_block, estimate
from fctune.models.run_config import load_run_config
from fctune.planner.kernel_times import count_adapter_bytes
from fctune.planner.memory import MemoryModel
from fctune.planner.models import find_architecture, shape_model
from tests.conftest import ROOT


def rate(name: str, *overrides: str, fraction: float | None = None) -> float:
    """Return the estimated tokens per second of a row of the benchmark."""
    row = next(row for row in ROWS if row.name == name)
    config = load_run_config(ROOT / row.config, ["compile=true", *row.overrides, *overrides])
    chosen = Row("", "", (), row.fraction if fraction is None else fraction, row.supervised, row.pairs)
    return estimate(chosen, config, find_architecture(config.model.path, None, config.model.source)[0])["tokens_per_s"]


def test_thin_products_move_the_counted_bytes() -> None:
    for overrides in (["adapter.rank=16"], ["adapter.modules=[q_proj,v_proj,down_proj]", "adapter.rank=16"]):
        config = load_run_config(ROOT / "configs/llama3_1_8b_lora.yaml", ["compile=true", *overrides])
        architecture = find_architecture(config.model.path, None, config.model.source)[0]
        counted = count_block(config, architecture)
        thin, _ = count_adapter_bytes(
            MemoryModel(shape_model(config, architecture), config, None), architecture.blocks[0], 2
        )
        # Without the inner dimension, which is 16 of thousands.
        assert thin.forward + thin.backward == pytest.approx(counted["thin bytes"], rel=0.01)
        assert counted["thin products"] == (33 if overrides == ["adapter.rank=16"] else 15)


def test_an_h100s_measured_step_is_estimated_within_a_tenth() -> None:
    # LoRA of rank 16 without dropout or recomputation, 16,006 tokens/s with padding, before inputs were shared.
    assert rate("LoRA rank 16, no dropout") == pytest.approx(16_006, rel=0.1)


def test_recomputation_dropout_and_float8_change_the_estimate() -> None:
    shipped = rate("LoRA as shipped (rank 64, dropout 0.1)")
    assert rate("LoRA rank 16, no dropout") > shipped > 1.15 * rate("LoRA as shipped, half of the blocks checkpointed")
    full = rate("full, 8,192 tokens, all blocks checkpointed")
    assert rate("full, 8,192 tokens, all blocks checkpointed", fraction=0.0) > 1.2 * full
    assert 1.2 < rate("full in float8, the same") / full < 1.77
