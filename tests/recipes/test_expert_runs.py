"""Runs on mixtures of experts: what they say and write, and that experts may be spread over ranks or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.models.expert_samples import save_base
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import CONFIGS, arguments_for, check_single_report, run_kind_on_rank

SPREAD = ("parallel.mode=fsdp", "parallel.expert=2")
ADAPTER = ("adapter.modules=all-linear", "adapter.rank=2", "adapter.train_tokens=off")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base("qwen3_moe", tmp_path_factory.mktemp("base"), with_tokenizer=True, num_experts=4)


def run(base: Path, output: Path, num_ranks: int, *changes: str) -> dict[str, Any]:
    common = (f"model.path={base}", "precision=fp64", "lr_scheduler.name=constant", "model.router_aux_loss=0.01")
    common += ("data.packed=true", "data.seq_len=512", "global_batch_size=2", "micro_batch_size=1")
    argv = arguments_for(output, *common, *ADAPTER, *changes)
    result: dict[str, Any] = run_ranks(run_kind_on_rank, num_ranks, argv, "lora")[0]
    assert result["code"] == 0, result["err"]
    return result


def read_weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "run" / "export" / "merged" / "model.safetensors")


@pytest.mark.parametrize("modules", ["all-linear", "[q_proj, experts.down_proj]"])
def test_a_policy_on_a_server_has_no_adapters_on_experts(base: Path, tmp_path: Path, modules: str) -> None:
    """vLLM would ignore them. The address is not asked before that is said."""
    words = ["--config", CONFIGS["grpo"], f"output_dir={tmp_path / 'run'}", f"model.path={base}", "data.seq_len=512"]
    words += ["grpo.engine=server", "grpo.server.url=http://127.0.0.1:9", "adapter.rank=2", "adapter.train_tokens=off"]
    words += ["grpo.cases=synthetic:train:4:1", "grpo.max_new_tokens=4", f"adapter.modules={modules}"]
    done = run_ranks(run_kind_on_rank, 1, words, "grpo")[0]
    assert done["code"] == 2, done
    assert "vLLM serves no adapters on experts" in done["err"]
    assert "adapter.modules=[q_proj, k_proj, v_proj, o_proj]" in done["err"]
    served = run_ranks(run_kind_on_rank, 1, [*words[:-1], "adapter.modules=[q_proj, k_proj, v_proj, o_proj]"], "grpo")[
        0
    ]
    assert "no server answers there" in served["err"], served
    assert "answers with the experts of the base" in served["out"] + served["err"]


def test_a_distilled_model_on_a_server_has_no_adapters_on_experts(base: Path, tmp_path: Path) -> None:
    words = ["--config", CONFIGS["lora"], f"output_dir={tmp_path / 'run'}", f"model.path={base}", "data.seq_len=512"]
    words += ["data.sources=[]", "data.packed=true", "data.validation_share=0", "optimizer.lr=1e-4", *ADAPTER]
    words += [f"distill={{teacher: {base}, cases: 'synthetic:train:4:1', max_new_tokens: 4}}"]
    words += ["distill.engine=server", "distill.server.url=http://127.0.0.1:9"]
    done = run_ranks(run_kind_on_rank, 1, words, "distill")[0]
    assert done["code"] == 2, done
    assert "distill.engine=server: this model is a mixture of experts" in done["err"]
    assert "adapter.modules=[q_proj, k_proj, v_proj, o_proj]" in done["err"]


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of four steps on one rank."""
    output = tmp_path_factory.mktemp("whole")
    return output, " ".join(run(base, output, 1, "max_steps=4")["out"].split())


def test_a_run_says_what_trains_and_which_export_to_serve(whole: tuple[Path, str]) -> None:
    output, text = whole
    assert "on experts" in text
    assert "which servers ignore: serve the merged model" in text
    lines = (output / "run" / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["router_aux_loss"] >= 2 for line in lines)  # two experts a token: balanced is 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((2, *SPREAD), (1,)),
        pytest.param((1,), (2, *SPREAD), marks=pytest.mark.slow),
        pytest.param((2, *SPREAD, "checkpoint.every=2"), (2, *SPREAD), marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_with_its_experts_spread_or_not(
    base: Path, whole: tuple[Path, str], tmp_path: Path, first: tuple[Any, ...], then: tuple[Any, ...]
) -> None:
    run(base, tmp_path, first[0], "max_steps=2", *first[1:])
    assert "resuming from" in run(base, tmp_path, then[0], "max_steps=4", *then[1:])["out"]
    expected, found = read_weights(whole[0]), read_weights(tmp_path)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-10)
    moved = "model.layers.0.mlp.experts.3.up_proj.weight"
    original = load_file(base / "model.safetensors")[moved]
    assert float((expected[moved] - original).abs().max()) > 1e-4


@pytest.mark.thorough
def test_auto_keeps_the_ranks_of_the_run_that_it_resumes_and_says_so(base: Path, tmp_path: Path) -> None:
    run(base, tmp_path, 2, "max_steps=1", *SPREAD)
    resumed = run(base, tmp_path, 2, "max_steps=2", "parallel.mode=fsdp", "parallel.expert=auto")
    assert "parallel.expert: auto is 2 ranks (as in " in " ".join((resumed["out"] + resumed["err"]).split())
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["config"]["parallel"]["expert"] == 2
    (state,) = (tmp_path / "run" / "checkpoints").glob("*2*/trainer_state.json")
    assert json.loads(state.read_text())["config"]["parallel"]["expert"] == 2


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("parallel.expert=3", "parallel.expert=3: does not divide the 2 ranks of this run"),
        ("parallel.mode=ddp", "parallel.expert=2: needs ranks that shard the other weights, but ddp shards none"),
        ("compile=true", "parallel.expert=2: blocks that exchange tokens are not compiled"),
        ("eval={every: 1}", "parallel.expert=2: ranks generate at their own pace"),
    ],
)
def test_what_cannot_combine_with_spread_experts_is_refused(
    base: Path, tmp_path: Path, override: str, words: str
) -> None:
    argv = arguments_for(tmp_path, f"model.path={base}", *ADAPTER, *SPREAD, override)
    check_single_report(argv, words)


def test_experts_of_a_dense_model_cannot_be_spread(tiny_base: Path, tmp_path: Path) -> None:
    words = "parallel.expert=2: this model has no experts that can be spread over ranks; leave it out"
    check_single_report(arguments_for(tmp_path, f"model.path={tiny_base}", *SPREAD), words)
