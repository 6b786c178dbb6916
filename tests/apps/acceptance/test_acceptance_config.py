"""Acceptance configs: keys, thresholds, and the traffic and steps of the training run that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.acceptance import compare, list_overrides, read_nccl_tests
from fctune.apps.acceptance.config import AcceptanceConfig, load_acceptance
from fctune.apps.acceptance.metrics import METRICS
from fctune.apps.acceptance.training import load_run
from fctune.base.errors import ConfigError
from fctune.config.schema import RunConfig
from fctune.models.attention import choose_attention_kernel, make_bounds
from fctune.models.lora import apply_lora_
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model, read_architecture
from fctune.parallel.activations import apply_activation_checkpointing_
from tests.conftest import ROOT

FILES = sorted((ROOT / "configs").glob("acceptance_*.yaml"))


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "acceptance.yaml"
    path.write_text(yaml.safe_dump({"output_dir": "x", "device": "cpu"} | changes))
    return path


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_profile_of_the_shipped_configs_is_valid(path: Path, tmp_path: Path) -> None:
    profiles = ["full", *(yaml.safe_load(path.read_text()).get("profiles") or {})]
    for profile in profiles:
        config = load_acceptance(path, [f"profile={profile}"])
        assert config.profile == profile
        assert config.thresholds
        assert all(len(threshold.source) > 20 for threshold in config.thresholds.values())
        judged = {METRICS[name].check for name in config.thresholds}
        assert judged & set(config.required)
        if config.training is not None:
            run, model_dir = load_run(config.training, tmp_path / profile)
            assert (model_dir / "config.json").is_file()
            assert run.micro_batch_size >= 1


def test_the_quick_profile_measures_less_and_fits_in_a_minute() -> None:
    path = ROOT / "configs" / "acceptance_2x8_h100.yaml"
    full, quick = load_acceptance(path), load_acceptance(path, ["profile=quick"])
    assert set(quick.required) < set(full.required)
    assert quick.training is None
    assert quick.storage.shared_dir is None
    assert quick.limits.total_s + quick.limits.grace_s < 60
    assert full.limits.total_s + full.limits.grace_s < 600
    assert quick.thresholds == full.thresholds
    assert len(full.required) == 18
    # An upper bound from sizes and durations, without the start and process groups.
    sizes = len(quick.collectives.operations) * len(quick.collectives.sizes_mib) * 2
    assert quick.compute.sustain_s + sizes * quick.collectives.max_s < 20
    sizes = len(full.collectives.operations) * len(full.collectives.sizes_mib) * 2
    assert len(full.compute.dtypes) * full.compute.sustain_s + sizes * full.collectives.max_s < 400


def test_overrides_take_precedence_over_the_profile_and_the_profile_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, compute={"size": 32}, profiles={"small": {"compute.size": 16, "pairs.mib": None}})
    assert load_acceptance(path).compute.size == 32
    assert load_acceptance(path, ["profile=small"]).compute.size == 16
    assert load_acceptance(path, ["compute.size=64", "profile=small"]).compute.size == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compute": {"sizze": 1}}, "compute.sizze: unknown key; did you mean compute.size?"),
        ({"device": "tpu"}, "device='tpu': expected one of cuda, cpu"),
        ({"required": ["comput"]}, "required: unknown name comput; did you mean compute?"),
        (
            {"profile": "quik", "profiles": {"quick": {}}},
            "profile=quik: not defined in the file's profiles; known: full, quick",
        ),
        (
            {"thresholds": {"matmul_bf16_tflop": {"fail": 1, "source": "x"}}},
            "did you mean thresholds.matmul_bf16_tflops?",
        ),
        ({"thresholds": {"memory_gb_s": {"fail": 1}}}, "thresholds.memory_gb_s.source: missing"),
        ({"thresholds": {"memory_gb_s": {"fail": 5, "warn": 4, "source": "x"}}}, "warn=4 is worse than fail=5"),
        ({"thresholds": {"xids": {"fail": 0, "warn": 4, "source": "x"}}}, "warn=4 is worse than fail=0"),
        ({"collectives": {"judged_mib": 3}}, "collectives.judged_mib=3: not listed in collectives.sizes_mib"),
        ({"collectives": {"operations": ["gather"]}}, "collectives.operations: unknown name gather"),
        ({"storage": {"max_share_of_free": 1.5}}, "storage.max_share_of_free=1.5"),
        ({"limits": {"total_s": 0}}, "limits.total_s=0.0: expected more than 0"),
        ({"nodes": 0}, "nodes=0: expected more than 0"),
        ({"compute": {"size": 100}}, "compute.size=100: expected a multiple of 16"),
        ({"faults": [{"kind": "slow", "rank": 0}]}, "faults.0.kind='slow': expected one of"),
        ({"training": {"config": "none.yaml"}}, "training.config=none.yaml: no such file"),
    ],
)
def test_each_problem_is_reported_with_its_key(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_acceptance(write(tmp_path, **changes))
    assert message in str(error.value)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, limits={"total_s": -1}, required=["x"], nodes=-1)
    with pytest.raises(ConfigError, match="3 problems"):
        load_acceptance(path)


@pytest.mark.parametrize("text", ["a: [", "- a", "\xff"])
def test_a_file_that_is_not_a_config_is_rejected(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"x\.yaml"):
        load_acceptance(path)


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
    model = build_model(architecture, run.data.seq_len, PrecisionPolicy.uniform(torch.bfloat16), kernel)
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
    assert config.thresholds["training_node_tokens_per_s"].fail == pytest.approx(0.7 * rate, rel=0.01)
    run.adapter.dropout = 0.1
    assert limit < estimate_rate(run, model_dir) < 9 / 10 * rate


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
