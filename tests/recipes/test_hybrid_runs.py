"""A run on a hybrid model resumes on another number of ranks, and evaluating it while it trains changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fctune.data.synthetic import iter_cases
from tests.models.hybrid_samples import save_hybrid
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import Kind, arguments_for, run_kind_on_rank

ADAPTER = ("adapter.modules=all-linear", "adapter.rank=2", "adapter.dropout=0.1", "adapter.train_tokens=off")


def run(base: Path, output: Path, num_ranks: int, kind: Kind, *changes: str) -> dict[str, Any]:
    common = (f"model.path={base}", "precision=fp64", "lr_scheduler={name: constant}", "optimizer.lr=1e-3")
    common += ("data.packed=true", "data.seq_len=512", "data.validation_share=0", "global_batch_size=4")
    adapter = ADAPTER if kind == "lora" else ()
    argv = arguments_for(output, *common, "micro_batch_size=1", *adapter, *changes, kind=kind)
    result: dict[str, Any] = run_ranks(run_kind_on_rank, num_ranks, argv, kind)[0]
    assert result["code"] == 0, result["err"]
    return result


def read_metrics(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        pytest.param("lfm2", "lora", marks=pytest.mark.thorough),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("lfm2", "full"), ("qwen3_5_text", "lora"), ("qwen3_5_text", "full"), ("falcon_h1", "full"))
        ),
    ],
)
def test_a_run_on_two_ranks_resumes_on_one_and_four(model_type: str, kind: Kind, tmp_path: Path) -> None:
    base = save_hybrid(model_type, tmp_path / "base", with_tokenizer=True)
    cases = tmp_path / "cases.jsonl"
    cases.write_text("".join(json.dumps(case.to_json()) + "\n" for case in iter_cases(4, 77)))
    run(base, tmp_path / "whole", 1, kind, "max_steps=3")
    expected = read_metrics(tmp_path / "whole")

    evaluation = (f"eval.cases={cases}", "eval.every=1", "eval.max_share_of_time=1", "eval.max_new_tokens=8")
    run(base, tmp_path / "2", 2, kind, "max_steps=2", "parallel.mode=fsdp", *evaluation)
    assert all(line["eval_num_cases"] == 4 for line in read_metrics(tmp_path / "2"))
    for num_ranks in (1, 4):
        output = tmp_path / f"2 then {num_ranks}"
        shutil.copytree(tmp_path / "2", output, symlinks=True)
        said = run(base, output, num_ranks, kind, "max_steps=3", "parallel.mode=fsdp")["out"]
        assert "resuming from" in said
        found = read_metrics(output)
        assert [line["step"] for line in found] == [1, 2, 3]
        for ours, theirs in zip(found, expected, strict=True):
            assert ours["data_digest"] == theirs["data_digest"]
            assert (ours["loss"], ours["grad_norm"]) == pytest.approx((theirs["loss"], theirs["grad_norm"]), rel=1e-9)
        weights = [load_file(folder / "run/export/merged/model.safetensors") for folder in (output, tmp_path / "whole")]
        torch.testing.assert_close(*weights, rtol=1e-9, atol=1e-10)
