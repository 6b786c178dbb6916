"""Exports of mixtures of experts, loaded by transformers and PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fctune.config.sections.adapter import AdapterConfig
from fctune.models.export import export_adapter, export_merged
from fctune.models.lora import is_adapter
from tests.models.expert_samples import draw_ids, save_base
from tests.models.model_samples import load_model

UP, DOWN = "experts.gate_up_proj", "experts.down_proj"

# Stored by [experts, out, in] or transposed, with one or both weights, and with linears and routers.
CASES = [
    ("qwen3_moe", [UP, DOWN, "q_proj", "o_proj"]),
    ("qwen3_moe", [UP]),
    ("qwen3_moe", [DOWN, "gate"]),
    ("gpt_oss", [UP, DOWN, "q_proj"]),
    ("gpt_oss", [DOWN, "router", "v_proj"]),
    ("glm4_moe", [UP, DOWN, "down_proj", "gate_proj"]),
    ("granitemoe", [DOWN, UP]),
]


def compute_logits(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=draw_ids(2, 20)).logits
    return logits


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("model_type", "modules"), CASES)
def test_peft_and_transformers_compute_what_was_trained(model_type: str, modules: list[str], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = save_base(model_type, tmp_path / "base")
    adapter = AdapterConfig(rank=3, alpha=6.0, modules=modules, dropout=0.1, scaling="rslora")
    model = load_model(base, adapter)
    with torch.no_grad():
        expected = model(draw_ids(2, 20))
    export_adapter(model, adapter, str(base), base, tmp_path / "adapter", is_writer=True)
    export_merged(model, base, tmp_path / "merged", is_writer=True)

    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(stored) == sum(is_adapter(name) for name, _ in model.named_parameters())
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert float((compute_logits(plain) - expected).abs().max()) > 1e-2
    with_adapter = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    assert stored.keys() == {name.replace(".default.", ".") for name in with_adapter.state_dict() if ".lora_" in name}
    torch.testing.assert_close(compute_logits(with_adapter), expected, rtol=0, atol=1e-4)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(compute_logits(merged), expected, rtol=0, atol=1e-4)


def test_merged_exports_have_the_tensors_of_the_base(tmp_path: Path) -> None:
    base = save_base("qwen3_moe", tmp_path / "base")
    model = load_model(base, AdapterConfig(rank=2, modules=[UP, DOWN]))
    export_merged(model, base, tmp_path / "merged", is_writer=True)
    shapes = [
        {name: tensor.shape for name, tensor in load_file(folder / "model.safetensors").items()}
        for folder in (base, tmp_path / "merged")
    ]
    assert shapes[0] == shapes[1]
    assert "model.layers.0.mlp.experts.4.down_proj.weight" in shapes[1]


def test_adapters_on_linears_alone_have_no_parameters_to_target(tmp_path: Path) -> None:
    base = save_base("qwen3_moe", tmp_path / "base")
    adapter = AdapterConfig(rank=2, modules=["q_proj"], dropout=0.25)
    export_adapter(load_model(base, adapter), adapter, str(base), base, tmp_path / "adapter", is_writer=True)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["target_modules"], config["target_parameters"], config["lora_dropout"]) == (["q_proj"], None, 0.25)
