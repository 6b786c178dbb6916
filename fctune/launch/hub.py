"""Models and datasets of the Hugging Face hub: reachable, once on a cluster's shared volume, and back to the hub."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fctune.config.schema import RunConfig
from fctune.errors import CheckpointError, ConfigError, DataError
from fctune.launch.problems import Fault
from fctune.models.hub import resolve_model_dir

Kind = Literal["model", "dataset"]

# Of a dataset: rows and what describes them; nothing that would run.
_DATA_PATTERNS = [
    f"*.{suffix}" for suffix in ("json", "jsonl", "jsonl.gz", "json.gz", "ndjson", "parquet", "arrow", "csv", "md")
]


def named_on_hub(config: RunConfig) -> list[tuple[Kind, str, str | None, str]]:
    """Kind, name, revision (None: the newest) and key of each repository that a config names."""
    keys: list[tuple[Kind, str, str]] = [("model", "model.path", config.model.path)]
    keys += [("dataset", f"data.sources.{i}.path", source.path) for i, source in enumerate(config.data.sources)]
    found: list[tuple[Kind, str, str | None, str]] = []
    for kind, key, path in keys:
        spec, _, revision = path.removeprefix("hf:").partition("@")
        name = spec.split(":")[0]
        if path.startswith("hf:") and not Path(name).is_dir():
            found.append((kind, name, revision or None, key))
    return found


def is_downloaded(kind: Kind, name: str, revision: str | None) -> bool:
    """Whether a repository is whole in the cache, as far as the cache itself knows."""
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(name, repo_type=kind, revision=revision, local_files_only=True, **_wanted(kind))
    except Exception:  # the client raises a family of its own; whatever it is, it has to be fetched
        return False
    return True


def check_hub(config: RunConfig, environment: Mapping[str, str]) -> list[Fault]:
    """What keeps the repositories that a config names, and that are not here yet, from being downloaded."""
    from huggingface_hub import auth_check
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    faults: list[Fault] = []
    seen: set[tuple[str, str]] = set()
    for kind, name, revision, key in named_on_hub(config):
        if (kind, name) in seen or is_downloaded(kind, name, revision):
            continue
        seen.add((kind, name))
        page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name}"
        if environment.get("HF_HUB_OFFLINE") in ("1", "true", "True"):
            remedy = f"Unset it, or put the {kind} into HF_HOME={environment.get('HF_HOME', '')}"
            faults.append(Fault(f"{key}: {name} is not downloaded, and HF_HUB_OFFLINE is set", remedy))
            continue
        has_token = bool(environment.get("HF_TOKEN"))
        try:
            auth_check(name, repo_type=kind, token=environment.get("HF_TOKEN") or None)
        except GatedRepoError:
            whose = "the account of HF_TOKEN has no access" if has_token else "HF_TOKEN is empty"
            remedy = f"Accept the licence at {page}"
            remedy += "" if has_token else ", export HF_TOKEN, and launch with --secret HF_TOKEN"
            faults.append(Fault(f"{key}: {name} is gated and {whose}", remedy))
        except RepositoryNotFoundError:
            remedy = "Check the name" + ("" if has_token else "; where it is private, launch with --secret HF_TOKEN")
            faults.append(Fault(f"{key}: the hub has no {kind} {name} that this token may see", remedy))
        except Exception as error:  # no network, a proxy, a hub that is down
            reason = " ".join(str(error).split())[:120]
            remedy = "Check the network of the head, or put it into HF_HOME beforehand"
            faults.append(
                Fault(f"{key}: the hub cannot be asked for {name} ({type(error).__name__}: {reason})", remedy)
            )
    return faults


def fetch(config: RunConfig, folder: Path) -> list[str]:
    """Download what a config names on the hub; overrides that name what came, by its commit.

    For one process of a cluster, whose HF_HOME all nodes share. Another run that fetches the same waits for it at a
    lock; what was cut off goes on where it stopped. Where no revision is named, the commit that came first stays the
    one that is used, until its record is removed.

    Args:
        config: of the run.
        folder: for the locks, and a record of what was fetched when, a file a repository.

    Raises:
        ConfigError: the model cannot be downloaded.
        DataError: a dataset cannot be.
    """
    from huggingface_hub.utils._fixes import WeakFileLock

    overrides: list[str] = []
    for kind, name, revision, key in named_on_hub(config):
        asked = f"@{revision.replace('/', '--')}" if revision else ""
        record = folder / f"{kind}s--{name.replace('/', '--')}{asked}.json"
        folder.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(record.with_suffix(".lock")):
            # A run that goes on must find what it began with, though the newest be another by now.
            known = _read_record(record).get("commit")
            local = _download(kind, name, known or revision)
            if known is None:
                _write_record(record, {"kind": kind, "name": name, "asked": revision, "commit": local.name}, local)
        if kind == "model":
            overrides.append(f"{key}=hf:{name}@{local.name}")
        else:
            path = config.data.sources[int(key.split(".")[2])].path
            rest = path.removeprefix("hf:").partition("@")[0].partition(":")[2]
            overrides.append(f"{key}=hf:{local}" + (f":{rest}" if rest else ""))
    return overrides


def push(model: str, name: str, is_private: bool, revision: str | None, environment: Mapping[str, str]) -> str:
    """Send an export to the hub as one commit; the address of the commit.

    Args:
        model: a run's output directory, an export or another model directory, or an adapter's.
        name: OWNER/NAME there; made where it is not.
        is_private: of a repository that is made.
        revision: branch; None: main.
        environment: of which HF_TOKEN is the token.

    Raises:
        ConfigError: no such model, no token, or the hub's refusal.
        CheckpointError: a directory without weights.
    """
    from huggingface_hub import create_repo, upload_folder

    folder = _find_export(Path(model))
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder}: holds no .safetensors, so no weights. Check it with python -m eval.validate.")
    token = environment.get("HF_TOKEN") or None
    try:
        repository = create_repo(name, token=token, private=is_private, exist_ok=True)
        commit: Any = upload_folder(
            repo_id=repository.repo_id,
            folder_path=folder,
            token=token,
            revision=revision,
            commit_message="Fine-tuned with fctune",
            ignore_patterns=[".*", "*.lock", "*.partial"],
        )
    except Exception as error:  # the client raises a family of its own
        reason = " ".join(str(error).split())[:300]
        hint = "a token that may write" if token else "HF_TOKEN, which is empty"
        raise ConfigError(f"{name}: cannot be pushed to ({type(error).__name__}: {reason}). It takes {hint}.") from None
    return str(commit.commit_url)


def _find_export(path: Path) -> Path:
    for folder in (path, path / "export" / "merged", path / "export" / "adapter"):
        if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
            return folder
    raise ConfigError(
        f"{path}: nothing to push: no model (config.json) or adapter (adapter_config.json) in it or in its export/. "
        "Name a run that has ended, or a model directory."
    )


def _download(kind: Kind, name: str, revision: str | None) -> Path:
    if kind == "model":
        return resolve_model_dir(f"hf:{name}" + (f"@{revision}" if revision else ""))
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, repo_type="dataset", revision=revision, **_wanted(kind)))
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"hf:{name}: the dataset cannot be downloaded ({type(error).__name__}: {reason}). Check the name and the "
            "network; a gated dataset needs its licence accepted and HF_TOKEN set."
        ) from None


def _wanted(kind: Kind) -> dict[str, Any]:
    return {"allow_patterns": _DATA_PATTERNS} if kind == "dataset" else {"allow_patterns": ["*.safetensors", "*.json"]}


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return record


def _write_record(path: Path, record: dict[str, Any], local: Path) -> None:
    record["bytes"] = sum(file.stat().st_size for file in local.rglob("*") if file.is_file())
    record["at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    partial.rename(path)
