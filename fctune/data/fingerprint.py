"""Fingerprints of everything that a prepared set is made from."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fctune.base.files import write_atomically
from fctune.config.fields import KEEPS_PREPARED, list_fields
from fctune.config.intervals import parse_share
from fctune.config.sections.data import AUGMENT_KINDS, DataConfig, SourceConfig
from fctune.data.chosen_template import ChosenTemplate
from fctune.data.sources.reader import list_files
from fctune.data.template_args import ADDITIONAL_TEMPLATES, TEMPLATE_ARGS_FILE

# Part of every fingerprint: raise it when the meaning of the files or the encoding of rows changes.
_VERSION = 7

_ROW_KEYS = ("sources", "augment", "replay", "secrets", "redact")
_SECRET_RULES = [str(Path(__file__).parent / name) for name in ("secrets.py", "redaction.py")]

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *(f"{ADDITIONAL_TEMPLATES}/*.jinja", TEMPLATE_ARGS_FILE),
)

# A download of a data set's commit, in whatever folder the hub's client keeps it.
DATASET_SNAPSHOT = re.compile(r"^hf:.*/datasets--([^/:]+)/snapshots/([0-9a-f]{40})(?=:|$)")

# A file changed this recently could change again without a visible change of its times, which file systems round.
_SETTLED_NS = 3 * 10**9


class FileDigests:
    """Digests of files' contents, cached in a file next to the prepared sets so that a second start reads nothing.

    A cached digest is valid while the file's name, size, times and inode are unchanged, in whatever folder its disk is
    mounted; its change time moves with every write and cannot be set back.

    Args:
        cache: File of the cached digests; None caches nothing.
        settled_ns: Age in ns from which a file's digest is cached.
    """

    def __init__(self, cache: Path | None = None, settled_ns: int = _SETTLED_NS):
        self._cache = cache
        self._settled_ns = settled_ns
        self._entries: dict[str, list[Any]] = {}
        self._known: dict[tuple[Any, ...], str] = {}
        self._is_changed = False
        if cache is not None:
            with contextlib.suppress(OSError, ValueError, TypeError, IndexError):  # a cache only saves time
                entries = dict(json.loads(cache.read_text(encoding="utf-8")))
                self._known = {(os.path.basename(path), *entry[:4]): str(entry[-1]) for path, entry in entries.items()}
                self._entries = entries

    def digest(self, path: str | Path) -> str:
        """Return the digest of a file's content, 32 hex digits."""
        key, stat = os.path.abspath(path), _stat(path)
        known = (os.path.basename(key), *stat[:4])
        if known in self._known:
            return self._known[known]
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        if stat == _stat(path) and time.time_ns() - max(stat[1:3]) > self._settled_ns:
            self._entries[key], self._known[known] = [*stat, digest], digest
            self._is_changed = True
        return digest

    def has(self, path: str | Path) -> bool:
        """Return True if the digest of a file is cached."""
        return (os.path.basename(path), *_stat(path)[:4]) in self._known

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

    Rows, tokenizer and template enter by content, so a file edited in place is a different input, and one that was
    moved is the same.
    """
    digests = digests or FileDigests()
    inputs: dict[str, Any] = {
        "version": _VERSION,
        "tokenizer": {
            file.relative_to(model_dir).as_posix(): digests.digest(file)
            for pattern in _TOKENIZER_FILES
            for file in model_dir.glob(pattern)
            if file.is_file()
        },
        "template_args": template_args or {},
        "chat_template": None if chat_template is None else _digest_json(chat_template.source),
    }
    read = [field.name for field in list_fields(type(config)) if field.change is not KEEPS_PREPARED]
    inputs |= {name: getattr(config, name) for name in read if name not in _ROW_KEYS}
    inputs |= describe_rows(config, digests)
    if config.secrets != "ignore":
        # With secrets=fail, the set is the same, and its counts end the run.
        inputs["secrets"] = inputs.get("secrets", {}) | {"rules": _digest_files(_SECRET_RULES, digests)}
    return name_inputs(inputs), inputs


def name_inputs(inputs: dict[str, Any]) -> str:
    """Return the name of the prepared set made from inputs, 16 hex digits; that of the same rows elsewhere is equal."""
    rows: dict[str, Any] = {"sources": _drop_places(inputs["sources"])}
    if "replay" in inputs:
        rows["replay"] = {**inputs["replay"], "sources": _drop_places(inputs["replay"]["sources"])}
    text = json.dumps(inputs | rows, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _drop_places(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return sources with a number in place of each path; equal paths keep equal numbers, since they share tools."""
    paths = [source["path"] for source in sources]
    return [
        source
        if source["path"].startswith("synthetic:")
        else {
            **source,
            "path": paths.index(source["path"]),
            "content": DATASET_SNAPSHOT.sub(r"hf:\1@\2", source["content"]),
        }
        for source in sources
    ]


def describe_rows(config: DataConfig, digests: FileDigests | None) -> dict[str, Any]:
    """Return the inputs that say which rows are trained on: ``sources``; ``augment``, ``replay``, ``secrets`` if set.

    Args:
        config: The data config.
        digests: Digests of the sources' files; None leaves the contents out.
    """

    def describe_sources(sources: list[SourceConfig]) -> list[dict[str, Any]]:
        contents = (None if digests is None else fingerprint_source(source.path, digests) for source in sources)
        return [{**asdict(source), "content": content} for source, content in zip(sources, contents, strict=True)]

    rows: dict[str, Any] = {"sources": describe_sources(config.sources)}
    if config.augment is not None:
        code = None if digests is None else _digest_folder("augment", digests)  # rows change with the wordings
        kinds = dict.fromkeys(AUGMENT_KINDS, 0.0) | config.augment.shares()
        rows["augment"] = {**asdict(config.augment), **kinds, "content": code}
    if config.replay is not None:
        share = parse_share(config.replay.share)
        rows["replay"] = {"sources": describe_sources(config.replay.sources), "share": share}
    if config.secrets == "redact":
        rows["secrets"] = {"redact": {**asdict(config.redact), "kinds": sorted(set(config.redact.kinds))}}
    return rows


def drop_contents(rows: Any, keys: tuple[str, ...] = ("content",)) -> Any:
    """Return what ``describe_rows`` returned without the contents, or other keys, to compare the settings alone."""
    if isinstance(rows, dict):
        return {key: None if key in keys else drop_contents(value, keys) for key, value in rows.items()}
    return [drop_contents(item, keys) for item in rows] if isinstance(rows, list) else rows


def fingerprint_source(path: str, digests: FileDigests) -> str:
    """Return a digest of the content of a source's files; of the generator for ``synthetic:``; the name for ``hf:``.

    A dataset of the hub is identified by its name and revision alone, so pin a revision (``hf:NAME@REVISION``) if its
    rows may change.
    """
    if path.startswith("hf:"):
        return path
    if path.startswith("synthetic:"):
        return _digest_folder("synthetic", digests)
    return _digest_files(list_files(path), digests)


def _digest_folder(name: str, digests: FileDigests) -> str:
    """Return a digest of a package of this directory, which makes rows."""
    folder = Path(__file__).parent / name
    return _digest_files(sorted(str(file) for pattern in ("*.py", "*.yaml") for file in folder.glob(pattern)), digests)


def _digest_files(files: list[str], digests: FileDigests) -> str:
    return _digest_json([[Path(file).name, digests.digest(file)] for file in files])


def _digest_json(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def _stat(path: str | Path) -> list[int]:
    """Return size, modification and change time in ns, inode and device."""
    stat = os.stat(path)
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]
