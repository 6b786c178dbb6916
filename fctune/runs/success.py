"""What a run had to reach, and whether it did: PASS, FAIL or not measured, each with its figure."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from fctune.config.schema import SuccessConfig
from fctune.runs.figures import FINAL_STEPS, describe_run, flatten
from fctune.runs.record import RunRecord
from fctune.runs.results import Accuracy, find_speed

CriterionStatus = Literal["PASS", "FAIL", "not measured"]

_HOLDS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
}
_LOSS_OF_ADAPTERS, _LOSS_OF_ALL = 1.5, 0.5
# What may differ between runs whose speeds are compared over ranks.
_OF_SCALE = ("output_dir", "seed", "epochs", "max_steps", "global_batch_size", "parallel.", "success", "checkpoint.")
_OUT_OF_MEMORY = re.compile(r"OutOfMemory|out of memory|can't allocate memory|MemoryError|ALLOC_FAILED", re.I)


@dataclass(frozen=True, slots=True)
class Criterion:
    """One thing that was asked of a run."""

    name: str
    wanted: str
    status: CriterionStatus
    value: float | None
    shown: str  # the value as text; where it was not measured, why


def judge_run(
    record: RunRecord,
    asked: SuccessConfig | None = None,
    accuracies: Sequence[Accuracy] = (),
    peers: Sequence[RunRecord] = (),
) -> list[Criterion]:
    """The verdict on each thing that is asked of a run.

    Args:
        record: the run.
        asked: of it; None: what its config asks, else the defaults.
        accuracies: of what it left; without them the last evaluation while training counts.
        peers: runs that scaling is measured against.
    """
    asked = asked or read_thresholds(record)
    figures = describe_run(record)
    judged: list[Criterion] = []

    def judge(name: str, sign: str, limit: float | None, value: float | None, form: str, why: str) -> None:
        if limit is not None:
            status: CriterionStatus = (
                "not measured" if value is None else "PASS" if _HOLDS[sign](value, limit) else "FAIL"
            )
            shown = why if value is None else f"{value:{form}}"
            judged.append(Criterion(name, f"{sign} {limit:{form}}", status, value, shown))

    accuracy, source = _accuracy(record, accuracies)
    judge(f"tool-call accuracy{source}", ">=", asked.min_accuracy, accuracy, ".1%", "run python -m eval.tool_calls")
    has_adapter = record.config.get("adapter") is not None
    loss_limit = asked.max_final_loss
    if loss_limit is None:
        loss_limit = _LOSS_OF_ADAPTERS if has_adapter else _LOSS_OF_ALL
    judge(
        f"loss, mean of the last {FINAL_STEPS} steps", "<", loss_limit, figures.final_loss, ".4g", "no step was taken"
    )
    why = "not on a GPU, or without nvidia-ml-py"
    judge("GPU utilisation", ">=", asked.min_gpu_utilization, figures.gpu_utilization, ".1%", why)
    held, whole = figures.peak_memory_gib, record.run.get("device_memory_gib")
    share = held / whole if held is not None and whole else None
    judge("GPU memory, most held", ">=", asked.min_memory_share, share, ".1%", "not on a GPU")
    judge("GPU memory, most held", "<=", asked.max_memory_share, share, ".1%", "not on a GPU")
    speed = figures.tokens_per_s_per_rank
    judge("tokens/s a GPU, median", ">", asked.min_tokens_per_s_per_gpu, speed, ",.0f", "no step was taken")
    judge("scaling", ">=", asked.min_scaling, _scaling(record, peers), ".1%", "needs a run of the same on fewer ranks")
    if asked.no_out_of_memory:
        judged.append(_judge_memory(record))
    why = "run python -m eval.throughput --model RUN_DIR --json RUN_DIR/throughput.json"
    speed_of_answers = find_speed(record)
    inference = None if speed_of_answers is None else speed_of_answers.tokens_per_s
    at = "" if speed_of_answers is None else f", {speed_of_answers.width} at a time"
    judge(f"inference tokens/s{at}", ">=", asked.min_inference_tokens_per_s, inference, ",.0f", why)
    return judged


def format_criteria(judged: Sequence[Criterion]) -> list[str]:
    """The verdicts as lines of a table: each with what was asked, what was wanted and what was found."""
    rows = [(one.status, one.name, one.wanted, one.shown) for one in judged]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]


def read_thresholds(record: RunRecord) -> SuccessConfig:
    """What a run's config asks of it; the defaults where it asks nothing."""
    asked = record.config.get("success")
    known = {spec.name for spec in fields(SuccessConfig)}
    return SuccessConfig(**{key: value for key, value in (asked or {}).items() if key in known})


def is_success(judged: Sequence[Criterion], is_strict: bool = False) -> bool:
    """Whether nothing failed; under ``is_strict`` also whether all was measured."""
    return all(one.status == "PASS" or (one.status == "not measured" and not is_strict) for one in judged)


def _accuracy(record: RunRecord, accuracies: Sequence[Accuracy]) -> tuple[float | None, str]:
    """The accuracy, and of what it is: the lowest of the suites that have a total."""
    rates = [(accuracy.rates()[-1][1]["rate"], accuracy.suite) for accuracy in accuracies if accuracy.has_total]
    if rates:
        lowest, suite = min(rates)
        return lowest, f", {suite}"
    found = record.metrics.last("eval_accuracy")
    return (None, "") if found is None else (found[1], f" while training, step {found[0]:,}")


def _judge_memory(record: RunRecord) -> Criterion:
    """Of every part of the run: how the one before a restart ended stands in ``run.json``."""
    ends = [part.end for part in record.segments[:-1]] + [record.exit]
    for end in ends:
        reason = " ".join(str((end or {}).get("reason", "")).split())
        if _OUT_OF_MEMORY.search(reason):
            return Criterion("no out-of-memory", "", "FAIL", None, reason[:160])
    if ends[-1] is None:
        return Criterion("no out-of-memory", "", "not measured", None, "the run has not said how it ended")
    if None in ends:
        return Criterion("no out-of-memory", "", "not measured", None, "why it was restarted is not on record")
    is_whole = all(end is not None and end.get("code") in (0, 75) for end in ends)
    shown = "none from start to end" if is_whole else "it ended of something else"
    return Criterion("no out-of-memory", "", "PASS", None, shown)


def _scaling(record: RunRecord, peers: Sequence[RunRecord]) -> float | None:
    """Tokens/s a rank over those of the same work on the fewest ranks among ``peers``; None without such a run."""
    mine, size = describe_run(record).tokens_per_s_per_rank, record.run.get("world_size")
    smaller = [
        peer
        for peer in peers
        if peer is not record and size and 0 < (peer.run.get("world_size") or 0) < size and _work(peer) == _work(record)
    ]
    if mine is None or not smaller:
        return None
    theirs = describe_run(min(smaller, key=lambda peer: peer.run["world_size"])).tokens_per_s_per_rank
    return mine / theirs if theirs else None


def _work(record: RunRecord) -> dict[str, Any]:
    return {key: value for key, value in flatten(record.config).items() if not key.startswith(_OF_SCALE)}
