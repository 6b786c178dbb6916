"""Buffers, scaled embeddings with trained rows, and names of modules of transformers' decoders."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from fctune.base.errors import ConfigError
from fctune.config.schema import AdapterConfig
from fctune.models.causal_lm import materialize_
from fctune.models.lora import apply_lora_
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model
from fctune.models.token_rows import TokenRows, train_tokens_
from fctune.models.transformers.architecture import parse_architecture
from fctune.models.transformers.build import HiddenStates
from tests.models.dense_samples import draw_conversations, make_model, read_raw

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0] * 8 + [1.5] * 8,
        "long_factor": [2.0] * 16,
        "original_max_position_embeddings": 64,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("rope_type", ROPES)
def test_buffers_have_transformers_values_after_memory_is_given(rope_type: str) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    rope = {"rope_type": rope_type, "rope_theta": 10000.0, **ROPES[rope_type]}
    raw = read_raw("llama", rope_parameters=rope)
    reference = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"].from_dict(raw), dtype=torch.bfloat16)
    model: Any = build_model(parse_architecture("config.json", raw), 64, PrecisionPolicy.uniform(torch.bfloat16))
    materialize_(model, torch.device("cpu"))
    expected = dict(reference.named_buffers())
    assert expected
    for name, buffer in expected.items():
        assert torch.equal(model.decoder.get_buffer(name), buffer), name


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "granite", "llama"])
def test_trained_rows_keep_what_the_family_does_to_embeddings(model_type: str) -> None:
    ids = (7, 70, 3)
    model, expected = make_model(model_type), make_model(model_type)
    (tokens,) = draw_conversations(20)
    tokens[:, ::4] = torch.tensor(ids)[torch.arange(5) % 3]
    architecture = model.architecture
    rows: Any = build_model(architecture, 64, PrecisionPolicy.uniform(torch.float64))
    apply_lora_(rows, AdapterConfig(rank=2, alpha=2))
    train_tokens_(rows, ids)
    materialize_(rows, torch.device("cpu"))
    weights = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(3)
    change = 0.1 * torch.randn(3, architecture.embed_dim, generator=generator, dtype=torch.float64)
    index = torch.tensor(sorted(ids))
    with torch.no_grad():
        for name, parameter in rows.named_parameters():
            if name.endswith("lora_b"):
                parameter.zero_()
            elif name.endswith("lora_a"):
                parameter.fill_(0.1)
            elif name.endswith("token_rows"):
                parameter.copy_(weights[name.replace("token_rows", "weight")][index] + change)
            else:
                parameter.copy_(weights[name])
        for matrix in {id(p): p for p in (expected.embedding.weight, expected.head.weight)}.values():
            matrix[index] += change
        torch.testing.assert_close(rows.eval()(tokens), expected(tokens), rtol=0, atol=1e-10)
    rows(tokens).sum().backward()
    assert isinstance(rows.embedding, TokenRows)
    assert float(rows.embedding.token_rows.grad.abs().max()) > 0


def test_norms_are_fused_where_they_equal_torchs_and_nowhere_else() -> None:
    for model_type, num_fused in (("qwen3", 13), ("gemma2", 13), ("cohere2", 0)):
        model = make_model(model_type, torch.float32)
        norms = [module for module in model.modules() if "Norm" in type(module).__name__]
        assert sum(hasattr(norm, "_offset") for norm in norms) == num_fused, model_type


def test_adapter_modules_come_from_the_model_and_are_checked_with_suggestions() -> None:
    phi = parse_architecture("config.json", read_raw("phi3"))
    assert phi.linear_names == ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    with pytest.raises(ConfigError, match=r"no such module: qkv_prj; did you mean qkv_proj\?"):
        apply_lora_(build_model(phi, 64, PrecisionPolicy.uniform(torch.float32)), AdapterConfig(modules=["qkv_prj"]))
    tied = parse_architecture("config.json", read_raw("gemma2"))
    assert "ties it to its embeddings" in tied.find_adapter_problems(["lm_head"])[0]


def test_rows_longer_than_the_positions_are_refused() -> None:
    with pytest.raises(ConfigError, match="exceeds the model's 256 positions"):
        build_model(parse_architecture("config.json", read_raw("qwen3")), 257, PrecisionPolicy.uniform(torch.float32))


@pytest.mark.thorough
def test_hidden_states_alone_have_every_field_that_causal_models_read() -> None:
    """A field that the declared output lacks would end the computation of the logits."""
    import transformers

    read: dict[str, str] = {}
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        for model in ast.parse(file.read_text("utf-8")).body:
            if isinstance(model, ast.ClassDef) and model.name.endswith("ForCausalLM"):
                read |= dict.fromkeys(list_output_fields(model), model.name)
    assert len(read) > 5
    undeclared = read.keys() - {field.name for field in dataclasses.fields(HiddenStates)}
    assert {read[name] for name in undeclared} <= {"ProphetNetForCausalLM"}, undeclared  # an encoder-decoder's


def list_output_fields(model: ast.ClassDef) -> set[str]:
    """Return the attributes of outputs that a model's forward reads."""
    forwards = [node for node in model.body if isinstance(node, ast.FunctionDef) and node.name == "forward"]
    nodes = [node for forward in forwards for node in ast.walk(forward) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id.endswith("outputs")}
