"""Compare vLLM's and SGLang's own parsers with fctune's readings, on seeded outputs of every call format.

    python -m benchmarks.parsers --python PYTHON [--formats hermes qwen3_coder] [--count 5000]
                                 [--show 5] [--results benchmarks/results/parsers.json]
                                 [--page docs/reference/parsers.md]

PYTHON has vLLM or SGLang (``FCTUNE_VLLM_PYTHON`` and ``FCTUNE_SGLANG_PYTHON`` name one for each). vLLM reads gpt_oss
from token ids, for which openai_harmony downloads a vocabulary, or takes o200k_base.tiktoken from the directory in
``TIKTOKEN_ENCODINGS_BASE``. The outputs are made by ``tests/calls/server_outputs.py``. Prints every difference that no
known reason explains, and fails if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError
from fctune.calls.formats.base import SERVERS, CallFormat, Server
from fctune.calls.formats.registry import FORMATS
from fctune.tasks.evaluation.serving import run_server_parser
from tests.calls.server_outputs import (
    GUESSES,
    REASONS,
    Output,
    Read,
    explain_difference,
    is_same,
    make_outputs,
    read_reply,
    to_requests,
)

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Comparison:
    """Comparison of one server's parser with both readings of one format."""

    call_format: str
    server: Server
    parser: str
    version: str
    num_outputs: int = 0
    num_same: int = 0
    num_same_strict: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    unexplained: list[tuple[Output, Read]] = field(default_factory=list)


def compare(call_format: CallFormat, server: Server, python: str, count: int, seed: int = 0) -> Comparison:
    """Compare both readings of a format with those of a server's parser."""
    parser = call_format.get_server_parser(server)
    assert parser is not None
    outputs = make_outputs(call_format, count, seed)
    with tempfile.TemporaryDirectory() as folder:
        model_dir = _make_tokenizer(Path(folder), call_format.vllm_tokens)
        version, replies = run_server_parser(server, parser, model_dir, to_requests(outputs), python)
    found = Comparison(call_format.name, server, parser, version, len(outputs))
    for index, output in enumerate(outputs):
        strict, lenient = call_format.parse_both(output.text, output.tools)
        theirs = read_reply(replies[index])
        found.num_same_strict += is_same(strict, theirs)
        if is_same(lenient, theirs):
            found.num_same += 1
        elif reasons := explain_difference(output, lenient, theirs, server):
            found.reasons.update(reasons)
        else:
            found.unexplained.append((output, theirs))
    return found


def _make_tokenizer(folder: Path, tokens: tuple[str, ...]) -> Path:
    """Write the tiny model's tokenizer, with more special tokens, and return the folder."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "fctune" / "assets" / "tiny_base")
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    tokenizer.save_pretrained(folder)
    return folder


def save_results(path: Path, one: Comparison) -> list[dict[str, Any]]:
    """Put a comparison in place of an earlier one of the same format and server, and return all of the file."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    row = {
        "format": one.call_format,
        "server": one.server,
        "parser": one.parser,
        "version": one.version,
        "outputs": one.num_outputs,
        "same": one.num_same,
        "same_strict": one.num_same_strict,
        "reasons": dict(sorted(one.reasons.items())),
        "unexplained": len(one.unexplained),
    }
    rows = [old for old in rows if (old["format"], old["server"]) != (one.call_format, one.server)] + [row]
    rows.sort(key=lambda row: (row["format"], row["server"]))
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return rows


def render_page(rows: list[dict[str, Any]]) -> str:
    """Return the page of the documentation."""
    versions = sorted({row["version"] for row in rows})
    used = {reason for row in rows for reason in row["reasons"]}
    lines = [
        "# The servers' parsers",
        "",
        "<!-- numbers of this page: benchmarks/results/parsers.json -->",
        "",
        "A server's parser turns a model's output into the calls that a client receives. This page compares each call",
        f"format's lenient reading with the corresponding parser of {' and '.join(versions)}, on seeded outputs:",
        "single and parallel calls, prose, nested values, unicode, markup, no arguments, wrong types, unknown",
        "arguments and tools, truncated and damaged text. `python -m benchmarks.parsers` writes it; do not edit it.",
        "",
        "*Same* is the share of outputs for which the lenient reading has exactly the server's calls and types,",
        "*strict* that of the strict reading. Every other output has one or more of the reasons below. Truncated or",
        "damaged text has no right reading: the last column counts how the two differ if no reason explains it.",
        "",
        "| format | server | parser | outputs | same | strict | differences by reason | in truncated or damaged text |",
        "|---|---|---|---:|---:|---:|---|---|",
    ]
    for row in rows:
        reasons = [f"{name} {number}" for name, number in row["reasons"].items() if name in REASONS]
        reasons += [f"**unexplained {row['unexplained']}**"] * bool(row["unexplained"])
        guesses = [f"{name} {number}" for name, number in row["reasons"].items() if name in GUESSES]
        shares = " | ".join(f"{row[key] / row['outputs']:.1%}" for key in ("same", "same_strict"))
        lines.append(
            f"| {row['format']} | {row['server']} | `{row['parser']}` | {row['outputs']:,} | {shares} "
            f"| {', '.join(reasons)} | {', '.join(guesses)} |"
        )
    for title, meanings in (("reason", REASONS), ("in truncated or damaged text", GUESSES)):
        lines += ["", f"| {title} | meaning |", "|---|---|"]
        lines += [f"| {name} | {meaning} |" for name, meaning in meanings.items() if name in used]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Compare, print and write; returns 1 if a difference has no explanation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the servers")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS), metavar="FORMAT")
    parser.add_argument("--servers", nargs="+", default=list(SERVERS), choices=list(SERVERS))
    parser.add_argument("--count", type=int, default=5000, help="outputs of each format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=5, help="unexplained differences to print for each parser")
    parser.add_argument("--results", type=Path, help="file of results, whose rows of the same formats are replaced")
    parser.add_argument("--page", type=Path, help="page to write from the file of results")
    arguments = parser.parse_args()
    if arguments.page and not arguments.results:
        parser.error("--page is written from --results: name that file too.")
    comparisons = []
    for name in arguments.formats:
        for server in arguments.servers:
            if FORMATS[name].get_server_parser(server) is None:
                continue
            python = os.environ.get(f"FCTUNE_{server.upper()}_PYTHON") or arguments.python
            try:
                one = compare(FORMATS[name], server, python, arguments.count, arguments.seed)
            except ConfigError as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
            comparisons.append(one)
            if arguments.results:
                rows = save_results(arguments.results, one)
                if arguments.page:
                    arguments.page.write_text(render_page(rows), encoding="utf-8")
            reasons = ", ".join(f"{reason} {number}" for reason, number in one.reasons.most_common())
            print(
                f"{name:14}{server:8}{one.parser:16}same {one.num_same:5}  strict {one.num_same_strict:5}  "
                f"unexplained {len(one.unexplained):4}  {reasons}",
                flush=True,
            )
            for output, theirs in one.unexplained[: arguments.show]:
                ours = FORMATS[name].parse(output.text, output.tools, lenient=True)
                print(f"  {output.kind}: {json.dumps(output.text, ensure_ascii=False)[:600]}")
                print(f"    ours   {[(call.name, call.arguments) for call in ours.calls]} {ours.malformed}")
                print(f"    theirs {theirs}")
    return 1 if any(one.unexplained for one in comparisons) else 0


if __name__ == "__main__":
    sys.exit(main())
