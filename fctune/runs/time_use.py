"""Account of a run's time: how much of it trained, and how much went to data, stalls, evaluations and restarts."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass

from fctune.runs.record import RunRecord, RunSegment

_STALL = 3.0  # a step stalled if it took more than this many times the median

PART_DESCRIPTIONS = {
    "training": "training steps kept: forward, backward, update",
    "data": "waiting for data",
    "stalls": f"time beyond the median, of steps that took over {_STALL:.0f} times the median",
    "first steps": "time beyond the median, of the first step after each start: compilation and memory allocation",
    "skipped steps": "steps whose update was skipped",
    "saves": "waiting for checkpoints to copy the weights, and for the last one to be written",
    "validation": "loss on the validation split",
    "evaluation": "tool-call accuracy while training",
    "export": "exporting the model at the end",
    "restarts": "from the last step kept to the restart: lost steps, downtime and earlier start-up",
    "other": "start-up and unmeasured time of the last segment",
}


@dataclass(frozen=True, slots=True)
class TimeUse:
    """Seconds of a run by use; ``parts`` are disjoint and add up to ``elapsed_s`` if that is known."""

    elapsed_s: float | None  # from the first start to the end, including restarts
    parts: dict[str, float]  # keys of ``PART_DESCRIPTIONS``
    gpu_hours: float | None  # all ranks, while a segment was running; None on CPUs

    @property
    def goodput(self) -> float | None:
        """Share of ``elapsed_s`` spent computing training steps that were kept, as MegaScale and others define it.

        None if the elapsed time is unknown, or smaller than its parts because clocks disagree.
        """
        if not self.elapsed_s or self.parts["training"] > self.elapsed_s:
            return None
        return self.parts["training"] / self.elapsed_s


def account_for_time(record: RunRecord) -> TimeUse:
    """Split a run's time by use; what was not measured is part of ``other``."""
    metrics = record.metrics
    names = ("step_time_s", "data_time_s", "save_wait_s", "save_time_s", "eval_time_s", "validation_time_s")
    steps, data, save_waits, saves, evaluations, validations = (
        [value or 0.0 for value in metrics.column(name)] for name in names
    )
    skipped, indices = metrics.column("is_skipped"), record.segment_indices()
    compute = [max(0.0, step - wait - save) for step, wait, save in zip(steps, data, save_waits, strict=True)]
    sizes = _world_sizes(record.segments)
    medians = _median_by_size(compute, [sizes[index] for index in indices])
    parts = dict.fromkeys(("training", "data", "stalls", "first steps", "skipped steps"), 0.0)
    previous = -1
    for index, seconds, is_skipped in zip(indices, compute, skipped, strict=True):
        median, is_first, previous = medians[sizes[index]], index != previous, index
        excess = max(0.0, seconds - median) if is_first or seconds > _STALL * median else 0.0
        parts["first steps" if is_first else "stalls"] += excess
        parts["skipped steps" if is_skipped else "training"] += seconds - excess
    closing = record.run.get("closing", {}) if record.exit is not None else {}
    parts["data"], parts["saves"] = sum(data), sum(save_waits) + sum(saves) + closing.get("save_s", 0.0)
    parts["validation"], parts["evaluation"] = sum(validations), sum(evaluations)
    parts["export"] = closing.get("export_s", 0.0)
    elapsed_s = _elapsed_s(record)
    if elapsed_s is not None:
        kept = [0.0] * len(record.segments)
        for index, step_parts in zip(indices, zip(steps, saves, evaluations, validations, strict=True), strict=True):
            kept[index] += sum(step_parts)
        parts["restarts"] = _lost_to_restarts(record.segments, kept)
        parts["other"] = max(0.0, elapsed_s - sum(parts.values()))
    return TimeUse(elapsed_s, parts, _gpu_hours(record, elapsed_s))


def _elapsed_s(record: RunRecord) -> float | None:
    started_at, ended_at = record.segments[0].started_at, record.ended_at
    if started_at is None or ended_at is None or not record.metrics.steps:
        return None
    return max((ended_at - started_at).total_seconds(), 1.0) if ended_at >= started_at else None


def _lost_to_restarts(segments: list[RunSegment], kept_s: list[float]) -> float:
    """Sum the duration of each interrupted segment, downtime included, minus the steps of it that were kept."""
    lost = 0.0
    for (segment, following), kept in zip(itertools.pairwise(segments), kept_s, strict=False):
        if segment.started_at is not None and following.started_at is not None:
            lost += max(0.0, (following.started_at - segment.started_at).total_seconds() - kept)
    return lost


def _world_sizes(segments: list[RunSegment]) -> list[int | None]:
    """Return each segment's number of ranks; where it was not recorded, the next segment's."""
    sizes: list[int | None] = []
    for segment in reversed(segments):
        sizes.append(segment.world_size or (sizes[-1] if sizes else None))
    return sizes[::-1]


def _median_by_size(compute_s: list[float], sizes: list[int | None]) -> dict[int | None, float]:
    """Return the median step time for each world size: on half the ranks a step takes twice as long, and no stall."""
    by_size: dict[int | None, list[float]] = {}
    for seconds, size in zip(compute_s, sizes, strict=True):
        by_size.setdefault(size, []).append(seconds)
    return {size: statistics.median(values) for size, values in by_size.items()}


def _gpu_hours(record: RunRecord, elapsed_s: float | None) -> float | None:
    """Sum ranks x duration over segments, without the downtime before a restart where the segment's end is known.

    None for a run on CPUs.
    """
    if elapsed_s is None or record.is_cpu:
        return None
    segments = record.segments
    ends = [segment.ended_at or following.started_at for segment, following in itertools.pairwise(segments)]
    total = 0.0
    for segment, end, size in zip(segments, [*ends, record.ended_at], _world_sizes(segments), strict=True):
        if segment.started_at is None or end is None or size is None:
            return None
        total += max(0.0, (end - segment.started_at).total_seconds()) * size
    return total / 3600
