"""Text of a run shared by its page and the terminal: outcome, numbers, durations and config values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fctune.base.exit_codes import DONE, INVALID, STOPPED
from fctune.pages.page import Tone
from fctune.runs.figures import flatten_config
from fctune.runs.record import RunRecord

ABSENT = "(absent)"  # shown for a key that a config does not have


def describe_outcome(record: RunRecord) -> tuple[str, Tone]:
    """Describe how the run ended, or where it is, in one sentence, with the tone to show it in."""
    step = record.metrics.steps[-1] if record.metrics.steps else 0
    of = f" of {record.num_steps:,}" if record.num_steps else ""
    if record.exit is None:
        return f"At step {step:,}{of}: still running, or killed.", "warn"
    code, reason = record.exit.get("code"), next(iter(exit_reason(record)), "")
    if code == DONE:
        return f"Completed after step {step:,}{of}.", "good"
    if code == STOPPED:
        return f"{reason[:1].upper()}{reason[1:]}.", "warn"
    if code == INVALID:  # before any step, so what earlier segments reached is not where it failed
        return f"Failed: invalid config or data: {reason}", "bad"
    return f"Failed with code {code} after step {step:,}{of}: {reason}", "bad"


def exit_reason(record: RunRecord) -> list[str]:
    """Return the lines of the reason in ``exit.json``; empty without one."""
    lines = str((record.exit or {}).get("reason", "")).splitlines()
    return [line.rstrip() for line in lines if line.strip()]


def find_differences(configs: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the dotted keys in which configs differ, with each config's value or ``ABSENT``."""
    flat = [flatten_config(config) for config in configs]
    keys = sorted(set().union(*flat))
    rows = {key: [one.get(key, ABSENT) for one in flat] for key in keys}
    return {key: row for key, row in rows.items() if any(value != row[0] for value in row)}


def format_value(value: Any) -> str:
    """Format a config value exactly: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def format_figure(value: float | None, spec: str, unit: str = "") -> str:
    """Format a number by a format specification; empty if it is None."""
    return "" if value is None else f"{value:{spec}}{unit}"


def format_number(value: float | None) -> str:
    """Format a number with four significant digits, or without decimals from 1,000 on; empty if it is None."""
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_seconds(seconds: float | None) -> str:
    """Format a duration in seconds, minutes or hours; empty if it is None."""
    if seconds is None:
        return ""
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:,.1f} h"


def format_bounds(rate: Mapping[str, Any]) -> str:
    """Format the interval of a rate, such as ``30.1% - 95.4%``."""
    return f"{rate['low']:.1%} - {rate['high']:.1%}"


def describe_method(adapter: dict[str, Any] | None) -> str:
    """Describe what was trained: all weights, or adapters with their settings."""
    if not adapter:
        return "all weights"
    kinds = [adapter.get("scaling", "standard"), *(["DoRA"] if adapter.get("dora") else [])]
    stored = adapter.get("base", "bf16")  # which keeps the run's precision
    base = f", base quantised to {stored}" if stored != "bf16" else ""
    return f"LoRA, rank {adapter['rank']}, alpha {adapter['alpha']:g} ({', '.join(kinds)}){base}"
