"""Check which architectures train exactly as with transformers and PEFT, and write the page of supported models.

    python -m benchmarks.models [--only TYPE ...] [--checks NAME ...] [--jobs 2] [--resume] [--out FILE]
    python -m benchmarks.models --page

For each architecture, a tiny random model with the real family's choices is saved by transformers and taken through
fctune: see ``benchmarks.model_checks``. Each row of the result is written as soon as it is known; each outcome has a
digest of the code that measured it. ``--jobs`` checks several architectures at a time; ``--resume`` skips the rows of
the present code, to continue a run that was cut off; with ``--only``, the other rows are kept, with ``--checks`` the
other outcomes. ``--page`` writes docs/reference/supported-models.md from the result, and runs nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.model_checks import CHECKS, LOSS_TOLERANCE, check_alone, train_on_ranks
from benchmarks.model_runs import prepare_sets
from benchmarks.model_zoo import (
    CALL_FORMATS,
    ENTRIES,
    HEADLINES,
    NO_CALL_FORMAT,
    ROOT,
    SERVED,
    TEMPLATES,
    Entry,
)
from fctune.models.transformers.refused_types import list_refusals
from tests.ranks import run_ranks

RESULT = ROOT / "benchmarks" / "results" / "models.json"
GPU_RESULT = ROOT / "benchmarks" / "results" / "gpu.json"
PAGE = ROOT / "docs" / "reference" / "supported-models.md"
LIMIT_S = 1800  # of one check of an architecture; minutes are usual where other work runs

_COLUMNS = {
    "pack": "packed",
    "lora": "LoRA",
    "full": "all weights",
    "ranks": "2 ranks",
    "resume": "resumes",
    "export": "export",
    "plan": "parameters",
}


def prove(entry: Entry, folder: Path, sets: Path, checks: Sequence[str] = tuple(CHECKS)) -> dict[str, Any]:
    """Run checks of an entry in processes of their own; returns its row of the result.

    The comparison of two ranks with one follows the training with adapters and that of all weights.
    """
    started = time.perf_counter()
    folder.mkdir()
    row: dict[str, Any] = {"model_type": entry.model_type, "models": entry.models}
    try:
        (found,) = run_ranks(check_alone, 1, entry, folder, sets, tuple(checks), timeout_s=LIMIT_S)
    except RuntimeError as error:
        return row | {"outcomes": {"build": _fail(error)}}
    losses = found.pop("losses", {})
    if losses.keys() == {"lora", "full"}:
        found["outcomes"]["ranks"] = _compare_ranks(entry, losses, found["is_packed"], folder, sets)
    return {**row, **found, "seconds": round(time.perf_counter() - started, 1)}


def _compare_ranks(
    entry: Entry, losses: dict[str, list[float]], is_packed: bool, folder: Path, sets: Path
) -> dict[str, Any]:
    """Compare the losses on two ranks with those on one."""
    started = time.perf_counter()
    try:
        on_ranks = run_ranks(train_on_ranks, 2, entry, folder, sets, is_packed, timeout_s=LIMIT_S)[0]
    except RuntimeError as error:
        return _fail(error)
    pairs = [pair for name in on_ranks for pair in zip(on_ranks[name], losses[name], strict=False)]
    worst = max(abs(a - b) for a, b in pairs)
    is_equal = worst <= LOSS_TOLERANCE
    note = f"{worst:.0e}" if is_equal else f"losses differ by {worst:.1e}"
    return {"passed": is_equal, "note": note, "seconds": time.perf_counter() - started}


def _fail(error: Exception) -> dict[str, Any]:
    return {"passed": False, "note": str(error).strip().rpartition("\n")[2][:300], "seconds": 0.0}


def has_passed(row: dict[str, Any]) -> bool:
    """Return whether all checks of a row of the result passed; compiling may not have been tried yet."""
    outcomes = row.get("outcomes", {})
    needed = {"build", "ranks", *CHECKS} - {"compile"}
    return outcomes.keys() >= needed and all(outcome["passed"] for outcome in outcomes.values())


def describe(row: dict[str, Any]) -> str:
    """Return one line on a row for the terminal."""
    if "refused" in row:
        return f"{row['model_type']:18} refused: {row['refused']}"
    outcomes = row["outcomes"].items()
    failed = "; ".join(f"{name}: {outcome['note']}" for name, outcome in outcomes if not outcome["passed"])
    passed = ", ".join(f"{name} {outcome['note']}" for name, outcome in outcomes if outcome["passed"])
    return f"{row['model_type']:18} {f'FAILED {failed}' if failed else 'passed'} [{passed}] {row.get('seconds')} s"


def format_page(result: dict[str, Any]) -> str:
    """Return docs/reference/supported-models.md of a result."""
    rows = result["rows"]
    proven = sorted((row for row in rows if has_passed(row)), key=lambda row: row["model_type"] not in HEADLINES)
    refused = [row for row in rows if "refused" in row]
    failed = [row for row in rows if row not in proven and row not in refused]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    lines = [
        f"""# Supported models

<!-- numbers of this page: benchmarks/results/models.json, benchmarks/results/gpu.json -->

Written by `python -m benchmarks.models` ({result["date"]}; {versions}; CPU, float32).{_describe_code(result)}

No row says more than what was run. None of the real models was trained for it, except where the last column says so.

For every row, a tiny random model with the choices of the real family (its layers, windows, soft caps, sinks, scales,
kinds of RoPE, tied weights, experts, latent attention) trained as with transformers and PEFT;
[the next table](#parity) has the numbers. The models that people tune most come first.

- **compiled**: a random model of small layers, but with all layers of the family's default config in their order,
  trained with compiled blocks, half of them checkpointed; the graphs of two layouts of conversations, validation and
  the frozen base, which do not grow when all of them are repeated; the loss is the uncompiled one.
- **call format**: the format of the family's calls that evaluation reads; without one, use another template
  (`model.chat_template`), unless the tokenizer declares a `response_template`, by which calls are read then.
- **template**: the family's own chat templates on which tests train, token by token; "not run" if no installed package
  has one.
- **served**: a model of the architecture answered in a real server as it does in process.
- **on a GPU**: what ran on an H100.

| models | `model_type` | kind | compiled | call format | template | served | on a GPU |
|---|---|---|---|---|---|---|---|"""
    ]
    on_gpu = find_gpu_runs()
    for row in proven:
        cells = (row["models"], f"`{row['model_type']}`", row["kind"], *_list_runs(row, on_gpu))
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(
        f"""
## Parity

transformers saves a tiny random model, and fctune loads it. The numbers are the largest differences measured.

- **packed**: logits of packed rows, compared with transformers' logits of each conversation alone, relative to the
  largest logit.
- **LoRA**, **all weights**: losses of 5 steps, compared with transformers and PEFT, and with transformers alone (limit
  {LOSS_TOLERANCE:g}). LoRA adapts every linear and every expert, except `out_proj` in Falcon-H1, which PEFT refuses,
  `dt_proj` in Jamba, the linear before the output head of ModernBERT decoders, and the experts of Llama 4, whose code
  does not use transformers' experts interface.
- **2 ranks**: losses of 3 steps, compared with those of one rank: adapters with DDP, all weights with FSDP.
- **resumes**: a sharded and an elastic checkpoint are resumed; losses and weights are compared bit by bit.
- **export**: logits that transformers and PEFT compute from the exports, which have the same tensors as the base.
- **parameters**: those of the family's default model; the planner's number equals transformers'.

Each run checks at its start that packed conversations do not see each other.

| `model_type` | {" | ".join(_COLUMNS.values())} |
|---|{"---|" * len(_COLUMNS)}"""
    )
    for row in proven:
        notes = " | ".join(row["outcomes"][name]["note"] for name in _COLUMNS)
        lines.append(f"| `{row['model_type']}` | {notes} |")
    if refused:
        lines.append(f"\n## Refused\n\nThese are refused before weights are read.\n\n{_TWO_COLUMNS}")
        lines += [f"| {row['models']} | `{row['model_type']}` | {row['refused']} |" for row in refused]
    lines.append(
        "\n## Refused by name\n\nThe other causal language models of transformers, most of which were published before "
        "chat templates.\n\n| `model_type` | reason |\n|---|---|"
    )
    lines += [
        f"| {', '.join(f'`{name}`' for name in sorted(names))} | {reason} |"
        for reason, names in list_refusals().items()
    ]
    if failed:
        lines.append(f"\n## Known to fail\n\n{_TWO_COLUMNS}")
        for row in failed:
            outcomes = row["outcomes"].items()
            notes = "; ".join(f"{name}: {outcome['note']}" for name, outcome in outcomes if not outcome["passed"])
            lines.append(f"| {row['models']} | `{row['model_type']}` | {notes} |")
    return "\n".join(lines) + "\n"


def find_gpu_runs() -> dict[str, str]:
    """Return what ran on a GPU by model type, by the results of the GPU benchmarks and of the tests run among them."""
    measured = json.loads(GPU_RESULT.read_text(encoding="utf-8"))
    test = "test_packed_rows_give_the_loss_and_gradients_of_float64"
    compared = re.findall(rf"{test}\[cuda-(\w+?)-", str(measured["tests"]))
    runs = dict.fromkeys(compared, "packed loss and gradients of a tiny model")
    rates = {name: f"{measured[name]['tokens_per_s']:,.0f}" for name in ("lora_8b_shipped", "full_8b")}
    return runs | {"llama": f"8B, random weights: LoRA {rates['lora_8b_shipped']} tokens/s, full {rates['full_8b']}"}


def _list_runs(row: dict[str, Any], on_gpu: Mapping[str, str]) -> list[str]:
    """Return the cells of a row after its kind."""
    name = row["model_type"]
    formats = ", ".join(f"`{found}`" for found in CALL_FORMATS.get(name, ())) or NO_CALL_FORMAT[name]
    templates = f"[{len(found)} run](chat-templates.md)" if (found := TEMPLATES.get(name)) else "not run"
    served = "vLLM" if name in SERVED else "not run"
    compiled = row["outcomes"].get("compile", {}).get("note", "not run")
    return [compiled, formats, templates, served, on_gpu.get(name, "not run")]


def _describe_code(result: dict[str, Any]) -> str:
    """Return a sentence on rows that were measured with earlier code than the last ones; empty if there are none."""
    rows = result["rows"]
    codes = [{part.get("code") for part in row.get("outcomes", {}).values()} or {row.get("code")} for row in rows]
    same = codes.count({result["code"]})
    return (
        ""
        if same == len(rows)
        else f"\n{same} of the {len(rows)} rows were measured with the latest code, the others with earlier code."
    )


_TWO_COLUMNS = "| models | `model_type` | reason |\n|---|---|---|"


def write_page() -> None:
    """Write the page of the result."""
    PAGE.write_text(format_page(json.loads(RESULT.read_text(encoding="utf-8"))), encoding="utf-8")


def digest_code() -> str:
    """Return a digest of the library, the checks and the versions of the packages compared with."""
    files = [*ROOT.glob("fctune/**/*.py"), *(ROOT / "benchmarks").glob("model*.py")]
    digest = hashlib.blake2b(repr(_versions()).encode(), digest_size=6)
    for file in sorted(files):
        digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers", "peft")}


def choose_entries(
    only: Sequence[str], checks: Sequence[str], rows: Mapping[str, dict[str, Any]], code: str | None
) -> list[Entry]:
    """Return the entries of these model types, without those of which this code made the checks, if one is given."""

    def is_current(row: dict[str, Any]) -> bool:
        outcomes = row.get("outcomes", {})
        made = [row.get("code")] if "refused" in row else [outcomes.get(name, {}).get("code") for name in checks]
        return set(made) == {code}

    chosen = [entry for entry in ENTRIES if entry.model_type in only]
    return [entry for entry in chosen if code is None or not is_current(rows.get(entry.model_type, {}))]


def merge(row: dict[str, Any], known: dict[str, Any], code: str) -> dict[str, Any]:
    """Return a row with the outcomes that are known but were not measured again; new ones are marked by the code."""
    outcomes = {name: outcome | {"code": code} for name, outcome in row.get("outcomes", {}).items()}
    if "refused" in row or not outcomes:
        return row | {"code": code}
    return {**known, **row, "outcomes": known.get("outcomes", {}) | outcomes}


def run(
    only: Sequence[str],
    out: Path,
    num_jobs: int = 1,
    checks: Sequence[str] = tuple(CHECKS),
    *,
    is_resumed: bool = False,
) -> None:
    """Prove the entries of these model types, and write each row of the result as soon as it is known.

    Args:
        only: Model types to prove.
        checks: Names of the checks to run.
        out: File of the result, whose other rows are kept.
        num_jobs: Entries to prove at a time, each in processes of its own.
        is_resumed: Skip rows that were made by the present code.
    """
    rows: dict[str, dict[str, Any]] = {}
    if out.is_file():
        rows = {row["model_type"]: row for row in json.loads(out.read_text(encoding="utf-8"))["rows"]}
    code = digest_code()  # before the checks, during which files may change
    entries = choose_entries(only, checks, rows, code if is_resumed else None)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(num_jobs) as pool:
        prepare_sets(Path(folder))
        running = {
            pool.submit(prove, entry, Path(folder) / entry.model_type, Path(folder), checks): entry.model_type
            for entry in entries
        }
        try:
            for done in as_completed(running):
                row = rows[running[done]] = merge(done.result(), rows.get(running[done], {}), code)
                print(describe(row), flush=True)
                result = {
                    "command": "python -m benchmarks.models",
                    "date": time.strftime("%Y-%m-%d"),
                    "code": code,
                    "versions": _versions(),
                    "rows": [rows[known.model_type] for known in ENTRIES if known.model_type in rows],
                }
                # A reader, or a run that is cut off, never sees half of it.
                partial = out.with_name(f"{out.name}.partial")
                partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
                partial.replace(out)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C, prove no others


def main() -> None:
    """Run the checks, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="model types to check; default: all")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=tuple(CHECKS), help="default: all")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="architectures to check at a time")
    parser.add_argument("--resume", action="store_true", help="skip rows that were made by the present code")
    parser.add_argument("--out", type=Path, default=RESULT, help="file of the result")
    parser.add_argument("--page", action="store_true", help="write the page from the result, and run nothing")
    arguments = parser.parse_args()
    known = [entry.model_type for entry in ENTRIES]
    if unknown := set(arguments.only or ()) - set(known):
        parser.error(f"no such model type: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    if not arguments.page:
        run(
            arguments.only or known,
            arguments.out,
            max(1, arguments.jobs),
            arguments.checks,
            is_resumed=arguments.resume,
        )
    if arguments.out == RESULT:
        write_page()


if __name__ == "__main__":
    main()
