"""Acceptance configs: strict parsing, profiles and thresholds with sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fctune.apps.acceptance.config import load_acceptance
from fctune.apps.acceptance.metrics import METRICS
from fctune.apps.acceptance.training import load_run
from fctune.base.errors import ConfigError
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
