"""Packed rows of transformers' families give what transformers gives for each conversation, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks.model_zoo import find_entry, save_config
from fctune.config.sections.parallel import ActivationCheckpointingConfig
from fctune.models.attention import make_bounds
from fctune.models.loss import supervised_losses
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model, read_architecture
from fctune.parallel.activations import apply_activation_checkpointing_
from tests.models.dense_samples import FAMILIES, LENGTHS, draw_conversations, make_model, make_reference, pack

SCALED = ("gemma2", "granite", "cohere2")  # families whose logits are capped or scaled


@pytest.mark.parametrize("model_type", FAMILIES)
def test_logits_and_gradients_of_a_packed_row_equal_each_conversation_alone(model_type: str) -> None:
    reference, model = make_reference(model_type), make_model(model_type)
    conversations = draw_conversations(*LENGTHS)
    tokens, positions = pack(conversations)
    ours = model(tokens, positions, make_bounds([LENGTHS], "per_document"))
    theirs = torch.cat([reference(input_ids=one, use_cache=False).logits for one in conversations], dim=1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
    reference.zero_grad()
    for logits in (ours, theirs):
        logits.sin().sum().backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        grad = expected[name.removeprefix("decoder.")]
        if grad is not None:  # experts that no token chose
            torch.testing.assert_close(parameter.grad, grad, rtol=1e-8, atol=1e-9, msg=name)


@torch.no_grad()
def test_longrope_depends_on_a_conversations_own_length_in_padded_rows() -> None:
    conversations = draw_conversations(5, 12)
    rows = torch.zeros(2, 20, dtype=torch.int64)
    for row, one in zip(rows, conversations, strict=True):
        row[: one.shape[1]] = one[0]
    found = make_model("phi3")(rows, row_lengths=torch.tensor([5, 12]))
    for row, one in zip(found, conversations, strict=True):
        expected = make_reference("phi3")(input_ids=one, use_cache=False).logits[0]
        torch.testing.assert_close(row[: len(expected)], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("model_type", SCALED)
def test_caps_and_scales_of_logits_survive_the_chunked_loss(model_type: str) -> None:
    reference, model = make_reference(model_type), make_model(model_type)
    (tokens,) = draw_conversations(600)
    labels = tokens.roll(-1, 1)
    with torch.no_grad():
        logits = reference(input_ids=tokens, use_cache=False).logits
        expected = cross_entropy(logits[0], labels[0], reduction="sum")
        complete = model(tokens, labels=labels)
        hidden = reference.model(input_ids=tokens, use_cache=False).last_hidden_state
        plain = cross_entropy(reference.lm_head(hidden)[0], labels[0], reduction="sum")
        chunked = supervised_losses(hidden, model.project, model.architecture.vocab_size, labels, max_logits=1000).sum()
    assert abs(float(plain - expected)) > 1  # else the family's cap or scale would not show
    torch.testing.assert_close(complete, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(chunked, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("model_type", ["gemma3_text", "nemotron", "gpt_oss"])
@pytest.mark.parametrize("policy", ["block", "op"])
def test_recomputed_blocks_have_the_bounds_of_their_batch(model_type: str, policy: Any) -> None:
    tokens, positions = pack(draw_conversations(*LENGTHS))
    batch = {"positions": positions, "labels": tokens.roll(-1, 1), "bounds": make_bounds([LENGTHS], "per_document")}
    plain, recomputing = make_model(model_type), make_model(model_type)
    apply_activation_checkpointing_(recomputing, ActivationCheckpointingConfig(fraction=1.0, policy=policy), "cpu")
    plain.train()
    recomputing.train()
    plain(tokens, **batch).backward()
    loss = recomputing(tokens, **batch)
    # Another batch between forward and backward, as with a pipeline of micro-batches.
    with torch.no_grad():
        recomputing(tokens[:, :10])
    loss.backward()
    for one, other in zip(plain.parameters(), recomputing.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("model_type", "kernel", "windows"),
    [
        ("qwen3", "varlen", ()),
        ("qwen3", "flex", (None,)),
        ("gemma2", "varlen", (16, None)),  # its soft cap needs flex attention in every layer
        ("gpt_oss", "varlen", (16, None)),  # its sinks do
        ("olmo3", "varlen", ()),
        ("olmo3", "flex", (16, None)),
    ],
)
def test_models_are_built_for_the_kernels_of_gpus_with_the_windows_of_their_layers(
    model_type: str, kernel: Any, windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    save_config(find_entry(model_type), tmp_path / "model")
    architecture = read_architecture(tmp_path / "model", "transformers")
    assert build_model(architecture, 64, PrecisionPolicy.uniform(torch.bfloat16), kernel).windows == windows
