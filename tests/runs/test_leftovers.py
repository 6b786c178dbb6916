"""What can be removed, and that nothing of a live run is."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from fctune.base import files
from fctune.cli import main
from fctune.config.sections.data import DataConfig, SourceConfig
from fctune.data.prepared_set import prepare
from fctune.runs.leftovers import find_leftovers
from tests.conftest import TINY_BASE
from tests.runs.sample_runs import make_run


def make_prepared(root: Path, name: str, days: float = 0.0) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text("{}")
    (folder / "tokens.bin").write_bytes(bytes(1000))
    os.utime(folder, (time.time() - days * 86400,) * 2)
    return folder


def removable(root: Path, **options: float | bool) -> set[str]:
    return {one.path.name for one in find_leftovers(root / "prepared", root / "runs", **options) if not one.keep}


def test_a_live_run_and_its_prepared_set_are_kept(tmp_path: Path) -> None:
    for name in ("used", "unused"):
        make_prepared(tmp_path / "prepared", name)
    directory = make_run(tmp_path / "runs" / "live", 3, code=None)
    directory.describe(data={"path": str(tmp_path / "prepared" / "used"), "inputs": {}})
    long_ago = time.time() - 5000
    for file in (tmp_path / "runs" / "live").iterdir():
        os.utime(file, (long_ago, long_ago))
    directory.lock()
    assert removable(tmp_path, has_all_runs=True) == {"unused"}
    directory.unlock()
    assert removable(tmp_path, has_all_runs=True) == {"used", "unused", "live"}


def test_a_prepared_set_that_a_process_has_open_is_kept(tmp_path: Path) -> None:
    make_prepared(tmp_path / "prepared", "unused", days=3)
    config = DataConfig(sources=[SourceConfig(path="synthetic:train:30")], seq_len=512)
    path = prepare(config, TINY_BASE, tmp_path / "prepared").path
    assert removable(tmp_path) == {"unused"}
    os.close(files._in_use.pop(path / "meta.json"))
    assert removable(tmp_path) == {"unused", path.name}


def test_a_set_that_a_killed_process_left_unfinished_is_offered_after_an_hour(tmp_path: Path) -> None:
    unfinished = tmp_path / "prepared" / ".0123456789abcdef.01234567"
    unfinished.mkdir(parents=True)
    tokens = unfinished / "tokens.bin"
    tokens.write_bytes(bytes(1000))
    os.utime(unfinished, (0, 0))
    assert removable(tmp_path) == set(), "its process may still write"
    os.utime(tokens, (time.time() - 4000,) * 2)
    with files.hold_lock(tmp_path / "prepared" / ".0123456789abcdef.lock", "", print):
        assert removable(tmp_path) == set(), "a process is writing it, if slowly"
    (leftover,) = find_leftovers(tmp_path / "prepared", tmp_path / "runs")
    assert (leftover.kind, leftover.num_bytes, leftover.keep) == ("unfinished set", 1000, "")
    leftover.remove()
    assert not any((tmp_path / "prepared").iterdir())


def test_a_run_that_has_just_written_is_kept_whatever_its_lock_says(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "runs" / "elsewhere", 3, code=None)  # on another machine, whose locks are not seen
    assert removable(tmp_path, has_all_runs=True) == set()
    directory.finish(0, "completed", 3)
    assert removable(tmp_path, has_all_runs=True) == {"elsewhere"}


def test_only_replaced_runs_are_offered_by_default_and_recent_ones_kept(tmp_path: Path) -> None:
    for name in ("mine", "mine.1", "other.1"):
        make_run(tmp_path / "runs" / name, 3)
    make_prepared(tmp_path / "prepared", "old", days=3)
    make_prepared(tmp_path / "prepared", "new")
    assert removable(tmp_path) == {"mine.1", "old", "new"}
    assert removable(tmp_path, min_age_s=86400.0) == {"old"}


def test_the_command_removes_nothing_until_it_is_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    kept = make_run(tmp_path / "runs" / "mine", 3).path
    replaced = make_run(tmp_path / "runs" / "mine.1", 3).path
    prepared = make_prepared(tmp_path / "prepared", "set")
    command = ["clean", "--runs", str(tmp_path / "runs"), "--prepared", str(tmp_path / "prepared")]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "2 of 3" in shown
    assert "repeat with --yes" in shown
    assert kept.is_dir()
    assert replaced.is_dir()
    assert prepared.is_dir()
    assert main([*command, "--yes"]) == 0
    assert kept.is_dir()
    assert not replaced.exists()
    assert not prepared.exists()
    assert list((tmp_path / "prepared").iterdir()) == []


def test_a_link_to_a_run_is_kept(tmp_path: Path) -> None:
    make_run(tmp_path / "elsewhere", 3)
    make_run(tmp_path / "runs" / "mine", 3)
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "elsewhere")
    found = {one.path.name: one.keep for one in find_leftovers(tmp_path, tmp_path / "runs", has_all_runs=True)}
    assert found == {"linked": "a link", "mine": ""}


def test_what_cannot_be_removed_is_named_and_the_rest_is_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name in ("one", "another"):
        make_prepared(tmp_path / "prepared", name)
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name == "one":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    command = ["clean", "--runs", str(tmp_path / "runs"), "--prepared", str(tmp_path / "prepared"), "--yes"]
    assert main(command) == 1
    shown = capsys.readouterr().out
    assert "not removed: Permission denied" in shown
    assert "1 of 2 in " in shown
    assert [path.name for path in (tmp_path / "prepared").iterdir()] == ["one"]


@pytest.mark.parametrize(
    ("option", "value"), [("--older-than", "5 days"), ("--older-than", "5%"), ("--older-than", "3")]
)
def test_a_wrong_age_is_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clean", option, value]) == 2
    assert f"{option} {value}: expected a time, such as 30min or 48h" in capsys.readouterr().err
