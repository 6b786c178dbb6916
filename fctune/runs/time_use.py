"""Where the time of a run went: what of it trained, and what data, stalls, evaluations and restarts took."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass

from fctune.runs.record import RunRecord, RunSegment

_STALL = 3.0  # times the median step, beyond which a step stood still


@dataclass(frozen=True, slots=True)
class TimeUse:
    """Seconds of a run, by what they went to; ``parts`` are disjoint and sum up to ``elapsed_s`` where that is known.

    ``goodput`` is the share of ``elapsed_s`` that computed steps that count, as MegaScale and others have it.
    """

    elapsed_s: float | None  # from the first start to the end, over restarts
    parts: dict[str, float]
    gpu_hours: float | None  # of all ranks, over that time

    @property
    def goodput(self) -> float | None:
        """None where the whole is not known, or is less than its parts: clocks that disagree."""
        if not self.elapsed_s or self.parts["training"] > self.elapsed_s:
            return None
        return self.parts["training"] / self.elapsed_s


def account_for_time(record: RunRecord) -> TimeUse:
    """The time of a run. What was not measured stands in no part of its own but in ``other``."""
    metrics = record.metrics
    names = ("step_time_s", "data_time_s", "save_wait_s", "save_time_s", "eval_time_s", "validation_time_s")
    took, waited, held, saved, evaluated, validated = ([v or 0.0 for v in metrics.column(name)] for name in names)
    skipped, segment_indices = metrics.column("is_skipped"), record.segment_indices()
    worked = [max(0.0, step - data - save) for step, data, save in zip(took, waited, held, strict=True)]
    sizes = _sizes(record.segments)
    usual = _medians(worked, [sizes[part] for part in segment_indices])
    parts = dict.fromkeys(("training", "data", "stalls", "first steps", "skipped steps"), 0.0)
    before = -1
    for part, work, is_skipped in zip(segment_indices, worked, skipped, strict=True):
        typical, is_first, before = usual[sizes[part]], part != before, part
        excess = max(0.0, work - typical) if is_first or work > _STALL * typical else 0.0
        parts["first steps" if is_first else "stalls"] += excess
        parts["skipped steps" if is_skipped else "training"] += work - excess
    closing = record.run.get("closing", {}) if record.exit is not None else {}
    parts["data"], parts["saves"] = sum(waited), sum(held) + sum(saved) + closing.get("save_s", 0.0)
    parts["validation"], parts["evaluation"] = sum(validated), sum(evaluated)
    parts["export"] = closing.get("export_s", 0.0)
    elapsed_s = _elapsed(record)
    if elapsed_s is not None:
        kept = [0.0] * len(record.segments)
        for part, of_step in zip(segment_indices, zip(took, saved, evaluated, validated, strict=True), strict=True):
            kept[part] += sum(of_step)
        parts["restarts"] = _lost_to_restarts(record.segments, kept)
        parts["other"] = max(0.0, elapsed_s - sum(parts.values()))
    return TimeUse(elapsed_s, parts, _gpu_hours(record, elapsed_s))


MEANINGS = {
    "training": "steps that count: forward, backward, update",
    "data": "waiting for data",
    "stalls": f"what steps over {_STALL:.0f} times the median took beyond it",
    "first steps": "what the first step after a start took beyond the median: compilation, first touches of memory",
    "skipped steps": "steps whose update was left out",
    "saves": "waiting for checkpoints to have their copy of the weights, and for the last to be written",
    "validation": "loss on the validation split",
    "evaluation": "tool-call accuracy while training",
    "export": "writing models for others, at the end",
    "restarts": "from the last step that was kept to the restart: steps lost and time down; with the start before them",
    "other": "start and what was not measured of the last part",
}


def _elapsed(record: RunRecord) -> float | None:
    begun, ended = record.segments[0].at, record.ended_at
    if begun is None or ended is None or not record.metrics.steps:
        return None
    return max((ended - begun).total_seconds(), 1.0) if ended >= begun else None


def _lost_to_restarts(parts: list[RunSegment], kept_s: list[float]) -> float:
    """What the parts that were cut lasted, less what of each its steps that were kept took."""
    lost = 0.0
    for (part, following), kept in zip(itertools.pairwise(parts), kept_s, strict=False):
        if part.at is not None and following.at is not None:
            lost += max(0.0, (following.at - part.at).total_seconds() - kept)
    return lost


def _sizes(parts: list[RunSegment]) -> list[int | None]:
    """Each part's count of ranks; that of the next where it is not on record, as of a first part in older records."""
    sizes: list[int | None] = []
    for part in reversed(parts):
        sizes.append(part.world_size or (sizes[-1] if sizes else None))
    return sizes[::-1]


def _medians(worked: list[float], sizes: list[int | None]) -> dict[int | None, float]:
    """The usual time of a step on each count of ranks: on half of them it takes twice as long, and stands not still."""
    by_size: dict[int | None, list[float]] = {}
    for work, size in zip(worked, sizes, strict=True):
        by_size.setdefault(size, []).append(work)
    return {size: statistics.median(of_size) for size, of_size in by_size.items()}


def _gpu_hours(record: RunRecord, elapsed_s: float | None) -> float | None:
    """Each part's time, by the ranks it had, without the time between a part's end and a restart where it is known."""
    if elapsed_s is None:
        return None
    parts, ended = record.segments, record.ended_at
    ends = [part.until or following.at for part, following in itertools.pairwise(parts)] + [ended]
    total = 0.0
    for part, end, size in zip(parts, ends, _sizes(parts), strict=True):
        if part.at is None or end is None or size is None:
            return None
        total += max(0.0, (end - part.at).total_seconds()) * size
    return total / 3600
