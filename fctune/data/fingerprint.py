"""Fingerprints of everything that a prepared set is made from."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fctune.base.files import write_atomically
from fctune.config.fields import KEEPS_PREPARED, list_fields
from fctune.config.sections.data import DataConfig
from fctune.data.chosen_template import ChosenTemplate
from fctune.data.sources.reader import list_files
from fctune.data.template_args import TEMPLATE_ARGS_FILE

# Part of every fingerprint: raise it when the meaning of the files or the encoding of rows changes.
_VERSION = 5

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", TEMPLATE_ARGS_FILE)

# A file changed this recently could change again without a visible change of its times, which file systems round.
_SETTLED_NS = 3 * 10**9


class FileDigests:
    """Digests of files' contents, cached in a file next to the prepared sets so that a second start reads nothing.

    A cached digest is valid while the file's size, times and inode are unchanged; its change time moves with every
    write and cannot be set back.

    Args:
        cache: File of the cached digests; None caches nothing.
        settled_ns: Age in ns from which a file's digest is cached.
    """

    def __init__(self, cache: Path | None = None, settled_ns: int = _SETTLED_NS):
        self._cache = cache
        self._settled_ns = settled_ns
        self._entries: dict[str, list[Any]] = {}
        self._is_changed = False
        if cache is not None:
            with contextlib.suppress(OSError, ValueError, TypeError):  # a cache only saves time
                self._entries = dict(json.loads(cache.read_text(encoding="utf-8")))

    def digest(self, path: str | Path) -> str:
        """Return the digest of a file's content, 32 hex digits."""
        key, stat = os.path.abspath(path), _stat(path)
        entry = self._entries.get(key)
        if entry is not None and entry[:-1] == stat:
            return str(entry[-1])
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        if stat == _stat(path) and time.time_ns() - max(stat[1:3]) > self._settled_ns:
            self._entries[key] = [*stat, digest]
            self._is_changed = True
        return digest

    def save(self) -> None:
        """Write new digests to the cache, if there is one and it can be written."""
        if self._cache is not None and self._is_changed:
            with contextlib.suppress(OSError):
                write_atomically(self._cache, json.dumps(self._entries))


def fingerprint_inputs(
    config: DataConfig,
    model_dir: Path,
    digests: FileDigests | None = None,
    template_args: dict[str, Any] | None = None,
    chat_template: ChosenTemplate | None = None,
) -> tuple[str, dict[str, Any]]:
    """Return the name of the prepared set made from these inputs, and the inputs by name, which explain a mismatch.

    Rows, tokenizer and template enter by content, so a file edited in place is a different input.
    """
    digests = digests or FileDigests()
    inputs: dict[str, Any] = {
        "version": _VERSION,
        "tokenizer": {
            name: digests.digest(model_dir / name) for name in _TOKENIZER_FILES if (model_dir / name).is_file()
        },
        "template_args": template_args or {},
        "chat_template": None if chat_template is None else _digest_json(chat_template.source),
    }
    read = [field.name for field in list_fields(type(config)) if field.change is not KEEPS_PREPARED]
    inputs |= {name: getattr(config, name) for name in read}
    inputs["sources"] = [
        {**asdict(source), "content": fingerprint_source(source.path, digests)} for source in config.sources
    ]
    text = json.dumps(inputs, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), inputs


def fingerprint_source(path: str, digests: FileDigests) -> str:
    """Return a digest of the content of a source's files; of the generator for ``synthetic:``; the name for ``hf:``.

    A dataset of the hub is identified by its name and revision alone, so pin a revision (``hf:NAME@REVISION``) if its
    rows may change.
    """
    if path.startswith("hf:"):
        return path
    if path.startswith("synthetic:"):
        folder = Path(__file__).parent / "synthetic"
        files = sorted(str(file) for pattern in ("*.py", "*.yaml") for file in folder.glob(pattern))
    else:
        files = list_files(path)
    names_and_contents = [[Path(file).name, digests.digest(file)] for file in files]
    return _digest_json(names_and_contents)


def _digest_json(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def _stat(path: str | Path) -> list[int]:
    """Return size, modification and change time in ns, inode and device."""
    stat = os.stat(path)
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]
