"""Compare two evaluations of the same cases, such as a base model and the model tuned from it.

    python -m eval.compare BEFORE.jsonl AFTER.jsonl

The files are what ``eval.tool_calls --out`` writes. Cases are paired by id.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fctune.calls.score import wilson_interval
from fctune.errors import DataError


def main(argv: list[str] | None = None) -> int:
    """Print the table; 0 done, 2 wrong usage or input."""
    parser = argparse.ArgumentParser(prog="python -m eval.compare", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("before")
    parser.add_argument("after")
    arguments = parser.parse_args(argv)
    try:
        before, after = _read(arguments.before), _read(arguments.after)
        if before.keys() != after.keys():
            only = len(before.keys() ^ after.keys())
            raise DataError(
                f"{arguments.before} and {arguments.after}: {only:,} cases are in one and not in the other. "
                "Evaluate both models on the same cases."
            )
    except DataError as error:
        print(error, file=sys.stderr)
        return 2
    Console().print(_table(before, after))
    return 0


def _read(path: str) -> dict[str, dict[str, Any]]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        results = {row["id"]: {"category": row["category"], "is_correct": row["verdict"] == "correct"} for row in rows}
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Pass a file that eval.tool_calls wrote.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not results of eval.tool_calls ({error}).") from None
    if not results:
        raise DataError(f"{path}: holds no results.")
    return results


def _table(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="tool-call accuracy, before and after", title_justify="left")
    for name in ("category", "n", "before", "after", "turned right", "turned wrong"):
        table.add_column(name, justify="left" if name == "category" else "right")
    categories = sorted({result["category"] for result in before.values()})
    for category in [*categories, "all"]:
        ids = [i for i, result in before.items() if category in ("all", result["category"])]
        right = sum(after[i]["is_correct"] and not before[i]["is_correct"] for i in ids)
        wrong = sum(before[i]["is_correct"] and not after[i]["is_correct"] for i in ids)
        rates = [_rate(sum(results[i]["is_correct"] for i in ids), len(ids)) for results in (before, after)]
        style = "bold" if category == "all" else ""
        table.add_row(category, str(len(ids)), *rates, str(right), str(wrong), style=style)
    return table


def _rate(successes: int, n: int) -> str:
    low, high = wilson_interval(successes, n)
    return f"{successes / n:.1%} ({low:.1%} - {high:.1%})"


if __name__ == "__main__":
    sys.exit(main())
