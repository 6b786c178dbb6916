"""Files of tasks for the agent and the scorer of the tests, and what runs with them record."""

from __future__ import annotations

import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fctune.config.yaml_text import dump_yaml

_HERE = Path(__file__).parent
AGENT, SCORER = (
    f"{shlex.quote(sys.executable)} -S {shlex.quote(str(_HERE / name))}"
    for name in ("agent_program.py", "scorer_program.py")
)


def write_agent_file(folder: Path, tasks: Sequence[Any], habit: str = "", **values: Any) -> Path:
    """Write tasks, lines of text as they are, and a file for an agent with them; ``habit`` is the scorer's."""
    rows, path = folder / "tasks.jsonl", folder / "agent.yaml"
    rows.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in tasks))
    scorer = {"command": f"{SCORER} {habit}".strip()}
    path.write_text(dump_yaml({"command": AGENT, "tasks": str(rows), "scorer": scorer, "time_limit_s": 60, **values}))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one a line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_recorded_tokens(run_dir: Path) -> None:
    """Check that each rollout's trained tokens and log-probabilities are those of its record, and no others."""
    events = [row for file in (run_dir / "agent_answers").glob("*.jsonl") for row in read_lines(file)]
    answers: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in events:
        if row["event"] == "answer":
            answers[row["episode"]].append(row)
    ends = {(row["task"], row["sample"], row["seed"]): row["episode"] for row in events if row["event"] == "end"}
    assert len(ends) == sum(row["event"] == "end" for row in events), "each episode once"
    rows = read_lines(run_dir / "rollouts.jsonl")
    assert len(rows) == len(ends)
    for row in rows:
        ((episode, _),) = (
            (name, key)
            for key, name in ends.items()
            if key[:2] == (row["case_id"], row["sample"]) and _fits(row, answers[name])
        )
        assert row["error"] is None
        assert row["version"] == min(one["version"] for one in answers[episode])


def _fits(row: dict[str, Any], answers: list[dict[str, Any]]) -> bool:
    trained = [
        (token, logprob)
        for sequence in (row, *row.get("further", ()))
        for token, logprob, is_new in zip(sequence["ids"], sequence["logprobs"], sequence["is_generated"], strict=True)
        if is_new
    ]
    recorded = [pair for one in answers for pair in zip(one["ids"], one["logprobs"], strict=True)]
    return sorted(trained) == sorted(recorded)
