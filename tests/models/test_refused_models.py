"""Models and adapters that cannot train are refused in one sentence with a remedy, before weights are read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.model_zoo import find_entry, save_config
from fctune.base.errors import CheckpointError, ConfigError
from fctune.config.schema import AdapterConfig
from fctune.models.architecture import Architecture
from fctune.models.base_weights import check_base, load_base_
from fctune.models.causal_lm import materialize_
from fctune.models.lora import LoRALinear, apply_lora_
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model, find_model_problems, read_architecture
from tests.models.tiny_models import SIZES, TEXT_MODELS, save_tiny_model

FLOAT32 = PrecisionPolicy.uniform(torch.float32)


def write_config(folder: Path, **config: Any) -> Path:
    """Write a model directory that has no weights."""
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def check_sentences(message: str, *parts: str) -> None:
    """Check that a message is of one line, ends with its remedy, and has these parts."""
    assert all(part in message for part in parts), message
    assert "\n" not in message
    assert re.search(r"(choose|install|use|set|leave|download|did you mean|known:)", message, re.IGNORECASE), message
    assert len(message) < 500


# By claim: the config.json, and parts of the message.
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "code of its own": (
        {"model_type": "chatglm", "auto_map": {"AutoModelForCausalLM": "modeling_chatglm.ChatGLM"}},
        ("'chatglm'", "auto_map", "never run", "choose a model that transformers has"),
    ),
    "encoder-decoder": (
        {"model_type": "t5", "is_encoder_decoder": True},
        ("'t5'", "encoder-decoder", "choose a causal language model"),
    ),
    "encoder-decoder that is the text model of another": (
        {"model_type": "gemma3", "text_config": {"model_type": "t5", "is_encoder_decoder": True}},
        ("'t5'", "encoder-decoder"),
    ),
    "not in this transformers": (
        {"model_type": "qwen3_mo"},
        ("'qwen3_mo'", "transformers", "did you mean qwen3_moe", "choose another model"),
    ),
    "without an architecture": ({"hidden_size": 64}, ("model_type", "choose another model")),
    "no language model": ({"model_type": "vit"}, ("'vit'", "not a causal language model")),
    "quantised in a way that is not undone": (
        {"model_type": "qwen3", "quantization_config": {"quant_method": "awq"}},
        ("'awq'", "Use the unquantised model"),
    ),
}


@pytest.mark.parametrize("claim", REFUSED)
def test_models_that_cannot_train_are_refused_by_name(claim: str, tmp_path: Path) -> None:
    config, parts = REFUSED[claim]
    model = write_config(tmp_path, **config)
    with pytest.raises(ConfigError) as caught:
        read_architecture(model)
    check_sentences(str(caught.value), "config.json", *parts)
    (problem,) = find_model_problems(model, "all-linear", "auto")  # what a run prints first, without torch
    assert str(caught.value) in problem


def test_known_models_are_built_by_transformers_whatever_code_their_repository_names(tmp_path: Path) -> None:
    from transformers import Qwen3Config

    config = Qwen3Config(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64).to_dict()
    model = write_config(tmp_path, **config, auto_map={"AutoModelForCausalLM": "modeling.Evil"})
    built = build_model(read_architecture(model), 64, FLOAT32)
    assert type(built.decoder).__module__.startswith("transformers.models.qwen3")  # type: ignore[union-attr]


def build_tiny(model_type: str, folder: Path, adapter: AdapterConfig) -> None:
    """Build a model with adapters from its config.json alone."""
    from transformers import AutoConfig

    from tests.models import tiny_models

    sizes = tiny_models.SIZES | TEXT_MODELS[model_type]
    AutoConfig.for_model(model_type, **sizes).save_pretrained(folder)
    apply_lora_(build_model(read_architecture(folder), 64, FLOAT32), adapter)


def test_modules_that_the_model_does_not_have_are_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        build_tiny("qwen3_moe", tmp_path, AdapterConfig(rank=2, modules=["q_prj"]))
    check_sentences(str(caught.value), "no such module: q_prj", "did you mean q_proj", "known: ", "down_proj")


@pytest.mark.parametrize(
    ("model_type", "module", "reason"), [("falcon_h1", "out_proj", "PEFT"), ("jamba", "dt_proj", "past any adapter")]
)
def test_adapters_that_would_not_load_or_do_nothing_are_refused_if_named(
    model_type: str, module: str, reason: str, tmp_path: Path
) -> None:
    save_config(find_entry(model_type), tmp_path / "model")
    model = build_model(read_architecture(tmp_path / "model"), 64, FLOAT32)
    with pytest.raises(ConfigError) as caught:
        apply_lora_(model, AdapterConfig(rank=2, modules=["q_proj", module]))
    check_sentences(str(caught.value), f"{module} takes no adapter", reason, "leave it out")


@pytest.mark.parametrize("model_type", ["falcon_h1", "nemotron_h", "gemma4", "olmoe"])
def test_peft_finds_the_linears_that_all_linear_adapts_and_refuses_none(model_type: str, tmp_path: Path) -> None:
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    save_config(find_entry(model_type), tmp_path / "model")
    architecture = read_architecture(tmp_path / "model")
    model = build_model(architecture, 64, FLOAT32)
    apply_lora_(model, AdapterConfig(rank=2, modules="all-linear"))
    adapted = {name for name, module in model.named_modules() if isinstance(module, LoRALinear)}
    plain: Any = build_model(architecture, 64, FLOAT32)
    names = Architecture.peft_targets(architecture, "all-linear")
    found = LoraModel(plain.decoder, LoraConfig(r=2, target_modules=names), "default").targeted_module_names
    assert {f"decoder.{name}" for name in found} == adapted


# By claim: the model type, and parts of the message.
UNTRAINABLE: dict[str, tuple[str, tuple[str, ...]]] = {
    "random numbers while training": ("phimoe", ("random numbers", "choose another model")),
    "attention that needs a mask": ("glm_moe_dsa", ("without a mask", "choose another model")),
}


@pytest.mark.parametrize("claim", UNTRAINABLE)
def test_models_whose_layers_cannot_train_are_refused_when_they_are_built(claim: str, tmp_path: Path) -> None:
    model_type, parts = UNTRAINABLE[claim]
    save_config(find_entry(model_type), tmp_path / "model")
    architecture = read_architecture(tmp_path / "model")
    with pytest.raises(ConfigError) as caught:
        build_model(architecture, 64, FLOAT32)
    check_sentences(str(caught.value), model_type, *parts)


def test_attention_that_cannot_be_checked_without_weights_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig

    # No model that trains has such attention now; JetMoE, which is refused for its experts, has.
    monkeypatch.setattr("fctune.models.transformers.model_config.find_refusal", lambda name: None)

    for model_type, is_checked in (("qwen3", True), ("jetmoe", False)):  # JetMoE reads how many tokens an expert has
        config = AutoConfig.for_model(model_type, **SIZES | {"kv_channels": 8, "num_local_experts": 4})
        config.save_pretrained(tmp_path / model_type)
        model = build_model(read_architecture(tmp_path / model_type, "transformers"), 64, FLOAT32, "flex")
        assert (model.attention_warning is None) == is_checked
        assert model.windows is None or is_checked  # unknown windows are those of flex attention's default
        if model.attention_warning is not None:
            assert "'jetmoe'" in model.attention_warning
            assert "compare its first losses" in model.attention_warning


def refuse(*arguments: Any, **options: Any) -> NoReturn:
    raise AssertionError("weights are read")


# By claim: the model type, what is changed in its config.json, and parts of the message.
OTHER_CONFIGS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "other sizes": ("qwen3", {"hidden_size": 64}, ("embed_tokens.weight", "[96, 32]", "[96, 64]", "tensors differ")),
    "more experts": ("mixtral", {"num_local_experts": 6}, ("missing", "experts.4.", "config.json")),
    "fewer experts": ("mixtral", {"num_local_experts": 2}, ("gate.weight", "[4, 32]", "[2, 32]", "6 tensors differ")),
}


@pytest.mark.parametrize("claim", OTHER_CONFIGS)
def test_a_changed_config_is_named_as_a_cause_before_memory_is_needed(claim: str, tmp_path: Path) -> None:
    model_type, changes, parts = OTHER_CONFIGS[claim]
    file = save_tiny_model(model_type, tmp_path) / "config.json"
    config = json.loads(file.read_text())
    assert changes.keys() <= config.keys()
    file.write_text(json.dumps(config | changes))
    model = build_model(read_architecture(tmp_path), 64, FLOAT32)
    assert all(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(CheckpointError) as caught:
        check_base(model, tmp_path)
    check_sentences(str(caught.value), "Either config.json or the weights are another model's", *parts)


def test_a_config_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    file = save_tiny_model("qwen3", tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 5}))
    with pytest.raises(ConfigError) as caught:
        build_model(read_architecture(tmp_path), 64, FLOAT32)
    check_sentences(str(caught.value), "config.json", "num_hidden_layers", "download the model again")


# By claim: what is done to a checkpoint's tensors, and parts of the message.
BROKEN: dict[str, tuple[Any, tuple[str, ...]]] = {
    "missing": (lambda tensors: tensors.pop("model.layers.1.self_attn.q_proj.weight"), ("q_proj.weight", "missing")),
    "of another size": (
        lambda tensors: tensors.update({"model.norm.weight": torch.zeros(7)}),
        ("model.norm.weight", "[7]", "[32]", "compare config.json with the published one, or download the model again"),
    ),
    "of another model": (
        lambda tensors: tensors.update({"model.layers.9.self_attn.q_proj.weight": torch.zeros(2, 2)}),
        ("model.layers.9.self_attn.q_proj.weight",),
    ),
}


@pytest.mark.parametrize("claim", BROKEN)
def test_weights_that_do_not_match_are_named_before_they_are_read(claim: str, tmp_path: Path) -> None:
    change, parts = BROKEN[claim]
    folder = save_tiny_model("qwen3", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = build_model(read_architecture(folder), 64, FLOAT32)
    materialize_(model, torch.device("cpu"))
    with pytest.raises(CheckpointError) as caught:
        load_base_(model, folder, open_file=refuse)
    check_sentences(str(caught.value), *parts)
