"""Accuracy as served: a model's texts through the parsers that vLLM and SGLang deploy it with.

They are lenient in ways of their own: SGLang drops calls of tools that are not on offer, one bad block can cost all
calls of a turn, a parser may raise. So a model may be better or worse as served than as read here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune.calls.formats.base import Server
from fctune.calls.metrics import Outcome, judge_failure
from fctune.errors import ConfigError
from fctune.evaluation.judging import Row, read_answer
from fctune.evaluation.suites import Suite
from fctune.generation.engine import Answer


@dataclass(frozen=True, slots=True)
class Served:
    """What a server's parser made of the texts: the outcome of each case by its id, and the server's version."""

    version: str
    parser: str
    outcomes: dict[str, Outcome]


def parse_as_served(
    server: Server,
    suite: Suite,
    rows: Sequence[Row],
    model_dir: Path,
    parser: str,
    python: str = sys.executable,
    timeout_s: float = 600.0,
) -> Served:
    """The outcomes of a run's answers, had this server read them.

    Args:
        server: Whose parser.
        suite: The cases that the rows are of.
        rows: Rows of results with the model's text.
        model_dir: Whose tokenizer the parser is given.
        parser: By the name that the server has for it.
        python: The interpreter that the server is installed for; servers pin other versions of torch than this
            project does, and of one another.
        timeout_s: For all texts.

    Raises:
        ConfigError: The server is not installed there, or has no such parser, or does not finish.
    """
    requests = "".join(
        json.dumps({"id": row["id"], "text": _served_text(row["answer"]), "tools": row["tools"]}) + "\n" for row in rows
    )
    worker = Path(__file__).with_name("served_calls.py")
    command = [python, "-I", str(worker), server, parser, str(model_dir)]
    try:
        done = subprocess.run(command, input=requests, capture_output=True, text=True, timeout=timeout_s)
    except OSError as error:
        raise ConfigError(f"{server}: {python} cannot be started ({error.strerror}).") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{server}: its parser {parser} did not finish within {timeout_s:g} s.") from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        reason = said[-1] if said else f"exit code {done.returncode}"
        raise ConfigError(f"{server}: its parser {parser} cannot be run in {python} ({reason}).")
    first, *lines = done.stdout.splitlines()
    replies = {reply["id"]: reply for reply in map(json.loads, lines)}
    cases = {case.id: case for case in suite.cases}
    outcomes: dict[str, Outcome] = {}
    for row in rows:
        case, reply = cases[row["id"]], replies[row["id"]]
        failed = row.get("error") or reply.get("error")
        if failed is not None:
            outcomes[case.id] = judge_failure(len(case.expected), failed)
            continue
        sent: list[dict[str, Any]] = [{"function": call} for call in reply["calls"]]
        parsed, _ = read_answer(Answer(0, tool_calls=tuple(sent)), None, case.prompt.tools)
        outcomes[case.id] = suite.judge(case, parsed)[0]
    return Served(json.loads(first)["version"], parser, outcomes)


def _served_text(text: str) -> str:
    """The text behind the thinking, which servers take off before they look for calls."""
    return text.split("</think>", 1)[1].lstrip("\n") if "</think>" in text else text
