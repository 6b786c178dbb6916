"""Runs that train token rows: what they write, and that a resumed run equals an uninterrupted one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fctune.data.chat_template import ChatTemplate
from fctune.data.synthetic import iter_conversations
from tests.models.model_samples import load_model
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import arguments_for, run_kind_on_rank, run_on_rank

CHANGES = ("adapter.modules=[q_proj,down_proj]", "precision=fp64", "lr_scheduler.name=constant")
DELTA = "token_adapter.trainable_tokens_delta"


def run(output: Path, num_ranks: int, *changes: str) -> dict[str, Any]:
    result: dict[str, Any] = run_ranks(run_on_rank, num_ranks, arguments_for(output, *CHANGES, *changes))[0]
    return result


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of four steps on two ranks."""
    output = tmp_path_factory.mktemp("whole")
    result = run(output, 2, "max_steps=4")
    assert result["code"] == 0, result["err"]
    return output / "run", result


def test_auto_names_the_tokens_and_exports_their_rows(whole: tuple[Path, dict[str, Any]], tiny_base: Path) -> None:
    folder, result = whole
    assert "these tokens look untrained in the base: <tool_call>, </tool_call>" in " ".join(result["out"].split())
    assert "serve the merged model" in " ".join(result["out"].split())
    config = json.loads((folder / "export" / "adapter" / "adapter_config.json").read_text())
    indices = config["trainable_token_indices"]
    assert {1404, 1405} <= set(indices["embed_tokens"])
    assert indices["embed_tokens"] == indices["lm_head"]
    adapter = load_file(folder / "export" / "adapter" / "adapter_model.safetensors")
    merged = load_file(folder / "export" / "merged" / "model.safetensors")
    base = load_file(tiny_base / "model.safetensors")
    ids = torch.tensor(indices["lm_head"])
    others = torch.ones(1408, dtype=torch.bool)
    others[ids] = False
    for name, prefix in (("lm_head", ""), ("embed_tokens", "model.")):
        rows, weight = adapter[f"base_model.model.{prefix}{name}.{DELTA}"], merged[f"{prefix}{name}.weight"]
        torch.testing.assert_close(weight[ids].double(), rows.double(), rtol=1e-12, atol=0)
        assert torch.equal(weight[others].double(), base[f"{prefix}{name}.weight"][others].double())
        assert (weight[ids].double() - base[f"{prefix}{name}.weight"][ids].double()).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("num_ranks", "sharded"),
    [
        pytest.param(2, "checkpoint.every=2", marks=pytest.mark.slow),
        pytest.param(1, "checkpoint.every=0", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path, num_ranks: int, sharded: str
) -> None:
    assert run(tmp_path, 2, "max_steps=2", sharded)["code"] == 0
    result = run(tmp_path, num_ranks, "max_steps=4", sharded)
    assert result["code"] == 0, result["err"]
    assert "resuming from" in result["out"]
    one, other = (
        load_file(folder / "export" / "adapter" / "adapter_model.safetensors")
        for folder in (whole[0], tmp_path / "run")
    )
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-9, atol=1e-12)


def test_other_tokens_cannot_resume(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    listed = "adapter.train_tokens=[<tool_call>]"
    assert run(tmp_path, 1, "max_steps=1", listed)["code"] == 0
    saved = tmp_path / "run" / "checkpoints"
    state = next(saved.glob("*/trainer_state.json"))
    assert json.loads(state.read_text())["trained_tokens"] == [1404]
    result = run(tmp_path, 1, "max_steps=2", "adapter.train_tokens=[</tool_call>]")
    assert result["code"] == 2
    assert "were [1404], are [1405]" in result["err"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_added_tokens_train_and_are_exported(tmp_path: Path, tiny_base: Path, kind: Any) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapter = ("adapter.modules=[q_proj,down_proj]",) if kind == "lora" else ()
    changes = (*adapter, "model.add_tokens=[<call>,</call>]", "precision=fp32")
    (result,) = run_ranks(run_kind_on_rank, 1, arguments_for(tmp_path, *changes, kind=kind), kind)
    assert result["code"] == 0, result["err"]
    merged = tmp_path / "run" / "export" / "merged"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(merged), AutoTokenizer.from_pretrained(str(merged))
    assert tokenizer.convert_tokens_to_ids(["<call>", "</call>"]) == [1408, 1409]
    assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size == 1410
    if kind == "lora":
        config = json.loads((tmp_path / "run" / "export" / "adapter" / "adapter_config.json").read_text())
        assert {1408, 1409} <= set(config["trainable_token_indices"]["lm_head"])
        base = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
        base.resize_token_embeddings(1410)
        loaded = PeftModel.from_pretrained(base, str(tmp_path / "run" / "export" / "adapter")).eval()
        tokens = torch.arange(1380, 1410)[None]
        with torch.no_grad():
            expected = model.eval()(tokens).logits
            torch.testing.assert_close(loaded(tokens).logits, expected, rtol=1e-4, atol=1e-4)


def test_added_tokens_and_an_adapter_on_the_head_are_rejected(tmp_path: Path) -> None:
    result = run_ranks(
        run_on_rank, 1, arguments_for(tmp_path, "model.add_tokens=[<call>]", "adapter.modules=[lm_head]")
    )[0]
    assert result["code"] == 2
    assert "model.add_tokens: rows of lm_head cannot train along with its LoRA adapter" in result["err"]


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "low", "high"), [("off", 0.0, 0.5), ("auto", 0.9, 1.0)])
def test_identical_markers_are_written_only_if_their_rows_train(
    tmp_path: Path, tiny_base: Path, choice: str, low: float, high: float
) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_base, base)
    weights = load_file(base / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name][1405] = weights[name][1404]
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    changes = [f"model.path={base}", "data.sources.0.path=synthetic:train:500:1", "max_steps=60", "precision=fp32"]
    changes += [f"adapter.train_tokens={choice}", "lr_scheduler.warmup=2"]
    result = run(tmp_path, 1, *changes)
    assert result["code"] == 0, result["err"]
    model = load_model(tmp_path / "run" / "export" / "merged")
    template = ChatTemplate(tiny_base)
    right, total = 0, 0
    for conversation in iter_conversations("train", 40, 99):
        for sample in template.encode(conversation):
            tokens = torch.tensor(sample.tokens[:256])
            with torch.no_grad():
                written = model(tokens[None])[0].argmax(-1)[:-1]
            is_marker = (tokens[1:] == 1404) | (tokens[1:] == 1405)
            is_marker &= torch.tensor(sample.weights[:256])[1:] > 0
            right += int((written == tokens[1:])[is_marker].sum())
            total += int(is_marker.sum())
    assert total > 20
    assert low <= right / total <= high, (choice, right, total)
