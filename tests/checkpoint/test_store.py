"""Published checkpoints are complete; incomplete or damaged ones are never used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fctune.base.errors import CheckpointError
from fctune.base.files import checksum
from fctune.checkpoint.fault_hooks import listen
from fctune.checkpoint.files import record_file, write_tensors
from fctune.checkpoint.store import Checkpoint, CheckpointStore, open_checkpoint, verify


def publish(store: CheckpointStore, step: int, kind: str = "sharded") -> Checkpoint:
    store.start(kind, step)  # type: ignore[arg-type]
    folder = store.partial_path(kind, step)  # type: ignore[arg-type]
    tensors = {"x": torch.full((100,), float(step))}
    records = [write_tensors(folder / name, tensors) for name in ("a.safetensors", "b.safetensors")]
    (folder / "state.json").write_text(json.dumps({"step": step}))
    records.append(record_file(folder / "state.json"))
    return store.publish(kind, step, records)  # type: ignore[arg-type]


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def remove(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("damage", [truncate, empty, flip, remove])
@pytest.mark.parametrize("name", ["a.safetensors", "b.safetensors", "state.json", "manifest.json", "_SUCCESS"])
def test_damage_to_any_file_is_detected_and_located(damage: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    checkpoint = publish(CheckpointStore(tmp_path), 4)
    verify(checkpoint)
    damage(checkpoint.path / name)
    if name == "_SUCCESS" and damage is remove:
        assert CheckpointStore(tmp_path).list_complete() == []
        assert CheckpointStore(tmp_path).list_unmarked() == [checkpoint]
        return
    with pytest.raises(CheckpointError, match="manifest.json" if name == "_SUCCESS" else name):
        verify(checkpoint)


def test_the_ranks_together_verify_every_file(tmp_path: Path) -> None:
    checkpoint = publish(CheckpointStore(tmp_path), 4)
    flip(checkpoint.path / "b.safetensors")
    outcomes = []
    for rank in range(3):
        try:
            verify(checkpoint, rank, 3)
        except CheckpointError as error:
            outcomes.append(str(error))
    assert len(outcomes) == 1
    assert "b.safetensors" in outcomes[0]


def interrupt(store: CheckpointStore, step: int, phase: str) -> None:
    """Publish a checkpoint up to a phase."""

    def raise_at(fired: str, name: str) -> None:
        if fired == phase:
            raise KeyboardInterrupt

    remove_listener = listen(raise_at)
    try:
        with pytest.raises(KeyboardInterrupt):
            publish(store, step)
    finally:
        remove_listener()


def test_an_interrupted_save_is_incomplete_and_swept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    first = publish(store, 1)
    interrupt(store, 2, "publish")
    assert store.list_complete() == [first]
    assert len(store.sweep()) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint-1"]


def test_an_intact_checkpoint_without_its_marker_is_kept_and_gets_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    publish(store, 1)
    interrupt(store, 2, "mark")
    interrupt(store, 3, "mark")
    flip(store.path("sharded", 3) / "a.safetensors")
    assert [c.step for c in store.list_unmarked()] == [3, 2]
    verify(store.list_unmarked()[1])
    assert store.sweep() == ["checkpoint-3"]
    assert [c.step for c in store.list_complete()] == [2, 1]
    verify(store.list_complete()[0])
    assert store.sweep() == []


def test_pruning_keeps_the_newest_the_multiples_and_the_final_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_every_n_steps=10)
    for step in (5, 10, 15, 20, 25):
        publish(store, step)
    store.link(publish(store, 7, "elastic"), "final")
    for step in (12, 17, 22):
        publish(store, step, "elastic")
    store.prune()
    assert sorted(c.step for c in store.list_complete() if c.kind == "sharded") == [10, 20, 25]
    assert sorted(c.step for c in store.list_complete() if c.kind == "elastic") == [7, 17, 22]
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]


def test_pruning_keeps_what_was_published_last_even_behind_later_steps(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (20, 30, 10):
        publish(store, step)
    assert store.prune() == []
    assert [c.step for c in store.list_complete()] == [30, 20, 10]


def test_newer_checkpoints_and_links_to_them_are_set_aside_and_never_used(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    publish(store, 4).path.rename(tmp_path / "checkpoint-4.1")  # set aside earlier
    for step in (2, 4, 6):
        publish(store, step)
    store.link(publish(store, 4, "elastic"), "best")
    store.link(publish(store, 6, "elastic"), "final")
    assert store.set_aside_newer(Checkpoint(tmp_path / "elastic-checkpoint-4", "elastic", 4)) == [
        "checkpoint-6.1",
        "elastic-checkpoint-6.1",
        "checkpoint-4.2",
    ]
    assert [c.path.name for c in store.list_complete()] == ["elastic-checkpoint-4", "checkpoint-2"]
    assert store.list_unmarked() == []
    assert store.sweep() == []
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        *("best", "checkpoint-2", "checkpoint-4.1", "checkpoint-4.2", "checkpoint-6.1"),
        *("elastic-checkpoint-4", "elastic-checkpoint-6.1"),
    ]


def test_checkpoints_set_aside_are_deleted_when_the_run_has_got_as_far_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    first, *_ = (publish(store, step) for step in (10, 20, 30))
    store.set_aside_newer(first)
    publish(store, 25)
    assert store.prune() == ["checkpoint-20.1", "checkpoint-10"]
    publish(store, 30, "elastic")
    assert store.prune() == ["checkpoint-30.1"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint-25", "elastic-checkpoint-30"]


def test_setting_aside_that_is_interrupted_leaves_no_gap_before_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    first, *_ = (publish(store, step) for step in (1, 2, 3, 4))
    rename = Path.rename
    moved: list[str] = []

    def rename_twice(path: Path, target: Path) -> Path:
        if len(moved) == 2:
            raise KeyboardInterrupt
        moved.append(path.name)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_twice)
    with pytest.raises(KeyboardInterrupt):
        store.set_aside_newer(first)
    assert [c.step for c in store.list_complete()] == [2, 1]
    monkeypatch.undo()
    store.set_aside_newer(first)
    assert store.list_complete() == [first]


def test_a_step_can_be_published_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    publish(store, 3)
    verify(publish(store, 3))
    assert [c.step for c in store.list_complete()] == [3]


def test_a_manifest_that_names_files_outside_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    checkpoint = publish(CheckpointStore(tmp_path / "checkpoints"), 1)
    manifest = json.loads((checkpoint.path / "manifest.json").read_text())
    manifest["files"]["../../secret"] = {"bytes": 1, "xxh3_128": checksum(tmp_path / "secret")}
    (checkpoint.path / "manifest.json").write_text(json.dumps(manifest))
    (checkpoint.path / "_SUCCESS").write_text(checksum(checkpoint.path / "manifest.json"))
    with pytest.raises(CheckpointError, match="outside"):
        verify(checkpoint)


@pytest.mark.parametrize("name", ["nothing", "folder"])
def test_a_path_that_is_not_a_checkpoint_is_rejected(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(tmp_path / name)
