"""Upload of a run's export to the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from fctune.base.errors import CheckpointError, ConfigError
from fctune.data.template_args import TEMPLATE_ARGS_FILE
from fctune.models.adapter_base import read_base
from fctune.models.hub import COMPANION_FILES, describe_failure, parse_name
from fctune.runs.tune_directory import find_run_dir


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
            reason = (
                "links to a file outside of it. Replace the link by the file."
                if (root / name).is_symlink()
                else "is missing. Check it with python -m eval.validate."
            )
            raise CheckpointError(f"{export}: {name}, which the model needs, {reason}")
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
    """Return the model or adapter directory of a run's or a tune's output directory, or the directory itself.

    Raises:
        ConfigError: There is none.
        CheckpointError: The directory has no weights.
    """
    path = find_run_dir(path)
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
