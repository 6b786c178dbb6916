"""The loss of supervised positions equals plain cross-entropy, for single and packed rows, with and without chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

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


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2**-7)], ids=str
)
@pytest.mark.parametrize("chunk", [256, 700])
def test_a_frozen_head_gives_the_gradients_of_plain_cross_entropy_and_keeps_no_logits(
    dtype: torch.dtype, tolerance: float, chunk: int
) -> None:
    """Losses with weights of their own, under a head with a soft cap; gradients are compared with those in float64."""
    torch.manual_seed(0)
    num_vocab, width, count = 331, 24, 700
    weight = torch.randn(num_vocab, width, dtype=dtype)
    hidden = torch.randn(2, count // 2, width, dtype=dtype).requires_grad_()
    labels, scales = torch.randint(0, num_vocab, (2, count // 2)), torch.rand(count, dtype=torch.float64) * 1e-3
    calls: list[int] = []

    def project(rows: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        calls.append(len(rows))
        return 8 * torch.tanh(linear(rows, weight) / 8)

    losses = supervised_losses(hidden, project, num_vocab, labels, max_logits=chunk * num_vocab)
    kept = count_bytes_kept(losses)
    (losses * scales.to(losses.dtype)).sum().backward()
    exact = hidden.detach().double().requires_grad_()
    logits = 8 * torch.tanh(linear(exact.flatten(0, 1), weight.double()) / 8)
    expected = cross_entropy(logits, labels.flatten(), reduction="none")
    (expected * scales).sum().backward()
    assert hidden.grad is not None
    assert exact.grad is not None
    error = (hidden.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error <= tolerance
    torch.testing.assert_close(losses.double(), expected, rtol=tolerance, atol=8 * tolerance)
    assert sum(calls) <= count + 64, "backward computed logits again"
    assert kept <= hidden.numel() * hidden.element_size()


def count_bytes_kept(losses: torch.Tensor) -> int:
    """Return the bytes of the tensors that the node of some losses keeps for backward."""
    node: Any = losses.grad_fn
    return sum(t.numel() * t.element_size() for t in getattr(node, "saved_tensors", ()))


@pytest.mark.parametrize("trained", ["weight", "adapter"])
def test_a_head_with_anything_that_trains_gets_its_gradient(trained: str) -> None:
    torch.manual_seed(0)
    tensors = {"weight": torch.randn(50, 8, dtype=torch.float64), "adapter": torch.randn(50, 8, dtype=torch.float64)}
    tensors[trained].requires_grad_()
    hidden, labels = torch.randn(1, 600, 8, dtype=torch.float64).requires_grad_(), torch.randint(0, 50, (1, 600))

    def project(rows: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        return linear(rows, tensors["weight"]) + linear(rows, tensors["adapter"])

    supervised_losses(hidden, project, 50, labels, max_logits=256 * 50).sum().backward()
    found, ours = tensors[trained].grad, hidden.grad
    tensors[trained].grad = hidden.grad = None
    cross_entropy(project(hidden[0], None), labels[0], reduction="sum").backward()
    torch.testing.assert_close(found, tensors[trained].grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, hidden.grad, rtol=1e-12, atol=1e-12)


def test_losses_without_gradients_equal_those_with() -> None:
    torch.manual_seed(0)
    weight, hidden, labels = torch.randn(50, 8), torch.randn(1, 600, 8), torch.randint(0, 50, (1, 600))
    arguments = (lambda rows, _: linear(rows, weight), 50, labels)
    with torch.no_grad():
        found = supervised_losses(hidden, *arguments, max_logits=256 * 50)
    torch.testing.assert_close(found, supervised_losses(hidden.requires_grad_(), *arguments).detach(), rtol=0, atol=0)


@pytest.mark.parametrize("trains_head", [False, True])
@pytest.mark.parametrize("num_labels", [0, 5])
def test_losses_are_no_views_of_which_fsdp_warns(num_labels: int, trains_head: bool) -> None:
    hidden = torch.randn(1, 7, 16, dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(11, 16, dtype=torch.bfloat16, requires_grad=trains_head)
    labels = torch.full((1, 7), -100)
    labels[0, :num_labels] = 3
    losses = supervised_losses(hidden, lambda rows, keys: linear(rows, head), 11, labels)
    assert losses.shape == (num_labels,)
    assert losses.requires_grad
    assert not losses._is_view()


@pytest.mark.parametrize("num_vocab", [32_000, 128_256, 151_936, 262_144])
def test_chunks_of_positions_fill_the_tiles_of_matrix_kernels(num_vocab: int) -> None:
    rows = chunk_rows(num_vocab)
    assert rows % 128 == 0
    assert rows == 256 or rows * num_vocab <= MAX_LOGITS
