"""Measure a served model case by case, and compare with the verdicts in process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fctune.cli import main
from fctune.engines.server import to_messages
from fctune.tasks.suite_files import read_cases

Rows = dict[str, dict[str, Any]]
Record = Callable[[str, object], None]


def read_rows(path: Path) -> Rows:
    """Return the rows of an evaluation by case id."""
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


def read_judged(results: Path, cases: Path) -> Rows:
    """Return results in process by id, each with its ``prompt``, and the ``messages`` of it as a client sends them."""
    rows = read_rows(results)
    for case in read_cases(cases):
        rows[case.id] |= {"prompt": case.prompt, "messages": to_messages(case.prompt.messages)}
    return rows


def measure(cases: Path, address: str, name: str | None, out: Path, *options: str) -> Rows:
    """Return the results of the served model ``name``, or of the only one, by case id."""
    words = ["eval", "--model", address, "--cases", str(cases), "--out", str(out)]
    words += [] if name is None else ["--served-model", name]
    assert main([*words, *options]) == 0
    return read_rows(out)


def count_same(judged: Rows, served: Rows, record: Record) -> list[str]:
    """Return the ids of the cases whose verdict is another than in process.

    ``record`` is pytest's ``record_property``: what was counted is printed at the end of the tests.
    """
    assert served.keys() == judged.keys()
    different = [id_ for id_, row in served.items() if row["verdict"] != judged[id_]["verdict"]]
    counted = f"{len(served) - len(different)} of {len(served)} cases are judged as in process"
    record("served", f"{counted}; {count_correct(judged)} are correct there and {count_correct(served)} as served")
    return different


def count_correct(rows: Rows) -> int:
    """Return the number of correct cases."""
    return sum(row["verdict"] == "correct" for row in rows.values())


def require_same(judged: Rows, served: Rows, record: Record, num_in_100: int = 1) -> None:
    """Check that each case has the verdict that it has in process, but for ``num_in_100`` with a known reason."""
    different = count_same(judged, served, record)
    for id_ in different:
        change = f"{judged[id_]['verdict']} -> {served[id_]['verdict']}"
        record("served", f"  {id_}: {change}: {_explain(judged[id_], served[id_])}")
    assert len(different) <= num_in_100 * len(served) // 100
    unexplained = [id_ for id_ in different if _explain(judged[id_], served[id_]) is None]
    assert not unexplained, [(judged[id_]["answer"], served[id_]["calls"]) for id_ in unexplained]


def _explain(here: dict[str, Any], served: dict[str, Any]) -> str | None:
    """Return why a case may be judged differently when served; None if there is no known reason."""
    content = served["answer"].strip()  # without the reasoning, which comes first
    if here["malformed"] and not served["calls"] and content and here["answer"].strip().endswith(content):
        return "vLLM sends text that is not a call as content, which is not called malformed"
    return None
