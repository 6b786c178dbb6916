"""Find, download and digest Hugging Face model directories."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from fctune.base.errors import ConfigError
from fctune.data.template_args import ADDITIONAL_TEMPLATES, TEMPLATE_ARGS_FILE

# Files to download: none that could run code, such as pickles or Python.
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

_NUM_DIGEST_BLOCKS = 64
_DIGEST_BLOCK_BYTES = 65_536
WEIGHT_FILES = ("config.json", "*.safetensors")
_MODEL_FILES = (*WEIGHT_FILES, "*.json", "*.jinja", f"{ADDITIONAL_TEMPLATES}/*.jinja", "tokenizer*")
# Files of a base, other than its config and weights, that a model trained from it needs; exports copy them.
COMPANION_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model*", "special_tokens_map.json"),
    *("vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    TEMPLATE_ARGS_FILE,
    *("generation_config.json", "*processor_config.json", "LICENSE*", "USE_POLICY*"),
)


def parse_name(path: str) -> tuple[str, str | None] | None:
    """Split ``hf:NAME[@REVISION]`` into name and revision; returns None for a directory."""
    if not path.startswith("hf:"):
        return None
    name, _, revision = path.removeprefix("hf:").partition("@")
    return name, revision or None


def describe_failure(error: Exception, length: int = 300) -> str:
    """Format an error of the hub's client as one line of at most ``length`` characters plus its type."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:length]}"


def resolve_model_dir(path: str) -> Path:
    """Return the local directory of ``model.path``, downloading ``hf:NAME[@REVISION]`` first.

    Raises:
        ConfigError: The download failed; gives the reason.
    """
    named = parse_name(path)
    if named is None:
        return Path(path)
    from huggingface_hub import snapshot_download

    name, revision = named
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_PATTERNS))
    except Exception as error:  # the client raises its own errors, network errors and others
        raise ConfigError(
            f"model.path={path}: cannot be downloaded ({describe_failure(error)}). "
            "Check the name and the network; a gated model needs its licence accepted and HF_TOKEN set."
        ) from None


def digest_model(model_dir: Path, patterns: Sequence[str] = _MODEL_FILES) -> str:
    """Return a digest of a model directory, 16 hex digits.

    Large files are sampled (their size and 64 blocks of 64 kB), so that 16 GB take seconds; training changes entire
    tensors, which the samples always hit. File times are ignored: a copy has the same digest.

    Args:
        model_dir: Hugging Face model or PEFT adapter directory.
        patterns: Files to cover; by default weights, configs, tokenizer and chat template.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted({file for pattern in patterns for file in model_dir.glob(pattern)}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as file:
            if size <= _NUM_DIGEST_BLOCKS * _DIGEST_BLOCK_BYTES:
                digest.update(file.read())
                continue
            for block in range(_NUM_DIGEST_BLOCKS):
                file.seek(block * (size - _DIGEST_BLOCK_BYTES) // (_NUM_DIGEST_BLOCKS - 1))
                digest.update(file.read(_DIGEST_BLOCK_BYTES))
    return digest.hexdigest()
