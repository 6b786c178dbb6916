"""Model directories by name."""

from __future__ import annotations

from pathlib import Path

from fctune.errors import ConfigError

# Nothing that would run: no pickles, no Python.
_PATTERNS = [
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "tokenizer*",
    "*.jinja",
    "*.txt",
    "LICENSE*",
    "USE_POLICY*",
]


def parse_name(path: str) -> tuple[str, str | None] | None:
    """Name and revision where ``model.path`` is ``hf:NAME[@REVISION]``; None where it is a directory."""
    if not path.startswith("hf:"):
        return None
    name, _, revision = path.removeprefix("hf:").partition("@")
    return name, revision or None


def describe_failure(error: Exception, length: int = 300) -> str:
    """What the hub's client raised, in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:length]}"


def resolve_model_dir(path: str) -> Path:
    """The local directory of ``model.path``, downloaded first where it is ``hf:NAME[@REVISION]``.

    Raises:
        ConfigError: when the download fails, with the hub's reason and what to do.
    """
    named = parse_name(path)
    if named is None:
        return Path(path)
    from huggingface_hub import snapshot_download

    name, revision = named
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_PATTERNS))
    except Exception as error:  # the hub's client raises a family of its own, network errors and more
        raise ConfigError(
            f"model.path={path}: cannot be downloaded ({describe_failure(error)}). "
            "Check the name and the network; a gated model needs its licence accepted and HF_TOKEN set."
        ) from None
