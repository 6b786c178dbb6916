"""What a run leaves in its output directory: run.json, metrics.jsonl, exit.json, checkpoints/, export/."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fctune.config.schema import RunConfig
from fctune.errors import ConfigError
from fctune.files import write_atomically
from fctune.training.lock import DirectoryLock

logger = logging.getLogger("fctune")

_PACKAGES = ("fctune", "torch", "torchtune", "torchao", "transformers", "peft", "safetensors", "tokenizers", "numpy")


class RunDirectory:
    """The output directory of one run; rank 0 alone writes to it."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._run: dict[str, Any] = {}
        self._lock: DirectoryLock | None = None

    @property
    def metrics(self) -> Path:
        """A line a step."""
        return self.path / "metrics.jsonl"

    @property
    def export(self) -> Path:
        """Models for others: ``merged`` and ``adapter``."""
        return self.path / "export"

    @property
    def checkpoints(self) -> Path:
        """What a run goes on from."""
        return self.path / "checkpoints"

    @property
    def stop_file(self) -> Path:
        """Asks the run to save and stop, when someone makes it."""
        return self.path / "stop"

    def lock(self) -> None:
        """Keep other runs out until this process ends, however it ends.

        Raises:
            ConfigError: another run writes here, or the directory cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = DirectoryLock(self.path)
        except OSError as error:
            raise self._cannot_write(error) from None

    def unlock(self) -> None:
        """Let other runs in."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def start(self, config: RunConfig, world_size: int) -> Path | None:
        """Make the directory and write run.json; returns where an earlier run in it was moved, if there was one.

        An earlier run is never overwritten: it is renamed beside, with a number.

        Raises:
            ConfigError: when the directory cannot be made or written.
        """
        moved: Path | None = None
        try:
            if (self.path / "run.json").exists():
                moved, is_locked = self._free_name(), self._lock is not None
                self.path.rename(moved)
                if is_locked:  # the lock went with what it stood for
                    self.unlock()
                    self.lock()
            self.path.mkdir(parents=True, exist_ok=True)
            self._run = {
                "config": config.to_dict(),
                "seed": config.seed,
                "world_size": world_size,
                "git_revision": _git_revision(),
                "versions": versions(),
                "started_at": _now(),
            }
            self._write("run.json", self._run)
        except OSError as error:
            raise self._cannot_write(error) from None
        return moved

    def go_on(self, config: RunConfig, world_size: int, step: int, checkpoint: Path, damaged: Sequence[str]) -> None:
        """Take up the run that is here after ``step``: run.json says so, and metrics.jsonl forgets the steps beyond.

        Raises:
            ConfigError: when the directory cannot be written.
        """
        try:
            if (self.path / "run.json").exists():
                self._run = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
            resumed = {
                "step": step,
                "checkpoint": str(checkpoint),
                "not_used": list(damaged),
                "world_size": world_size,
                "at": _now(),
                "before": self._describe_part(),
            }
            for key in ("closing", "finished_at", "success"):  # of an end that was none
                self._run.pop(key, None)
            self._run |= {"config": config.to_dict(), "world_size": world_size, "versions": versions()}
            self._run["resumed"] = [*self._run.get("resumed", []), resumed]
            self._write("run.json", self._run)
            for file in (self.metrics, self.path / "alerts.jsonl"):
                _forget_steps_after(file, step)
            for name in ("exit.json", "stop"):
                (self.path / name).unlink(missing_ok=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"output_dir={self.path}: the run in it cannot be taken up ({error}).") from None

    def gpu_hours(self) -> float:
        """Hours of all ranks until now, over restarts; the time between them, when nothing ran, is left out."""
        resumed = self._run.get("resumed", [])
        befores = [one.get("before") or {} for one in resumed]
        starts = [self._run.get("started_at"), *(one["at"] for one in resumed)]
        ends = [*(before.get("until") for before in befores), _now()]
        sizes = [*(before.get("world_size") for before in befores), self._run.get("world_size")]
        seconds = 0.0
        for start, end, size in zip(starts, ends, sizes, strict=True):
            if start and end and size:
                seconds += (
                    max(0.0, (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()) * size
                )
        return seconds / 3600

    def _describe_part(self) -> dict[str, Any]:
        """What is known of the part of a run that is to be gone on from: its ranks, when and how it ended."""
        part: dict[str, Any] = {"world_size": self._run.get("world_size"), "until": None, "exit": None}
        exit_file = self.path / "exit.json"
        for file in (exit_file, self.metrics):
            if file.exists():
                part["until"] = _tell(datetime.fromtimestamp(file.stat().st_mtime, UTC))
                break
        if exit_file.exists():
            try:
                ended = json.loads(exit_file.read_text(encoding="utf-8"))
                part["exit"] = {"code": ended["code"], "reason": ended["reason"]}
            except (ValueError, KeyError, TypeError):  # a note, which no run should fail of
                part["exit"] = {"code": None, "reason": "exit.json cannot be read"}
        return part

    def describe(self, **details: Any) -> None:
        """Add to run.json what is known only after the start."""
        self._run |= details
        self._write("run.json", self._run)

    def _free_name(self) -> Path:
        number = 1
        while (path := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        return path

    def finish(
        self, code: int, reason: str, step: int, checkpoint: Path | None = None, is_defect: bool = False
    ) -> None:
        """Write exit.json: why the run ended, since torchrun turns every exit code into 1.

        A defect is written by the rank that met it, unless there is a word already: what follows a rank's end on the
        others is not why the run ended.
        """
        if is_defect and (self.path / "exit.json").exists():
            return
        shown = None if checkpoint is None else str(checkpoint)
        if not self.path.is_dir():
            return
        try:
            self._write("exit.json", {"code": code, "reason": reason, "step": step, "checkpoint": shown})
        except OSError as error:  # most likely a full disk; why the run ended was said already, and the code tells it
            logger.error("%s: cannot be written (%s)", self.path / "exit.json", error.strerror)

    def _cannot_write(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"output_dir={self.path}: cannot be written ({error.strerror}). Choose a directory you can write to."
        )

    def _write(self, name: str, value: dict[str, Any]) -> None:
        write_atomically(self.path / name, json.dumps(value, indent=2) + "\n")


def _now() -> str:
    return _tell(datetime.now(UTC))


def _tell(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def versions() -> dict[str, str]:
    """Of Python and the packages that a run depends on."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


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


def _forget_steps_after(file: Path, step: int) -> None:
    """Keep the lines of steps up to this one; what is taken again is written again."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):  # a line that a kill cut, or that another wrote
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
    write_atomically(file, "".join(kept))
