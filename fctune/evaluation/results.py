"""The results of an evaluation on disk: a line a case as it finishes, and the settings that they were made with.

A run that was killed leaves what it had; the next one with the same settings goes on from there. Several ranks write a
file each, which are put together at the end, or by the next run.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from fctune.errors import ConfigError, DataError
from fctune.files import write_atomically

Row = dict[str, Any]


class ResultsFile:
    """``results.jsonl``, ``results.settings.json`` and ``results.summary.json`` beside it.

    Args:
        path: The first of them.
        rank: Of this process; with others it writes to ``results.rank<N>.jsonl``.
        world_size: How many processes write.

    Raises:
        ConfigError: It cannot be written.
    """

    def __init__(self, path: str | Path, rank: int = 0, world_size: int = 1):
        self.path = Path(path)
        self.settings_path = self.path.with_suffix(".settings.json")
        self.summary_path = self.path.with_suffix(".summary.json")
        self._lock_path = self.path.with_name(f".{self.path.name}.lock")
        self._lock: IO[bytes] | None = None
        self._part = self.path.with_suffix(f".rank{rank}.jsonl") if world_size > 1 else self.path
        self._file: IO[bytes] | None = None

    def start(self, settings: Mapping[str, Any], is_fresh: bool = False) -> dict[str, Row]:
        """The rows that need no second answer, by id; one process does this, before any appends.

        Args:
            settings: What the answers depend on. They must be what the rows that are there were made with.
            is_fresh: Forget what is there.

        Raises:
            ConfigError: The results there are of other settings, or the place cannot be written.
            DataError: What is there are no results.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            if is_fresh:
                for path in (self.path, self.settings_path, self.summary_path, *self._parts()):
                    path.unlink(missing_ok=True)
            elif self.path.exists() or self._parts():
                self._check(settings)
            rows = {row["id"]: row for path in (self.path, *self._parts()) for row in read_rows(path, is_partial=True)}
            finished = {i: row for i, row in rows.items() if row.get("error") is None}
            self._replace(self.path, finished.values())
            for path in self._parts():
                path.unlink()
            self._write(self.settings_path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            self.release()
            raise self._unwritable(error) from None
        except ValueError:
            self.release()
            raise
        return finished

    def append(self, row: Row) -> None:
        """Write a row, so that it is there whatever becomes of this process."""
        try:
            if self._file is None:
                self._file = self._part.open("ab")
            self._file.write(_to_line(row))
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from None

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def release(self) -> None:
        """Let others write here."""
        if self._lock is not None:
            self._lock_path.unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def finish(self, order: Sequence[str]) -> list[Row]:
        """The rows of all ranks in the order of ids, and the file in that order; one process does this."""
        self.close()
        try:
            rows = {row["id"]: row for path in (self.path, *self._parts()) for row in read_rows(path)}
            ordered = [rows[i] for i in order if i in rows]
            self._replace(self.path, ordered)
            for path in self._parts():
                path.unlink()
            self.release()
        except OSError as error:
            raise self._unwritable(error) from None
        return ordered

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write what came of it."""
        try:
            self._write(self.summary_path, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            raise self._unwritable(error) from None

    def _take_lock(self) -> None:
        """Keep others from replacing the files while this process writes; given up with the process."""
        lock = self._lock_path.open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._lock = lock
        except BlockingIOError:
            lock.close()
            raise ConfigError(f"{self.path}: another evaluation is writing to it. Name another file: --out.") from None

    def _check(self, settings: Mapping[str, Any]) -> None:
        there = read_settings(self.path)
        if there is None:
            raise ConfigError(
                f"{self.path}: holds results, and no {self.settings_path.name} says of what. "
                "Pass --fresh to replace them, or another --out."
            )
        if differ := _describe_changes(there, json.loads(json.dumps(settings))):
            shown = "\n".join(f"  {line}" for line in differ)
            raise ConfigError(
                f"{self.path}: holds results of other settings\n{shown}\n"
                "Pass --fresh to replace them, or another --out to keep both."
            )

    def _parts(self) -> list[Path]:
        return sorted(self.path.parent.glob(f"{self.path.stem}.rank*.jsonl"))

    def _replace(self, path: Path, rows: Iterable[Row]) -> None:
        self._write(path, b"".join(map(_to_line, rows)))

    def _write(self, path: Path, content: str | bytes) -> None:
        write_atomically(path, content.encode("utf-8", "replace") if isinstance(content, str) else content)

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(f"--out {self.path}: cannot be written ({error.strerror}).")


def read_settings(path: str | Path) -> dict[str, Any] | None:
    """The settings that results were made with; None where none are beside them."""
    try:
        settings = json.loads(Path(path).with_suffix(".settings.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return settings if isinstance(settings, dict) else None


def read_rows(path: str | Path, is_partial: bool = False) -> list[Row]:
    """The rows of a results file; none where there is no file and ``is_partial``.

    Args:
        path: The file.
        is_partial: Leave out a last line that was cut in half.

    Raises:
        DataError: No such file, no rows, or rows that are no results.
    """
    path = Path(path)
    try:
        *lines, last = path.read_bytes().split(b"\n")
    except OSError as error:
        if is_partial and isinstance(error, FileNotFoundError):
            return []
        raise DataError(f"{path}: cannot be read ({error.strerror}). Pass a file that eval.tool_calls wrote.") from None
    lines += [last] if last and not is_partial else []
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row["id"], str) or not isinstance(row["category"], str):
                raise ValueError("id and category are not both text")
            rows.append({**row, "verdict": str(row["verdict"])})
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}:{number}: not results of eval.tool_calls ({error}).") from None
    return rows


def _describe_changes(there: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{key}: {json.dumps(there.get(key))} there, {json.dumps(now.get(key))} now"
        for key in sorted(there.keys() | now.keys())
        if there.get(key) != now.get(key)
    ]


def _to_line(row: Row) -> bytes:
    # Half of a surrogate pair, which a model may well write, cannot be UTF-8; escaped it can be read back.
    text = json.dumps(row, ensure_ascii=False)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(row).encode() + b"\n"
