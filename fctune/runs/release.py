"""The mark of a model that the gate stopped: ``not_released`` next to its weights, which serving and uploading heed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError
from fctune.base.files import write_atomically
from fctune.runs.directory import RunFiles
from fctune.runs.tune_directory import find_run_dir

FILE_NAME = "not_released"
_EXPORTS = ("merged", "adapter")  # of one run, which are released together
_CONFIGS = ("config.json", "adapter_config.json")


def find_marks(model: str | Path) -> list[Path]:
    """Return the paths of a model's mark, which may not exist; several if its exports lie on two disks.

    An export on ``checkpoint.fallback_dir`` is linked from its run. It has a mark at both ends of the link, so that it
    is refused by either path.

    Args:
        model: The output directory of a run or a tune, one of its exports, or a model or adapter directory.
    """
    path = find_run_dir(model)
    run_export = RunFiles(path).export
    if run_export.is_dir() and not any((path / name).is_file() for name in _CONFIGS):
        exports = run_export
    elif _is_export(absolute := path.absolute()):  # by its name in the run, which may be a link
        exports = absolute.parent
    elif _is_export(resolved := path.resolve()):
        exports = resolved.parent
    else:
        return [path / FILE_NAME]
    linked = [target.parent for name in _EXPORTS if _is_export(target := (exports / name).resolve())]
    others = dict.fromkeys(folder for folder in linked if folder != exports.resolve())
    return [folder / FILE_NAME for folder in (exports, *others)]


def _is_export(path: Path) -> bool:
    return path.name in _EXPORTS and path.parent.name == RunFiles("").export.name


def mark_not_released(model: str | Path, lines: Sequence[Mapping[str, Any]], report: Path) -> Path:
    """Mark a model as not released, and return the path of the mark.

    Args:
        model: The model, as ``find_marks`` takes it.
        lines: The gate's lines that block it, each with ``name``, ``title`` and ``verdict``.
        report: The gate's report.

    Raises:
        ConfigError: The mark cannot be written.
    """
    marks, problems = find_marks(model), list[str]()
    for mark in marks:
        try:
            write_atomically(mark, json.dumps({"report": str(report.resolve()), "lines": list(lines)}, indent=2) + "\n")
        except OSError as error:
            problems.append(f"{mark}: cannot be written ({error.strerror}), so {model} is not marked there.")
    if problems:
        raise ConfigError(" ".join(problems))
    return marks[0]


def remove_mark(model: str | Path) -> bool:
    """Remove the mark of a model; True if there was one.

    Raises:
        ConfigError: The mark cannot be removed.
    """
    had_one = False
    for mark in find_marks(model):
        try:
            had_one |= mark.is_file()
            mark.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"{mark}: cannot be removed ({error.strerror}).") from None
    return had_one


def read_mark(model: str | Path) -> list[dict[str, Any]] | None:
    """Return the lines that block a model, each with ``name``, ``title`` and ``verdict``; None if it is not marked.

    Lines have ``n``, the number of items that were judged, unless an older version wrote the mark. Those of a damaged
    mark are unknown, so empty.
    """
    marks = [mark for mark in find_marks(model) if mark.is_file()]
    if not marks:
        return None
    lines: dict[str, dict[str, Any]] = {}
    for mark in marks:
        for line in _read_lines(mark):
            lines.setdefault(line["name"], line)
    return list(lines.values())


def _read_lines(mark: Path) -> list[dict[str, Any]]:
    try:
        lines = json.loads(mark.read_text(encoding="utf-8"))["lines"]
        return [
            {key: str(line[key]) for key in ("name", "title", "verdict")}
            | ({"n": int(n)} if (n := line.get("n")) else {})
            for line in lines
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def require_released(model: str | Path, action: str, is_forced: bool) -> None:
    """Refuse a model that the gate has stopped, and the checkpoints of a run whose exports it has stopped.

    Args:
        model: The model, as ``find_marks`` takes it.
        action: What is refused, as in "not served".
        is_forced: Allow it.

    Raises:
        ConfigError: The model is marked, and it is not forced.
    """
    places = (model, *_list_runs_of_checkpoint(Path(model)))
    stopped = next((place for place in places if read_mark(place) is not None), None)
    if stopped is None or is_forced:
        return
    lines = read_mark(stopped) or []
    mark = next(path for path in find_marks(stopped) if path.is_file())
    fallen = ", ".join(f"{line['title']} ({line['verdict']})" for line in lines) or "the mark is damaged"
    raise ConfigError(
        f"{model}: {action}, because the gate stopped {'it' if stopped is model else 'its run'}: {fallen}. See {mark}; "
        "mend the rows and run fctune gate again, or pass --force."
    )


def _list_runs_of_checkpoint(path: Path) -> list[Path]:
    """Return the directory of a checkpoint's run, by the path's own name and by that of what it links to."""
    spelled = (path.absolute(), path.resolve())
    return [one.parents[1] for one in spelled if one.parent.name == RunFiles("").checkpoints.name]
