"""The output directory of a run: run.json, metrics.jsonl, exit.json, checkpoints/, export/, and its lock.

A launch changes what an earlier one left only once it is certain to train. One that ends before writes its code and
reason to not_started.json.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from fctune.base.errors import ConfigError
from fctune.base.files import write_atomically
from fctune.config.schema import RunConfig
from fctune.training.directory_lock import DirectoryLock

logger = logging.getLogger("fctune")

NOT_STARTED = "not_started.json"

# Deleted before exit.json is written, so that a full disk has room for it.
_RESERVE, _RESERVE_BYTES = ".reserve", 64 * 1024

_LAUNCHERS = ("tune", "fctune", "torchrun")
_PACKAGES = ("fctune", "torch", "torchtune", "torchao", "transformers", "peft", "safetensors", "tokenizers", "numpy")


class RunDirectory:
    """The output directory of one run; only rank 0 writes to it."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.has_begun = False  # what it holds is of this launch; set on every rank
        self._run: dict[str, Any] = {}
        self._lock: DirectoryLock | None = None

    @property
    def metrics(self) -> Path:
        """Metrics file: one JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        """Answers of a run with reinforcement learning, each once: one JSON object per answer."""
        return self.path / "rollouts.jsonl"

    @property
    def export(self) -> Path:
        """Directory of the exported models, ``merged`` and ``adapter``."""
        return self.path / "export"

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints, sharded and elastic."""
        return self.path / "checkpoints"

    @property
    def stop_file(self) -> Path:
        """File whose creation asks the run to save and stop."""
        return self.path / "stop"

    def lock(self) -> None:
        """Keep other runs out until ``unlock`` or the end of this process.

        Raises:
            ConfigError: Another run holds the lock, or the directory cannot be created.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = DirectoryLock(self.path)
            for name in (NOT_STARTED, "stop", "stop-for-good"):  # of the launch before
                (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise self._cannot_write(error) from None

    def unlock(self) -> None:
        """Let other runs use the directory."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def start(self, config: RunConfig, world_size: int, not_used: Sequence[str] = ()) -> Path | None:
        """Create the directory and run.json; an earlier run in it is renamed, never overwritten.

        Args:
            config: The run's config.
            world_size: Number of ranks.
            not_used: Problems of the earlier run's checkpoints, if this run could resume from none of them.

        Returns:
            New path of the earlier run; None if there was none.

        Raises:
            ConfigError: The directory cannot be created or written.
        """
        moved: Path | None = None
        try:
            if (self.path / "run.json").exists():
                moved, is_locked = self._free_name(), self._lock is not None
                self.path.rename(moved)
                if is_locked:  # the lock file moved with the directory
                    self.unlock()
                    self.lock()
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "exit.json").unlink(missing_ok=True)  # of an attempt that ended before it had a run.json
            self._run = {
                "config": config.to_dict(),
                "seed": config.seed,
                "world_size": world_size,
                "git_revision": _git_revision(),
                "versions": installed_versions(),
                "started_at": _format_time(datetime.now(UTC)),
                **self._run,  # with the config's chosen values
            }
            if not_used:
                self._run["not_used"] = list(not_used)
            self.has_begun = True
            self._write("run.json", self._run)
            (self.path / _RESERVE).write_bytes(os.urandom(_RESERVE_BYTES))
        except OSError as error:
            raise self._cannot_write(error) from None
        return moved

    def resume(self, config: RunConfig, world_size: int, step: int, checkpoint: Path, damaged: Sequence[str]) -> None:
        """Continue the run in this directory after ``step``: extend run.json and drop metrics of later steps.

        Args:
            config: Config from now on.
            world_size: Number of ranks from now on.
            step: Optimizer steps that the checkpoint contains.
            checkpoint: The checkpoint to resume from.
            damaged: Problems of newer checkpoints that could not be used.

        Raises:
            ConfigError: The directory cannot be read or written.
        """
        try:
            described, self._run = self._run, {}
            if (self.path / "run.json").exists():
                self._run = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
            resumed = {
                "step": step,
                "checkpoint": str(checkpoint),
                "not_used": list(damaged),
                "world_size": world_size,
                "at": _format_time(datetime.now(UTC)),
                "before": self._describe_segment(),
            }
            for key in ("closing", "finished_at", "success"):  # the run continues after all
                self._run.pop(key, None)
            self._run |= {"config": config.to_dict(), "world_size": world_size, "versions": installed_versions()}
            self._run |= described
            self._run["resumed"] = [*self._run.get("resumed", []), resumed]
            self.has_begun = True
            self._write("run.json", self._run)
            (self.path / _RESERVE).write_bytes(os.urandom(_RESERVE_BYTES))
            for file in (self.metrics, self.rollouts, self.path / "alerts.jsonl"):
                _drop_steps_after(file, step)
            (self.path / "exit.json").unlink(missing_ok=True)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"output_dir={self.path}: the run in it cannot be resumed ({error}). Fix the cause, or set another "
                "output_dir."
            ) from None

    def describe(self, **details: Any) -> None:
        """Add details to run.json; those known before the start or restart are written by it.

        A disk that is full must not end a run here, so it is only logged.
        """
        self._run |= details
        if self.has_begun:
            try:
                self._write("run.json", self._run)
            except OSError as error:
                logger.error("%s: cannot be written (%s)", self.path / "run.json", error.strerror)

    def finish(
        self,
        code: int,
        reason: str,
        step: int,
        checkpoint: Path | None = None,
        is_crash: bool = False,
        is_consequence: bool = False,
    ) -> None:
        """Write exit.json: why the run ended, since torchrun turns every exit code into 1.

        A launch that has changed nothing of an earlier run writes not_started.json instead.

        Args:
            code: Exit code of the run.
            reason: Reason in words, for people.
            step: Optimizer steps taken.
            checkpoint: Checkpoint that a re-run resumes from; None if there is none.
            is_crash: The run crashed on this rank. An existing exit.json is kept: the first crash is the cause, and
                other ranks fail because of it.
            is_consequence: The crash was caused by another rank, whose own record replaces this one.
        """
        is_refused = not self.has_begun and (self.path / "run.json").exists()
        file = self.path / (NOT_STARTED if is_refused else "exit.json")
        if not self.path.is_dir() or (is_crash and file.exists() and (is_consequence or not _has_consequence(file))):
            return
        shown = None if checkpoint is None else str(checkpoint)
        record: dict[str, Any] = {"code": code, "reason": reason, "step": step, "checkpoint": shown}
        if is_consequence:
            record["is_consequence"] = True
        try:
            (self.path / _RESERVE).unlink(missing_ok=True)
            self._write(file.name, record)
        except OSError as error:  # probably a full disk; the reason was printed, and the exit code is unaffected
            logger.error("%s: cannot be written (%s)", file, error.strerror)

    def is_complete(self, exports: Iterable[str]) -> bool:
        """Return True if the run in this directory has ended well and its exports are there."""
        try:
            code = json.loads((self.path / "exit.json").read_text(encoding="utf-8"))["code"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return code == 0 and all((self.export / name).is_dir() for name in exports)

    def gpu_hours(self) -> float:
        """Return the hours of all ranks so far, over restarts, without the time between them."""
        resumed = self._run.get("resumed", [])
        befores = [one.get("before") or {} for one in resumed]
        starts = [self._run.get("started_at"), *(one["at"] for one in resumed)]
        ends = [*(before.get("until") for before in befores), _format_time(datetime.now(UTC))]
        sizes = [*(before.get("world_size") for before in befores), self._run.get("world_size")]
        seconds = 0.0
        for start, end, size in zip(starts, ends, sizes, strict=True):
            if start and end and size:
                duration = datetime.fromisoformat(end) - datetime.fromisoformat(start)
                seconds += max(0.0, duration.total_seconds()) * size
        return seconds / 3600

    def _describe_segment(self) -> dict[str, Any]:
        """Return the ranks of the segment that just ended, and when and how it ended, as far as known."""
        segment: dict[str, Any] = {"world_size": self._run.get("world_size"), "until": None, "exit": None}
        exit_file = self.path / "exit.json"
        for file in (exit_file, self.metrics):
            if file.exists():
                segment["until"] = _format_time(datetime.fromtimestamp(file.stat().st_mtime, UTC))
                break
        if exit_file.exists():
            try:
                ended = json.loads(exit_file.read_text(encoding="utf-8"))
                if "before" in ended:  # versions before not_started.json wrote a refused launch to exit.json
                    return segment | {key: ended["before"][key] for key in ("until", "exit")}
                segment["exit"] = {"code": ended["code"], "reason": ended["reason"]}
            except (ValueError, KeyError, TypeError):  # informative only, so no reason to fail
                segment["exit"] = {"code": None, "reason": "exit.json cannot be read"}
        return segment

    def _free_name(self) -> Path:
        number = 1
        while (path := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        return path

    def _cannot_write(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"output_dir={self.path}: cannot be written ({error.strerror}). Choose a directory you can write to."
        )

    def _write(self, name: str, value: dict[str, Any]) -> None:
        write_atomically(self.path / name, json.dumps(value, indent=2) + "\n")


def _has_consequence(file: Path) -> bool:
    try:
        return bool(json.loads(file.read_text(encoding="utf-8")).get("is_consequence"))
    except (OSError, ValueError, AttributeError):
        return False


def find_typed_command(command_lines: Sequence[Sequence[str]] | None = None) -> list[str] | None:
    """Return the command that launched this rank, as typed; None if no launcher is known.

    Args:
        command_lines: Command lines of this process and its parent, which is the launcher if there is one; None: ask
            the system.
    """
    if command_lines is None:
        own = psutil.Process()
        with contextlib.suppress(psutil.Error):
            command_lines = [process.cmdline() for process in (own, own.parent()) if process is not None]
    for words in command_lines or ():
        for index, word in enumerate(words[:2]):  # a script follows its interpreter
            if Path(word).name in _LAUNCHERS:
                return [Path(word).name, *words[index + 1 :]]
        if list(words[1:3]) == ["-m", "fctune.cli"]:
            return ["fctune", *words[3:]]
    return None


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a run depends on."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _git_revision() -> str | None:
    """Return the commit of the code, with ``+`` if files differ from it; None outside of a repository."""
    root = Path(__file__).parent
    try:
        head, changes = (
            subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
            for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changes else "")


def _drop_steps_after(file: Path, step: int) -> None:
    """Keep only the lines of steps up to ``step``; the later steps are repeated and written again."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):  # truncated by a kill, or not a step
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
    write_atomically(file, "".join(kept))


def _format_time(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
