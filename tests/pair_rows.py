"""Preference pairs for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fctune.data.synthetic import iter_conversations
from fctune.data.synthetic.pairs import make_pairs as make_synthetic


def make_pairs(count: int, seed: int = 3) -> list[dict[str, Any]]:
    """Return rows of pairs: the last answer of a synthetic conversation, and a near miss."""
    return list(make_synthetic(iter_conversations("train", count, seed), seed))


def write_pairs(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows to a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
