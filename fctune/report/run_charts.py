"""Charts of a run over its steps, or of several over each other; long runs thinned out without losing extremes."""

from __future__ import annotations

from collections.abc import Sequence

from fctune.report.page import Chart, Mark, Series
from fctune.runs.metrics_file import Column
from fctune.runs.record import RunRecord

NUM_POINTS = 400
_MAX_MARKS = 60  # of a kind; beyond it they would be a wall


def thin(values: Sequence[float | None], num_points: int = NUM_POINTS) -> list[int]:
    """Places of ``num_points`` values at most that draw the same line: of each stretch its least and its greatest.

    The first and the last value are among them. After the min-max decimation of plotting libraries.
    """
    places = [place for place, value in enumerate(values) if value is not None]
    if len(places) <= num_points:
        return places
    num_stretches = num_points // 2 - 1
    kept = {places[0], places[-1]}
    for number in range(num_stretches):
        stretch = places[number * len(places) // num_stretches : (number + 1) * len(places) // num_stretches]
        kept.add(min(stretch, key=lambda place: values[place] or 0.0))
        kept.add(max(stretch, key=lambda place: values[place] or 0.0))
    return sorted(kept)


def make_lines(
    curves: Sequence[tuple[str, Sequence[int], Column]],
    value_label: str,
    marks: Sequence[Mark] = (),
    is_log: bool = False,
) -> Chart:
    """A chart of (name, steps, values) over steps; ``is_log`` where all are over 0 and they span a decade or more.

    Over less than a decade an axis of logarithms has hardly a round number to label.
    """
    num_points = max(100, min(NUM_POINTS, 3 * NUM_POINTS // len(curves)))
    shown: list[dict[int, float | None]] = []
    for _, steps, values in curves:
        shown.append({steps[place]: values[place] for place in thin(values, num_points)})
    labels = sorted(set().union(*shown))
    series = []
    for (name, steps, values), points in zip(curves, shown, strict=True):
        # Where another curve has a point and this one has a value, the value is shown: both read off at one step.
        own = dict(zip(steps, values, strict=True)) if len(labels) > len(points) else points
        row = [own.get(label) for label in labels]
        series.append(Series(name, row, is_sparse=_is_sparse(row)))
    known = [value for one in series for value in one.values if value is not None]
    is_wide = bool(known) and 0 < 10 * min(known) <= max(known)
    return Chart("lines", labels, series, "step", value_label, marks, is_log and is_wide)


def _is_sparse(row: Column) -> bool:
    """Whether there is a gap between the first value and the last, as none is where a run ended sooner than another.

    So is a single value, which no line leads to.
    """
    places = [place for place, value in enumerate(row) if value is not None]
    return len(places) == 1 or (bool(places) and places[-1] - places[0] >= len(places))


def find_marks(record: RunRecord) -> list[Mark]:
    """Restarts, checkpoints that are still there, and alerts of a run, at their steps."""
    restarts = [Mark(part.after_step, "restart") for part in record.segments[1:]]
    saves = [Mark(step, "checkpoint") for step in sorted({state.step for state in record.checkpoints})]
    alerts = [Mark(step, "alert") for step in sorted({alert["step"] for alert in record.alerts})]
    return [mark for kind in (restarts, saves, alerts) for mark in _spread(kind)]


def _spread(marks: list[Mark]) -> list[Mark]:
    if len(marks) <= _MAX_MARKS:
        return marks
    return [marks[number * (len(marks) - 1) // (_MAX_MARKS - 1)] for number in range(_MAX_MARKS)]
