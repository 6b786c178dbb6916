"""The compiler's counts of a block: equally many graphs for all conversations, and the products of the model."""

from __future__ import annotations

import pytest

from benchmarks.compiled_blocks import count_compiled_block, count_compiled_layer
from fctune.config.sections.adapter import AdapterConfig
from fctune.models.run_config import load_run_config
from fctune.models.sources import read_architecture
from tests.conftest import ROOT

LINEARS = 7


@pytest.mark.slow
def test_a_compiled_block_has_the_products_of_its_linears_and_two_graphs() -> None:
    config = load_run_config(str(ROOT / "configs" / "tiny_full.yaml"), ["compile=true"])
    counts = count_compiled_block(config, read_architecture(ROOT / "fctune" / "assets" / "tiny_base"), 64)
    assert counts["products"] == 3 * LINEARS  # forward, gradient of the input and of the weight
    assert counts["graphs"] == counts["graphs after other conversations"] == 2
    assert counts["kernel bytes"] > 0 < counts["kernels"] < 3 * LINEARS


@pytest.mark.slow
def test_a_layer_with_adapters_has_a_product_for_each_b_and_one_for_the_a_of_each_input() -> None:
    architecture = read_architecture(ROOT / "fctune" / "assets" / "tiny_base")
    counts = count_compiled_layer(architecture, AdapterConfig(rank=4, alpha=8, dropout=0.0, modules="all-linear"), 64)
    inputs = 4  # of queries, keys and values; of the attention's output; of gate and up; of down
    assert counts["forward"]["products"] == LINEARS + inputs + LINEARS
    assert counts["graphs"] == 2


@pytest.mark.slow
def test_the_scale_of_adapters_adds_no_kernel_and_no_bytes() -> None:
    architecture = read_architecture(ROOT / "fctune" / "assets" / "tiny_base")
    unscaled, scaled = (
        count_compiled_layer(architecture, AdapterConfig(rank=4, alpha=a, dropout=0.0, modules="all-linear"), 64)
        for a in (4, 10)
    )
    assert scaled == unscaled
