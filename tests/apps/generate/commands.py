"""Run ``fctune data generate`` and read what it wrote."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from fctune.apps.generate.teacher import DROPPED
from fctune.cli import main


def generate(teacher: str, tools: Path | str, out: Path, *options: str, num: int = 24) -> int:
    fixed = ["--votes", "2", "--attempts", "1", "--concurrency", "4", "--timeout", "5"]
    arguments = ["data", "generate", "--teacher", teacher, "--tools", str(tools), "--out", str(out)]
    return main([*arguments, "--num", str(num), *fixed, *options])


def read_rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def read_log(out: Path) -> list[dict[str, Any]]:
    return read_rows(out.with_suffix(".generate") / "log.jsonl")


def read_summary(out: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((out.with_suffix(".generate") / "log.summary.json").read_text())
    assert summary["asked"] == summary["kept"] + sum(summary["dropped"].values())
    assert summary["asked"] == len(read_log(out))
    assert summary["kept"] == len(read_rows(out))
    assert set(summary["dropped"]) <= set(DROPPED)
    by_kind = Counter[str]()
    for counts in summary["kinds"].values():
        by_kind.update({name: count for name, count in counts.items() if name != "wanted"})
    assert by_kind == Counter(summary["dropped"]) + Counter(kept=summary["kept"])
    return summary
