"""Draft training rows from the cases that a model got wrong, for a person to review."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError
from fctune.calls.judge import ERROR_KINDS
from fctune.data.conversation import Call, Message
from fctune.tasks.judge import Row
from fctune.tasks.suite import Suite
from fctune.tasks.suite_files import benchmark_of


def write_proposals(suite: Suite, rows: Sequence[Row], path: str | Path) -> int:
    """Write the failures as JSONL, sorted by kind of error, and return their count; see ``propose``."""
    drafts = propose(suite, rows)
    text = "".join(json.dumps(draft, ensure_ascii=True) + "\n" for draft in drafts)
    Path(path).write_text(text, encoding="utf-8")
    return len(drafts)


def propose(suite: Suite, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the failures as rows in OpenAI's shape: ``messages``, including the expected answer, and ``tools``.

    Each row also has ``reviewed`` (false), ``error_class``, ``case``, ``suite`` and ``got``: the model's answer and
    what is wrong with it. If no call was due, the expected answer is empty and the row is rejected by every reader
    until a person has written one.

    Training on a case makes it useless for evaluation; ``fctune data check --eval-suite`` finds such cases.

    Raises:
        ConfigError: The suite is a benchmark.
    """
    if (name := benchmark_of(suite)) is not None:
        raise ConfigError(f"{suite.name}: belongs to a benchmark ({name}), which must not be trained on. Use others.")
    cases = {case.id: case for case in suite.cases}
    drafts = []
    for row in sorted(rows, key=lambda row: ERROR_KINDS.index(row["verdict"])):
        case = cases.get(row["id"])
        if case is None or row["verdict"] in ("correct", "no_answer"):
            continue
        calls = tuple(Call(c.name, c.arguments, f"call_{n}") for n, c in enumerate(case.expected, start=1))
        answer = Message("assistant", None, calls)
        draft = {
            "reviewed": False,
            "error_class": row["verdict"],
            "suite": suite.name,
            "case": case.id,
            "messages": [message.to_openai() for message in (*case.prompt.messages, answer)],
            "got": {"answer": row["answer"], "calls": row["calls"], "differences": row["differences"]},
        }
        if case.prompt.tools:
            draft["tools"] = [tool.to_openai() for tool in case.prompt.tools]
        drafts.append(draft)
    return drafts
