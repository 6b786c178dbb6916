"""The loss of supervised positions equals plain cross-entropy, for single and packed rows, with and without chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from fctune.models.attention import make_bounds
from fctune.models.causal_lm import CausalLM
from fctune.models.loss import MAX_LOGITS, chunk_rows, supervised_losses
from tests.models.model_samples import load_model


@pytest.fixture
def model(make_model: Callable[..., Path]) -> CausalLM:
    return load_model(make_model("llama"), dtype=torch.float64).train()


def batch(model: CausalLM, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (1, sum(lengths))
    tokens = torch.randint(0, model.architecture.vocab_size, shape, generator=generator)
    labels = torch.where(torch.rand(shape, generator=generator) < 0.4, tokens.roll(-1, dims=1), -100)
    ends = torch.tensor(lengths).cumsum(0) - 1
    labels[:, ends] = -100
    return tokens, labels


def gradients(model: CausalLM) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-9, atol=1e-12)


def test_loss_and_gradients_equal_plain_cross_entropy(model: CausalLM) -> None:
    tokens, labels = batch(model, [60])
    ours = model(tokens, labels=labels)
    ours.backward()
    our_gradients = gradients(model)
    plain = cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    plain.backward()
    torch.testing.assert_close(ours, plain, rtol=1e-9, atol=0)
    assert_same(our_gradients, gradients(model))


def test_chunks_give_the_same_loss_and_gradients(model: CausalLM) -> None:
    tokens, labels = batch(model, [1200])
    tokens, labels = tokens[:, :250].repeat(4, 1), labels[:, :250].repeat(4, 1)
    labels = torch.where(labels == -100, tokens.roll(-1, dims=1), labels)  # all supervised: 1,000 rows of logits
    complete = model(tokens, labels=labels)
    complete.backward()
    expected = gradients(model)
    hidden = model.hidden_states(tokens, None, None)
    chunked = supervised_losses(hidden, model.project, model.architecture.vocab_size, labels, max_logits=1000).sum()
    chunked.backward()
    torch.testing.assert_close(chunked, complete, rtol=1e-9, atol=0)
    assert_same(gradients(model), expected)


def test_packing_does_not_change_the_loss_and_gradients_of_a_conversation(model: CausalLM) -> None:
    lengths = [17, 40, 5, 23]
    tokens, labels = batch(model, lengths)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(tokens, positions=positions, bounds=make_bounds([lengths], "per_document"), labels=labels)
    packed.backward()
    packed_gradients = gradients(model)
    alone = torch.zeros((), dtype=torch.float64)
    for part, part_labels in zip(tokens.split(lengths, dim=1), labels.split(lengths, dim=1), strict=True):
        loss = model(part, labels=part_labels)
        loss.backward()
        alone += loss.detach()
    torch.testing.assert_close(packed.detach(), alone, rtol=1e-9, atol=0)
    assert_same(packed_gradients, gradients(model))


def test_without_bounds_attention_crosses_conversations(model: CausalLM) -> None:
    lengths = [17, 40]
    tokens, labels = batch(model, lengths)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    apart = model(tokens, positions=positions, bounds=make_bounds([lengths], "per_document"), labels=labels)
    assert abs(float(apart) - float(model(tokens, positions=positions, labels=labels))) > 1e-3


def test_a_batch_without_supervised_tokens_reaches_every_parameter(model: CausalLM) -> None:
    tokens, _ = batch(model, [8])
    loss = model(tokens, labels=torch.full_like(tokens, -100))
    assert float(loss) == 0
    loss.backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_weights_scale_the_loss_of_their_tokens(model: CausalLM) -> None:
    tokens, labels = batch(model, [60])
    weights = torch.where(torch.arange(60) < 30, 0.25, 2.0)[None]
    halves = [model(tokens, labels=torch.where(torch.arange(60)[None] < 30, labels, -100))]
    halves.append(model(tokens, labels=torch.where(torch.arange(60)[None] < 30, -100, labels)))
    torch.testing.assert_close(
        model(tokens, labels=labels, loss_weights=weights.double()),
        0.25 * halves[0] + 2.0 * halves[1],
        rtol=1e-9,
        atol=0,
    )


@pytest.mark.parametrize("num_vocab", [32_000, 128_256, 151_936, 262_144])
def test_chunks_of_positions_fill_the_tiles_of_matrix_kernels(num_vocab: int) -> None:
    rows = chunk_rows(num_vocab)
    assert rows % 128 == 0
    assert rows == 256 or rows * num_vocab <= MAX_LOGITS
