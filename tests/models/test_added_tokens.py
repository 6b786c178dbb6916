"""Tokens added to a base: ids, initial rows, padding, both ends of the model, and bad input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from fctune.base.errors import ConfigError
from fctune.config.loading import parse_config
from fctune.models.added_tokens import count_vocabulary, extend_base
from fctune.models.export import export_merged
from fctune.models.sources import read_architecture
from tests.models.model_samples import load_model
from tests.models.tiny_models import load_hf, save_tiny_model

NEW = ["<call>", "</call>"]
TIED = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    weights = {
        n: t
        for f in sorted(path.glob("*.safetensors"))
        if f.name != "resized.safetensors"
        for n, t in load_file(f).items()
    }
    resized = path / "resized.safetensors"
    return weights | (load_file(resized) if resized.is_file() else {})


@TIED
def test_rows_start_as_the_mean_of_their_text(make_model: Callable[..., Path], tmp_path: Path, tied: bool) -> None:
    path = make_model("llama", tie_word_embeddings=tied)
    extended = extend_base(path, NEW, tmp_path)
    tokenizer, before = (AutoTokenizer.from_pretrained(str(p)) for p in (extended, path))
    ids = tokenizer.convert_tokens_to_ids(NEW)
    assert ids == [1408, 1409]
    assert tokenizer.encode("a<call>b</call>", add_special_tokens=False).count(1408) == 1
    assert tokenizer.decode([1408, 1409], skip_special_tokens=True).replace(" ", "") == "<call></call>"
    assert read_architecture(extended).vocab_size == 1410
    weights, old = read_weights(extended), read_weights(path)
    for name in ["model.embed_tokens.weight"] + ([] if tied else ["lm_head.weight"]):
        assert torch.equal(weights[name][:1408], old[name])
        for token, text in zip(ids, NEW, strict=True):
            parts = before.encode(text, add_special_tokens=False)
            torch.testing.assert_close(weights[name][token], old[name][parts].mean(0), rtol=1e-5, atol=1e-7)


@TIED
def test_the_extended_model_computes_what_the_base_does(
    make_model: Callable[..., Path], tmp_path: Path, tied: bool
) -> None:
    path = make_model("llama", tie_word_embeddings=tied)
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        logits = load_model(extend_base(path, NEW, tmp_path))(tokens)
        assert logits.shape[-1] == 1410
        torch.testing.assert_close(logits[..., :1408], load_model(path)(tokens), rtol=1e-5, atol=1e-6)


def test_padded_rows_are_used_before_the_matrices_grow(make_model: Callable[..., Path], tmp_path: Path) -> None:
    path = make_model("llama", vocab_size=1409)
    assert read_architecture(extend_base(path, NEW[:1], tmp_path)).vocab_size == 1409
    assert read_architecture(extend_base(path, NEW, tmp_path)).vocab_size == 1410
    assert count_vocabulary(read_architecture(path), path, NEW) == 1410
    assert count_vocabulary(read_architecture(path), None, NEW) == 1411


def test_a_base_is_extended_once(make_model: Callable[..., Path], tmp_path: Path) -> None:
    first = extend_base(make_model(), NEW, tmp_path)
    written = (first / "config.json").stat().st_mtime_ns
    assert extend_base(make_model(), NEW, tmp_path) == first
    assert (first / "config.json").stat().st_mtime_ns == written
    assert extend_base(make_model(), NEW[::-1], tmp_path) != first


def test_a_token_that_exists_is_named(make_model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'<tool_call>': the tokenizer of .* already has this"):
        extend_base(make_model(), ["<call>", "<tool_call>"], tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("tokens", "words"), [(["<a>", " "], "empty token"), (["<a>", "<a>"], "'<a>' is listed twice")]
)
def test_bad_lists_are_named(make_model: Callable[..., Path], tokens: list[str], words: str, tmp_path: Path) -> None:
    problems: list[str] = []
    model = {"path": str(make_model()), "add_tokens": tokens}
    parse_config(
        {"output_dir": str(tmp_path), "model": model, "data": {"sources": [{"path": "synthetic:train:2:1"}]}}, problems
    )
    assert any("model.add_tokens" in problem and words in problem for problem in problems), problems


def test_an_index_chooses_between_versions_of_a_tensor(make_model: Callable[..., Path], tmp_path: Path) -> None:
    from fctune.models.tensor_files import read_headers

    extended = extend_base(make_model(), NEW, tmp_path)
    located = {name: header.file for name, header in read_headers(extended).items()}
    assert located["lm_head.weight"].name == "resized.safetensors"
    assert located["model.norm.weight"].name == "base-model.safetensors"
    index = json.loads((extended / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == located.keys()


@pytest.mark.parametrize(("family", "repeats_size"), [("smollm3", False), ("gemma3", False), ("gemma3", True)], ids=str)
def test_bases_of_transformers_grow_too(
    family: str, repeats_size: bool, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    tokenizer = make_model()
    vocab_size = read_architecture(tokenizer).vocab_size
    base = save_tiny_model(family, tmp_path / "base", vocab_size=vocab_size)
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, base)
    if repeats_size:  # as SmolVLM and others do
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))
    extended = extend_base(base, NEW, tmp_path)
    model, before = load_model(extended), load_model(base)
    assert model.architecture.vocab_size == vocab_size + 2
    rows = [dict(m.named_parameters())["decoder.model.embed_tokens.weight"].detach() for m in (model, before)]
    assert rows[0].shape[0] == vocab_size + 2
    assert torch.equal(rows[0][:vocab_size], rows[1])
    assert rows[0][vocab_size:].abs().sum(1).all()
    export_merged(model, extended, tmp_path / "out", is_writer=True)
    assert load_hf(tmp_path / "out").get_input_embeddings().weight.shape[0] == vocab_size + 2
