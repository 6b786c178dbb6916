"""Results of an evaluation on disk: one line for each case as it finishes, and the settings of the run.

A killed run keeps its finished cases; the next run with the same settings resumes from there. Several ranks write one
file each, which are merged at the end or by the next run.
"""

from __future__ import annotations

import fcntl
import glob
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from fctune.base.errors import ConfigError, DataError
from fctune.base.files import write_atomically
from fctune.tasks.judge import Row


class ResultsError(ConfigError):
    """Results that cannot be written, or that another run is writing."""


class ResultsConflictError(ResultsError):
    """Existing results of other settings, which only ``is_fresh`` replaces."""


class ResultsFile:
    """``results.jsonl`` with its ``results.settings.json`` and ``results.summary.json``.

    Args:
        path: The ``.jsonl`` file.
        rank: Rank of this process; if there are several, it writes to a hidden ``.results.jsonl.rank<N>``, which
            no results of another name are.
        world_size: Number of processes that write.
    """

    def __init__(self, path: str | Path, rank: int = 0, world_size: int = 1):
        self.path = Path(path)
        self.settings_path = name_beside(self.path, ".settings.json")
        self.summary_path = name_beside(self.path, ".summary.json")
        self._lock_path = self.path.with_name(f".{self.path.name}.lock")
        self._lock: IO[bytes] | None = None
        self._part = self.path.with_name(f".{self.path.name}.rank{rank}") if world_size > 1 else self.path
        self._file: IO[bytes] | None = None

    def start(self, settings: Mapping[str, Any], is_fresh: bool = False) -> dict[str, Row]:
        """Return the finished rows of an earlier run, by id; called by one process, before any appends.

        Args:
            settings: Everything that the answers depend on; must equal the settings of existing rows.
            is_fresh: Discard existing results.

        Raises:
            ResultsConflictError: Existing results have other settings.
            ResultsError: Another run is writing them, they cannot be written, or the file is of another kind.
            DataError: The existing files are not results.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            self._require_results()
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
            self._write_object(self.settings_path, settings)
        except OSError as error:
            self.release()
            raise self._unwritable(error) from None
        except ValueError:
            self.release()
            raise
        return finished

    def take_over(self, earlier: str | Path, settings: Mapping[str, Any]) -> list[str]:
        """Begin with the finished rows of another results file, if there are none here and its settings are these.

        Args:
            earlier: The other file, which may be missing.
            settings: As for ``start``, which is called next.

        Returns:
            Why nothing was taken over; empty if it was, or if there are rows here.

        Raises:
            DataError: The other file has invalid rows.
            ResultsError: The rows cannot be written.
        """
        if self.path.exists() or self._parts():
            return []
        rows = [row for row in read_rows(earlier, is_partial=True) if row.get("error") is None]
        if not rows:
            return ["it has none"]
        if differences := _describe_changes(read_settings(earlier) or {}, json.loads(json.dumps(settings))):
            return differences
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write_object(self.settings_path, settings)
            self._replace(self.path, rows)
        except OSError as error:
            raise self._unwritable(error) from None
        return []

    def append(self, row: Row) -> None:
        """Write one row and flush it, so that it survives this process."""
        try:
            if self._file is None:
                self._file = self._part.open("ab")
            self._file.write(_to_line(row))
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from None

    def count(self) -> int:
        """Return the number of answers on disk, of all ranks; a row with an error is asked again."""
        rows = (row for path in (self.path, *self._parts()) for row in read_rows(path, is_partial=True))
        return len({row["id"] for row in rows if row.get("error") is None})

    def close(self) -> None:
        """Close the results file; the lock stays until ``release``."""
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()  # writes again what a full disk has refused
            except OSError as error:
                raise self._unwritable(error) from None

    def release(self) -> None:
        """Release the lock, so that other processes may write the results."""
        if self._lock is not None:
            self._lock_path.unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def finish(self, order: Sequence[str]) -> list[Row]:
        """Merge the rows of all ranks in the given order of ids, and return them; called by one process."""
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
        """Write the summary next to the results."""
        try:
            self._write_object(self.summary_path, summary)
        except OSError as error:
            raise self._unwritable(error) from None

    def _take_lock(self) -> None:
        """Keep other processes from replacing the files; the lock ends with this process."""
        lock = self._lock_path.open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._lock = lock
        except BlockingIOError:
            lock.close()
            raise ResultsError(
                f"{self.path}: another run of this command is writing to it. Pass another --out."
            ) from None

    def _require_results(self) -> None:
        """Keep a file of another kind, such as that of the cases, which ``is_fresh`` would empty."""
        if not self.path.is_file() or read_settings(self.path) is not None:
            return
        with self.path.open("rb") as file:
            first = file.readline()
        try:
            if first.strip():
                _parse_row(first)
        except (ValueError, KeyError, TypeError):
            raise ResultsError(f"--out {self.path}: is not a result of fctune eval. Pass another --out.") from None

    def _check(self, settings: Mapping[str, Any]) -> None:
        existing = read_settings(self.path)
        if existing is None:
            raise ResultsConflictError(
                f"{self.path}: contains results, but {self.settings_path.name}, which describes them, is missing. "
                "Pass --fresh to replace them, or another --out."
            )
        if differences := _describe_changes(existing, json.loads(json.dumps(settings))):
            shown = "\n".join(f"  {line}" for line in differences)
            raise ResultsConflictError(
                f"{self.path}: contains results of different settings\n{shown}\n"
                "Pass --fresh to replace them, or another --out to keep both."
            )

    def _parts(self) -> list[Path]:
        return sorted(self.path.parent.glob(f".{glob.escape(self.path.name)}.rank*"))

    def _replace(self, path: Path, rows: Iterable[Row]) -> None:
        self._write(path, b"".join(map(_to_line, rows)))

    def _write_object(self, path: Path, content: Mapping[str, Any]) -> None:
        self._write(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def _write(self, path: Path, content: str | bytes) -> None:
        write_atomically(path, content.encode("utf-8", "replace") if isinstance(content, str) else content)

    def _unwritable(self, error: OSError) -> ResultsError:
        return ResultsError(f"--out {self.path}: cannot be written ({error.strerror}).")


def name_beside(path: Path, suffix: str) -> Path:
    """Return the path with another suffix than ``.jsonl``; other names are kept, as ``llama-3.1`` has no suffix."""
    return path.with_name(path.name.removesuffix(".jsonl") + suffix)


def read_settings(path: str | Path) -> dict[str, Any] | None:
    """Return the settings of a results file; None if they are missing."""
    path = Path(path)
    file = name_beside(path, ".settings.json")
    if not file.exists():
        file = path.with_suffix(".settings.json")  # that of llama-3.1 was once llama-3.settings.json
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return settings if isinstance(settings, dict) else None


def read_rows(path: str | Path, is_partial: bool = False) -> list[Row]:
    """Read the rows of a results file.

    Args:
        path: The file.
        is_partial: The file may be missing, and its last line incomplete, which is then ignored.

    Raises:
        DataError: The file is missing or has invalid rows, such as those of ``fctune score``.
    """
    path = Path(path)
    try:
        *lines, last = path.read_bytes().split(b"\n")  # the last is empty unless writing it was interrupted
    except OSError as error:
        if is_partial and isinstance(error, FileNotFoundError):
            return []
        raise DataError(f"{path}: cannot be read ({error.strerror}). Pass a file that fctune eval wrote.") from None
    lines += [last] if last and not is_partial else []
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(_parse_row(line))
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and last.startswith(b"{") and isinstance(error, json.JSONDecodeError):
                raise DataError(
                    f"{path}:{number}: the last row is incomplete, as after an evaluation that was killed. Run the "
                    "same fctune eval again to finish it."
                ) from None
            raise DataError(f"{path}:{number}: not a result of fctune eval ({error}).") from None
    if any("valid" in row for row in rows):
        # They lack the answers and the cases without a prediction, and their verdict need not be the benchmark's.
        raise DataError(
            f"{path}: contains verdicts of fctune score, whose rates are in its .summary.json. Pass a file that "
            "fctune eval wrote."
        )
    return rows


def _parse_row(line: bytes) -> Row:
    row = json.loads(line)
    if not isinstance(row["id"], str) or not isinstance(row["category"], str):
        raise ValueError("id and category must be strings")
    return {**row, "verdict": str(row["verdict"])}


def _describe_changes(existing: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [
        f"{key}: was {json.dumps(existing.get(key))}, is now {json.dumps(new.get(key))}"
        for key in sorted(existing.keys() | new.keys())
        if existing.get(key) != new.get(key)
    ]


def _to_line(row: Row) -> bytes:
    # Half a surrogate pair, which a model may write, cannot be encoded as UTF-8; escaped it can be read back.
    text = json.dumps(row, ensure_ascii=False)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(row).encode() + b"\n"
