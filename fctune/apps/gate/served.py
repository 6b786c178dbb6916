"""What clients of a server get: the held-out cases again with streamed answers, and with guided decoding."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from fctune.apps.gate.cases import SUITE, HeldOutCases
from fctune.apps.gate.models import GateModel, ServerGoneError
from fctune.base.errors import ConfigError
from fctune.config.intervals import format_count
from fctune.config.sections.gate import GateConfig
from fctune.tasks.evaluation.results import ResultsError
from fctune.tasks.judge import Row, is_valid
from fctune.tasks.suite import Suite

STREAMED, GUIDED = "held_out_streamed", "held_out_guided"
LINES = {STREAMED: "calls_streamed", GUIDED: "calls_guided"}  # names under which they are listed as not run
# With it, vLLM constrains the answer by the tools' schemas, so that it is always a readable call.
_GUIDED_REQUEST = {"tool_choice": "required"}

Rows = Mapping[str, Row]


def check_servers(models: Sequence[GateModel], config: GateConfig) -> None:
    """Require servers where answers are to be streamed or guided.

    Raises:
        ConfigError: One of the models is not on a server.
    """
    for model in models if config.streamed or config.guided else ():
        if not model.has_server:
            option = "streamed" if config.streamed else "guided"
            raise ConfigError(
                f"gate.{option}: --{model.side} {model.model} is no server. Serve it (fctune serve), and pass its URL."
            )


def ask_served(
    model: GateModel,
    cases: HeldOutCases,
    config: GateConfig,
    folder: Path,
    is_fresh: bool,
    log: Callable[[str], None],
    not_run: dict[str, str],
) -> dict[str, dict[str, Row]]:
    """Ask a server the held-out cases as the settings say; returns the rows by suite and case.

    Args:
        model: The server.
        cases: The held-out cases.
        config: Settings of the gate.
        folder: Directory of the answers.
        is_fresh: Discard earlier answers.
        log: Called with lines on the progress.
        not_run: Why lines are not run, by name. What the server refuses is added, and not asked if it is there.
    """
    due = [case for case in cases.suite.cases if case.expected]
    guided = replace(model, request={**model.request, **_GUIDED_REQUEST})
    wanted = {
        STREAMED: (config.streamed, replace(model, is_streamed=True), cases.suite),
        GUIDED: (config.guided, guided, cases.suite.with_cases(due)),
    }
    asked: dict[str, dict[str, Row]] = {}
    for name, (is_wanted, variant, suite) in wanted.items():
        if not is_wanted or LINES[name] in not_run or not suite.cases:
            continue
        try:
            rows = variant.ask(_rename(suite, name), config, folder, is_fresh, log)
            model.num_kept += variant.num_kept
            refused = _find_refusal(rows)
            if model.side != "base" and not _is_unsupported(refused):
                refused = ""  # the base answered: it is the result that fails
        except ResultsError:
            raise
        except ConfigError as error:
            refused = error.outage if isinstance(error, ServerGoneError) else str(error)
            is_unsupported = model.side == "base" or _is_unsupported(refused)
            if not (is_unsupported and model.can_answer(suite.cases[0], config)):
                raise
        if refused:
            not_run[LINES[name]] = f"{model.side}: the server does not answer such requests ({refused})"
        else:
            asked[name] = rows
    return asked


def _find_refusal(rows: Rows) -> str:
    """Return the first error if no case was answered, otherwise nothing."""
    errors = [row.get("error") for row in rows.values()]
    return "" if None in errors else str(errors[0])


def _is_unsupported(refused: str) -> bool:
    """Return True if a server says that it does not take a request, rather than failing to answer it."""
    return re.search(r"\bHTTP (400|404|422)\b", refused) is not None


def find_ignored(asked: Mapping[str, Mapping[str, Rows]]) -> list[str]:
    """Return warnings of servers that answered guided requests without a call.

    Args:
        asked: The rows by ``base`` or ``tuned``, suite and case.
    """
    warnings = []
    for side, rows in asked.items():
        complete = [row for row in rows.get(GUIDED, {}).values() if row.get("error") is None and not row.get("is_cut")]
        if free := sum(not row["calls"] for row in complete):
            count = format_count(len(complete), "answer")
            warnings.append(
                f"{GUIDED}: {free:,} of {count} of the {'base' if side == 'base' else 'result'} with "
                "tool_choice=required are no calls, so its server ignores the request: the figures are not of guided "
                "decoding"
            )
    return warnings


def make_tables(before: Mapping[str, Rows], after: Mapping[str, Rows]) -> dict[str, Any]:
    """Return what streaming and guided decoding change, for the report; each with ``columns``, ``rows`` and ``lead``.

    Args:
        before: The base's rows by suite and case.
        after: The result's.
    """
    sides = {"base": before, "result": after}
    tables: dict[str, Any] = {}
    if STREAMED in before:
        tables["Streaming"] = {
            "lead": "Answers whose calls differ from those of the same request without streaming.",
            "columns": ["model", "answers", "with other calls", "such as"],
            "rows": [[side, *_compare_streams(rows[SUITE], rows[STREAMED])] for side, rows in sides.items()],
        }
    if GUIDED in before:
        tables["Guided decoding"] = {
            "lead": "Cases with a call due, with tool_choice=required. Hidden: wrong without it because no call could "
            "be read, and right with it; every answer is then a call, also where none is due.",
            "columns": ["model", "decoding", "cases", "right", "median s", "unanswered", "hidden"],
            "rows": [row for side, rows in sides.items() for row in _compare_guided(side, rows[SUITE], rows[GUIDED])],
        }
    return tables


def _rename(suite: Suite, name: str) -> Suite:
    renamed = suite.with_cases(suite.cases)
    renamed.name = name
    return renamed


def _compare_streams(plain: Rows, streamed: Rows) -> list[object]:
    answered = [i for i in streamed if streamed[i].get("error") is None and plain[i].get("error") is None]
    other = [i for i in answered if streamed[i]["calls"] != plain[i]["calls"]]
    return [len(answered), len(other), ", ".join(other[:3])]


def _compare_guided(side: str, plain: Rows, guided: Rows) -> list[list[object]]:
    rows: list[list[object]] = []
    hidden = sum(not plain[i]["calls"] and not is_valid(plain[i]) and is_valid(row) for i, row in guided.items())
    for name, found in (("free", {i: plain[i] for i in guided}), ("guided", guided)):
        seconds = [row["seconds"] for row in found.values() if row.get("seconds") is not None]
        num_failed = sum(row.get("error") is not None for row in found.values())
        right = sum(map(is_valid, found.values()))
        time = f"{median(seconds):.2f}" if seconds else ""
        rows.append([side, name, len(found), right, time, num_failed, hidden if name == "guided" else ""])
    return rows
