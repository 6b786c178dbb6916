"""Time and memory of reading logs that repeat themselves, folded, as the commands and the preparation read them.

    python benchmarks/logs.py [--bytes 1000000000] [--case NAME ...] [--folder DIR] [--out benchmarks/results/logs.json]

Each case is written to ``--folder`` (a temporary one) and read by a process of its own, whose peak memory is reported.
Agents' runs have 20 model calls, each logged with all messages before it: spans of OTLP, requests and responses of
Anthropic's API, sessions of Claude Code as a file each and as one file, and a single line of twice the bytes. The last
case has three secrets in each run, and is read, redacted and written as ``fctune data convert --redact`` does; nothing
that was planted may be in the rows.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

NUM_CALLS = 20
FILE_BYTES = 200_000  # of a session, where each has a file
WORDS = [f"word{i}" for i in range(5000)]
PLANTED = "Qq7Zx"  # a part of every secret
REDACTED = "data convert --redact"
TOOL = {"name": "search", "description": "Search the web", "parameters": {"type": "object", "properties": {}}}


def say(rng: random.Random, num_words: int) -> str:
    """Return a text of ``num_words`` random words."""
    return " ".join(rng.choices(WORDS, k=num_words))


def iter_spans(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the spans of a run."""
    messages: list[dict[str, Any]] = []
    for _ in range(NUM_CALLS):
        messages.append({"role": "user", "parts": [{"type": "text", "content": say(rng, 60)}]})
        answer = {"role": "assistant", "parts": [{"type": "text", "content": say(rng, 40)}]}
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.tool.definitions": json.dumps([{"type": "function", **TOOL}]),
            "gen_ai.input.messages": json.dumps(messages),
            "gen_ai.output.messages": json.dumps([answer]),
        }
        pairs = [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()]
        yield {"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "chat", "attributes": pairs}]}]}]}
        messages.append(answer)


def iter_exchanges(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the requests and responses of a run, in which every answer is a call."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": say(rng, 60)}]
    tools = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}]
    for i in range(NUM_CALLS):
        call = {"type": "tool_use", "id": f"call_{i}", "name": "search", "input": {"query": say(rng, 20)}}
        request = {"model": "m", "max_tokens": 1024, "tools": tools, "messages": messages}
        response = {"type": "message", "role": "assistant", "content": [call], "stop_reason": "tool_use"}
        yield {"request": request, "response": response}
        result = {"type": "tool_result", "tool_use_id": f"call_{i}", "content": say(rng, 60)}
        messages = [*messages, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


def iter_secrets(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the exchanges of a run with a token in its first message, and a password and a key in its first call."""
    token, password, key = (PLANTED + f"{rng.getrandbits(bits):x}" for bits in (160, 60, 160))
    for i, exchange in enumerate(iter_exchanges(rng)):
        messages = exchange["request"]["messages"]  # which later exchanges share
        if i == 0:
            messages[0]["content"] += f"\nAuthorization: Bearer {token}"
            exchange["response"]["content"][0]["input"]["password"] = password
        elif i == 1:
            result = messages[2]["content"][0]
            result["content"] = json.dumps({"token": key, "text": result["content"]})
        yield exchange


def iter_events(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the events of a session of Claude Code."""
    session, parent = f"{rng.getrandbits(64):x}", None
    for i in range(NUM_CALLS):
        texts = [("user", say(rng, 60)), ("assistant", [{"type": "text", "text": say(rng, 40)}])]
        for role, content in texts:
            uuid = f"{session}-{i}-{role}"
            message = {"role": role, "content": content}
            yield {"type": role, "uuid": uuid, "parentUuid": parent, "sessionId": session, "message": message}
            parent = uuid


def write_file(path: Path, num_bytes: int, make: Callable[[random.Random], Iterator[dict[str, Any]]]) -> int:
    """Write records to a file until it has enough bytes; returns their number."""
    rng, written, records = random.Random(str(path)), 0, 0
    with path.open("w", encoding="utf-8") as file:
        while written < num_bytes:
            for record in make(rng):
                written += file.write(json.dumps(record) + "\n")
                records += 1
    return records


def write_sessions(path: Path, num_bytes: int) -> int:
    """Write a directory of sessions with a file each; returns the number of events."""
    path.mkdir()
    sizes = range(0, num_bytes, FILE_BYTES)
    return sum(write_file(path / f"{i:06}.jsonl", FILE_BYTES, iter_events) for i, _ in enumerate(sizes))


def write_line(path: Path, num_bytes: int) -> int:
    """Write a row, a line of twice the bytes, and a row; returns the number of lines."""
    row = json.dumps({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]})
    chunk = "x" * 2**20
    with path.open("w", encoding="utf-8") as file:
        file.write(row + '\n{"messages": "')
        for _ in range(2 * num_bytes // len(chunk)):
            file.write(chunk)
        file.write('"}\n' + row + "\n")
    return 3


CASES: dict[str, Callable[[Path, int], int]] = {
    "OTLP spans": lambda path, num_bytes: write_file(path, num_bytes, iter_spans),
    "Anthropic requests and responses": lambda path, num_bytes: write_file(path, num_bytes, iter_exchanges),
    "Claude Code, a file a session": write_sessions,
    "Claude Code, one file": lambda path, num_bytes: write_file(path, num_bytes, iter_events),
    "a line of twice the bytes": write_line,
    REDACTED: lambda path, num_bytes: write_file(path, num_bytes, iter_secrets),
}


def read(path: str) -> None:
    """Read a source and print what was found, with the peak memory of this process."""
    from fctune.data.sources import Defect, RowReader, scan_source

    start, cpu, reader = time.perf_counter(), time.process_time(), RowReader()
    kept = defects = 0
    left_out = 0
    for row in scan_source(path):
        left_out += sum((row.left_out or {}).values())
        is_defect = isinstance(reader.read(row), Defect)
        kept, defects = kept + (not is_defect), defects + is_defect
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    seconds = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    print(json.dumps({"kept": kept, "defects": defects, "left_out": left_out, **seconds, "peak_memory_gib": peak}))


def redact(path: str) -> None:
    """Convert a source with placeholders, and print what ``read`` prints and what became of the secrets."""
    from fctune.config.sections.data import RedactConfig
    from fctune.data.conversion import convert_source

    start, cpu, out = time.perf_counter(), time.process_time(), Path(path).with_suffix(".redacted.jsonl")
    report = convert_source(path, out, redact=RedactConfig())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    seconds = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    counts = {"kept": report.converted, "defects": report.num_skipped, "left_out": report.left_out.total()}
    with out.open(encoding="utf-8") as file:
        found = {"secrets": report.secrets.kinds, "planted_left": sum(line.count(PLANTED) for line in file)}
    out.unlink()
    print(json.dumps({**counts, **found, **seconds, "peak_memory_gib": peak}))


def measure(name: str, num_bytes: int, folder: Path) -> dict[str, Any]:
    """Write a case, read it in another process, and remove it."""
    path = folder / "rows" if name.endswith("session") else folder / "rows.jsonl"
    records = CASES[name](path, num_bytes)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files)
    command = [sys.executable, __file__, "--redact" if name == REDACTED else "--read", str(path)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    for file in files:
        file.unlink()
    if path.is_dir():
        path.rmdir()
    rates = {
        f"{what}_per_cpu_s": number / found["cpu_seconds"] for what, number in (("records", records), ("bytes", size))
    }
    return {"case": name, "bytes": size, "files": len(files), "records": records, **found, **rates}


def main() -> None:
    """Measure all cases and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=1_000_000_000, help="bytes of each case; default: %(default)s")
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), help="cases to measure; default: all")
    parser.add_argument("--folder", type=Path, help="where to write the rows; default: a temporary folder")
    parser.add_argument("--out", type=Path, help="file for the result, which keeps other cases")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    parser.add_argument("--redact", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read or arguments.redact:
        read(arguments.read) if arguments.read else redact(arguments.redact)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rows = []
        for name in arguments.case:
            rows.append(measure(name, arguments.bytes, Path(folder)))
            print(rows[-1], flush=True)
    out = arguments.out
    if out is not None and out.exists():
        earlier = json.loads(out.read_text(encoding="utf-8"))["rows"]
        rows = [row for row in earlier if row["case"] not in arguments.case] + rows
    result = {
        "date": str(date.today()),
        "python": platform.python_version(),
        "command": " ".join(sys.argv),
        "rows": rows,
    }
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
