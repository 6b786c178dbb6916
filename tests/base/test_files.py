"""Files are replaced completely or not at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fctune.base.files import open_atomically, staged_directory, write_atomically


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
