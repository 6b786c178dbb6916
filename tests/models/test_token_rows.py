"""Trained rows of the embedding and the head: results equal a full matrix, exports equal transformers and PEFT."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch.nn.functional import cross_entropy

from fctune.base.errors import ConfigError
from fctune.config.sections.adapter import AdapterConfig
from fctune.models.causal_lm import CausalLM
from fctune.models.export import export_adapter, export_merged
from fctune.models.token_rows import init_token_rows_, trained_token_ids
from tests.models.model_samples import ALL_MODULES, draw_tokens, load_model, load_reference

IDS = (7, 1404, 3)
TIED = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
ADAPTER = AdapterConfig(rank=4, alpha=8, modules=["q_proj", "down_proj"])


def load_with_rows(path: Path, adapter: AdapterConfig = ADAPTER, dtype: torch.dtype = torch.float64) -> CausalLM:
    """Load a model whose rows of three tokens train and differ from the base's."""
    model = load_model(path, adapter, dtype, IDS)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith("token_rows"):
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


@pytest.fixture
def tokens(make_model: Callable[..., Path]) -> torch.Tensor:
    """Random tokens, the trained ones among them."""
    drawn = draw_tokens(make_model())
    drawn[:, ::5] = torch.tensor(IDS)[torch.arange(drawn[:, ::5].numel()).view(2, -1) % 3]
    return drawn


@TIED
def test_rows_start_as_the_base(make_model: Callable[..., Path], tokens: torch.Tensor, tied: bool) -> None:
    path = make_model("llama", tie_word_embeddings=tied)
    base, model = load_model(path, dtype=torch.float64), load_model(path, None, torch.float64)
    model.requires_grad_(False)
    assert not trained_token_ids(model)
    with torch.no_grad():
        expected = base(tokens)
    rows = load_model(path, ADAPTER, torch.float64, IDS)
    for name, parameter in rows.named_parameters():
        if name.endswith("lora_b"):
            parameter.data.zero_()
    with torch.no_grad():
        torch.testing.assert_close(rows(tokens), expected, rtol=0, atol=1e-14)
    assert trained_token_ids(rows) == tuple(sorted(IDS))


MARKERS = ("<tool_call>", "</tool_call>", "<call>")


@TIED
def test_equal_rows_start_as_the_mean_of_their_texts_pieces(
    make_model: Callable[..., Path], tmp_path: Path, tied: bool
) -> None:
    path = Path(shutil.copytree(make_model("llama", tie_word_embeddings=tied), tmp_path / "base"))
    tokenizer = Tokenizer(WordLevel({"<": 0, "</": 1, "tool": 2, "_": 3, "call": 4, ">": 5, "?": 6}, unk_token="?"))
    tokenizer.pre_tokenizer = Split(Regex("</|<|>|_"), "isolated")
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    ids = [tokenizer.token_to_id(marker) for marker in MARKERS]
    assert tokenizer.encode("<tool_call>").ids == ids[:1]
    tokenizer.save(str(path / "tokenizer.json"))
    weights = load_file(path / "model.safetensors")
    matrices = ["model.embed_tokens.weight"] + ([] if tied else ["lm_head.weight"])
    for name in matrices:  # as two tokens end that no text had
        weights[name][ids[1]] = 1.01 * weights[name][ids[0]]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})

    model = load_model(path, ADAPTER, torch.float64, ids)
    rows = {name: p for name, p in model.named_parameters() if name.endswith("token_rows")}
    assert len(rows) == len(matrices)
    for matrix, started in zip(matrices, rows.values(), strict=True):
        base = weights[matrix].double()
        torch.testing.assert_close(started[0].data, base[[0, 2, 3, 4, 5]].mean(0), rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(started[1].data, base[[1, 2, 3, 4, 5]].mean(0), rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(started[2].data, base[ids[2]], rtol=0, atol=0)  # unlike any other
    init_token_rows_(model, path, separates=False)
    for matrix, started in zip(matrices, rows.values(), strict=True):
        torch.testing.assert_close(started.data, weights[matrix][ids].double(), rtol=0, atol=0)
    alone = load_model(path, ADAPTER, torch.float64, ids[:1])  # nothing to tell it apart from
    started = next(p for name, p in alone.named_parameters() if name.endswith("token_rows"))
    torch.testing.assert_close(started[0].data, weights[matrices[0]][ids[0]].double(), rtol=0, atol=0)


@TIED
def test_loss_and_gradients_equal_those_of_a_full_matrix(
    make_model: Callable[..., Path], tokens: torch.Tensor, tied: bool
) -> None:
    path = make_model("llama", tie_word_embeddings=tied)
    model = load_with_rows(path)
    labels = tokens.roll(-1, 1)
    model(tokens, labels=labels).backward()
    # The same model with both matrices trained in full, and the rows written into them.
    full = load_model(path, ADAPTER, torch.float64)
    full.load_state_dict({n: p for n, p in model.state_dict().items() if "token_rows" not in n}, strict=False)
    index = torch.tensor(sorted(IDS))
    pairs = [(full.embedding.weight, model.embedding)] + ([] if tied else [(full.head.weight, model.head)])
    for weight, rows in pairs:
        weight.data[index] = rows.token_rows.data
        weight.requires_grad_(True)
    loss = cross_entropy(full(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    for weight, rows in pairs:
        torch.testing.assert_close(rows.token_rows.grad, weight.grad[index], rtol=1e-10, atol=1e-12)
        assert rows.weight.grad is None
    others = dict(full.named_parameters())
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.testing.assert_close(parameter.grad, others[name].grad, rtol=1e-10, atol=1e-12)


def test_a_batch_without_the_tokens_has_a_gradient_of_zero(make_model: Callable[..., Path]) -> None:
    model = load_model(make_model("llama", tie_word_embeddings=False), ADAPTER, torch.float64, IDS)
    model(torch.full((1, 8), 20), labels=torch.full((1, 8), -100)).backward()
    embedding: Any = model.embedding
    assert not embedding.token_rows.grad.any()


@TIED
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_exports_equal_the_live_model(
    make_model: Callable[..., Path], tmp_path: Path, tokens: torch.Tensor, tied: bool, dora: bool
) -> None:
    from peft import PeftModel

    path = make_model("llama", tie_word_embeddings=tied)
    adapter = AdapterConfig(rank=4, alpha=8, modules=["q_proj", "down_proj"], dora=dora)
    model = load_with_rows(path, adapter, torch.float32)
    with torch.no_grad():
        expected = model(tokens)
    export_merged(model, path, tmp_path / "merged", is_writer=True)
    export_adapter(model, adapter, str(path), path, tmp_path / "adapter", is_writer=True)
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["trainable_token_indices"]
    assert written == (sorted(IDS) if tied else {"embed_tokens": sorted(IDS), "lm_head": sorted(IDS)})
    with torch.no_grad():
        merged = load_reference(tmp_path / "merged")(tokens).logits
        torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-4)
        loaded = PeftModel.from_pretrained(load_reference(path), str(tmp_path / "adapter")).eval()
        torch.testing.assert_close(loaded(tokens).logits, expected, rtol=1e-4, atol=1e-4)
        base = load_reference(path)(tokens).logits
    assert (base - expected).abs().max() > 0.01  # the rows matter


@pytest.mark.parametrize("base", ["nf4", "float8"])
def test_rows_train_on_a_quantized_base(make_model: Callable[..., Path], tokens: torch.Tensor, base: Any) -> None:
    path = make_model("llama", hidden_size=256, intermediate_size=512, num_key_value_heads=4)
    model = load_model(path, AdapterConfig(rank=4, modules=["q_proj"], base=base), torch.bfloat16, IDS)
    model(tokens, labels=tokens.roll(-1, 1)).backward()
    for module in (model.embedding, model.head):
        rows: Any = module
        assert rows.token_rows.dtype is torch.float32
        assert torch.isfinite(rows.token_rows.grad).all()
        assert rows.token_rows.grad.any()


def test_rows_of_a_head_with_an_adapter_are_rejected(make_model: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="lm_head cannot have both"):
        load_model(make_model(), AdapterConfig(modules=ALL_MODULES), torch.float32, IDS)


def test_compiled_blocks_give_the_same_loss(make_model: Callable[..., Path], tokens: torch.Tensor) -> None:
    from fctune.parallel.activations import compile_blocks_

    model = load_with_rows(make_model())
    with torch.no_grad():
        expected = model(tokens, labels=tokens.roll(-1, 1))
        compile_blocks_(model)
        torch.testing.assert_close(model(tokens, labels=tokens.roll(-1, 1)), expected, rtol=1e-10, atol=0)
