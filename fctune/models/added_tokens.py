"""Bases with tokens that their tokenizer lacked: ``model.add_tokens``.

An extended base is a directory next to the prepared sets, written once. It holds the extended tokenizer, a
``config.json`` with the new vocabulary, the resized matrices, and links to the base's other weights, so that data,
training and export use it like any base.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fctune.base.errors import ConfigError
from fctune.base.files import staged_directory
from fctune.data.template_args import ADDITIONAL_TEMPLATES
from fctune.models.architecture import Architecture
from fctune.models.base_weights import plan_base, read_matrix
from fctune.models.hub import digest_model
from fctune.models.sources import read_architecture
from fctune.models.tensor_files import INDEX, read_headers

_RESIZED = "resized.safetensors"


def extend_base(model_dir: Path, tokens: Sequence[str], root: Path) -> Path:
    """Return the directory under ``root`` of a base with additional tokens; write it first if it does not exist.

    A token's rows start as the mean of the rows of its text's tokens. Ids follow the tokenizer's last one; the matrices
    grow only if these exceed the rows that they have, which many are padded with.

    Raises:
        ConfigError: A token that the tokenizer has already, or the directory cannot be written.
        CheckpointError: The base's files are damaged.
    """
    path = find_extended_path(model_dir, tokens, root)
    if (path / "config.json").is_file():
        return path
    architecture = read_architecture(model_dir)
    base, extended = _extend_tokenizer(model_dir, tokens)
    ids = [extended.token_to_id(token) for token in tokens]
    try:
        with staged_directory(path, suffix=uuid.uuid4().hex[:8]) as staging:
            for file in model_dir.iterdir():
                if file.suffix == ".safetensors":
                    (staging / f"base-{file.name}").symlink_to(file.resolve())
                elif file.is_file() and file.name != INDEX:
                    shutil.copyfile(file, staging / file.name)
            if (model_dir / ADDITIONAL_TEMPLATES).is_dir():
                shutil.copytree(model_dir / ADDITIONAL_TEMPLATES, staging / ADDITIONAL_TEMPLATES)
            extended.save(str(staging / "tokenizer.json"))
            texts = [base.encode(token, add_special_tokens=False).ids for token in tokens]
            _write_matrices(staging, model_dir, architecture, dict(zip(ids, texts, strict=True)))
            config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
            text = config.get("text_config") or config
            # A vision-language model may repeat it outside its text's section.
            for section in (text, config) if "vocab_size" in config else (text,):
                section["vocab_size"] = _grown(architecture, ids)
            (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"model.add_tokens: {path} cannot be written ({error.strerror or error}). Free some space, or choose "
            "another directory with data.prepared_dir."
        ) from None
    return path


def find_extended_path(model_dir: Path, tokens: Sequence[str], root: Path) -> Path:
    """Return where ``extend_base`` writes a base, named by a digest of all its inputs."""
    inputs = json.dumps([str(model_dir.resolve()), digest_model(model_dir), list(tokens)])
    return root / f"base-{hashlib.blake2b(inputs.encode(), digest_size=8).hexdigest()}"


def count_vocabulary(architecture: Architecture, model_dir: Path | None, tokens: Sequence[str]) -> int:
    """Return the rows of an extended base's matrices; without its tokenizer, padding is taken to be used up.

    Raises:
        ConfigError: A token that the tokenizer has already.
    """
    if model_dir is None or not (model_dir / "tokenizer.json").is_file():
        return architecture.vocab_size + len(tokens)
    _, extended = _extend_tokenizer(model_dir, tokens)
    return _grown(architecture, [extended.token_to_id(token) for token in tokens])


def _grown(architecture: Architecture, ids: Sequence[int]) -> int:
    return max(architecture.vocab_size, max(ids) + 1)


def _extend_tokenizer(model_dir: Path, tokens: Sequence[str]) -> tuple[Any, Any]:
    """Return the tokenizer of a base, without and with the tokens."""
    from tokenizers import AddedToken, Tokenizer

    file = model_dir / "tokenizer.json"
    try:
        base, extended = (Tokenizer.from_file(str(file)) for _ in range(2))
    except Exception as error:  # the library raises plain exceptions
        raise ConfigError(f"{file}: the tokenizer cannot be loaded ({error}). Download the model again.") from None
    known = [token for token in tokens if base.token_to_id(token) is not None]
    if known:
        raise ConfigError(
            f"model.add_tokens: {', '.join(map(repr, known))}: the tokenizer of {model_dir} already has this. Leave it "
            "out; adapter.train_tokens trains its rows."
        )
    # Not special: servers drop special tokens from the text that their parsers of calls read.
    extended.add_tokens([AddedToken(token, normalized=False, special=False) for token in tokens])
    return base, extended


def _write_matrices(staging: Path, model_dir: Path, architecture: Architecture, texts: dict[int, list[int]]) -> None:
    """Write the resized embedding and head, and the index of all weights; ``texts``: tokens to average, by id."""
    plan = plan_base(architecture, model_dir)
    resized: dict[str, Tensor] = {}
    for matrix in architecture.token_matrices.values():
        rows = read_matrix(plan, matrix)
        grown = rows.new_zeros(_grown(architecture, list(texts)), rows.shape[1])
        grown[: len(rows)] = rows
        for token, parts in texts.items():
            grown[token] = rows[torch.tensor(parts)].double().mean(0).to(rows.dtype)
        resized.update((leaf.name, grown.clone()) for source in plan.sources[matrix] for leaf in source.leaves())
    save_file(resized, staging / _RESIZED, metadata={"format": "pt"})
    files = {name: f"base-{header.file.name}" for name, header in read_headers(model_dir).items()}
    weight_map = files | dict.fromkeys(resized, _RESIZED)
    (staging / INDEX).write_text(json.dumps({"weight_map": weight_map}, indent=2) + "\n", encoding="utf-8")
