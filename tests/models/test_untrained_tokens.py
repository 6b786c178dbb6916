"""Detection of untrained tokens: planted rows are found, trained ones are not, and the choice follows the config."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fctune.base.errors import ConfigError
from fctune.config.sections.adapter import AdapterConfig
from fctune.models.sources import read_architecture
from fctune.models.token_choice import TokenChoice, choose_tokens
from fctune.models.untrained_tokens import MAX_DISTANCE, Candidates, find_untrained_rows

VOCAB, DIM = 4_000, 64
ALL = Candidates(frozenset(range(1408)))
ADAPTER = AdapterConfig(modules=["q_proj"])


def draw_rows(spread: float = 0.3, seed: int = 0) -> torch.Tensor:
    """Rows with a shared mean direction and log-normal norms, as in trained models, ``[vocab, d]``."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(VOCAB, DIM, generator=generator) + 0.5 * torch.randn(DIM, generator=generator)
    norms = torch.exp(spread * torch.randn(VOCAB, 1, generator=generator))
    return directions / directions.norm(dim=1, keepdim=True) * norms


@pytest.mark.parametrize("spread", [0.001, 0.05, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_trained_rows_are_not_flagged(spread: float, seed: int) -> None:
    found = find_untrained_rows(draw_rows(spread, seed), range(VOCAB), set(range(200)))
    # Beyond the outer fences lie 2.3 in 10^6 of log-normal norms.
    assert not found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planted_rows_are_found(dtype: torch.dtype) -> None:
    rows = draw_rows()
    generator = torch.Generator().manual_seed(9)
    noise = torch.randn(DIM, generator=generator)
    rows[10] = rows[3_999]  # identical
    rows[20] = rows[900] + 0.1 * rows[900].norm() * noise / noise.norm()  # nearly so
    rows[30] = 0.0
    rows[40] *= 0.05 / rows[40].norm()
    rows[50] *= 50 / rows[50].norm()
    found = find_untrained_rows(rows.to(dtype), range(100), set(range(100)))
    assert {token: equal for token, (equal, _) in found.items()} == {10: 3_999, 20: 900, 30: None, 40: None, 50: None}
    assert found[30][1] == 0
    assert found[40][1] < 0.1
    assert found[50][1] > 30


def test_rows_that_are_only_similar_are_not_equal() -> None:
    rows = draw_rows()
    noise = torch.randn(DIM, generator=torch.Generator().manual_seed(9))
    for factor, is_found in ((0.9, True), (1.3, False)):
        rows[20] = rows[900] + factor * MAX_DISTANCE * rows[900].norm() * noise / noise.norm()
        assert (20 in find_untrained_rows(rows, [20], {20})) == is_found


def test_only_added_tokens_are_compared() -> None:
    rows = draw_rows()
    rows[20] = rows[900]
    assert not find_untrained_rows(rows, [20], {21})


@pytest.fixture
def planted(make_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Copy a random model whose rows of two markers are identical in one matrix."""

    def plant(matrix: str, tied: bool = False) -> Path:
        path = tmp_path / "planted"
        shutil.copytree(make_model("llama", tie_word_embeddings=tied), path)
        weights = load_file(path / "model.safetensors")
        weights[f"{matrix}.weight"][1405] = weights[f"{matrix}.weight"][1404]
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return plant


@pytest.mark.parametrize(
    ("matrix", "tied"), [("model.embed_tokens", False), ("lm_head", False), ("model.embed_tokens", True)]
)
def test_auto_trains_both_markers_and_says_why(planted: Callable[..., Path], matrix: str, tied: bool) -> None:
    path = planted(matrix, tied)
    choice = choose_tokens(ADAPTER, path, read_architecture(path), ALL)
    assert choice.ids == (1404, 1405)
    assert "row of <tool_call> equals that of </tool_call>" in choice.note
    assert not choice.is_warning


def test_tokens_that_the_data_lacks_are_not_trained(planted: Callable[..., Path]) -> None:
    path = planted("lm_head")
    assert not choose_tokens(
        ADAPTER, path, read_architecture(path), Candidates(frozenset(range(1404)), frozenset(range(1404)))
    ).ids


def test_off_warns_with_remedies(planted: Callable[..., Path]) -> None:
    path = planted("lm_head")
    choice = choose_tokens(AdapterConfig(train_tokens="off"), path, read_architecture(path), ALL)
    assert not choice.ids
    assert choice.is_warning
    assert "adapter.train_tokens=auto" in choice.note
    assert "model.chat_template" in choice.note


def test_a_head_with_an_adapter_needs_no_rows(planted: Callable[..., Path]) -> None:
    path = planted("lm_head")
    choice = choose_tokens(AdapterConfig(modules=["lm_head"]), path, read_architecture(path), ALL)
    assert not choice.ids
    assert not choice.is_warning
    assert "the lm_head adapter trains them" in choice.note


def test_a_trained_model_needs_no_rows(make_model: Callable[..., Path]) -> None:
    path = make_model()
    assert choose_tokens(ADAPTER, path, read_architecture(path), ALL) == TokenChoice(())


def test_listed_tokens_are_found_or_named(make_model: Callable[..., Path]) -> None:
    path = make_model()
    architecture = read_architecture(path)
    listed = AdapterConfig(modules=["q_proj"], train_tokens=["</tool_call>", "<tool_call>"])
    assert choose_tokens(listed, path, architecture, Candidates()).ids == (1404, 1405)
    wrong = AdapterConfig(modules=["q_proj"], train_tokens=["<tool_cal>", "<nothing like it>"])
    with pytest.raises(ConfigError) as error:
        choose_tokens(wrong, path, architecture, Candidates())
    assert "did you mean <tool_call>?" in str(error.value)
    assert "'<nothing like it>' is not a token" in str(error.value)
    head = AdapterConfig(modules=["lm_head"], train_tokens=["<tool_call>"])
    with pytest.raises(ConfigError, match="lm_head cannot train along with its LoRA adapter"):
        choose_tokens(head, path, architecture, Candidates())


def test_weights_that_are_not_there_are_not_looked_at(make_model: Callable[..., Path], tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(make_model() / name, tmp_path / name)
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 1408
    assert not choose_tokens(ADAPTER, tmp_path, read_architecture(tmp_path), ALL).ids


def test_head_rows_of_tokens_that_are_only_read_may_be_untrained(planted: Callable[..., Path]) -> None:
    path = planted("lm_head")
    read = Candidates(frozenset(range(1404)), frozenset(range(1408)))
    assert not choose_tokens(ADAPTER, path, read_architecture(path), read).ids


def test_embedding_rows_of_tokens_that_are_only_read_train(planted: Callable[..., Path]) -> None:
    path = planted("model.embed_tokens")
    read = Candidates(frozenset(range(1404)), frozenset(range(1408)))
    assert choose_tokens(ADAPTER, path, read_architecture(path), read).ids == (1404, 1405)
