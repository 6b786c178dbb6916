"""Padding at the end of rows is left out of the routing to experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fctune.base.distributed import World
from fctune.config.sections.adapter import AdapterConfig
from fctune.models.causal_lm import CausalLM
from fctune.models.expert_exchange import ExpertExchange
from fctune.models.transformers import experts as expert_module
from tests.models.expert_samples import draw_ids, make_model, make_reference
from tests.ranks import run_ranks

LENGTHS = [9, 14]
PADDED = 20
RUN_EXPERTS = expert_module._run_experts
ADAPTER = AdapterConfig(rank=3, alpha=6.0, modules=["q_proj", "experts.gate_up_proj", "experts.down_proj"])


def draw_rows() -> tuple[Tensor, Tensor]:
    """Return rows that end in one repeated token, and labels of the others."""
    tokens = draw_ids(2, PADDED)
    labels = torch.full_like(tokens, -100)
    for row, length in enumerate(LENGTHS):
        tokens[row, length:] = 0
        labels[row, : length - 1] = tokens[row, 1:length]
    return tokens, labels


def run(model: CausalLM, monkeypatch: pytest.MonkeyPatch, is_padded: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the loss and all gradients, and the rows of each expert in each layer, of both rows together."""
    counts: list[Tensor] = []

    def count(experts: Any, has_padding: bool, rows: Tensor, keys: Any, ends: Tensor) -> Tensor:
        counts.append(torch.diff(ends, prepend=ends.new_zeros(1)))
        return RUN_EXPERTS(experts, has_padding, rows, keys, ends)

    monkeypatch.setattr(expert_module, "_run_experts", count)
    tokens, labels = draw_rows()
    model.zero_grad()
    if is_padded:
        model(tokens, labels=labels, row_lengths=torch.tensor(LENGTHS)).backward()
    else:
        for row, length in enumerate(LENGTHS):
            model(tokens[row : row + 1, :length], labels=labels[row : row + 1, :length]).backward()
        counts = [a + b for a, b in zip(counts[: len(counts) // 2], counts[len(counts) // 2 :], strict=True)]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, counts


@pytest.mark.parametrize("adapter", [ADAPTER, None], ids=["adapters", "all weights"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_experts_get_the_rows_that_they_get_without_padding(
    model_type: str, adapter: AdapterConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(make_reference(model_type), adapter)
    # Memory that nothing is written to is NaN, so that what a product leaves in rows of padding shows.
    torch.use_deterministic_algorithms(True)
    try:
        grads, counts = run(model, monkeypatch, is_padded=True)
        expected_grads, expected = run(model, monkeypatch, is_padded=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [found.tolist() for found in counts] == [wanted.tolist() for wanted in expected]
    assert int(counts[0].sum()) == 2 * sum(LENGTHS)
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=0, atol=1e-9, msg=name)


def exchange_with_padding(world: World) -> tuple[list[int], Tensor, Tensor]:
    group = torch.distributed.group.WORLD
    assert group is not None
    rows = torch.ones(6, 2, dtype=torch.float64, requires_grad=True)
    seen: list[int] = []

    def compute(arrived: Tensor, keys: Tensor | None, ends: Tensor) -> Tensor:
        seen.append(len(arrived))
        return 3 * arrived

    # One row for each of two experts; four rows are of padding.
    out = ExpertExchange(group).run(compute, rows, None, torch.tensor([1, 2], dtype=torch.int32))
    out.sum().backward()
    assert rows.grad is not None
    return seen, out.detach()[:, 0], rows.grad[:, 0]


def test_padding_does_not_travel_to_experts_on_other_ranks() -> None:
    for seen, out, grad in run_ranks(exchange_with_padding, 2):
        assert seen == [2]
        assert out.tolist() == grad.tolist() == [3, 3, 0, 0, 0, 0]
