"""The checkpoint directory of a run: publishing, listing, verifying and pruning checkpoints.

    checkpoints/checkpoint-500/           sharded: fast to write, for this run to resume from
    checkpoints/elastic-checkpoint-1000/  Hugging Face form: for any number of ranks, and for other tools
    checkpoints/final -> elastic-checkpoint-1500     and ``best``, of the best accuracy while training
    checkpoints/.checkpoint-600.partial/  being written, or left by a killed run
    checkpoints/checkpoint-700.1/         set aside when the run went back to an earlier step; never used, and deleted
                                          when it has got that far again

A checkpoint is written under its hidden name. Then ``manifest.json`` lists each file with its size and checksum, the
directory is renamed, and finally the marker, which holds the manifest's checksum, is put into it. A directory without
its marker is used only if its files match its manifest.
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

from fctune.base.errors import CheckpointError
from fctune.base.files import checksum, delete, find_free_name, flush, write_atomically
from fctune.checkpoint.fault_hooks import fire
from fctune.checkpoint.files import FileRecord, record_file

Kind = Literal["sharded", "elastic"]

MANIFEST = "manifest.json"
_PREFIXES: dict[Kind, str] = {"sharded": "checkpoint", "elastic": "elastic-checkpoint"}
_MARKERS: dict[Kind, str] = {"sharded": "_SUCCESS", "elastic": "_ELASTIC_SUCCESS"}
_NAME = re.compile(r"(elastic-)?checkpoint-(\d+)")
_ASIDE = re.compile(rf"{_NAME.pattern}\.\d+")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A published checkpoint, saved after ``step`` optimizer steps."""

    path: Path
    kind: Kind
    step: int


class CheckpointStore:
    """Publishes, lists and prunes a run's checkpoints. Only rank 0 changes the directory; any rank may read it.

    Args:
        root: The checkpoint directory.
        keep_last: Number of newest checkpoints of each kind that ``prune`` keeps.
        keep_every_n_steps: ``prune`` also keeps checkpoints whose step is a multiple of this.
    """

    def __init__(self, root: Path, keep_last: int = 3, keep_every_n_steps: int | None = None):
        self.root = root
        self.keep_last = keep_last
        self.keep_every_n_steps = keep_every_n_steps
        self._published: Path | None = None  # the newest by time, which a later step of an earlier launch may precede

    def path(self, kind: Kind, step: int) -> Path:
        """Return the directory of a published checkpoint."""
        return self.root / f"{_PREFIXES[kind]}-{step}"

    def partial_path(self, kind: Kind, step: int) -> Path:
        """Return the hidden directory in which a checkpoint is written before it is published."""
        return self.root / f".{_PREFIXES[kind]}-{step}.partial"

    def start(self, kind: Kind, step: int) -> None:
        """Create the hidden directory of a new checkpoint, replacing one that a killed run left."""
        partial = self.partial_path(kind, step)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def publish(self, kind: Kind, step: int, files: Iterable[FileRecord]) -> Checkpoint:
        """Write the manifest, rename and mark a checkpoint whose files are all written and flushed.

        Raises:
            OSError: The disk is full, gone or read-only; earlier checkpoints are unaffected.
        """
        partial, final = self.partial_path(kind, step), self.path(kind, step)
        listed = {file.name: {"bytes": file.num_bytes, "xxh3_128": file.checksum} for file in files}
        manifest = json.dumps({"version": 1, "kind": kind, "step": step, "files": listed}, indent=1, sort_keys=True)
        (partial / MANIFEST).write_text(manifest + "\n", encoding="utf-8")
        manifest_checksum = record_file(partial / MANIFEST).checksum
        for folder in {(partial / file).parent for file in listed} | {partial}:
            flush(folder)
        fire("publish", final.name)
        removed = self._removal_path(final)
        if final.exists():  # the same step again, after resuming from an earlier one
            final.rename(removed)
        partial.rename(final)
        flush(self.root)
        fire("mark", final.name)
        checkpoint = Checkpoint(final, kind, step)
        self._mark(checkpoint, manifest_checksum)
        self._published = final
        delete(removed, ignore_errors=True)
        return checkpoint

    def discard(self, kind: Kind, step: int) -> None:
        """Delete the files of a checkpoint that could not be saved."""
        shutil.rmtree(self.partial_path(kind, step), ignore_errors=True)

    def link(self, checkpoint: Checkpoint, name: Literal["final", "best"]) -> None:
        """Make ``name`` a symbolic link to a checkpoint, atomically; ``prune`` never deletes its target."""
        link = self.root / f".{name}.partial"
        link.unlink(missing_ok=True)
        link.symlink_to(checkpoint.path.name)
        os.replace(link, self.root / name)

    def list_complete(self) -> list[Checkpoint]:
        """Return the marked checkpoints; see ``newest_first``."""
        found = [c for entry in self._entries() if (c := _parse_name(entry)) and (entry / _MARKERS[c.kind]).is_file()]
        return newest_first(found)

    def list_unmarked(self) -> list[Checkpoint]:
        """Return the checkpoints whose marker is missing, newest first."""
        found = [c for entry in self._entries() if (c := _parse_name(entry)) and not entry.is_symlink()]
        return newest_first(c for c in found if not (c.path / _MARKERS[c.kind]).is_file())

    def sweep(self) -> list[str]:
        """Delete the hidden and the incomplete directories that killed runs left; returns their names.

        A checkpoint that lacks only its marker gets it.
        """
        fire("sweep", self.root.name)
        swept: list[str] = []
        for checkpoint in self.list_unmarked():
            try:
                verify(checkpoint)
            except CheckpointError:
                shutil.rmtree(checkpoint.path, ignore_errors=True)
                swept.append(checkpoint.path.name)
            else:
                self._mark(checkpoint, checksum(checkpoint.path / MANIFEST))
        for entry in self._entries():
            if not entry.name.startswith("."):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
                swept.append(entry.name)
            else:
                entry.unlink(missing_ok=True)
        return swept

    def set_aside_newer(self, resumed: Checkpoint) -> list[str]:
        """Rename the complete checkpoints that sort before the one a run resumes from; returns their new names.

        They belong to steps that the run takes again, or are damaged. The newest is renamed first, so that those left
        by a crash are still of one course of the run. Links to them are removed.
        """
        order = newest_first([*self.list_complete(), resumed])
        newer = order[: next(i for i, c in enumerate(order) if (c.kind, c.step) == (resumed.kind, resumed.step))]
        names = [checkpoint.path.name for checkpoint in newer]
        for link in (self.root / "final", self.root / "best"):
            if link.is_symlink() and link.readlink().name in names:
                link.unlink()
        renamed: list[str] = []
        for checkpoint in newer:
            aside = find_free_name(checkpoint.path)
            checkpoint.path.rename(aside)
            renamed.append(aside.name)
        if newer:
            flush(self.root)
        return renamed

    def prune(self) -> list[str]:
        """Delete checkpoints that are no longer kept; returns their names.

        Of each kind the newest ``keep_last`` are kept, and at least one; so are multiples of ``keep_every_n_steps``,
        the targets of ``final`` and ``best``, and what was published last. Those set aside are deleted when the run has
        got as far again.
        """
        linked = [(self.root / name).resolve() for name in ("final", "best")]
        pruned: list[str] = []
        complete = self.list_complete()
        newest = complete[0].step if complete else 0
        for entry in self._entries():
            if (aside := _ASIDE.fullmatch(entry.name)) and int(aside[2]) <= newest:
                delete(entry, ignore_errors=True)
                pruned.append(entry.name)
        for kind in _PREFIXES:
            of_kind = [c for c in complete if c.kind == kind]
            for checkpoint in of_kind[max(1, self.keep_last) :]:
                is_multiple = self.keep_every_n_steps and checkpoint.step % self.keep_every_n_steps == 0
                if is_multiple or checkpoint.path.resolve() in linked or checkpoint.path == self._published:
                    continue
                fire("prune", checkpoint.path.name)
                removed = self._removal_path(checkpoint.path)
                checkpoint.path.rename(removed)  # a kill during deletion leaves nothing that looks complete
                delete(removed, ignore_errors=True)
                pruned.append(checkpoint.path.name)
        return pruned

    def _mark(self, checkpoint: Checkpoint, manifest_checksum: str) -> None:
        write_atomically(checkpoint.path / _MARKERS[checkpoint.kind], manifest_checksum, is_durable=True)

    def _entries(self) -> list[Path]:
        return sorted(self.root.iterdir()) if self.root.is_dir() else []

    def _removal_path(self, path: Path) -> Path:
        removed = path.with_name(f".{path.name}.removed")
        delete(removed, ignore_errors=True)
        return removed


def newest_first(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Sort checkpoints by step, newest first; of the same step, the sharded one first."""
    return sorted(checkpoints, key=lambda c: (-c.step, c.kind != "sharded"))


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in a directory that a user named; links such as ``final`` are followed.

    Raises:
        CheckpointError: The directory is missing or is not a checkpoint.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory. Pass a checkpoint, such as RUN/checkpoints/checkpoint-500.")
    checkpoint = _parse_name(path.resolve())
    if checkpoint is None:
        raise CheckpointError(f"{path}: not a checkpoint. Pass one, such as RUN/checkpoints/checkpoint-500.")
    return checkpoint


def read_manifest(checkpoint: Checkpoint) -> Mapping[str, FileRecord]:
    """Return the manifest entries of a checkpoint by file name.

    Raises:
        CheckpointError: The manifest is missing, damaged, or names files outside of the checkpoint.
    """
    file, marker = checkpoint.path / MANIFEST, checkpoint.path / _MARKERS[checkpoint.kind]
    try:
        if marker.exists() and marker.read_text(encoding="utf-8") != checksum(file):
            raise CheckpointError(f"{file}: damaged: its checksum differs from the one in {marker.name}.")
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
    """Check this rank's share of a checkpoint's files against the manifest.

    Raises:
        CheckpointError: A file is missing, truncated or altered; the first such file is named.
    """
    records = read_manifest(checkpoint)
    for record in sorted(records.values(), key=lambda r: (-r.num_bytes, r.name))[rank::world_size]:
        file = checkpoint.path / record.name
        try:
            num_bytes = file.stat().st_size
            if num_bytes != record.num_bytes:
                raise CheckpointError(f"{file}: damaged: {num_bytes:,} bytes, expected {record.num_bytes:,}.")
            if checksum(file) != record.checksum:
                raise CheckpointError(f"{file}: damaged: its checksum differs from the manifest's.")
        except OSError as error:
            raise CheckpointError(f"{file}: damaged: cannot be read ({error.strerror}).") from None


def _parse_name(path: Path) -> Checkpoint | None:
    match = _NAME.fullmatch(path.name)
    if match is None or not path.is_dir():
        return None
    return Checkpoint(path, "elastic" if match[1] else "sharded", int(match[2]))
