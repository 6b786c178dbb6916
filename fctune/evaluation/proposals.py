"""From failures to data: cases that a model got wrong, as draft rows for a person to review and train on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fctune.calls.metrics import VERDICTS
from fctune.data.conversation import Call, Message
from fctune.errors import ConfigError
from fctune.evaluation.judging import Row
from fctune.evaluation.suites import Suite, benchmark_of


def write_proposals(suite: Suite, rows: Sequence[Row], path: str | Path) -> int:
    """Writes the failures as JSONL, by error class, and returns their count; see ``propose``."""
    drafts = propose(suite, rows)
    text = "".join(json.dumps(draft, ensure_ascii=True) + "\n" for draft in drafts)
    Path(path).write_text(text, encoding="utf-8")
    return len(drafts)


def propose(suite: Suite, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The failures as rows in OpenAI shape: ``messages`` up to and with the answer that was due, and ``tools``.

    Beside them stand ``reviewed`` (false), ``error_class``, ``case``, ``suite`` and, under ``got``, what the model said
    instead and what is wrong with it. Where no call was due the answer is left out, which no reader of rows takes: a
    person has to write it.

    A case that is trained on measures nothing any more; ``fctune data check --eval-suite`` finds those that were.

    Raises:
        ConfigError: The suite is a benchmark.
    """
    if (name := benchmark_of(suite)) is not None:
        raise ConfigError(f"{suite.name}: is a benchmark ({name}), of which nothing may be trained on.")
    cases = {case.id: case for case in suite.cases}
    drafts = []
    for row in sorted(rows, key=lambda row: VERDICTS.index(row["verdict"])):
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
