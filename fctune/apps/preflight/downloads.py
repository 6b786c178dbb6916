"""Downloads of the hub repositories that a run names, pinned to their commits."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from fctune.apps.preflight.checks import (
    ALLOW_PATTERNS,
    RepoKind,
    find_snapshot,
    list_hub_repositories,
    list_source_paths,
)
from fctune.base.errors import DataError, one_line
from fctune.base.files import is_in_use, run_within, write_atomically
from fctune.config.schema import RunConfig
from fctune.models.hub import resolve_model_dir

_HUB_S = 15.0  # limit for the size of a repository; other nodes wait for the one that asks


def download(config: RunConfig, folder: Path) -> list[str]:
    """Download the hub repositories that a config names and return overrides that pin their commits.

    To be called by one process of a cluster whose nodes share HF_HOME. Concurrent runs wait for each other at a lock,
    and an interrupted download resumes. Without a revision in the config, the commit of the first download is pinned
    until its record is deleted, so that a resumed run does not switch to a newer one.

    Args:
        config: The run's config.
        folder: Receives the locks and one record for each downloaded repository.

    Raises:
        ConfigError: The model cannot be downloaded.
        DataError: A dataset cannot be downloaded.
    """
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    overrides: list[str] = []
    folder.mkdir(parents=True, exist_ok=True)
    for kind, name, revision, key in list_hub_repositories(config):
        record = _record_of(folder, kind, name, revision)
        with WeakFileLock(record.with_suffix(".lock")):
            commit = _read_record(record).get("commit")
            local = _download(kind, name, commit or revision)
            if commit is None:
                _write_record(record, {"kind": kind, "name": name, "revision": revision, "commit": local.name}, local)
        overrides.append(_pin(config, kind, name, key, local))
    return overrides


def find_downloads(config: RunConfig, folder: Path) -> list[str] | None:
    """Return the overrides that ``download`` would return, without the network; None if anything is not downloaded."""
    overrides: list[str] = []
    for kind, name, revision, key in list_hub_repositories(config):
        commit = _read_record(_record_of(folder, kind, name, revision)).get("commit")
        local = None if commit is None else find_snapshot(kind, name, commit)
        if local is None:
            return None
        overrides.append(_pin(config, kind, name, key, local))
    return overrides


def is_being_downloaded(config: RunConfig, folder: Path) -> bool:
    """Return True if a process downloads one of the repositories; False where the file system has no locks."""
    repositories = list_hub_repositories(config)
    records = [_record_of(folder, kind, name, revision) for kind, name, revision, _ in repositories]
    return any(is_in_use(record.with_suffix(".lock")) for record in records)


def measure_repository(kind: RepoKind, name: str, revision: str | None, folder: Path) -> int | None:
    """Return the bytes of a repository's files that are downloaded; None if they are not known.

    Without a record of its download, the hub is asked, which may not answer for minutes where packets are dropped.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    record = _read_record(_record_of(folder, kind, name, revision))
    if "bytes" in record:
        return int(record["bytes"])
    tree: list[Any] = []

    def ask() -> None:
        with suppress(Exception):  # the client raises errors of several families; check_hub reports them
            tree.append(list(HfApi().list_repo_tree(name, repo_type=kind, revision=revision, recursive=True)))

    if not run_within(_HUB_S, ask) or not tree:
        return None
    patterns = ALLOW_PATTERNS[kind]
    files = [file for file in tree[0] if isinstance(file, RepoFile)]
    return sum(file.size for file in files if any(fnmatch(file.path, pattern) for pattern in patterns))


def measure_snapshot(snapshot: Path) -> int:
    """Return the bytes of the files of a downloaded repository."""
    return sum(file.stat().st_size for file in snapshot.rglob("*") if file.is_file())


def _record_of(folder: Path, kind: RepoKind, name: str, revision: str | None) -> Path:
    suffix = f"@{revision.replace('/', '--')}" if revision else ""
    return folder / f"{kind}s--{name.replace('/', '--')}{suffix}.json"


def _pin(config: RunConfig, kind: RepoKind, name: str, key: str, local: Path) -> str:
    """Return the override that replaces a repository by its snapshot."""
    if kind == "model":
        return f"{key}=hf:{name}@{local.name}"
    rollouts = config.rollouts
    is_cases = rollouts is not None and key == f"{rollouts.section}.cases"
    path = rollouts.cases if rollouts is not None and is_cases else list_source_paths(config)[key]
    prefix, _, spec = path.partition("hf:")
    rest = spec.partition("@")[0].partition(":")[2]
    return f"{key}={prefix}hf:{local}" + (f":{rest}" if rest else "")


def _download(kind: RepoKind, name: str, revision: str | None) -> Path:
    if kind == "model":
        return resolve_model_dir(f"hf:{name}" + (f"@{revision}" if revision else ""))
    from huggingface_hub import snapshot_download

    try:
        patterns = ALLOW_PATTERNS[kind]
        return Path(snapshot_download(name, repo_type=kind, revision=revision, allow_patterns=patterns))
    except Exception as error:
        reason = one_line(error, 300)
        raise DataError(
            f"hf:{name}: the dataset cannot be downloaded ({type(error).__name__}: {reason}). Check the name and the "
            "network; for a gated dataset, accept its license and set HF_TOKEN."
        ) from None


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return record


def _write_record(path: Path, record: dict[str, Any], local: Path) -> None:
    record["bytes"] = measure_snapshot(local)
    record["downloaded_at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    write_atomically(path, json.dumps(record, indent=2) + "\n")
