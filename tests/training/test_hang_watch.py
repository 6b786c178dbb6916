"""The time limit of a step follows the steps before it, with room for compilation."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import cast

import pytest

from fctune.base.exit_codes import NODE_FAULT
from fctune.training.callbacks.hang_watch import HangWatch, find_late_ranks
from tests.ranks import be_rank, context, find_port, start_server


@pytest.mark.parametrize(("is_compiled", "limit_s"), [(False, 120.0), (True, 600.0)])
def test_a_compiled_run_may_compile_within_a_step(is_compiled: bool, limit_s: float, tmp_path: Path) -> None:
    watch = HangWatch(tmp_path, 0, lambda reason, code, late: None, is_compiled=is_compiled)
    try:
        assert watch.limit_s == 1800.0
        for step in range(5):
            watch.on_step_start(step)
            watch.after_optimizer_update(step)
        assert watch.limit_s == limit_s
    finally:
        watch.close()


WAITS = "a step took longer than 2 s; stacks of all threads:\nmain thread: waits for other ranks\n"
ELSEWHERE = WAITS.replace("waits for other ranks", "elsewhere")


@pytest.mark.parametrize(
    ("stacks", "late"),
    [
        ([WAITS, None, WAITS, None], [1, 3]),
        ([WAITS, ELSEWHERE, None, WAITS], [2]),  # a frozen one comes first: it may hold up the other, too
        ([WAITS, WAITS, ELSEWHERE, WAITS], [2]),
        ([WAITS] * 4, []),  # a GPU or a link hangs
        ([ELSEWHERE] * 4, []),
        ([None] * 4, []),
    ],
)
def test_the_ranks_that_hold_up_the_others_are_known_from_the_stacks(
    stacks: list[str | None], late: list[int], tmp_path: Path
) -> None:
    for rank, text in enumerate(stacks):
        if text is not None:
            (tmp_path / f"rank-{rank}.txt").write_text(text)
    assert find_late_ranks(tmp_path, 4, wait_s=0.3) == late


def test_the_stacks_of_an_earlier_start_are_kept_apart(tmp_path: Path) -> None:
    folder = tmp_path / "stacks"
    folder.mkdir()
    (folder / "rank-0.txt").write_text(WAITS)
    HangWatch(tmp_path, 0, lambda reason, code, late: None).close()
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"rank-0.before.txt": WAITS}


STUCK = "import time\ndef read(): time.sleep(60)\n"


def hang(rank: int, port: int, folder: Path, what: str) -> None:
    """Hang as one of two nodes with one rank each: rank 1 is frozen or reads its data, and rank 0 waits for it."""
    import torch
    import torch.distributed as dist

    from fctune.base.distributed import World
    from fctune.checkpoint.store import CheckpointStore
    from fctune.config.schema import RunConfig
    from fctune.runs.directory import RunDirectory
    from fctune.training.callbacks import hang_watch
    from fctune.training.entry import Run
    from fctune.training.peers import RankProcess

    assert hang_watch._MIN_SPREAD_S >= 30, "NFS keeps a name that it has not found for that long"
    hang_watch._MIN_SPREAD_S = 5.0  # this disk is local
    be_rank(rank, 2, port)
    dist.init_process_group("gloo")
    world = World(rank, 2, 0, torch.device("cpu"), ranks_per_node=1)
    peers = [RankProcess(other, 0, f"host-{other}", "") for other in range(2)]
    store = CheckpointStore(folder / "checkpoints", 1, None)
    run = Run(cast(RunConfig, None), RunDirectory(folder), store, world, peers, is_open=True)
    watch = HangWatch(folder, rank, run.record_hang, timeout_s=2.0, num_ranks=2)
    dist.barrier()
    watch.on_step_start(1)
    if rank == 0:
        with contextlib.suppress(RuntimeError):  # the other rank may be the first to end
            dist.barrier()
        time.sleep(60)
    elif what == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        names: dict[str, object] = {}
        exec(compile(STUCK, "/x/fctune/data/loader.py", "exec"), names)
        names["read"]()  # type: ignore[operator]


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", ["frozen", "reads its data"])
def test_a_hang_names_the_node_that_holds_up_the_other(what: str, tmp_path: Path) -> None:
    run, port = tmp_path / "run", find_port()
    run.mkdir()
    start_server()
    ranks = [context.Process(target=hang, args=(rank, port, run, what)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    ranks[0].join(120)
    ended = json.loads((run / "exit.json").read_text())
    if what == "frozen":
        os.kill(ranks[1].pid, signal.SIGKILL)
    ranks[1].join(60)
    assert ranks[0].exitcode == ended["code"] == NODE_FAULT
    assert ended["faulty_node"] == {"rank": 1, "host": "host-1"}
    assert ended["reason"].endswith("a step took longer than 2 s; held up by rank 1 on host-1")
