"""The source of a model: torchtune where it builds the model exactly, else transformers, else a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fctune.base.errors import ConfigError
from fctune.models.sources import choose_source, find_model_problems
from tests.models.dense_samples import read_raw

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"head_dim": 32},
        {"hidden_act": "gelu"},
        {"tie_word_embeddings": True},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}},
        {"model_type": "qwen2", "use_sliding_window": True},
        {"model_type": "qwen2", "layer_types": ["sliding_attention"]},
        {"model_type": "qwen3"},
    ],
    ids=str,
)
def test_what_torchtune_would_ignore_goes_to_transformers(change: dict[str, Any]) -> None:
    assert choose_source("config.json", LLAMA) == "torchtune"
    assert choose_source("config.json", LLAMA, "transformers") == "transformers"
    assert choose_source("config.json", LLAMA | change) == "transformers"
    with pytest.raises(ConfigError):
        choose_source("config.json", LLAMA | change, "torchtune")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"model_type": "made_up", "auto_map": {"AutoModelForCausalLM": "a.B"}}, "needs the code in its own repo"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "is an encoder-decoder"),
        ({"model_type": "qwen33"}, "did you mean qwen3?"),
        ({"model_type": "vit"}, "is not a causal language model of transformers"),
        ({}, "model_type=None is not a causal language model"),
    ],
)
def test_models_that_no_source_builds_are_refused_in_a_sentence(
    raw: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_source("config.json", raw)
    assert words in str(caught.value)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert words in find_model_problems(tmp_path, "all-linear", "auto")[0]


def test_a_vision_language_model_is_known_by_its_text_model() -> None:
    raw = {"model_type": "gemma3", "text_config": read_raw("gemma3_text")}
    assert choose_source("config.json", raw) == "transformers"


def test_choosing_a_source_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(read_raw("qwen3")))
    script = (
        "import sys; from fctune.models.sources import find_model_problems; "
        f"assert find_model_problems({str(tmp_path)!r}, ['x'], 'auto') == []; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
