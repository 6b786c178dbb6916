"""Times by kind of kernel: their counts, and the rows measured on an H100."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.kernels import ROWS, Row, count_block, estimate
from benchmarks.planner import compare_speeds, read_gpu_results
from fctune.apps.plan.models import find_architecture
from fctune.apps.plan.speed import MEASURED_RANGE, count_block_bytes
from fctune.apps.plan.startup import COMPILE_S, SETUP_S
from fctune.models.run_config import load_run_config
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
        thin, _ = count_block_bytes(architecture, architecture.blocks[0], config, 2)
        # Without the inner dimension, which is 16 of thousands.
        assert thin.forward + thin.backward == pytest.approx(counted["thin bytes"], rel=0.01)
        assert counted["thin products"] == (33 if overrides == ["adapter.rank=16"] else 15)


def test_every_row_measured_on_an_h100_is_planned_within_the_stated_error() -> None:
    speeds = compare_speeds(read_gpu_results())
    assert {"lora_8b", "lora_8b_shipped", "full_8b", "lora_8b_float8"} <= speeds.keys()
    for name, (planned, measured) in speeds.items():
        assert MEASURED_RANGE[0] <= planned / measured <= MEASURED_RANGE[1], name


def test_setup_and_compilation_take_as_long_as_measured_on_an_h100() -> None:
    rows = [row for row in read_gpu_results().values() if "first_step_s" in row]
    assert len(rows) >= 6
    compiling = [row["first_step_s"] - statistics.median(row["tried"][0]["step_s"]) for row in rows]
    assert statistics.median(row["setup_s"] for row in rows) == pytest.approx(SETUP_S, abs=1)
    assert statistics.median(compiling) == pytest.approx(COMPILE_S, abs=1)


def test_recomputation_dropout_and_float8_change_the_estimate() -> None:
    shipped = rate("LoRA as shipped (rank 64, dropout 0.1)")
    assert rate("LoRA rank 16, no dropout") > shipped > 1.15 * rate("LoRA as shipped, half of the blocks checkpointed")
    full = rate("full, 8,192 tokens, all blocks checkpointed")
    assert rate("full, 8,192 tokens, all blocks checkpointed", fraction=0.0) > 1.1 * full
    assert 1.2 < rate("full in float8, the same") / full < 2
