"""The directory of a tune as other commands see it: its record, and the run that it holds."""

from __future__ import annotations

import json
from pathlib import Path

RECORD, RUN = "tune.json", "run"


def is_tune(path: str | Path) -> bool:
    """Return True for the directory of a tune."""
    return (Path(path) / RECORD).is_file()


def find_run_dir(path: str | Path) -> Path:
    """Return the run's directory in that of a tune; any other path, and a tune that has not trained, as it is."""
    run = Path(path) / RUN
    return run if is_tune(path) and run.is_dir() else Path(path)


def read_repeat(run: Path) -> list[str] | None:
    """Return the command that repeats a run with what was edited in its config; None if it is of no tune's record."""
    try:
        words = json.loads((run.parent / RECORD).read_text(encoding="utf-8"))["repeat"]
        return [str(word) for word in words] if run.name == RUN and words else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
