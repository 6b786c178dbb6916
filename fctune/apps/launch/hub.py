"""Models and datasets on the Hugging Face hub: access checks, downloads to the shared volume, and uploads."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from fctune.apps.launch.problems import Problem
from fctune.base.errors import CheckpointError, ConfigError, DataError
from fctune.base.files import write_atomically
from fctune.config.schema import RunConfig
from fctune.data.template_args import TEMPLATE_ARGS_FILE
from fctune.models.adapter_base import read_base
from fctune.models.hub import COMPANION_FILES, describe_failure, parse_name, resolve_model_dir

RepoKind = Literal["model", "dataset"]

# Files downloaded of each kind of repository: nothing executable.
_ALLOW_PATTERNS = {
    "model": ["*.safetensors", "*.json"],
    "dataset": [f"*.{s}" for s in ("json", "jsonl", "jsonl.gz", "json.gz", "ndjson", "parquet", "arrow", "csv", "md")],
}


def list_hub_repositories(config: RunConfig) -> list[tuple[RepoKind, str, str | None, str]]:
    """List the hub repositories that a config names: kind, name, revision (None: the newest) and config key."""
    keys: list[tuple[RepoKind, str, str]] = [("model", "model.path", config.model.path)]
    keys += [("dataset", f"data.sources.{i}.path", source.path) for i, source in enumerate(config.data.sources)]
    repositories: list[tuple[RepoKind, str, str | None, str]] = []
    for kind, key, path in keys:
        spec, _, revision = path.removeprefix("hf:").partition("@")
        name = spec.split(":")[0]
        if path.startswith("hf:") and not Path(name).is_dir():
            repositories.append((kind, name, revision or None, key))
    return repositories


def is_downloaded(kind: RepoKind, name: str, revision: str | None) -> bool:
    """Return True if the hub client's cache holds a complete snapshot of a repository."""
    from huggingface_hub import snapshot_download

    patterns = _ALLOW_PATTERNS[kind]
    try:
        snapshot_download(name, repo_type=kind, revision=revision, local_files_only=True, allow_patterns=patterns)
    except Exception:  # the client raises errors of several families; any of them means that a download is needed
        return False
    return True


def check_hub(config: RunConfig, environment: Mapping[str, str]) -> list[Problem]:
    """Check that every repository that a config names is downloaded or can be."""
    problems: list[Problem] = []
    seen: set[tuple[str, str]] = set()
    for kind, name, revision, key in list_hub_repositories(config):
        if (kind, name) in seen or is_downloaded(kind, name, revision):
            continue
        seen.add((kind, name))
        problem = _check_access(kind, name, key, environment)
        problems += [] if problem is None else [problem]
    return problems


def _check_access(kind: RepoKind, name: str, key: str, environment: Mapping[str, str]) -> Problem | None:
    from huggingface_hub import auth_check
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if environment.get("HF_HUB_OFFLINE") in ("1", "true", "True"):
        remedy = f"Unset it, or put the {kind} into HF_HOME={environment.get('HF_HOME', '')}"
        return Problem(f"{key}: {name} is not downloaded, and HF_HUB_OFFLINE is set", remedy)
    token = environment.get("HF_TOKEN") or None
    try:
        auth_check(name, repo_type=kind, token=token)
    except GatedRepoError:
        reason = "the account of HF_TOKEN has no access" if token else "HF_TOKEN is empty"
        page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name}"
        remedy = f"Accept the license at {page}" + ("" if token else ", export HF_TOKEN and pass --secret HF_TOKEN")
        return Problem(f"{key}: {name} is gated and {reason}", remedy)
    except RepositoryNotFoundError:
        remedy = "Check the name" + ("" if token else "; if it is private, pass --secret HF_TOKEN")
        return Problem(f"{key}: the hub has no {kind} {name}, or this token cannot see it", remedy)
    except Exception as error:  # no network, a proxy, or an outage of the hub
        reason = " ".join(str(error).split())[:120]
        remedy = f"Check the head's network, or download the {kind} into HF_HOME beforehand"
        return Problem(f"{key}: cannot reach the hub for {name} ({type(error).__name__}: {reason})", remedy)
    return None


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
        suffix = f"@{revision.replace('/', '--')}" if revision else ""
        record = folder / f"{kind}s--{name.replace('/', '--')}{suffix}.json"
        with WeakFileLock(record.with_suffix(".lock")):
            commit = _read_record(record).get("commit")
            local = _download(kind, name, commit or revision)
            if commit is None:
                _write_record(record, {"kind": kind, "name": name, "revision": revision, "commit": local.name}, local)
        if kind == "model":
            overrides.append(f"{key}=hf:{name}@{local.name}")
        else:
            path = config.data.sources[int(key.split(".")[2])].path
            rest = path.removeprefix("hf:").partition("@")[0].partition(":")[2]
            overrides.append(f"{key}=hf:{local}" + (f":{rest}" if rest else ""))
    return overrides


@dataclass(frozen=True, slots=True)
class Upload:
    """Files that ``fctune push`` publishes from a directory.

    Attributes:
        files: The content of each file, or where it lies, by its name in the repository.
        skipped: Names of everything else in the directory, sorted; directories end with a slash.
    """

    files: Mapping[str, Path | bytes]
    skipped: tuple[str, ...]

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file, by name."""
        return {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in self.files.items()
        }


def plan_upload(export: Path, card: str | None = None) -> Upload:
    """Choose the files of a model or adapter directory to publish: those that an export consists of, and no others.

    Of the weights, these are the files that the index names. A link that leaves the directory is not followed. An
    adapter is published with the name of its base, and without the path of one that is a directory.

    Args:
        export: The directory, as ``find_export`` returns it.
        card: Text of README.md; None: the directory's own.

    Raises:
        CheckpointError: The config or weights are missing, or lie outside the directory.
        ConfigError: An adapter names no base.
    """
    from fctune.calls.server_parsers import FILE_NAME as SERVER_PARSERS_FILE  # slow to import

    root = export.resolve()
    names = sorted(entry.name for entry in root.iterdir())
    stem = "adapter_model" if "adapter_config.json" in names else "model"
    needed = ["adapter_config.json" if stem == "adapter_model" else "config.json"]
    index = f"{stem}.safetensors.index.json"
    needed += [index, *_read_shards(root / index)] if index in names else [f"{stem}.safetensors"]
    allowed = {"README.md", "config.json", "adapter_config.json", TEMPLATE_ARGS_FILE, SERVER_PARSERS_FILE, *needed}
    files: dict[str, Path | bytes] = {}
    for name in names:
        path = (root / name).resolve()
        is_known = name in allowed or any(fnmatchcase(name, pattern) for pattern in COMPANION_FILES)
        if is_known and path.is_file() and path.is_relative_to(root):
            files[name] = path
    for name in needed:
        if name not in files:
            reason = "links to a file outside of it" if (root / name).is_symlink() else "is missing"
            remedy = (
                "Check it with python -m eval.validate." if reason == "is missing" else "Replace the link by the file."
            )
            raise CheckpointError(f"{export}: {name}, which the model needs, {reason}. {remedy}")
    if card is not None:
        files["README.md"] = card.encode()
    if stem == "adapter_model":
        files["adapter_config.json"] = _publish_adapter_config(root)
    others = (f"{name}/" if (root / name).is_dir() else name for name in names if name not in files)
    return Upload(dict(sorted(files.items())), tuple(others))


def find_visibility(name: str, environment: Mapping[str, str]) -> Literal["new", "private", "public"]:
    """Return the visibility of a model repository on the hub; ``new`` if there is none that the token can see.

    Raises:
        ConfigError: The hub does not answer.
    """
    from huggingface_hub import model_info
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        found = model_info(name, token=environment.get("HF_TOKEN") or None)
    except GatedRepoError:  # a subclass of the next; its page and file list are public
        return "public"
    except RepositoryNotFoundError:
        return "new"
    except Exception as error:  # the client raises errors of several families
        raise ConfigError(f"{name}: the hub cannot be asked for it ({describe_failure(error)}).") from None
    return "private" if found.private else "public"


def push(upload: Upload, name: str, is_private: bool, revision: str | None, environment: Mapping[str, str]) -> str:
    """Upload files to the hub as one commit and return the commit's URL.

    Args:
        upload: The files.
        name: OWNER/NAME of the repository, which is created if it does not exist.
        is_private: Visibility of a repository that is created.
        revision: Branch; None: main.
        environment: Holds the token, HF_TOKEN.

    Raises:
        ConfigError: The hub refused the upload.
    """
    from huggingface_hub import CommitOperationAdd, create_commit, create_repo

    token = environment.get("HF_TOKEN") or None
    additions = [CommitOperationAdd(file, content) for file, content in upload.files.items()]
    try:
        repository = create_repo(name, token=token, private=is_private, exist_ok=True)
        commit: Any = create_commit(
            repository.repo_id, additions, commit_message="Fine-tuned with fctune", token=token, revision=revision
        )
    except Exception as error:  # the client raises errors of several families
        hint = _advise_on_token(error, bool(token))
        raise ConfigError(f"{name}: upload failed ({describe_failure(error)}).{hint}") from None
    return str(commit.commit_url)


def _advise_on_token(error: Exception, has_token: bool) -> str:
    """Return the advice for an upload that the hub refused for want of access; empty for other failures."""
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    is_refused = isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403)
    if not is_refused and not isinstance(error, RepositoryNotFoundError):
        return ""
    return f" {'Use' if has_token else 'HF_TOKEN is empty; set it to'} a token with write access."


def _read_shards(index: Path) -> list[str]:
    """Return the names of the weight files in an index, sorted."""
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if not all(isinstance(name, str) and fnmatchcase(name, "*.safetensors") and "/" not in name for name in shards):
            raise ValueError("expected names of .safetensors files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: cannot be read ({error!r}). Export the model again.") from None
    return shards


def _publish_adapter_config(folder: Path) -> bytes:
    """Return the content of ``adapter_config.json`` without the local path of the adapter's base."""
    base = read_base(folder)
    name, revision = parse_name(base) or (Path(base).resolve().name, None)
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    published = config | {"base_model_name_or_path": name, "revision": revision}
    return (json.dumps(published, indent=2) + "\n").encode()


def find_local_base(folder: Path) -> str | None:
    """Return the directory that an adapter names as its base; None for a base on the hub, or no adapter.

    Raises:
        ConfigError: The adapter names no base.
    """
    if not (folder / "adapter_config.json").is_file():
        return None
    base = read_base(folder)
    return base if parse_name(base) is None else None


def find_export(path: Path) -> Path:
    """Return the model or adapter directory of a run's output directory, or the directory itself.

    Raises:
        ConfigError: There is none.
        CheckpointError: The directory has no weights.
    """
    for folder in (path, path / "export" / "merged", path / "export" / "adapter"):
        if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
            if any(folder.glob("*.safetensors")):
                return folder
            raise CheckpointError(
                f"{folder}: contains no .safetensors files, and so no weights. Check it with python -m eval.validate."
            )
    raise ConfigError(
        f"{path}: nothing to upload: neither it nor its export/ holds a model (config.json) or an adapter "
        "(adapter_config.json). Pass a completed run's output directory or a model directory."
    )


def _download(kind: RepoKind, name: str, revision: str | None) -> Path:
    if kind == "model":
        return resolve_model_dir(f"hf:{name}" + (f"@{revision}" if revision else ""))
    from huggingface_hub import snapshot_download

    try:
        patterns = _ALLOW_PATTERNS[kind]
        return Path(snapshot_download(name, repo_type=kind, revision=revision, allow_patterns=patterns))
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
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
    record["bytes"] = sum(file.stat().st_size for file in local.rglob("*") if file.is_file())
    record["downloaded_at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    write_atomically(path, json.dumps(record, indent=2) + "\n")
