"""Rows travel to the rank that holds their expert, and results and gradients back."""

from __future__ import annotations

import torch

from fctune.base.distributed import World
from fctune.models.expert_exchange import ExpertExchange
from fctune.models.grouped_products import multiply_groups
from tests.ranks import run_ranks

NUM_EXPERTS, SIZE = 4, 3

# Rows of each rank for each expert; the second rank has none, and nobody has any for the last expert.
ROWS = [[2, 0, 3, 0], [0, 0, 0, 0]]


def make_weights() -> torch.Tensor:
    return torch.randn(NUM_EXPERTS, SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def make_rows(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randn(sum(ROWS[rank]), SIZE, dtype=torch.float64, generator=generator)


def exchange(world: World) -> dict[str, torch.Tensor]:
    group = torch.distributed.group.WORLD
    assert group is not None
    held = make_weights()[2 * world.rank : 2 * world.rank + 2].requires_grad_()
    rows = make_rows(world.rank).requires_grad_()
    keys = torch.arange(len(rows)) + 10 * world.rank
    ends = torch.tensor(ROWS[world.rank]).cumsum(0, dtype=torch.int32)
    seen: list[torch.Tensor] = []

    def compute(arrived: torch.Tensor, arrived_keys: torch.Tensor | None, local_ends: torch.Tensor) -> torch.Tensor:
        assert arrived_keys is not None
        seen.append(arrived_keys)
        return multiply_groups(arrived, held, local_ends)

    out = ExpertExchange(group).run(compute, rows, keys, ends)
    out.pow(2).sum().backward()
    assert rows.grad is not None
    assert held.grad is not None
    return {"out": out.detach(), "rows": rows.grad, "weights": held.grad, "keys": seen[0]}


def test_results_and_gradients_are_those_of_one_rank_with_all_experts() -> None:
    found = run_ranks(exchange, 2)
    weights = make_weights().requires_grad_()
    for rank, result in enumerate(found):
        rows = make_rows(rank).requires_grad_()
        out = multiply_groups(rows, weights, torch.tensor(ROWS[rank]).cumsum(0, dtype=torch.int32))
        out.pow(2).sum().backward()
        torch.testing.assert_close(result["out"], out.detach())
        torch.testing.assert_close(result["rows"], rows.grad)
    torch.testing.assert_close(torch.cat([result["weights"] for result in found]), weights.grad)
    assert [result["keys"].tolist() for result in found] == [[0, 1], [2, 3, 4]]
