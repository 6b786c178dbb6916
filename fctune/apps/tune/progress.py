"""Record of a tune's steps in its directory: which are done, for which inputs, and what they found."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError
from fctune.base.files import write_atomically
from fctune.runs.directory import DirectoryLock, RunFiles
from fctune.runs.tune_directory import RECORD, RUN

STEPS = ("check", "split", "plan", "train", "gate", "report")
GATE_SETTINGS = "gate settings"  # the input that may change after training
_SCHEMA_VERSION = 1


class Progress:
    """The steps of a tune, written to ``tune.json`` in its directory after each.

    Args:
        folder: Directory of the tune; created if it is missing, and locked until ``release``.

    Raises:
        ConfigError: The directory holds something else, is in use, or cannot be written.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._path = folder / RECORD
        self._inputs: dict[str, str] = {}
        self._steps: dict[str, dict[str, Any]] = {}
        self._repeat: list[str] = []
        try:
            if folder.is_dir() and any(folder.iterdir()) and not self._path.is_file() and not _is_only_lock(folder):
                held = sorted(path.name for path in folder.iterdir())
                is_run = "run.json" in held
                raise ConfigError(
                    f"--out {folder}: holds {'a run of fctune train' if is_run else 'other files'} "
                    f"({', '.join(held[:3])}{', ...' if len(held) > 3 else ''}), no tune. Choose another directory."
                )
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = DirectoryLock(folder)
            if self._path.is_file():
                self._read()
        except OSError as error:
            raise self._cannot_write(error) from None

    def release(self) -> None:
        """Let another tune use the directory."""
        self._lock.release()

    def _read(self) -> None:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            self._inputs = {str(name): str(value) for name, value in found["inputs"].items()}
            if GATE_SETTINGS not in self._inputs:  # of a tune by an older version
                self._inputs |= split_settings(shlex.split(self._inputs.get("settings", "")))
            self._steps = {name: dict(found["steps"][name]) for name in STEPS if name in found["steps"]}
            self._repeat = list(found.get("repeat", []))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{self._path}: not the record of a tune ({type(error).__name__}). Choose another --out, or delete the "
                "directory to start again."
            ) from None

    def accept(self, inputs: Mapping[str, str]) -> list[str]:
        """Compare the inputs with those of the finished steps; returns what changed, one phrase each.

        Steps before training are forgotten if anything changed, so that they are repeated. After training, only the
        settings of the gate may change, and the gate is forgotten.

        Args:
            inputs: What the steps depend on, by a name for messages.

        Raises:
            ConfigError: Something changed, and training has begun.
        """
        changes = self._list_changes(inputs)
        is_trained = self.has_training_begun
        if is_trained and (refused := [change for name, change in changes.items() if name != GATE_SETTINGS]):
            lines = "\n".join(f"  {change}" for change in refused)
            raise ConfigError(
                f"--out {self.folder}: was trained with other rows or settings.\n{lines}\n"
                "Repeat the command as it was, or choose another --out."
            )
        is_repeated = bool(changes and self._steps)
        if changes and is_trained:
            self.forget("gate")
        elif changes:
            self._steps = {}
        self._inputs = dict(inputs)
        self._write_record()
        return list(changes.values()) if is_repeated else []

    @property
    def has_training_begun(self) -> bool:
        """True if training has taken or loaded a step; a launch that is refused leaves a directory without run.json."""
        return RunFiles(self.folder / RUN).run.is_file()

    def _list_changes(self, inputs: Mapping[str, str]) -> dict[str, str]:
        """Return one phrase for each input that changed, by its name."""
        changes: dict[str, str] = {}
        if not self._inputs:
            return changes
        for name in dict.fromkeys((*self._inputs, *inputs)):
            before, after = self._inputs.get(name), inputs.get(name)
            if before == after:
                continue
            if name.startswith("content of "):
                what = "has changed" if before and after else "is new" if after else "is gone"
                changes[name] = f"{name.removeprefix('content of ')} {what}"
            else:
                changes[name] = f"{name}: was {before or 'not given'}, is {after or 'not given'}"
        return changes

    def find(self, step: str) -> dict[str, Any] | None:
        """Return what a finished step found; None if it is to be done."""
        done = self._steps.get(step)
        return None if done is None else dict(done["found"])

    def forget(self, step: str) -> None:
        """Have a step and those after it done again."""
        kept = STEPS[: STEPS.index(step)]
        self._steps = {name: self._steps[name] for name in kept if name in self._steps}

    def when(self, step: str) -> str:
        """Return the time at which a finished step ended."""
        return str(self._steps[step]["at"])

    def finish(self, step: str, found: Mapping[str, Any]) -> None:
        """Record a step as done; later ones are to be done again."""
        self.forget(step)
        at = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        self._steps[step] = {"at": at, "found": dict(found)}
        self._write_record()

    def amend(self, step: str, **found: Any) -> None:
        """Change what a finished step found; the later ones stay done."""
        self._steps[step]["found"] |= found
        self._write_record()

    def set_repeat(self, command: Iterable[str]) -> None:
        """Record the command that trains again as this tune does, for the remedies of a gate."""
        self._repeat = list(command)
        self._write_record()

    def _write_record(self) -> None:
        record = {"schema_version": _SCHEMA_VERSION, "inputs": self._inputs, "steps": self._steps}
        record |= {"repeat": self._repeat} if self._repeat else {}
        self.write(RECORD, json.dumps(record, indent=2, ensure_ascii=False) + "\n")

    def write(self, name: str, text: str) -> Path:
        """Write a file of the tune, atomically.

        Raises:
            ConfigError: The directory cannot be written.
        """
        path = self.folder / name
        try:
            write_atomically(path, text)
        except OSError as error:
            raise self._cannot_write(error) from None
        return path

    def _cannot_write(self, error: OSError) -> ConfigError:
        reason = error.strerror or str(error)
        return ConfigError(
            f"--out {self.folder}: cannot be written ({reason}). Free some space or choose another directory; the "
            "same command resumes."
        )


def split_settings(words: Iterable[str]) -> dict[str, str]:
    """Return ``key=value`` words as two inputs, those of the gate apart."""
    found: dict[str, list[str]] = {"settings": [], GATE_SETTINGS: []}
    for word in words:
        section = word.removeprefix("~").partition("=")[0].partition(".")[0]
        found[GATE_SETTINGS if section == "gate" else "settings"].append(word)
    return {name: shlex.join(part) for name, part in found.items()}


def _is_only_lock(folder: Path) -> bool:
    return all(path.name == ".lock" for path in folder.iterdir())
