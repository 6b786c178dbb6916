"""The directory of a run's checkpoints: what is complete, what is damaged, what is kept.

    checkpoints/checkpoint-500/           sharded: fast, for this run to go on
    checkpoints/elastic-checkpoint-1000/  portable: for any number of ranks, and for other tools
    checkpoints/final -> elastic-checkpoint-1500     and ``best``, of the best accuracy while training
    checkpoints/.checkpoint-600.partial/  being written, or left by a run that was killed

A checkpoint is written under its hidden name. ``manifest.json`` then lists each file with its size and checksum, the
directory is renamed, and last the mark is put into it, which holds the manifest's checksum. Whatever lacks its mark is
never read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fctune.checkpoint.fault_hooks import reached
from fctune.checkpoint.files import checksum, flush_directory, write_text
from fctune.errors import CheckpointError

Kind = Literal["sharded", "elastic"]

MANIFEST = "manifest.json"
_PREFIXES: dict[Kind, str] = {"sharded": "checkpoint", "elastic": "elastic-checkpoint"}
_MARKS: dict[Kind, str] = {"sharded": "_SUCCESS", "elastic": "_ELASTIC_SUCCESS"}
_NAME = re.compile(r"(elastic-)?checkpoint-(\d+)")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A published checkpoint, taken after ``step`` optimizer steps."""

    path: Path
    kind: Kind
    step: int


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What the manifest says of a file; ``name`` is relative to the checkpoint."""

    name: str
    num_bytes: int
    checksum: str


class CheckpointStore:
    """Publishes, finds, verifies and prunes. Rank 0 alone changes the directory; any rank may read it."""

    def __init__(self, root: Path, keep_last: int = 3, keep_every_n_steps: int | None = None):
        self.root = root
        self.keep_last = keep_last
        self.keep_every_n_steps = keep_every_n_steps

    def path(self, kind: Kind, step: int) -> Path:
        """Where a published checkpoint stands."""
        return self.root / f"{_PREFIXES[kind]}-{step}"

    def hidden(self, kind: Kind, step: int) -> Path:
        """Where it is written before."""
        return self.root / f".{_PREFIXES[kind]}-{step}.partial"

    def start(self, kind: Kind, step: int) -> None:
        """Make the hidden directory that a checkpoint is written to."""
        hidden = self.hidden(kind, step)
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)

    def publish(self, kind: Kind, step: int, files: Iterable[FileRecord]) -> Checkpoint:
        """Name and mark a checkpoint whose files are all written and flushed.

        Raises:
            OSError: the disk is full, gone or read-only; what was there before stands.
        """
        hidden, final = self.hidden(kind, step), self.path(kind, step)
        listed = {file.name: {"bytes": file.num_bytes, "xxh3_128": file.checksum} for file in files}
        manifest = json.dumps({"version": 1, "kind": kind, "step": step, "files": listed}, indent=1, sort_keys=True)
        manifest_checksum = write_text(hidden / MANIFEST, manifest + "\n")
        for folder in {(hidden / file).parent for file in listed} | {hidden}:
            flush_directory(folder)
        reached("publish", final.name)
        doomed = self._doomed(final)
        if final.exists():  # the same step once more, after a resume from before it
            final.rename(doomed)
        hidden.rename(final)
        flush_directory(self.root)
        reached("mark", final.name)
        partial_mark = final / f".{_MARKS[kind]}.partial"
        write_text(partial_mark, manifest_checksum)
        partial_mark.rename(final / _MARKS[kind])
        flush_directory(final)
        shutil.rmtree(doomed, ignore_errors=True)
        return Checkpoint(final, kind, step)

    def discard(self, kind: Kind, step: int) -> None:
        """Take away what was written of a checkpoint that failed."""
        shutil.rmtree(self.hidden(kind, step), ignore_errors=True)

    def point_to(self, checkpoint: Checkpoint, name: Literal["final", "best"]) -> None:
        """Make ``name`` a link to a checkpoint, replacing an older one in one stroke; its target is never pruned."""
        link = self.root / f".{name}.partial"
        link.unlink(missing_ok=True)
        link.symlink_to(checkpoint.path.name)
        os.replace(link, self.root / name)

    def complete(self) -> list[Checkpoint]:
        """The marked checkpoints, newest first; of one step, the sharded one first."""
        found = [c for entry in self._entries() if (c := read_name(entry)) and (entry / _MARKS[c.kind]).is_file()]
        return sorted(found, key=lambda c: (-c.step, c.kind != "sharded"))

    def sweep(self) -> list[str]:
        """Remove what runs that were killed left behind: hidden and unmarked directories. Their names."""
        reached("sweep", self.root.name)
        swept: list[str] = []
        for entry in self._entries():
            checkpoint = read_name(entry)
            is_left = entry.name.startswith(".") or (checkpoint and not (entry / _MARKS[checkpoint.kind]).is_file())
            if is_left and entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
                swept.append(entry.name)
            elif entry.name.startswith("."):
                entry.unlink(missing_ok=True)
        return swept

    def prune(self) -> list[str]:
        """Remove old checkpoints of each kind beyond the newest ``keep_last`` and every nth; names of what went.

        The targets of ``final`` and ``best`` stay, and so does the newest of each kind whatever is asked for.
        """
        linked = [(self.root / name).resolve() for name in ("final", "best")]
        removed: list[str] = []
        for kind in _PREFIXES:
            mine = [c for c in self.complete() if c.kind == kind]
            for checkpoint in mine[max(1, self.keep_last) :]:
                is_nth = self.keep_every_n_steps and checkpoint.step % self.keep_every_n_steps == 0
                if is_nth or checkpoint.path.resolve() in linked:
                    continue
                reached("prune", checkpoint.path.name)
                doomed = self._doomed(checkpoint.path)
                checkpoint.path.rename(doomed)  # so that a kill half-way leaves nothing that looks complete
                shutil.rmtree(doomed, ignore_errors=True)
                removed.append(checkpoint.path.name)
        return removed

    def _entries(self) -> list[Path]:
        return sorted(self.root.iterdir()) if self.root.is_dir() else []

    def _doomed(self, path: Path) -> Path:
        doomed = path.with_name(f".{path.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        return doomed


def read_name(path: Path) -> Checkpoint | None:
    """The checkpoint that a directory's name speaks of; None where it is no checkpoint's."""
    match = _NAME.fullmatch(path.name)
    if match is None or not path.is_dir():
        return None
    return Checkpoint(path, "elastic" if match[1] else "sharded", int(match[2]))


def open_checkpoint(path: Path) -> Checkpoint:
    """The published checkpoint in a directory that a user named; ``final`` and other links are followed.

    Raises:
        CheckpointError: none is there, or it is not complete.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory. Name a checkpoint, such as RUN/checkpoints/checkpoint-500.")
    checkpoint = read_name(path.resolve())
    if checkpoint is None:
        raise CheckpointError(f"{path}: not a checkpoint. Name one, such as RUN/checkpoints/checkpoint-500.")
    if not (checkpoint.path / _MARKS[checkpoint.kind]).is_file():
        raise CheckpointError(
            f"{path}: lacks {_MARKS[checkpoint.kind]}, so it was not written to its end. Use an older one."
        )
    return checkpoint


def read_manifest(checkpoint: Checkpoint) -> Mapping[str, FileRecord]:
    """The files of a checkpoint by name.

    Raises:
        CheckpointError: the manifest is missing, damaged, or names files outside of the checkpoint.
    """
    file, mark = checkpoint.path / MANIFEST, checkpoint.path / _MARKS[checkpoint.kind]
    try:
        if mark.read_text(encoding="utf-8") != checksum(file):
            raise CheckpointError(f"{file}: damaged: its checksum is not the one in {mark.name}.")
        listed = json.loads(file.read_text(encoding="utf-8"))["files"]
        records = {name: FileRecord(name, int(of["bytes"]), str(of["xxh3_128"])) for name, of in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: damaged: {type(error).__name__}: {error}.") from None
    root = checkpoint.path.resolve()
    for name in records:
        if not (checkpoint.path / name).resolve().is_relative_to(root):
            raise CheckpointError(f"{file}: damaged: {name!r} is outside of the checkpoint.")
    return records


def verify(checkpoint: Checkpoint, rank: int = 0, world_size: int = 1) -> None:
    """Hold this rank's share of a checkpoint's files to the manifest.

    Raises:
        CheckpointError: a file is missing, cut or altered; the first such file is named.
    """
    records = read_manifest(checkpoint)
    for record in sorted(records.values(), key=lambda r: (-r.num_bytes, r.name))[rank::world_size]:
        file = checkpoint.path / record.name
        try:
            num_bytes = file.stat().st_size
            if num_bytes != record.num_bytes:
                raise CheckpointError(f"{file}: damaged: {num_bytes:,} bytes instead of {record.num_bytes:,}.")
            if checksum(file) != record.checksum:
                raise CheckpointError(f"{file}: damaged: its checksum is not the manifest's.")
        except OSError as error:
            raise CheckpointError(f"{file}: damaged: cannot be read ({error.strerror}).") from None
