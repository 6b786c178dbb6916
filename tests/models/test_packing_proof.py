"""Packing is proven on the model that trains: leaks and attention that differs from the model's own stop the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fctune.base.errors import ConfigError
from fctune.models import packing_proof
from fctune.models.causal_lm import CausalLM, materialize_
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model
from fctune.models.transformers import attention, build
from fctune.models.transformers.architecture import parse_architecture
from fctune.parallel.activations import use_float8_matmuls_
from tests.models.dense_samples import make_model, read_raw

CPU = torch.device("cpu")
SEQ_LEN = 256

# A family whose layers get their window from the mask alone.
WINDOW_IN_MASKS: dict[str, Any] = {
    "head_dim": None,
    "use_sliding_window": True,
    "layer_types": ["sliding_attention"] * 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_models_that_keep_conversations_apart_pass_and_keep_their_mode(model_type: str) -> None:
    model = make_model(model_type).train()
    packing_proof.prove_packing(model, CPU, SEQ_LEN)
    assert model.training


def test_attention_that_ignores_the_bounds_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen3")
    attend = attention.attend
    monkeypatch.setattr(attention, "attend", lambda q, k, v, bounds, **options: attend(q, k, v, None, **options))
    with pytest.raises(ConfigError, match=r"conversations of a packed row see each other.*Set data.packed=false"):
        packing_proof.prove_packing(model, CPU, SEQ_LEN)


def test_the_scale_that_conversations_share_in_float8_products_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = make_model("qwen3", torch.bfloat16)
    model.precision = replace(model.precision, has_float8_matmuls=True)
    use_float8_matmuls_(model)
    # One channel is large, so the first conversation decides how finely the second is rounded.
    with torch.no_grad():
        for layer in model.decoder.model.layers:
            layer.mlp.up_proj.weight[0] *= 200
    assert max(packing_proof._compare(model, packing_proof._draw(model, CPU, SEQ_LEN, 0))) > 0.05
    packing_proof.prove_packing(model, CPU, SEQ_LEN)
    assert (
        max(packing_proof._compare(model, packing_proof._draw(model, CPU, SEQ_LEN, 0))) > 0.05
    )  # its products are in float8 again
    attend = attention.attend
    monkeypatch.setattr(attention, "attend", lambda q, k, v, bounds, **options: attend(q, k, v, None, **options))
    with pytest.raises(ConfigError, match="see each other"):
        packing_proof.prove_packing(model, CPU, SEQ_LEN)


class Neighbour(nn.Module):
    """A linear whose input is mixed with the token before, as a convolution over the row does."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mixed projection."""
        mixed: torch.Tensor = self.linear(x + 0.05 * x.roll(1, dims=1))
        return mixed


def test_a_layer_that_reads_one_token_of_the_neighbour_is_caught() -> None:
    model: Any = make_model("qwen3")
    mlp = model.decoder.model.layers[1].mlp
    mlp.up_proj = Neighbour(mlp.up_proj)
    with pytest.raises(ConfigError, match="see each other"):
        packing_proof.prove_packing(model, CPU, SEQ_LEN)


def test_positions_that_go_on_in_the_next_conversation_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # RoPE knows distances only; Llama 4 scales queries by their absolute position, too.
    model: Any = make_model("llama")
    rotary = model.decoder.model.rotary_emb
    monkeypatch.setattr(
        rotary, "forward", lambda x, position_ids, own=rotary.forward: own(x, position_ids * (position_ids.shape[1]))
    )
    with pytest.raises(ConfigError, match="has different logits from those that it has alone"):
        packing_proof.prove_packing(model, CPU, SEQ_LEN)


def test_positions_beyond_the_original_length_that_change_a_neighbour_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rope = read_raw("phi3")["rope_parameters"] | {"original_max_position_embeddings": 100}
    raw = read_raw("phi3", rope_parameters=rope, original_max_position_embeddings=100)

    def make() -> CausalLM:
        model = build_model(parse_architecture("config.json", raw), SEQ_LEN, PrecisionPolicy.uniform(torch.float64))
        materialize_(model, CPU)
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        return model

    packing_proof.prove_packing(make(), CPU, SEQ_LEN)
    monkeypatch.setattr(build, "choose_by_conversation_", lambda decoder, lengths: None)
    model = make()
    with pytest.raises(ConfigError, match=r"see each other in Phi3RotaryEmbedding"):
        packing_proof.prove_packing(model, CPU, SEQ_LEN)
    packing_proof.prove_packing(model, CPU, 100)  # no conversation of the run is longer


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        ("qwen2_moe", WINDOW_IN_MASKS | {"sliding_window": 4}, "see all tokens, but their masks show them all or 4"),
        ("doge", {}, "attends with a mask of its own"),
        ("bloom", {"head_dim": None, "num_key_value_heads": None}, "computes attention with code of its own"),
        ("llama4_text", {"attention_chunk_size": 32}, "lower it to 32"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attends to later tokens"),
    ],
)
def test_attention_other_than_the_models_own_is_refused_before_weights_are_read(
    model_type: str, changes: dict[str, Any], words: str
) -> None:
    architecture = parse_architecture("config.json", read_raw(model_type, **changes))
    with pytest.raises(ConfigError) as caught:
        build_model(architecture, 64, PrecisionPolicy.uniform(torch.float32))
    assert words in str(caught.value)


def test_chunks_and_windows_beyond_the_rows_are_no_obstacle() -> None:
    wide = WINDOW_IN_MASKS | {"sliding_window": 64}
    for model_type, changes in (("llama4_text", {"attention_chunk_size": 64}), ("qwen2_moe", wide)):
        raw = read_raw(model_type, **changes)
        build_model(parse_architecture("config.json", raw), 64, PrecisionPolicy.uniform(torch.float32))
