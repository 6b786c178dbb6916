"""Collectives give every rank the same result and the same error."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from fctune import distributed
from fctune.distributed import World
from fctune.errors import DataError
from tests.ranks import run_ranks


def catch(action: Any) -> str:
    try:
        return f"returned {action()}"
    except DataError as error:
        return f"raised {error}"


def exchange(world: World) -> dict[str, Any]:
    def fail_on_the_last_ranks() -> int:
        if world.rank > 0:
            raise DataError(f"rank {world.rank}")
        return world.rank

    def fail() -> int:
        raise DataError(f"rank {world.rank}")

    mesh = init_device_mesh("cpu", (world.world_size,))
    full = torch.arange(10.0).view(5, 2)
    group = distributed.new_cpu_group()
    gathered = distributed.gather_full_tensor(distribute_tensor(full, mesh, [Shard(0)]), 1, group)
    return {
        "agreed": catch(lambda: distributed.run_on_all_ranks(fail_on_the_last_ranks)),
        "all": catch(lambda: distributed.run_on_all_ranks(lambda: world.rank)),
        "first": catch(lambda: distributed.run_on_rank_0(lambda: world.rank)),
        "failed": catch(lambda: distributed.run_on_rank_0(fail)),
        "flags": distributed.any_rank([world.rank == 1, False]),
        "rows": distributed.all_gather_rows(torch.tensor([world.rank, 7])).tolist(),
        "objects": distributed.all_gather_objects(f"rank {world.rank}"),
        "full": gathered is not None and torch.equal(gathered, full),
    }


def test_every_rank_gets_the_same_results_and_errors() -> None:
    ranks = run_ranks(exchange, 3)
    for rank, found in enumerate(ranks):
        assert found["agreed"] == "raised rank 1"
        assert found["all"] == f"returned {rank}"
        assert found["first"] == "returned 0"
        assert found["failed"] == "raised rank 0"
        assert found["flags"] == [True, False]
        assert found["rows"] == [[0, 7], [1, 7], [2, 7]]
        assert found["objects"] == ["rank 0", "rank 1", "rank 2"]
        assert found["full"] is (rank == 1)
