"""Our models and their exports compute the same as transformers and peft."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fctune.config.sections.adapter import AdapterConfig
from fctune.models import export
from tests.models.model_samples import ALL_MODULES, draw_tokens, load_model, load_reference

# Small models of each kind: scaled and plain RoPE, tied and untied heads.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 3.1": ("llama", {}),
    "llama 3.2, tied": ("llama", {"tie_word_embeddings": True}),
    "llama 3, plain rope": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
    "qwen 2": ("qwen2", {}),
    "qwen 2.5, tied": ("qwen2", {"tie_word_embeddings": True, "rms_norm_eps": 1e-6}),
}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_equal_those_of_transformers(name: str, make_model: Callable[..., Path]) -> None:
    family, changes = MODELS[name]
    path = make_model(family, **changes)
    tokens = draw_tokens(path)
    torch.testing.assert_close(load_model(path)(tokens), load_reference(path)(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scaling", ["standard", "rslora"])
@pytest.mark.parametrize("name", ["llama 3.1", "qwen 2"])
@torch.no_grad()
def test_exports_give_the_logits_of_the_trained_model(
    name: str, scaling: str, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    from peft import PeftModel

    family, changes = MODELS[name]
    path = make_model(family, **changes)
    adapter = AdapterConfig(rank=4, alpha=8, modules=ALL_MODULES, scaling=scaling)  # type: ignore[arg-type]
    model = load_model(path, adapter)
    tokens = draw_tokens(path)
    logits = model(tokens)
    assert (logits - load_model(path)(tokens)).abs().max() > 0.01, "the adapter changes nothing"
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    export.export_merged(model, path, tmp_path / "merged", is_writer=True)
    export.export_adapter(model, adapter, str(path), path, tmp_path / "adapter", is_writer=True)

    torch.testing.assert_close(load_reference(tmp_path / "merged")(tokens).logits, logits, rtol=1e-4, atol=1e-4)
    adapted = PeftModel.from_pretrained(load_reference(path), str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(adapted(tokens).logits, logits, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_a_large_export_is_split_into_files_that_transformers_reads(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = make_model("llama")
    model = load_model(path)
    export.export_merged(model, path, tmp_path / "out", is_writer=True, max_file_bytes=100_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    tokens = draw_tokens(path)
    with torch.no_grad():
        torch.testing.assert_close(load_reference(tmp_path / "out")(tokens).logits, model(tokens), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path / "out")(tokens), model(tokens))


def test_an_export_keeps_tokenizer_and_template(make_model: Callable[..., Path], tmp_path: Path) -> None:
    path = make_model("llama")
    export.export_merged(load_model(path), path, tmp_path / "out", is_writer=True)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (path / "tokenizer.json").read_bytes()
    exported, own = (json.loads((at / "tokenizer_config.json").read_bytes()) for at in (tmp_path / "out", path))
    assert exported.pop("response_template")  # tests/calls/test_response_template.py reads answers with it
    assert exported == own
