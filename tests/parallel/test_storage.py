"""Planned disk space and save intervals, compared with what the checkpoint store keeps and a rank copies."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fctune.checkpoint.store import CheckpointStore, Kind
from fctune.parallel.storage import Storage, count_elastic_steps, optimal_save_interval, plan_storage
from tests.parallel.sample_plans import LLAMA, make_config, make_memory


def count_most_on_disk(root: Path, num_steps: int, every: int, elastic_every: int, keep: int, nth: int | None) -> int:
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
        (45, 500, 1000, 3, None),  # a run that ends before its first save is due
        (45, 10, 20, 3, None),
        (45, 5, 0, 2, None),
        (45, 0, 10, 1, None),
        (60, 2, 4, 2, 6),
        (60, 5, 15, 3, 10),
    ],
)
def test_planned_checkpoints_are_those_the_store_keeps_plus_at_most_two(
    num_steps: int, every: int, elastic_every: int, keep: int, nth: int | None, tmp_path: Path
) -> None:
    checkpoint = {"every": every, "elastic_every": elastic_every, "keep_last": keep}
    config = make_config(LLAMA, 512, adapter={"rank": 8}, checkpoint=checkpoint | {"keep_every_n_steps": nth})
    storage = plan_storage(make_memory(config, 79.1), config, 8, None, 1.0, 1e-4, 1, num_steps)
    planned = storage.checkpoints_bytes // storage.checkpoint_bytes
    # The plan adds a stop's checkpoint, and does not know which nth ones are among the newest.
    assert 0 <= planned - count_most_on_disk(tmp_path, num_steps, every, elastic_every, keep, nth) <= 2


def make_storage(num_shards: int, failures: float = 1e-4) -> Storage:
    config = make_config(LLAMA, 512, adapter={"rank": 8})
    return plan_storage(make_memory(config, 79.1), config, 16, None, 1.0, failures, num_shards)


def test_training_waits_for_the_copy_of_its_own_shard() -> None:
    """Under DDP each rank copies all trained parameters, whatever the number of ranks."""
    full, eighth = make_storage(1), make_storage(8)
    assert full.checkpoint_bytes == 20_971_520 * 12 + 4 * 448  # weights and two moments; steps of 32 x 7 x 2 tensors
    assert full.stall_s == full.checkpoint_bytes / 25e9
    assert eighth.stall_s == pytest.approx(full.stall_s / 8)
    assert full.best_interval_s == pytest.approx(8**0.5 * eighth.best_interval_s, rel=0.01)


def test_auto_saves_by_the_interval_that_loses_the_least_time_and_at_each_third_of_a_short_run() -> None:
    assert count_elastic_steps("auto", 3000, 2.0, 1350.0) == 675
    assert count_elastic_steps("auto", 300, 2.0, 1350.0) == 100
    assert count_elastic_steps("auto", 300, None, 1350.0) == 100
    assert count_elastic_steps("auto", None, 2.0, 1350.0) == 675
    assert count_elastic_steps("2h", 300, 2.0, 1350.0) == 3600
    assert count_elastic_steps(0, 300, 2.0, 1350.0) == 0


def test_the_save_interval_follows_young_and_daly() -> None:
    assert optimal_save_interval(10, 86_400) == pytest.approx(math.sqrt(2 * 10 * 86_400), rel=0.01)
    assert optimal_save_interval(300, 100) == 100
    lost = {w: 20 / w + w / 2 / 40_000 for w in range(100, 5000)}
    assert optimal_save_interval(20, 40_000) == pytest.approx(min(lost, key=lambda w: lost[w]), rel=0.03)
