"""The recipe of preference pairs as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import run_ranks
from tests.recipes.recipe_runs import CONFIGS, Kind, check_single_reports, run_kind_on_rank

SMALL = ("data.sources.0.path=synthetic:pairs:24:1", "data.validation_share=0.2", "global_batch_size=2", "epochs=9")


def arguments(output: Path, *overrides: str, kind: Kind = "dpo") -> list[str]:
    return ["--config", CONFIGS[kind], f"output_dir={output / 'run'}", *SMALL, "max_steps=2", *overrides]


def read_metrics(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.thorough
def test_a_run_that_is_resumed_equals_one_that_was_not(tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    options = ("lr_scheduler.name=constant", "lr_scheduler.warmup=0", "checkpoint.every=1", "validation.every=0")
    done = run_ranks(run_kind_on_rank, 1, arguments(whole, *options), "dpo")[0]
    assert done["code"] == 0, done
    assert (whole / "run" / "export" / "merged" / "model.safetensors").is_file()
    for steps in (1, 2):
        done = run_ranks(run_kind_on_rank, 1, arguments(halves, *options, f"max_steps={steps}"), "dpo")[0]
        assert done["code"] == 0, done
    one, two = (read_metrics(folder) for folder in (whole, halves))
    assert [m["loss"] for m in one] == [m["loss"] for m in two]
    assert one[0]["reward_margin"] == 0
    adapters = [load_file(f / "run" / "export" / "adapter" / "adapter_model.safetensors") for f in (whole, halves)]
    assert all(torch.equal(weight, adapters[1][name]) for name, weight in adapters[0].items())


def test_a_recipe_or_config_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    wrong: list[tuple[Kind, list[str], str]] = [
        ("lora", ["data.pairs=false"], "preference: trains on preference pairs; set data.pairs=true"),
        ("lora", ["seed=1"], "and this one is with preference. Run recipes/lora_dpo_distributed"),
        ("full", ["~adapter"], "but adapter is missing; add e.g. adapter: {rank: 16, alpha: 32}"),
        (
            "dpo",
            ["~preference", "data.pairs=false"],
            "recipes/lora_dpo_distributed is for configs with preference, and this one is with adapter",
        ),
    ]
    check_single_reports([(arguments(tmp_path, *overrides), words, kind) for kind, overrides, words in wrong])
