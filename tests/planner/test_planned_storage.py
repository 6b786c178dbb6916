"""Room on the shared disk and the rhythm of saves, against what the store keeps and what a rank copies."""

from __future__ import annotations

from pathlib import Path

import pytest

from fctune.checkpoint.store import CheckpointStore, Kind
from fctune.gpus import find_gpu
from fctune.planner.plan import make_plan
from fctune.planner.plan_request import PlanRequest
from fctune.planner.storage import Storage, plan_storage
from tests.planner.test_plan import LLAMA, config_of, memory_of


def most_on_disk(root: Path, num_steps: int, every: int, elastic_every: int, keep: int, nth: int | None) -> int:
    """Checkpoints there at the fullest, the one that is written among them, of a run that saves as the keeper does."""
    store = CheckpointStore(root, keep, nth)
    most = 0

    def save(kind: Kind, step: int) -> None:
        nonlocal most
        store.start(kind, step)
        most = max(most, len(list(root.iterdir())))
        store.publish(kind, step, [])
        store.prune()

    for step in range(1, num_steps):
        if elastic_every and step % elastic_every == 0:
            save("elastic", step)
        if every and step % every == 0:
            save("sharded", step)
    save("elastic", num_steps)
    return most


@pytest.mark.parametrize(
    ("num_steps", "every", "elastic_every", "keep", "nth"),
    [
        (45, 500, 1000, 3, None),  # a run that is over before its first save is due
        (45, 10, 20, 3, None),
        (45, 5, 0, 2, None),
        (45, 0, 10, 1, None),
        (60, 2, 4, 2, 6),
        (60, 5, 15, 3, 10),
    ],
)
def test_room_for_checkpoints_is_what_the_store_keeps_and_one_for_a_stop(
    num_steps: int, every: int, elastic_every: int, keep: int, nth: int | None, tmp_path: Path
) -> None:
    checkpoint = {"every_n_steps": every, "elastic_every_n_steps": elastic_every, "keep_last": keep}
    config = config_of(LLAMA, 512, adapter={"rank": 8}, checkpoint=checkpoint | {"keep_every_n_steps": nth})
    storage = plan_storage(memory_of(config, 79.1), config, 8, None, 1.0, 1e-4, 1, num_steps)
    planned = storage.checkpoints_bytes // storage.checkpoint_bytes
    # Beside it a stop's, one of each kind being written at the same time, and every nth that is among the newest, too.
    assert 0 <= planned - most_on_disk(tmp_path, num_steps, every, elastic_every, keep, nth) <= 2


def storage_of(num_shards: int, failures: float = 1e-4) -> Storage:
    config = config_of(LLAMA, 512, adapter={"rank": 8})
    return plan_storage(memory_of(config, 79.1), config, 16, None, 1.0, failures, num_shards)


def test_training_waits_for_a_copy_of_what_its_own_rank_holds() -> None:
    """Under DDP each rank copies all that trains; how many ranks there are changes nothing of it."""
    whole, eighth = storage_of(1), storage_of(8)
    assert whole.checkpoint_bytes == 20_971_520 * 12 + 4 * 448  # weights and two moments; steps of 32 x 7 x 2 tensors
    assert whole.stall_s == whole.checkpoint_bytes / 25e9
    assert eighth.stall_s == pytest.approx(whole.stall_s / 8)
    assert whole.best_interval_s == pytest.approx(8**0.5 * eighth.best_interval_s, rel=0.01)


def test_hours_are_with_saves_and_failures_in_the_search_too() -> None:
    config = config_of(LLAMA, 2048, adapter={"rank": 8}, compile=True, parallel={"mode": "ddp"})
    ask = PlanRequest(
        find_gpu("h100"), 1, 8, rows=100_000, mean_tokens=500, failures_per_gpu_day=50.0, is_searching=True
    )
    plan = make_plan(config, ask)
    best = plan.scaling[0].best
    assert best is not None
    assert (best.setting.mode, best.setting.replicate) == ("ddp", 8)
    assert plan.storage.lost_share > 0.01
    assert plan.num_steps is not None
    without = plan.num_steps * best.time.total_s / 3600
    assert plan.scaling[0].hours == pytest.approx(without / (1 - plan.storage.lost_share))


def test_saves_and_failures_that_leave_nothing_of_the_time_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    from fctune.cli import main
    from tests.conftest import ROOT

    config = str(ROOT / "configs" / "llama3_1_8b_full.yaml")
    assert main(["plan", "--config", config, "--nodes", "2", "--failures-per-gpu-day", "100"]) == 0
    assert "the run hardly advances" in capsys.readouterr().out
    assert main(["plan", "--config", config, "--nodes", "2"]) == 0
    assert "the run hardly advances" not in capsys.readouterr().out
