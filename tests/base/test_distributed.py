"""Collectives give every rank the same result and the same error."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from fctune.base import distributed
from fctune.base.distributed import DuplicateRankError, World
from fctune.base.errors import DataError
from tests.ranks import be_rank, context, find_port, run_ranks


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


def list_modules(world: World) -> list[str]:
    return list(sys.modules)


def test_ranks_start_with_their_slow_imports_made() -> None:
    if context.get_start_method() != "forkserver":
        pytest.skip("ranks start afresh on a machine with GPUs")
    (modules,) = run_ranks(list_modules, 1)
    assert "tests.rank_imports" in modules


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


def outlast_the_time_out(world: World) -> dict[str, str]:
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    distributed._SIGN_OF_LIFE_S = 0.5

    def be_slow() -> int:
        time.sleep(4)
        return 7

    def fail() -> int:
        raise DataError(f"rank {world.rank}")

    return {
        "slow": catch(lambda: distributed.run_long_on_rank_0(be_slow)),
        "failed": catch(lambda: distributed.run_long_on_rank_0(fail)),
    }


@pytest.mark.thorough
def test_rank_0_may_take_longer_than_the_time_out_of_collectives() -> None:
    assert run_ranks(outlast_the_time_out, 2) == [{"slow": "returned 7", "failed": "raised rank 0"}] * 2


def join(port: int, run_id: str, folder: Path) -> None:
    be_rank(1, 2, port)
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID=run_id)
    try:
        distributed.init_distributed()
    except DuplicateRankError as error:
        (folder / "error").write_text(str(error))


def test_ranks_of_two_launches_do_not_meet_on_one_port(tmp_path: Path) -> None:
    port = find_port()
    store = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=60), wait_for_workers=False)
    ranks = [context.Process(target=join, args=(port, run_id, tmp_path)) for run_id in ("one", "two", "two")]
    try:
        for rank in ranks:
            rank.start()
        store.wait(["one/restart-0-of-2/joined/1"])
        deadline = time.monotonic() + 60
        while not (tmp_path / "error").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "another process has joined" in (tmp_path / "error").read_text()
        assert ranks[0].is_alive(), "the only rank of its launch waits"
        assert sum(rank.is_alive() for rank in ranks[1:]) >= 1
    finally:
        for rank in ranks:
            rank.kill()
