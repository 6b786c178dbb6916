"""The table of the shapes of rows: what each reader was tested with, and what it found.

    python -m tests.shape_table benchmarks/results/row_shapes.md

Every fixture is written to a file and read as the commands read it; nothing in the table is an expectation.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fctune.data.conversation import Tool
from fctune.data.pairs import Pair, PairReader
from fctune.data.sources import Defect, LeftOut, ParsedRow, RowReader, UnreadRow, scan_source
from tests import api_rows, pair_rows, trace_rows

# What the fixtures are written to, and the package whose types accept them; tests/data/test_published_schemas.py.
SOURCES = {
    "anthropic": ("Messages API reference", "anthropic 2.13"),
    "atif": ("Harbor's RFC 0001, ATIF 1.4 to 1.8", "harbor 0.25 (Python 3.12)"),
    "claude_code": ("sessions of Claude Code 2.1", "messages: anthropic 2.13"),
    "codex": ("rollouts of Codex", "items: openai 3.57"),
    "gemini": ("generateContent reference", "google-genai 3.6"),
    "langchain": ("langchain_core.messages", "langchain-core 1.8"),
    "log": ("Langfuse's, LangSmith's and LiteLLM's export pages", "langfuse, langsmith 0.15, litellm 1.110"),
    "openai": ("ms-swift's roles (`tool_call`, `tool_response`)", "none published"),
    "otel": ("semantic-conventions-genai 0.1.0", "opentelemetry-proto and -semantic-conventions"),
    "prompt_completion": ("TRL's dataset formats", "none published"),
    "responses": ("Responses API reference; NeMo Gym's data sets", "openai 3.57"),
    "swe_trajectory": ("SWE-smith's `collect_trajs.py`; nebius' columns", "trajectory: openai 3.57"),
}


PAIRS = {"pairs": ("OpenAI's, When2Call's and ms-swift's preference rows", "none published")}  # data.pairs


def _read_pairs() -> tuple[Counter[str], int]:
    """Return the kinds of the defects of broken pairs, and the number of pairs in the other shapes."""
    reader = PairReader()
    whole = [reader.read(UnreadRow("rows", 1, row)) for row in pair_rows.OTHER_SHAPES.values()]
    changed = (pair_rows.OTHER_SHAPES[shape] | change for shape, change, *_ in pair_rows.BAD_SHAPES)
    broken = [reader.read(UnreadRow("rows", 1, row)) for row in changed]
    kinds = Counter(row.kind for row in broken if isinstance(row, Defect))
    return kinds, sum(isinstance(row, Pair) for row in whole)


def _iter_fixtures() -> Iterable[tuple[str, str, list[Any]]]:
    """Yield the format, the kind of fixture, and the rows of each."""
    for shape, row in api_rows.SHAPES.items():
        yield shape.partition(":")[0], "shape", [row]
    yield from (("openai", "shape", [row]) for row in api_rows.SWIFT_SHAPES.values())
    yield from (("openai", "broken", [row]) for row in api_rows.iter_swift_defects())
    for rows, name in trace_rows.SHAPES.values():
        yield name, "shape", rows
    for shape, path, value, *_ in api_rows.DEFECTS:
        yield shape.partition(":")[0], "broken", [api_rows.change(shape, path, value)]
    for rows, _, pointer in trace_rows.DEFECTS.values():
        root = pointer.partition(".")[0].partition("[")[0]
        yield _FORMATS_BY_POINTER[root], "broken", rows


# The format of a broken trace, by the first key of its defect's place.
_FORMATS_BY_POINTER = {
    **dict.fromkeys(("attributes", "status", "document", "resourceSpans"), "otel"),
    "steps": "atif",
    **dict.fromkeys(("events", "parentUuid"), "claude_code"),
    "items": "codex",
    **dict.fromkeys(("trajectory", "messages"), "swe_trajectory"),
}


def make_table() -> str:
    """Return the table in Markdown."""
    shapes: Counter[str] = Counter()
    num_rows: Counter[str] = Counter()
    found: dict[str, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        for name, kind, rows in _iter_fixtures():
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            needs_tools = name in ("claude_code", "codex", "swe_trajectory") and kind == "shape"
            reader = RowReader(tools=(Tool(trace_rows.FUNCTION),) if needs_tools else ())
            for row in map(reader.read, scan_source(str(path))):
                if kind == "shape":
                    assert isinstance(row, ParsedRow), row
                    assert row.row_format == name
                    num_rows[name] += 1
                elif isinstance(row, Defect | LeftOut):
                    found[name][row.kind] += 1
            shapes[name] += kind == "shape"
    lines = [
        "# Shapes of rows",
        "",
        "Written by `python -m tests.shape_table benchmarks/results/row_shapes.md`; a test compares it. Fixtures are",
        "written by hand to what the second column names and validated with the third. Broken rows are one change of a",
        "shape each; their kinds are what `fctune data check` reports.",
        "",
        "| row format | fixtures written to | validated with | shapes | rows read | broken rows by kind |",
        "|---|---|---|---|---|---|",
    ]
    found["pairs"], num_rows["pairs"] = _read_pairs()
    shapes["pairs"] = len(pair_rows.OTHER_SHAPES)
    for name, (source, types) in {**SOURCES, **PAIRS}.items():
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found[name].items())) or "none"
        lines.append(f"| `{name}` | {source} | {types} | {shapes[name]} | {num_rows[name]} | {kinds} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(make_table(), encoding="utf-8")
