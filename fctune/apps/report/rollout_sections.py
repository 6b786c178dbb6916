"""Report sections of a run with rollouts: where its time went, and answers from the start to the end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fctune.pages.page import Page, make_table
from fctune.runs.record import RunRecord

_NUM_STEPS = 6  # of which answers are shown
_STEP = re.compile(r'\{"step": (\d+),')


def add_rollouts(page: Page, record: RunRecord, suffix: str = "") -> None:
    """Add the time shares and examples of a run with rollouts; nothing for other runs."""
    if not record.metrics.has("generation_time_s"):
        return
    page.add_section(
        f"Time of learning from answers{suffix}",
        make_table([("Part", False), ("Seconds", True), ("Share of all steps", True)], _make_shares(record)),
        lead="Generation may overlap with training: what training waits for is the first line. Judging is a sum over "
        "ranks and part of generation.",
    )
    if examples := list(_iter_examples(record)):
        page.add_section(
            f"Answers over time{suffix}",
            page.make_cases(examples, {"step": "Step", "reward": "Reward"}),
            lead="Of some steps, the best and the worst answer of one group.",
        )


def _make_shares(record: RunRecord) -> list[list[object]]:
    def total(name: str) -> float:
        return sum(value or 0.0 for value in record.metrics.column(name)) if record.metrics.has(name) else 0.0

    steps_s, waiting_s = total("step_time_s"), total("data_time_s")
    parts = {
        "waiting for answers": waiting_s,
        "training": steps_s - waiting_s,
        "generation and judging": total("generation_time_s"),
        "judging": total("judging_time_s"),
        "publishing the policy": total("publish_time_s"),
    }
    return [[name, f"{seconds:,.1f}", f"{seconds / steps_s:.2%}"] for name, seconds in parts.items()]


def _iter_examples(record: RunRecord) -> Iterator[dict[str, Any]]:
    answered = [
        step
        for step, answers in zip(record.metrics.steps, record.metrics.column("answers"), strict=True)
        if answers is not None
    ]
    last = len(answered) - 1
    wanted = sorted({answered[round(i * last / (_NUM_STEPS - 1))] for i in range(_NUM_STEPS)}) if answered else []
    for step, rows in _read_groups(record.path / "rollouts.jsonl", wanted).items():
        best = max(rows, key=lambda row: row["reward"])
        worst = min(rows, key=lambda row: row["reward"])
        for row in (best, worst) if worst["reward"] < best["reward"] else (best,):
            parts = ", ".join(f"{name} {value:g}" for name, value in row["parts"].items())
            yield {
                "title": f"step {step}, {row['case_id']}",
                "tags": [f"reward {row['reward']:g}", *(["cut off"] if row["is_cut"] else [])],
                "facets": {"step": str(step), "reward": f"{row['reward']:g}"},
                "parts": [
                    {"heading": "Answer", "text": row["text"] or row["error"] or "(empty)", "kind": "text"},
                    {"heading": "Parts of the reward", "text": parts, "kind": "text"},
                ],
            }


def _read_groups(path: Path, steps: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    """Return the first trained group of each step, without holding the complete log of answers in memory."""
    groups: dict[int, list[dict[str, Any]]] = {}
    if not path.is_file():
        return groups
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            found = _STEP.match(line)
            if found is None or (step := int(found[1])) not in steps:
                continue
            try:
                row = json.loads(line)
            except ValueError:  # truncated by a kill
                continue
            group = groups.setdefault(step, [])
            if row["advantage"] is not None and (not group or group[0]["case_id"] == row["case_id"]):
                group.append(row)
    return {step: group for step, group in groups.items() if group}
