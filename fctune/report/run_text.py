"""Text of a run for its page and the terminal: its outcome, numbers, durations and differences of configs."""

from __future__ import annotations

from typing import Any

from fctune.report.page import Tone
from fctune.runs.figures import flatten
from fctune.runs.record import RunRecord

ABSENT = "(absent)"  # shown for a key that a config does not have


def describe_end(record: RunRecord) -> tuple[str, Tone]:
    """How the run ended, or where it is, and how good that is."""
    step = record.metrics.steps[-1] if record.metrics.steps else 0
    of = f" of {record.num_steps:,}" if record.num_steps else ""
    if record.exit is None:
        return f"At step {step:,}{of}: running, or killed without a word.", "warn"
    code, reason = record.exit.get("code"), next(iter(exit_reason(record)), "")
    if code == 0:
        return f"Completed after step {step:,}{of}.", "good"
    if code == 75:
        return f"{reason[:1].upper()}{reason[1:]}.", "warn"
    return f"Ended with code {code} after step {step:,}{of}: {reason}", "bad"


def exit_reason(record: RunRecord) -> list[str]:
    """The lines of why it ended, as ``exit.json`` has them."""
    lines = str((record.exit or {}).get("reason", "")).splitlines()
    return [line.rstrip() for line in lines if line.strip()]


def find_differences(configs: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The keys in which configs differ, with each one's value; ``ABSENT`` where it has no such key."""
    flat = [flatten(config) for config in configs]
    keys = sorted(set().union(*flat))
    rows = {key: [one.get(key, ABSENT) for one in flat] for key in keys}
    return {key: row for key, row in rows.items() if any(value != row[0] for value in row)}


def format_number(value: float | None) -> str:
    """A number in four digits, or whole where it has more; empty where it is not known."""
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_seconds(seconds: float | None) -> str:
    """A time as people say it; empty where it is not known."""
    if seconds is None:
        return ""
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:,.1f} h"
