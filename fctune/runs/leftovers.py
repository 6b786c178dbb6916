"""Leftovers of runs that can be removed: prepared sets, earlier runs and compiled kernels."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fctune.base.files import is_in_use
from fctune.runs.directory import RunFiles

Kind = Literal["prepared set", "unfinished set", "earlier run", "run", "cache"]

_MOVED_ASIDE = re.compile(r"(.+)\.\d+")  # a run that `resume=never` renamed
_RECENT_S = 600.0  # a run that has written since may be running on another machine, whose locks are not seen
_UNFINISHED_S = 3600.0  # a set that nobody has written to since is that of a process that was killed


@dataclass(frozen=True, slots=True)
class Leftover:
    """A directory that could be removed, and the reason to keep it, if there is one."""

    kind: Kind
    path: Path
    num_bytes: int
    age_s: float  # since its last use
    keep: str = ""  # why it is kept; empty: it can be removed

    def remove(self) -> None:
        """Remove the directory; an interruption or error leaves a hidden one that the next clean removes.

        Raises:
            OSError: It cannot be removed.
        """
        hidden = self.path.with_name(f".{self.path.name}.removed")
        self.path.rename(hidden)
        shutil.rmtree(hidden)


def find_leftovers(
    prepared: Path, runs: Path, caches: Sequence[Path] = (), min_age_s: float = 0.0, has_all_runs: bool = False
) -> list[Leftover]:
    """List what could be removed, the largest of each kind first.

    Args:
        prepared: Directory of prepared sets; one that a process has open is kept, whatever run it belongs to.
        runs: Directory of runs; a run whose ``.lock`` is held or that has just written is kept, with its prepared set.
        caches: Directories of compiled kernels.
        min_age_s: Keep what has been used since.
        has_all_runs: Offer every ended run, not only those that a later run of the same name has replaced.
    """
    now = time.time()
    folders = [file.parent for file in sorted(runs.glob("*/run.json"))]
    live = {folder for folder in folders if is_live(folder, now)}
    in_use = {path for folder in live if (path := _read_prepared_path(folder)) is not None}
    found: list[Leftover] = []

    def add(kind: Kind, path: Path, used_at: float, keep: str) -> None:
        age_s = max(0.0, now - used_at)
        # Removing a link would free nothing; where it leads may be another's.
        keep = keep or ("a link" if path.is_symlink() else "" if age_s >= min_age_s else "too recent")
        found.append(Leftover(kind, path, count_bytes(path), age_s, keep))

    for file in sorted([*prepared.glob("*/meta.json"), *prepared.glob("*/config.json")]):  # sets, and extended bases
        is_used = file.parent in in_use or is_in_use(file)
        add("prepared set", file.parent, file.parent.stat().st_mtime, "in use" if is_used else "")
    for path in sorted(path for path in prepared.glob(".*.*") if path.is_dir() and path.suffix != ".removed"):
        with suppress(FileNotFoundError):  # it was finished meanwhile
            written = max(file.stat().st_mtime for file in [path, *path.iterdir()])
            is_written = now - written <= _UNFINISHED_S or is_in_use(path.with_suffix(".lock"))
            add("unfinished set", path, written, "being written" if is_written else "")
    for path in sorted([*prepared.glob(".*.removed"), *runs.glob(".*.removed")]):
        add("cache", path, 0.0, "")
    for folder in folders:
        moved = _MOVED_ASIDE.fullmatch(folder.name)
        is_replaced = moved is not None and RunFiles(runs / moved[1]).run.is_file()
        keep = "running" if folder in live else "" if is_replaced or has_all_runs else "the newest of its name"
        add("earlier run" if is_replaced else "run", folder, _last_written(folder), keep)
    for path in caches:
        if path.is_dir():
            add("cache", path, _last_written(path), "in use" if live else "")
    return sorted(found, key=lambda one: (one.kind, -one.num_bytes))


def is_live(folder: Path, now: float) -> bool:
    """Return True if a run holds its directory's lock, or wrote in the last ten minutes and has not ended."""
    if RunFiles(folder).is_locked():
        return True
    return not RunFiles(folder).exit.is_file() and now - _last_written(folder) < _RECENT_S


def count_bytes(folder: Path) -> int:
    """Return the bytes of all files below a directory, without following links."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _last_written(folder: Path) -> float:
    files = RunFiles(folder)
    times = [file.stat().st_mtime for file in (files.metrics, files.exit, files.run) if file.is_file()]
    return max(times, default=folder.stat().st_mtime)


def _read_prepared_path(folder: Path) -> Path | None:
    try:
        return Path(json.loads(RunFiles(folder).run.read_text(encoding="utf-8"))["data"]["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
