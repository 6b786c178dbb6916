"""Planned peak memory compared with torch's memory tracker, which runs this project's step on fake tensors.

Small shapes by default; with ``-m slow`` models of 1, 8 and 70 billion parameters, 10 to 90 seconds each. Neither the
formulas nor their constants were fitted to them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planner import CASES, Case, compare
from fctune.apps.plan.memory_timeline import Setting

LORA = {"adapter": {"rank": 8}, "precision": "bf16"}
FULL = {"precision": "bf16_mixed"}


@pytest.mark.parametrize(
    ("raw", "setting"),
    [
        (FULL, Setting("fsdp", 1, 4, 0.5, 2)),
        (FULL, Setting("hsdp", 2, 2, 1.0, 1, 2)),
        (LORA, Setting("fsdp", 1, 4, 1.0, 2)),
        (LORA, Setting("none", 1, 1, 0.0, 2)),
        pytest.param(
            {"adapter": {"rank": 8, "base": "nf4"}, "precision": "bf16"},
            Setting("none", 1, 1, 1.0, 2),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_the_planned_peak_of_a_small_model_is_within_a_twentieth_of_the_trackers(
    raw: dict[str, Any], setting: Setting, make_model: Callable[..., Path]
) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 4, "num_attention_heads": 8}
    model_dir = make_model("llama", **sizes, max_position_embeddings=4096, vocab_size=2048)
    assert compare(Case(str(model_dir), setting, raw))["error"] == pytest.approx(0, abs=0.05)


SIZES = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": False},
    "gemma3_text": {"sliding_window": 64, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("raw", "setting"),
    [
        (FULL, Setting("fsdp", 1, 4, 0.5, 2)),
        (LORA, Setting("none", 1, 1, 0.0, 2)),
        (LORA, Setting("fsdp", 1, 4, 1.0, 2)),
    ],
    ids=str,
)
def test_the_planned_peak_of_a_model_from_transformers_is_within_a_tenth_of_the_trackers(
    raw: dict[str, Any], setting: Setting, family: str, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(family, **SIZES | FAMILIES[family]).save_pretrained(tmp_path)
    assert compare(Case(str(tmp_path), setting, raw))["error"] == pytest.approx(0, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_planned_peak_is_within_a_twentieth_of_the_trackers(name: str) -> None:
    assert compare(CASES[name])["error"] == pytest.approx(0, abs=0.05)
