"""Finds the files of a model by the name that a user gives."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fctune.base.errors import ConfigError
from fctune.config.parsing import suggest_hub_name
from fctune.models.adapter_base import read_base
from fctune.models.hub import resolve_model_dir
from fctune.runs.directory import RunFiles
from fctune.runs.tune_directory import find_run_dir, is_tune


class ModelFiles(NamedTuple):
    """A Hugging Face model directory, and the PEFT adapter to put on it, if any."""

    model_dir: Path
    adapter_dir: Path | None = None

    @property
    def tokenizer_dir(self) -> Path:
        """Directory of the tokenizer and template: the adapter's, which may replace the base's, else the model's."""
        if self.adapter_dir is not None and (self.adapter_dir / "tokenizer.json").is_file():
            return self.adapter_dir
        return self.model_dir


def is_server(model: str) -> bool:
    """Return True if a model is given as the URL of a server."""
    return model.startswith(("http://", "https://"))


def is_on_disk(model: str) -> bool:
    """Return True if a model is given as a path on this machine, where it may have a run and a mark of the gate."""
    return not is_server(model) and not model.startswith("hf:")


def check_model_paths(model: str, adapter: str | None = None) -> None:
    """Check the paths of a model, unless it is on the Hub, before slow imports.

    Raises:
        ConfigError: There is no such model or adapter, or the adapter is for a server.
    """
    if is_server(model):
        if adapter is not None:
            raise ConfigError(
                f"--adapter {adapter}: {model} is a server, which uses only the adapters that it has loaded. Load the "
                "adapter there, and pass the name that it is served under with --served-model instead."
            )
    elif not model.startswith("hf:"):
        find_model(model, adapter)


def find_model(name: str, adapter: str | None = None) -> ModelFiles:
    """Return the files of a model.

    Args:
        name: A Hugging Face model directory; the output directory of a run, or of a tune, whose merged export is
            taken, else its adapter; the directory of an adapter, which names its base; an elastic checkpoint, which is
            one of these; or ``hf:NAME[@REVISION]``.
        adapter: Directory of an adapter to put on the model.

    Raises:
        ConfigError: There is no such model, or it is incomplete.
    """
    if name.startswith("hf:"):
        return ModelFiles(resolve_model_dir(name), _require_adapter(adapter))
    path = find_run_dir(name)
    if not path.is_dir():
        raise ConfigError(
            f"{name}: no such directory{suggest_hub_name(name, '.')} Pass a model directory, a URL, or hf:NAME."
        )
    for candidate in (path, path / "export" / "merged"):
        if (candidate / "config.json").is_file():
            return ModelFiles(candidate, _require_adapter(adapter))
    for candidate in (path, path / "export" / "adapter"):
        if (candidate / "adapter_config.json").is_file():
            if adapter is not None:
                raise ConfigError(f"{name}: is an adapter itself. Omit --adapter {adapter}, or name the base model.")
            return ModelFiles(_find_base(candidate), candidate)
    if RunFiles(path).run.is_file():
        raise ConfigError(f"{name}: the run has no export/merged or export/adapter. {_describe_ending(path)}")
    if path.name.startswith("checkpoint-"):
        raise ConfigError(f"{name}: a sharded checkpoint, which only its own run can read.{_hint_elastic(path.parent)}")
    if is_tune(name):
        raise ConfigError(f"{name}: the tune has not trained its model yet. Repeat its command, which resumes.")
    raise ConfigError(
        f"{name}: not a model directory (no config.json), not an adapter (no adapter_config.json), not a run "
        "(no export/). Pass a Hugging Face directory, or a run's output directory."
    )


def _require_adapter(adapter: str | None) -> Path | None:
    if adapter is None:
        return None
    if not (Path(adapter) / "adapter_config.json").is_file():
        raise ConfigError(
            f"--adapter {adapter}: not an adapter (no adapter_config.json). Pass a PEFT adapter's directory."
        )
    return Path(adapter)


def _find_base(adapter_dir: Path) -> Path:
    base = read_base(adapter_dir)
    key = f"base_model_name_or_path in {adapter_dir}/adapter_config.json"
    if base.startswith("hf:"):
        try:
            return resolve_model_dir(base)
        except ConfigError as error:
            raise ConfigError(
                f"{adapter_dir}: its base model: {error} If you have a copy, set {key} to its directory (relative "
                f"paths start at {Path.cwd()})."
            ) from None
    if not (Path(base) / "config.json").is_file():
        raise ConfigError(
            f"{adapter_dir}: its base model {base} does not exist (relative paths start at {Path.cwd()}). "
            f"Set {key} to the base's directory, or to its name on the hub."
        )
    return Path(base)


def _describe_ending(run_dir: Path) -> str:
    files = RunFiles(run_dir)
    ended = files.read_exit()
    ending = f"It ended with: {ended.get('reason')}" if ended else "It has not ended, or was killed."
    return ending + _hint_elastic(files.checkpoints)


def _hint_elastic(checkpoints: Path) -> str:
    """Return a hint at the newest checkpoint that is a model directory, or nothing."""
    steps = [
        int(end) for path in checkpoints.glob("elastic-checkpoint-*") if (end := path.name.split("-")[-1]).isdigit()
    ]
    if not steps:
        return ""
    return f" Pass {checkpoints}/elastic-checkpoint-{max(steps)}, the newest that is a model directory."
