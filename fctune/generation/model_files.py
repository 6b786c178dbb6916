"""What the name of a model stands for on disk, and a digest that tells one model from another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from fctune.errors import ConfigError
from fctune.models.hub import resolve_model_dir


class ModelFiles(NamedTuple):
    """A Hugging Face directory, and a PEFT adapter on it or None."""

    model_dir: Path
    adapter_dir: Path | None = None


def find_model(name: str, adapter: str | None = None) -> ModelFiles:
    """The files of a model by what a user calls it.

    Args:
        name: a Hugging Face directory; the output directory of a run, of which the merged export is taken; the
            directory of an adapter, which names its base itself; an elastic checkpoint of a run, which is either; or
            ``hf:NAME[@REVISION]``.
        adapter: an adapter to put on it.

    Raises:
        ConfigError: nothing of the kind is there.
    """
    if name.startswith("hf:"):
        return ModelFiles(resolve_model_dir(name), _adapter_dir(adapter))
    path = Path(name)
    if not path.is_dir():
        raise ConfigError(f"{name}: no such directory, so not a model directory. Pass one, a URL, or hf:NAME.")
    for candidate in (path, path / "export" / "merged"):
        if (candidate / "config.json").is_file():
            return ModelFiles(candidate, _adapter_dir(adapter))
    for candidate in (path, path / "export" / "adapter"):
        if (candidate / "adapter_config.json").is_file():
            if adapter is not None:
                raise ConfigError(f"{name}: is an adapter itself; leave --adapter {adapter} out, or name its base.")
            return ModelFiles(_base_of(candidate), candidate)
    if (path / "run.json").is_file():
        raise ConfigError(f"{name}: this run has left no export/merged or export/adapter. {_ending(path)}")
    if path.name.startswith("checkpoint-"):
        raise ConfigError(f"{name}: a sharded checkpoint, which only its run can read.{_elastic(path.parent)}")
    raise ConfigError(
        f"{name}: not a model directory (no config.json), not an adapter (no adapter_config.json), not a run "
        "(no export/). Pass a Hugging Face directory, or a run's output directory."
    )


def _adapter_dir(adapter: str | None) -> Path | None:
    if adapter is None:
        return None
    if not (Path(adapter) / "adapter_config.json").is_file():
        raise ConfigError(
            f"--adapter {adapter}: cannot be loaded, holds no adapter_config.json. Pass a PEFT directory."
        )
    return Path(adapter)


def _base_of(adapter_dir: Path) -> Path:
    try:
        config = json.loads((adapter_dir / "adapter_config.json").read_text(encoding="utf-8"))
        base = str(config["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{adapter_dir}/adapter_config.json: names no base model ({error}).") from None
    if base.startswith("hf:"):
        return resolve_model_dir(base)
    if not (Path(base) / "config.json").is_file():
        raise ConfigError(
            f"{adapter_dir}: its base {base} is not here (relative paths start at {Path.cwd()}). "
            f"Pass --model BASE --adapter {adapter_dir}."
        )
    return Path(base)


def _ending(run_dir: Path) -> str:
    try:
        ended = json.loads((run_dir / "exit.json").read_text(encoding="utf-8"))
        said = f"It ended with: {ended['reason']}"
    except (OSError, ValueError, KeyError, TypeError):
        said = "It has not ended, or was killed."
    return said + _elastic(run_dir / "checkpoints")


def _elastic(checkpoints: Path) -> str:
    """The newest checkpoint that is a model, as a hint."""
    steps = [
        int(end) for path in checkpoints.glob("elastic-checkpoint-*") if (end := path.name.split("-")[-1]).isdigit()
    ]
    return f" Pass {checkpoints}/elastic-checkpoint-{max(steps)}, its newest portable one." if steps else ""
