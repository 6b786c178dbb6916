"""Measure what becomes of long rows, and write docs/reference/long-rows.md.

    git clone https://github.com/sierra-research/tau-bench && git -C tau-bench checkout 59a200c
    python -m benchmarks.long_rows parity
    python -m benchmarks.long_rows lengths tau-bench MODEL_DIR
    python -m benchmarks.long_rows page

``parity`` compares losses and gradients of rows that gloo ranks share, and whose MLPs are computed in tiles, with those
of whole rows, in float64. ``lengths`` prepares the traces of an agent that tau-bench publishes (MIT; 200 dialogues of
GPT-4o with the tools of an airline), with the tokenizer and chat template of a model directory, under several settings,
and lets the loader distribute them: what is lost, padded and waited for. Waiting is the share of the computation that
ranks could do while they wait for the one with the most of it in each micro-batch; a row costs what the planner counts
for LoRA on Llama 3.1 8B. ``page`` writes the page from both results and the planner, and runs nothing.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster_pages import BEGIN, END, make_context_table
from benchmarks.model_zoo import ROOT
from fctune.base.distributed import World
from fctune.config.intervals import format_share
from fctune.config.loading import load_config
from fctune.config.schema import RunConfig
from fctune.data.loader import Batch, GlobalLoader
from fctune.data.prepared_set import PreparedSet, prepare, resolve_batch_size
from fctune.data.row_lengths import RowLengths, measure_lengths
from fctune.models.planned_model import find_architecture, shape_model
from fctune.models.sources import read_architecture
from fctune.parallel.search import fit_seq_len
from fctune.runs.metrics import FlopCounter
from fctune.training.meter import count_flops
from tests.models.dense_samples import FAMILIES
from tests.parallel.split_rows import BATCHES, LORA, measure_split
from tests.ranks import run_ranks

RESULT = ROOT / "benchmarks" / "results" / "long_rows.json"
PAGE = ROOT / "docs" / "reference" / "long-rows.md"

TRACES = "historical_trajectories/gpt-4o-airline.json"
_TOOLS = "tau_bench/envs/airline/tools"
_NUM_RANKS, _BATCH_TOKENS = 16, 262_144

# The columns of the table of parity: ranks that share a row, tiles, and adapters with dropout.
_SPLITS: dict[str, dict[str, Any]] = {
    "2 ranks": {"context": 2},
    "4 ranks": {"context": 4},
    "8 tiles": {"context": 1, "mlp_tiles": 8},
    "4 ranks, tiles, LoRA": {"context": 4, "adapter": LORA, "mlp_tiles": 8},
}
# data.seq_len, data.overlong and data.packed; of shorter rows than these, drop keeps nothing.
_SETTINGS = (
    ("4096", "cut", True),
    ("4096", "split_turns", True),
    ("8192", "drop", True),
    ("8192", "cut", True),
    ("8192", "split_turns", True),
    ("auto", "fail", True),
    ("auto", "fail", False),
)


def measure_families(world: World) -> dict[str, dict[str, float]]:
    """Return the largest differences by family and column, on each of four ranks; see ``measure_split``."""
    found = {}
    for model_type in FAMILIES:
        batches = [BATCHES[0], BATCHES[-1]]  # packed, and padded
        found[model_type] = {name: measure_split(world, model_type, batches, **how) for name, how in _SPLITS.items()}
        if world.is_main:
            print(model_type, *(f"{difference:.0e}" for difference in found[model_type].values()), flush=True)
    return found


def measure_parity() -> dict[str, dict[str, float]]:
    """Return the largest differences by family and column."""
    ranks = run_ranks(measure_families, 4, timeout_s=3600)
    return {
        model_type: {name: max(found[model_type][name] for found in ranks) for name in _SPLITS}
        for model_type in FAMILIES
    }


def read_traces(checkout: Path) -> Iterator[dict[str, Any]]:
    """Yield the traces of a checkout of tau-bench as rows with OpenAI's messages and tools."""
    tools = [_read_tool(path) for path in sorted((checkout / _TOOLS).glob("*.py")) if path.stem != "__init__"]
    for trace in json.loads((checkout / TRACES).read_text(encoding="utf-8")):
        messages = [
            {
                key: message[key]
                for key in ("role", "content", "tool_calls", "tool_call_id")
                if message.get(key) is not None
            }
            for message in trace["traj"]
        ]
        yield {"messages": messages, "tools": tools}


def _read_tool(path: Path) -> Any:
    """Return the schema that the function ``get_info`` of a file returns, without running it."""
    functions = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == "get_info"
    ]
    (returned,) = [node for node in ast.walk(functions[0]) if isinstance(node, ast.Return)]
    assert returned.value is not None
    return ast.literal_eval(returned.value)


def measure_loading(checkout: Path, model_dir: Path) -> dict[str, Any]:
    """Return the lengths of the traces, and what each setting loses, pads and waits for."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in read_traces(checkout)), encoding="utf-8")
        fixed = [f"model.path={model_dir}", f"data.sources=[{{path: {rows}}}]", f"output_dir={folder}/run"]
        fixed += [
            "data.validation_share=0",
            "validation.every=0",
            "eval.every=0",
            f"global_batch_tokens={_BATCH_TOKENS}",
            "global_batch_size=null",
        ]
        fixed += [f"data.prepared_dir={folder}/prepared", "micro_batch_size=1"]
        config = load_config(ROOT / "configs" / "llama3_1_8b_lora.yaml", [*fixed, "data.seq_len=auto"])
        lengths = measure_lengths(config, model_dir, lambda counts: None)
        settings = []
        for seq_len, overlong, is_packed in _SETTINGS:
            changes = [f"data.seq_len={seq_len}", f"data.overlong={overlong}", f"data.packed={json.dumps(is_packed)}"]
            config = load_config(ROOT / "configs" / "llama3_1_8b_lora.yaml", [*fixed, *changes])
            if seq_len == "auto":
                config, _ = fit_seq_len(config, lengths, read_architecture(model_dir), None)
            prepared = prepare(config.data, model_dir, Path(folder) / "prepared")
            config = resolve_batch_size(config, prepared.num_tokens("train"), prepared.num_packs("train"))
            settings.append(
                {"seq_len": seq_len, "overlong": overlong, "packed": is_packed} | _load(config, prepared, lengths)
            )
            print(settings[-1], flush=True)
    commit = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    tokens = np.repeat(*map(np.array, zip(*((n, number) for n, (number, _) in lengths.counts.items()), strict=True)))
    quantiles = {str(q): int(np.quantile(tokens, q, method="higher")) for q in (0, 0.1, 0.5, 0.9, 0.99, 1)}
    return {
        "commit": commit,
        "conversations": len(tokens),
        "mean_tokens": round(float(tokens.mean())),
        "quantiles": quantiles,
        "num_over_4096": int((tokens > 4096).sum()),
        "settings": settings,
    }


def _load(config: RunConfig, prepared: PreparedSet, lengths: RowLengths) -> dict[str, Any]:
    supervised = sum(total for _, total in lengths.counts.values())
    loader = GlobalLoader(prepared, "train", config.global_batch_size, seed=0)
    architecture, _, _ = find_architecture(load_config(ROOT / "configs" / "llama3_1_8b_lora.yaml", []).model.path)
    planned = replace(config, data=replace(config.data, seq_len=prepared.seq_len))
    counter = count_flops(shape_model(planned, architecture), planned)
    slots, waiting = 0, {}
    for context in (1, 8):
        num_shares, done, bound = _NUM_RANKS // context, 0.0, 0.0
        slots = 0
        for number in range(1, loader.steps_per_epoch + 1):
            step = loader.step_at(number)
            shares = [loader.micro_batches(step, share, num_shares, 1) for share in range(num_shares)]
            for batches in zip(*shares, strict=True):
                costs = [_count_cost(counter, batch) for batch in batches]
                slots += sum(batch.tokens.numel() for batch in batches if batch.num_tokens)
                done, bound = done + sum(costs), bound + max(costs) * num_shares
        waiting[str(context)] = round(1 - done / bound, 4)
    counts = prepared.counts
    return {
        "row_tokens": prepared.seq_len,
        "whole": counts.conversations - counts.cut - counts.split,
        "cut": counts.cut,
        "split": counts.split,
        "parts": counts.parts,
        "dropped": counts.overlong,
        "kept_supervised": round(counts.supervised / supervised, 4),
        "packs": prepared.num_packs("train"),
        "global_batch_size": config.global_batch_size,
        "padding": round(1 - prepared.num_tokens("train") / slots, 4),
        "waiting": waiting,
    }


def _count_cost(counter: FlopCounter, batch: Batch) -> float:
    """Return the FLOPs of a micro-batch; a row of padding alone costs as much as its tokens."""
    lengths = batch.lengths or tuple((length,) for length in batch.row_lengths)
    pairs = sum(length * (length + 1) // 2 for row in lengths for length in row)
    if not batch.num_tokens:
        return 0.0
    return counter.hardware(batch.tokens.numel(), batch.num_tokens, batch.num_supervised, pairs)


def format_page(result: dict[str, Any]) -> str:
    """Return docs/reference/long-rows.md of a result."""
    parity, loading = result["parity"], result["loading"]
    lines = [
        f"""# Long rows

Written by `python -m benchmarks.long_rows`. [Plan a run](../plan.md#long-rows) says what the settings do.

## Parity

<!-- numbers: benchmarks/results/long_rows.json -->

Tiny models with the attention of each family, in float64 on CPUs ({result["parity_date"]}): packed rows whose
conversations cross the split, and padded ones. The largest difference of the loss or of any gradient to those of whole
rows, relative to the largest gradient. LoRA has dropout. Four ranks repeat the two key heads of most families. Models
without dense MLPs have no tiles.

| `model_type` | {" | ".join(_SPLITS)} |
|---|{"---|" * len(_SPLITS)}"""
    ]
    for model_type, cells in parity.items():
        lines.append(
            f"| `{model_type}` | {' | '.join(f'{cells[name]:.0e}' if cells[name] else '-' for name in _SPLITS)} |"
        )
    lines.append(
        f"""
## Memory and time

<!-- numbers: tests/docs/test_planned_pages.py -->

Planned GiB of a GPU at the peak / seconds of a step of 16 rows on H100s, by the ranks that share a row, with FSDP and
all blocks recomputed: `1` is FSDP alone. The last column is what a run chooses that leaves it open, with the share of
the blocks that are recomputed. No GPU has run rows that ranks share yet.

{BEGIN.format("long rows")}

{make_context_table()}

{END}"""
    )
    quantiles = loading["quantiles"]
    lines.append(
        f"""
## Traces of an agent

<!-- numbers: benchmarks/results/long_rows.json -->

{loading["conversations"]} dialogues of GPT-4o with the tools of tau-bench's airline, as its repository publishes them
({loading["commit"]}), in the template of Qwen2.5: {loading["mean_tokens"]:,} tokens on average, {quantiles["0.1"]:,} to
{quantiles["0.9"]:,} from the tenth to the ninetieth percentile, {quantiles["1"]:,} at most;
{loading["num_over_4096"]} are longer than 4,096, the default row. The loader gives steps of {_BATCH_TOKENS:,} tokens to
{_NUM_RANKS} ranks:

- **kept**: supervised tokens that are trained.
- **padding**: computed positions without a token.
- **waiting**: computation that ranks could do while they wait for the one with the most of it in each micro-batch, by
  the FLOPs of LoRA on Llama 3.1 8B; with rows of their own, and with eight ranks to each row. Ranks also wait where the
  rows of a step do not divide by them.

| `data.seq_len` | `overlong` | `packed` | conversations | kept | rows | padding | waiting | waiting, `context: 8` |
|---|---|---|---|---|---|---|---|---|"""
    )
    for one in loading["settings"]:
        length = f"auto: {one['row_tokens']:,}" if one["seq_len"] == "auto" else f"{one['row_tokens']:,}"
        cells = [length, f"`{one['overlong']}`", str(one["packed"]).lower(), _describe_conversations(one)]
        cells += [format_share(one["kept_supervised"]), f"{one['packs']:,}", format_share(one["padding"])]
        cells += [format_share(one["waiting"][context]) for context in ("1", "8")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _describe_conversations(one: dict[str, Any]) -> str:
    named = {
        "complete": one["whole"],
        "cut": one["cut"],
        f"in {one['parts']:,} parts": one["split"],
        "dropped": one["dropped"],
    }
    return ", ".join(f"{number} {name}" for name, number in named.items() if number)


def main() -> None:
    """Run one of the measurements and keep the other, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("parity")
    lengths = commands.add_parser("lengths")
    lengths.add_argument("checkout", type=Path)
    lengths.add_argument("model_dir", type=Path)
    commands.add_parser("page")
    args = parser.parse_args()
    result = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    today = datetime.date.today().isoformat()
    if args.command == "parity":
        result |= {"parity_date": today, "parity": measure_parity()}
    elif args.command == "lengths":
        result |= {"loading_date": today, "loading": measure_loading(args.checkout, args.model_dir)}
    else:
        PAGE.write_text(format_page(result), encoding="utf-8")
        return
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
