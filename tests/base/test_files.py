"""Files are replaced completely or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fctune.base.files import hold_lock, is_in_use, open_atomically, staged_directory, write_atomically


def test_concurrent_writers_leave_one_complete_file(tmp_path: Path) -> None:
    contents = [f"{number}" * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda content: write_atomically(tmp_path / "file", content, is_durable=True), contents * 5))
    assert (tmp_path / "file").read_text() in contents
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_writer_that_fails_keeps_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(UnicodeEncodeError), open_atomically(tmp_path / "file") as file:
        file.write("half" * 100_000 + "\ud800")
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("replaces", "kept"), [(True, "new"), (False, "old")])
def test_a_staged_directory_appears_complete(replaces: bool, kept: str, tmp_path: Path) -> None:
    for content in ("old", "new"):
        with staged_directory(tmp_path / "folder", replaces=replaces) as staging:
            (staging / "file").write_text(content)
    assert (tmp_path / "folder" / "file").read_text() == kept
    with pytest.raises(KeyboardInterrupt), staged_directory(tmp_path / "folder", replaces=True):
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def replace_folder(folder: Path) -> None:
    with staged_directory(folder, replaces=True) as staging:
        (staging / "file").write_text("new")


def test_a_directory_that_cannot_be_renamed_is_kept_and_the_error_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rename = tmp_path / "folder", Path.rename
    folder.mkdir()
    (folder / "file").write_text("old")
    for refused in ("folder", ".folder.partial"):

        def refuse(path: Path, target: Path, refused: str = refused) -> Path:
            if path.name == refused:
                raise PermissionError(13, "Permission denied")
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", refuse)
        with pytest.raises(PermissionError):
            replace_folder(folder)
        assert (folder / "file").read_text() == "old"
        assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_directory_that_cannot_be_deleted_is_replaced_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rmtree = tmp_path / "folder", shutil.rmtree
    folder.mkdir()
    (folder / "file").write_text("old")

    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if any(file.read_text() == "old" for file in Path(path).glob("file")):
            if not ignore_errors:
                raise OSError(16, "Device or resource busy")
        else:
            rmtree(path, ignore_errors=ignore_errors)

    with monkeypatch.context() as patches:
        patches.setattr(shutil, "rmtree", refuse)
        for _ in range(2):  # the second time, the first one's old directory is still there
            replace_folder(folder)
            assert (folder / "file").read_text() == "new"
            assert len(list(tmp_path.iterdir())) == 2
    replace_folder(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_replaced_link_leaves_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("old")
    (tmp_path / "folder").symlink_to("elsewhere")
    replace_folder(tmp_path / "folder")
    assert (tmp_path / "folder" / "file").read_text() == "new"
    assert (tmp_path / "elsewhere" / "file").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "folder"]


def test_a_lock_is_held_by_one_at_a_time_and_says_by_whom(tmp_path: Path) -> None:
    lock, told = tmp_path / "lock", threading.Event()
    order: list[str] = []

    def tell(holder: str) -> None:
        order.append(f"waits for {holder}")
        told.set()

    def wait() -> None:
        with hold_lock(lock, "second", tell):
            order.append("second")

    with hold_lock(lock, "first", tell):
        assert lock.read_text() == "first"
        assert is_in_use(lock)
        other = threading.Thread(target=wait)
        other.start()
        assert told.wait(20)
        order.append("first")
    other.join(20)
    assert order == ["waits for first", "first", "second"]
    assert not is_in_use(lock)
    assert not lock.exists()


def test_a_lock_whose_file_was_removed_while_this_process_waited_is_taken_again(tmp_path: Path) -> None:
    lock, told = tmp_path / "lock", threading.Event()
    held: list[bool] = []

    def wait() -> None:
        with hold_lock(lock, "second", lambda holder: told.set()):
            held.append(is_in_use(lock) and lock.read_text() == "second")

    with hold_lock(lock, "first", print):
        other = threading.Thread(target=wait)
        other.start()
        assert told.wait(20)
    other.join(20)
    assert held == [True]


def test_without_locks_the_file_system_lets_both_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with hold_lock(tmp_path / "lock", "", print), hold_lock(tmp_path / "lock", "", print):
        assert not is_in_use(tmp_path / "lock")


def test_the_lock_that_another_users_process_left_does_not_stop_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, open_file = tmp_path / "lock", os.open
    lock.write_text("theirs")

    def open_theirs(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return open_file(path, flags, *mode)

    monkeypatch.setattr(os, "open", open_theirs)
    with hold_lock(lock, "mine", print):
        assert lock.read_text() == "theirs"
    assert not lock.exists()
