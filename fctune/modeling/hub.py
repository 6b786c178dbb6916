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


def resolve_model_dir(path: str) -> Path:
    """The local directory of ``model.path``, downloaded first where it is ``hf:NAME[@REVISION]``.

    Raises:
        ConfigError: when the download fails, with the hub's reason and what to do.
    """
    if not path.startswith("hf:"):
        return Path(path)
    from huggingface_hub import snapshot_download

    name, _, revision = path.removeprefix("hf:").partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=_PATTERNS))
    except Exception as error:  # the hub's client raises a family of its own, network errors and more
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model.path={path}: cannot be downloaded ({type(error).__name__}: {reason}). "
            "Check the name and the network; a gated model needs its licence accepted and HF_TOKEN set."
        ) from None
