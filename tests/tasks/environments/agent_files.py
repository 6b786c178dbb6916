"""Files of tasks for the agent and the scorer of the tests."""

from __future__ import annotations

import json
import shlex
import sys
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
