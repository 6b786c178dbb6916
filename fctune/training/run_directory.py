"""What a run leaves in its output directory: run.json, metrics.jsonl, exit.json, export/."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from fctune.config import RunConfig
from fctune.errors import ConfigError

_PACKAGES = ("fctune", "torch", "torchtune", "torchao", "transformers", "peft", "safetensors", "tokenizers", "numpy")


class RunDirectory:
    """The output directory of one run; rank 0 alone writes to it."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._run: dict[str, Any] = {}

    @property
    def metrics(self) -> Path:
        """A line a step."""
        return self.path / "metrics.jsonl"

    @property
    def export(self) -> Path:
        """Models for others: ``merged`` and ``adapter``."""
        return self.path / "export"

    def start(self, config: RunConfig, world_size: int) -> Path | None:
        """Make the directory and write run.json; returns where an earlier run in it was moved, if there was one.

        An earlier run is never overwritten: it is renamed beside, with a number.

        Raises:
            ConfigError: when the directory cannot be made or written.
        """
        moved: Path | None = None
        try:
            if (self.path / "run.json").exists():
                moved = self._free_name()
                self.path.rename(moved)
            self.path.mkdir(parents=True, exist_ok=True)
            self._run = {
                "config": config.to_dict(),
                "seed": config.seed,
                "world_size": world_size,
                "git_revision": _git_revision(),
                "versions": _versions(),
                "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
            self._write("run.json", self._run)
        except OSError as error:
            raise ConfigError(
                f"output_dir={self.path}: cannot be written ({error.strerror}). Choose a directory you can write to."
            ) from None
        return moved

    def describe(self, **details: Any) -> None:
        """Add to run.json what is known only after the start."""
        self._run |= details
        self._write("run.json", self._run)

    def _free_name(self) -> Path:
        number = 1
        while (path := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        return path

    def finish(self, code: int, reason: str, step: int, checkpoint: str | None = None) -> None:
        """Write exit.json: why the run ended, since torchrun turns every exit code into 1."""
        if self.path.is_dir():
            self._write("exit.json", {"code": code, "reason": reason, "step": step, "checkpoint": checkpoint})

    def _write(self, name: str, value: dict[str, Any]) -> None:
        partial = self.path / f".{name}.partial"
        partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        partial.rename(self.path / name)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _git_revision() -> str | None:
    """Commit of the code, with ``+`` where files differ from it; None outside a repository."""
    root = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")
