"""The full fine-tuning recipe as a user starts it, and errors of both recipes before the first step."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from fctune.base.distributed import World
from fctune.training import setup
from tests.conftest import ROOT
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import Kind, arguments_for, check_single_report, check_single_reports, run_kind_on_rank


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "precision",
    [
        pytest.param("fp32", marks=pytest.mark.slow),
        "bf16_mixed",
        pytest.param("bf16", marks=pytest.mark.slow),
        "float8_mixed",
    ],
)
def test_all_weights_train_and_are_exported_as_a_model(precision: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    argv = arguments_for(tmp_path, f"precision={precision}", "optimizer.lr=4e-3", kind="full")
    results = run_ranks(run_kind_on_rank, 2, argv, "full")
    assert [r["code"] for r in results] == [0, 0], results
    run = tmp_path / "run"
    assert json.loads((run / "exit.json").read_text())["reason"] == "completed"
    first, second = losses(run)
    assert second < first
    before = load_file(ROOT / "fctune" / "assets" / "tiny_base" / "model.safetensors")
    after = load_file(run / "export" / "merged" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], weight.float()) for name, weight in after.items()), "some do not train"
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    assert {weight.dtype for weight in after.values()} == {dtype}
    assert AutoModelForCausalLM.from_pretrained(run / "export" / "merged").dtype is dtype
    assert not (run / "export" / "adapter").exists()


def test_a_run_logs_its_layout_and_the_reason(tmp_path: Path) -> None:
    out = run_ranks(run_kind_on_rank, 2, arguments_for(tmp_path, "parallel.mode=auto", kind="lora"), "lora")[0]["out"]
    for words in (
        "attention: flash attention, one call per conversation",
        "layout: DDP, 2 copies (auto: the base fits in one device, so only adapter gradients are sent)",
        "estimated memory per rank: ",
    ):
        assert words in out, out


def test_metrics_account_for_time_and_tokens(tmp_path: Path) -> None:
    assert run_ranks(run_kind_on_rank, 2, arguments_for(tmp_path, "max_steps=3", kind="full"), "full")[0]["code"] == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert "compute_time_s" not in lines[0]  # each step reports the previous one
    for before, line in itertools.pairwise(lines):
        # Of the slower rank; the other one, whose step times these are, may have waited for it in the next step.
        assert 0 < line["compute_time_s"] < before["step_time_s"] + line["step_time_s"]
        assert line["compute_skew"] >= 1
        assert line["slowest_rank"] in (0, 1)
    for line in lines:
        assert line["tokens_padding"] > 0  # rows of different lengths
        assert line["tflops_per_device"] > 0
        assert line["peak_memory_gib"] > 0
        assert line["data_time_s"] >= 0


def test_an_impossible_layout_is_reported_once(tmp_path: Path) -> None:
    impossible: list[tuple[Kind, list[str], str]] = [
        ("full", ["adapter={rank: 4}"], "recipes/full_fc_distributed is for configs without adapter"),
        (
            "full",
            ["parallel.mode=hsdp", "parallel.replicate=3"],
            "parallel.replicate=3: does not divide the 2 ranks of this run; use 1 or 2.",
        ),
        ("lora", ["parallel.mode=hsdp"], "parallel.replicate: not set"),
        ("lora", ["parallel.mode=ddp", "parallel.replicate=2"], "only hsdp uses replicas"),
        ("full", ["parallel.mode=fsdp", "parallel.cpu_offload=true"], "this run is on CPU"),
        ("full", ["parallel.mode=ddp", "parallel.cpu_offload=true"], "ddp has none"),
        ("lora", ["activation_checkpointing={fraction: 1.0, offload: true}"], "this run is on CPU"),
        ("full", ["activation_checkpointing={offload: true}"], "set activation_checkpointing.fraction over 0"),
        (
            "full",
            ["activation_checkpointing={fraction: 1.5}"],
            "activation_checkpointing.fraction=1.5: expected 0 or more and at most 1",
        ),
        ("lora", ["precision=bf16_mixed"], "with adapters use bf16"),
        ("lora", ["adapter.base=nf4"], "adapter.base=nf4: the size of a linear, [64, 128], is not a multiple"),
        (
            "full",
            ["optimizer={_component_: torchao.optim._AdamW, lr: 1e-3, bf16_stochastic_round: true}"],
            "optimizer.bf16_stochastic_round: torchao does not support it for sharded weights",
        ),
        ("lora", ["adapter.base=int3"], "adapter.base='int3': expected one of bf16, nf4, float8"),
    ]
    check_single_reports(
        [(arguments_for(tmp_path, *overrides, kind=k), words, k) for k, overrides, words in impossible]
    )


def run_with_little_memory(world: World, argv: list[str], kind: Kind) -> dict[str, Any]:
    """Run a recipe on a rank that has memory for no model."""
    with patch.object(setup, "total_memory", return_value=2**20):
        return run_kind_on_rank(world, argv, kind)


def test_a_model_too_large_for_its_devices_is_reported_once(tmp_path: Path) -> None:
    argv = arguments_for(tmp_path, "parallel.mode=ddp", kind="full")
    check_single_report(argv, "a rank needs about", "full", run_with_little_memory)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def add_nan(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][3, 3] = float("nan")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def drop_weight(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_broken_weights_are_reported_once(tiny_base: Path, tmp_path: Path) -> None:
    cases: list[tuple[list[str], str, Kind]] = []
    for change, words in (
        (add_nan, "model.layers.2.mlp.up_proj.weight holds NaN or infinity"),
        (drop_weight, "1 missing: model.layers.2.mlp.up_proj.weight"),
    ):
        model = shutil.copytree(tiny_base, tmp_path / change.__name__)
        change(model)
        cases.append((arguments_for(tmp_path, f"model.path={model}", kind="full"), words, "full"))
    check_single_reports(cases)
