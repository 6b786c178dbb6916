"""How vLLM's and SGLang's own parsers read seeded outputs of every call format, compared with this project.

    python -m benchmarks.parsers --python PYTHON [--formats hermes qwen3_coder] [--count 5000]
                                 [--show 5] [--out docs/parsers.md]

PYTHON has vLLM or SGLang (``FCTUNE_VLLM_PYTHON`` and ``FCTUNE_SGLANG_PYTHON`` name one for each). The outputs are made
by ``tests/calls/server_outputs.py``. Prints every difference that no known reason explains, and fails if there is one.
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

from fctune.calls.formats.base import SERVERS, CallFormat, Server
from fctune.calls.formats.registry import FORMATS
from fctune.errors import ConfigError
from fctune.evaluation.serving import run_server_parser
from tests.calls.server_outputs import (
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
# Tokens that a parser looks up in the tokenizer and refuses to work without.
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_TOKENS: dict[str, tuple[str, ...]] = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "lfm": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral_v3": ("[TOOL_CALLS]",),
    "mistral_v7": ("[TOOL_CALLS]",),
    "mistral_v11": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "mistral_v13": ("[TOOL_CALLS]", "[ARGS]"),
}


@dataclass
class Comparison:
    """How one server's parser reads the outputs of one format."""

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
        model_dir = _make_tokenizer(Path(folder), _TOKENS.get(call_format.name, ()))
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


def write_page(comparisons: list[Comparison]) -> str:
    """Return the page of the documentation."""
    versions = sorted({comparison.version for comparison in comparisons})
    lines = [
        "# Call formats and the servers' parsers",
        "",
        "Made by `python -m benchmarks.parsers --out docs/parsers.md`: do not edit.",
        "",
        "Seeded outputs of each format (single and parallel calls, prose, nested values, unicode, markup, missing and "
        "wrong",
        "arguments, unknown tools, cut and damaged text) were read by this project and by the parser that the format "
        f"names, of {' and '.join(versions)}.",
        "*Same* counts outputs in which the lenient reading has exactly the server's calls, *strict* those in which "
        "the strict one has.",
        "",
        "| format | server | parser | outputs | same | strict | differences by reason |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    for one in sorted(comparisons, key=lambda one: (one.call_format, one.server)):
        reasons = ", ".join(f"{name} {number}" for name, number in sorted(one.reasons.items()))
        reasons += f"{', ' if reasons else ''}**unexplained {len(one.unexplained)}**" if one.unexplained else ""
        lines.append(
            f"| {one.call_format} | {one.server} | `{one.parser}` | {one.num_outputs:,} "
            f"| {one.num_same / one.num_outputs:.1%} | {one.num_same_strict / one.num_outputs:.1%} | {reasons} |"
        )
    used = Counter(name for one in comparisons for name in one.reasons)
    lines += ["", "| reason | meaning |", "|---|---|"]
    lines += [f"| {name} | {meaning} |" for name, meaning in REASONS.items() if used[name]]
    unread = [name for name, one in FORMATS.items() if not (one.vllm_parser or one.sglang_parser)]
    lines += ["", f"No parser of either server reads {', '.join(f'`{name}`' for name in unread)}."]
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
    parser.add_argument("--out", type=Path, help="page to write")
    arguments = parser.parse_args()
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
    if arguments.out:
        arguments.out.write_text(write_page(comparisons), encoding="utf-8")
    return 1 if any(one.unexplained for one in comparisons) else 0


if __name__ == "__main__":
    sys.exit(main())
