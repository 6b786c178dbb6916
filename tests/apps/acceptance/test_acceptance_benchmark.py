"""The acceptance benchmark: parsing, comparison, and the run that it starts on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.acceptance import compare, list_overrides, read_nccl_tests
from fctune.apps.acceptance.config import load_acceptance
from tests.conftest import ROOT

# Output of all_reduce_perf: out of place, then in place.
PRINTED = """
# nThread 1 nGpus 8 minBytes 268435456 maxBytes 536870912 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
   268435456      67108864     float     sum      -1   1147.4  233.95  409.41      0   1146.9  234.05  409.59      0
   536870912     134217728     float     sum      -1   2154.1  249.23  436.15      0   2155.0  249.13  435.97      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 422.78
"""


def test_in_place_busbw_is_parsed_from_nccl_tests() -> None:
    assert read_nccl_tests(PRINTED) == {268435456: 409.59, 536870912: 435.97}


def test_sides_are_compared_round_by_round() -> None:
    # A machine twice as busy in every other round: the two sides still differ by 5 % in each round.
    theirs = [10.0, 20.0, 10.0, 20.0]
    found = compare([1.05 * rate for rate in theirs], theirs)
    assert found["difference"] == pytest.approx(0.05)
    assert found["spread"] > 0.5


@pytest.mark.parametrize("num_devices", [1, 8])
def test_the_run_on_gpus_has_a_valid_config(num_devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for is_toy in (False, True):
        _, path, *overrides = list_overrides(tmp_path, num_devices, is_toy, on_gpus=True)
        config = load_acceptance(path, overrides)
        assert config.device == "cuda"
        assert (config.nodes, config.ranks_per_node, config.gpu) == (1, num_devices, None)
        assert config.thresholds == {}
        assert "fp8" in config.compute.dtypes
        assert config.limits.total_s + config.limits.grace_s < 300
        assert {"transfer", "health", "training_node", "checkpoint"} <= set(config.required)
        assert ("links" in config.required) == (num_devices > 1)
        assert "collectives_all" not in config.required
