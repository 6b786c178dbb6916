"""What a source holds, as a short text that changes when its rows do."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from fctune.data.sources.reader import list_files
from fctune.files import write_atomically

# A file changed so short a time ago could change again without its times telling; file systems round them.
_SETTLED_NS = 3 * 10**9


class FileDigests:
    """Digests of files' content, kept in a file beside the prepared sets so that a second start reads nothing.

    A kept digest holds as long as the file's size, times and inode do; its change time moves with every write and
    cannot be set back.
    """

    def __init__(self, kept_in: Path | None = None):
        self._path = kept_in
        self._kept: dict[str, list[Any]] = {}
        self._is_changed = False
        if kept_in is not None:
            with contextlib.suppress(OSError, ValueError, TypeError):  # it saves time, no more
                self._kept = dict(json.loads(kept_in.read_text(encoding="utf-8")))

    def digest(self, path: str | Path) -> str:
        """Digest of a file's content, 32 hex digits."""
        place, facts = os.path.abspath(path), _stat(path)
        kept = self._kept.get(place)
        if kept is not None and kept[:-1] == facts:
            return str(kept[-1])
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        if facts == _stat(path) and time.time_ns() - max(facts[1:3]) > _SETTLED_NS:
            self._kept[place] = [*facts, digest]
            self._is_changed = True
        return digest

    def keep(self) -> None:
        """Write what is new, where there is a place for it."""
        if self._path is None or not self._is_changed:
            return
        with contextlib.suppress(OSError):
            write_atomically(self._path, json.dumps(self._kept))


def fingerprint_source(path: str, digests: FileDigests) -> str:
    """Digest of the content of a source's files; of the generator's code for ``synthetic:``; the name for ``hf:``.

    A dataset of the hub is told apart by its name and revision alone, so name a revision (``hf:NAME@REVISION``) where
    rows may change under the name.
    """
    if path.startswith("hf:"):
        return path
    if path.startswith("synthetic:"):
        import fctune.data.synthetic

        folder = Path(fctune.data.synthetic.__file__).parent
        files = sorted(str(file) for pattern in ("*.py", "*.yaml") for file in folder.glob(pattern))
    else:
        files = list_files(path)
    names_and_contents = [[Path(file).name, digests.digest(file)] for file in files]
    return hashlib.blake2b(json.dumps(names_and_contents).encode(), digest_size=16).hexdigest()


def _stat(path: str | Path) -> list[int]:
    """Size, times of content and of change in ns, inode and device."""
    of = os.stat(path)
    return [of.st_size, of.st_mtime_ns, of.st_ctime_ns, of.st_ino, of.st_dev]
