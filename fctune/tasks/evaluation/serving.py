"""Accuracy as served: a model's texts read by the reasoning and tool-call parsers of vLLM and SGLang.

Those parsers are lenient in their own ways: SGLang drops calls of tools that are not on offer, one bad block can cost
all calls of a turn, and a parser may raise. A model may therefore be better or worse when served than as read here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError
from fctune.base.processes import run_command
from fctune.calls.formats.base import Server
from fctune.calls.judge import Judgement
from fctune.engines.engine import Answer
from fctune.tasks.evaluation.summary import tally_judgements
from fctune.tasks.judge import JudgedEpisode, Row, judge_answer
from fctune.tasks.suite import Suite
from fctune.tasks.task import Case

_LIMIT_S = 600.0  # for all texts


@dataclass(frozen=True, slots=True)
class Served:
    """Judgements of the texts as one server's parser read them, by case id, and their rates by category."""

    version: str
    parser: str
    judgements: dict[str, Judgement]
    scores: dict[str, Any]


def parse_as_served(
    server: Server,
    suite: Suite,
    rows: Sequence[Row],
    model_dir: Path,
    parser: str,
    python: str = sys.executable,
    reasoning_parser: str | None = None,
    template_args: Mapping[str, Any] | None = None,
    is_open: bool | None = None,
) -> Served:
    """Judge the answers of a run as this server would read them.

    Args:
        server: The server whose parser is used.
        suite: The cases of the rows.
        rows: Rows of results, with the model's texts.
        model_dir: Model directory, for the tokenizer that the parser needs.
        parser: The server's name of the parser.
        python: Interpreter of the environment with the server, which pins other versions of torch than this project.
        reasoning_parser: The server's name of the parser that takes the reasoning out first; None: it looks for calls
            in the complete text.
        template_args: The switches of the chat template with which the answers were made.
        is_open: The template's prompts end inside the reasoning; None if that is unknown.

    Raises:
        ConfigError: The server is not installed there, has no such parser, or does not finish.
    """
    prompted = {"template_args": dict(template_args or {}), "is_open": is_open}
    requests = [{"id": row["id"], "text": row["answer"], "tools": row["tools"], **prompted} for row in rows]
    version, replies = run_server_parser(server, parser, model_dir, requests, python, reasoning_parser)
    cases = {case.id: case for case in suite.cases}
    judged = [_judge_reply(cases[row["id"]], row, replies[row["id"]]) for row in rows]
    tally = tally_judgements(suite, ((one.case.category, one.strict, one.lenient) for one in judged))
    judgements = {one.case.id: one.strict for one in judged}
    return Served(version, parser, judgements, tally.summarise()["scores"])


def run_server_parser(
    server: Server,
    parser: str,
    model_dir: Path,
    requests: Sequence[Mapping[str, Any]],
    python: str = sys.executable,
    reasoning_parser: str | None = None,
) -> tuple[str, dict[Any, dict[str, Any]]]:
    """Have a server's own parser read texts, in a process of the environment that has it.

    Args:
        server: The server whose parser is used.
        parser: The server's name of the parser.
        model_dir: Model directory, for the tokenizer that the parser needs.
        requests: ``{"id", "text", "tools"}`` for each text, as ``served_calls`` describes.
        python: Interpreter of that environment.
        reasoning_parser: The server's name of the parser that takes the reasoning out first, if any.

    Returns:
        The server's name and version, and the reply to each request by its id.

    Raises:
        ConfigError: The server is not installed there, has no such parser, or does not finish.
    """
    worker = Path(__file__).with_name("served_calls.py")
    command = [python, "-I", str(worker), server, parser, str(model_dir)]
    command += [reasoning_parser] if reasoning_parser else []
    given = "".join(json.dumps(request) + "\n" for request in requests)
    try:
        done = run_command(command, given.encode(), _LIMIT_S)
    except OSError as error:
        raise ConfigError(
            f"{server}: {python} cannot be started ({error.strerror}). Pass the Python of an environment with {server}."
        ) from None
    if done.code is None:
        raise ConfigError(f"{server}: its parser {parser} did not finish within {_LIMIT_S:g} s.")
    if done.code != 0:
        reason = done.errors.last_line or f"exit code {done.code}"
        raise ConfigError(f"{server}: its parser {parser} cannot be run in {python} ({reason}).")
    first, *lines = done.output.text.splitlines()
    return json.loads(first)["version"], {reply["id"]: reply for reply in map(json.loads, lines)}


def _judge_reply(case: Case, row: Row, reply: dict[str, Any]) -> JudgedEpisode:
    error = row.get("error") or reply.get("error")
    return judge_answer(case, Answer(0, tool_calls=tuple(reply.get("calls", ())), error=error), None)
