"""Write the page of GPU results from the JSON that ``benchmarks.gpu`` makes.

python -m benchmarks.gpu_report [--results benchmarks/results/gpu.json] [--out docs/reference/gpu-results.md]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.training import RESULTS, ROOT

RESULTS_FILE = RESULTS / "gpu.json"
PAGE = ROOT / "docs" / "reference" / "gpu-results.md"

NOT_RUN = "not yet run"

_SHIPPED = "LoRA, `configs/{}_lora.yaml`, 4,096 tokens"

# Rows of the table of speeds, in its order: name and what it trains.
SPEEDS = {
    "lora_8b_float8": "LoRA, rank 16 on all linears, float8 base, 4,096 tokens",
    "lora_8b": "LoRA, rank 16, bfloat16 base",
    "lora_8b_dense": "the same; nearly every token supervised",
    "lora_8b_shipped": "LoRA, `configs/llama3_1_8b_lora.yaml` as shipped (rank 64, dropout 0.1)",
    "lora_8b_nf4": "LoRA, rank 16, NF4 base",
    "lora_8b_trl": "TRL's LoRA with Liger kernels, rank 16, packed",
    "lora_8b_torchtune": "torchtune's LoRA, rank 16, packed, compiled",
    "lora_8b_32k": "LoRA, rank 16, conversations of 32,768 tokens",
    "lora_8b_128k": "LoRA, rank 16, conversations of 131,072 tokens",
    "lora_qwen3_8b": f"Qwen3 8B, {_SHIPPED.format('qwen3_8b')}",
    "lora_qwen3_30b_a3b": f"Qwen3 30B A3B, {_SHIPPED.format('qwen3_30b_a3b')}, compiled or not",
    "lora_gpt_oss_20b": f"gpt-oss 20B, {_SHIPPED.format('gpt_oss_20b')}, compiled or not",
    "lora_qwen3_5_9b": f"Qwen3.5 9B, {_SHIPPED.format('qwen3_5_9b')}, compiled or not",
    "full_8b": "full, bfloat16 throughout, 8,192 tokens, every block recomputed",
    "full_8b_float8": "the same, float8 products",
    "full_8b_master": "the same, float32 main weights",
    "full_8b_torchtune": "torchtune's full recipe",
    "full_8b_trl": "TRL's full fine-tuning",
}


def render(results: dict[str, Any]) -> str:
    """Render the page; rows that are missing or failed say so."""
    parts = [_head(results), _speeds(results), _others(results), _tests(results), _kernels(results)]
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def _head(results: dict[str, Any]) -> str:
    lines = [
        "<!-- Written by python -m benchmarks.gpu_report; do not edit. -->",
        "# GPU results",
        "",
        "<!-- numbers of this page: benchmarks/results/gpu.json -->",
        "",
        "Speed and memory of the shapes of public models on a GPU, with random weights and synthetic rows, packed.",
        "`make bench-gpu` measures what is missing here and writes this page; all numbers are in",
        "`benchmarks/results/gpu.json`.",
        "",
    ]
    for machine, names in _machines(results).items():
        lines.append(f"- {machine}: {', '.join(f'`{name}`' for name in names)}")
    return "\n".join([*lines, ""])


def _machines(results: dict[str, Any]) -> dict[str, list[str]]:
    """Return the rows by device, versions and date."""
    found: dict[str, list[str]] = {}
    for name, row in results.items():
        if not row["ok"]:
            continue
        device, versions = row["device"], row["versions"]
        gpu = f"{device['gpu']} ({device['gib']} GiB, CUDA {device['cuda']})" if "gpu" in device else "CPU"
        packages = ", ".join(f"{package} {versions[package]}" for package in ("torch", "triton") if package in versions)
        found.setdefault(f"{gpu}, {packages}, {row['date'][:10]}", []).append(name)
    return found


def _speeds(results: dict[str, Any]) -> str:
    lines = [
        "## Training",
        "",
        "Llama 3.1 8B unless another model is named. Tokens per second of one GPU, without padding. TFLOP/s count 4",
        "operations per weight and token for a frozen base, and 6 if all weights train; of experts, those that a token",
        "chooses, and none of attention. About a fifth of the tokens are supervised unless stated otherwise; logits",
        "are computed only for those. Peak memory is that of tensors.",
        *_notes(results),
        "",
        "| row | run | tokens/s | TFLOP/s | peak GiB | set-up and first step, s |",
        "|---|---|---|---|---|---|",
    ]
    for name, what in SPEEDS.items():
        row = results.get(name)
        if row is None or not row["ok"]:
            lines.append(f"| `{name}` | {what} | {_reason(row)} | | | |")
            continue
        tflops = next(row[key] for key in ("tflops_4N", "tflops_6N") if key in row)
        start = f"{row['setup_s']:.0f} + {row['first_step_s']:.0f}"
        speed = f"{row['tokens_per_s']:,.0f}"
        if len({run["job"]["compile"] for run in row["tried"]}) > 1:
            what += f"; faster: {'compiled' if row['compiled'] else 'not compiled'}"
        what += f"; {NOT_RUN}: {row['not_run']}" if "not_run" in row else ""
        lines.append(f"| `{name}` | {what} | {speed} | {tflops:,.0f} | {row['peak_gib']:.1f} | {start} |")
    return "\n".join([*lines, ""])


def _notes(results: dict[str, Any]) -> list[str]:
    """Return the notes on rows, such as changes to the code since they were measured."""
    notes = [results[name]["note"] for name in SPEEDS if "note" in results.get(name, {})]
    return list(dict.fromkeys(line for note in notes for line in note.splitlines()))


def _reason(row: dict[str, Any] | None) -> str:
    return NOT_RUN if row is None else "failed"


def _others(results: dict[str, Any]) -> str:
    lines = ["## Correctness, memory, saves, loading, generation", "", "| row | result |", "|---|---|"]
    shown = {
        "correctness": _correctness,
        "planner": _planner,
        "save_lora_8b": _save,
        "save_full_3b": _save,
        "inference_3b": _inference,
        "acceptance": lambda row: "passed",
        "liger": _liger,
    }
    for name, text in shown.items():
        row = results.get(name)
        lines.append(f"| `{name}` | {text(row) if row is not None and row['ok'] else _reason(row)} |")
    return "\n".join([*lines, ""])


def _correctness(row: dict[str, Any]) -> str:
    checks = row["checks"]
    kinds = dict.fromkeys(name.split()[0] for name in checks)
    worst = {kind: max(max(c["errors"]) for name, c in checks.items() if name.split()[0] == kind) for kind in kinds}
    errors = ", ".join(f"{kind} {error:.1g}" for kind, error in worst.items())
    return (
        f"losses and gradients of {len(checks)} combinations of dtype, attention kernel, compilation and recomputation "
        f"against float64 on the CPU; largest relative errors: {errors}"
    )


def _planner(row: dict[str, Any]) -> str:
    return f"planned peaks of {len(row['tried'])} runs are off by at most {abs(row['peak_over_worst']):.1%}"


def _save(row: dict[str, Any]) -> str:
    size = row["save"]["bytes"] / 1e9
    return f"{row['added_s_a_save']:.2f} s longer a save, of {size:.1f} GB; {row['num_saves']} saves"


def _liger(row: dict[str, Any]) -> str:
    if "not_run" in row:
        return f"{NOT_RUN}: {row['not_run']}"
    parts = {f"loss of {count} positions": ways for count, ways in row["losses"].items()} | {"norm": row["norm"]}
    shown = {
        name: ", ".join(f"{way} {one['ms']:.2f} ms and {one['peak_mib']:,.0f} MiB" for way, one in ways.items())
        for name, ways in parts.items()
    }
    return "; ".join(f"{name}: {text}" for name, text in shown.items())


def _inference(row: dict[str, Any]) -> str:
    return (
        f"weights read from cached files in {row['load_s']} s ({row['load_gb_per_s']} GB/s); {row['prompts']} prompts "
        f"at once, {row['new_tokens']} tokens each: {row['generated_per_s']:,.0f} tokens/s"
    )


def _tests(results: dict[str, Any]) -> str:
    """Return the tests that need a GPU, by their outcome."""
    row = results.get("tests")
    lines = ["## Tests", ""]
    if row is None:
        return "\n".join([*lines, f"`pytest -m gpu`: {NOT_RUN} by this command.", ""])
    counts = f"{len(row['passed'])} passed, {len(row['failed'])} failed, {row['skipped']} skipped"
    lines.append(f"`pytest -m gpu`, {row['date'][:10]}: {counts}{'; ' + row['error'] if 'error' in row else ''}.")
    if row["failed"]:
        lines += ["", "| failed | message |", "|---|---|"]
    for test in row["failed"]:
        message = test["message"].replace("|", "\\|").replace("`", "'")
        lines.append(f"| `{test['test']}` | `{message}` |")
    return "\n".join([*lines, ""])


def _kernels(results: dict[str, Any]) -> str:
    """Return the largest kernels of a profiled step."""
    row = results.get("profile_lora_8b")
    if row is None or not row["ok"]:
        return ""
    lines = ["## Kernels of a step of `lora_8b`", "", f"Profiled on {row['date'][:10]}{row.get('note', '')}.", ""]
    lines += ["| kernel | GPU time | share | calls |", "|---|---|---|---|"]
    for cells in _kernel_rows(row["table"])[:12]:
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _kernel_rows(table: list[str]) -> list[tuple[str, str, str, str]]:
    """Return name, time, share and calls of each kernel in a profiler's table, without the operators that call them."""
    header = next((line for line in table if "Self CUDA %" in line), None)
    if header is None:  # profiled on the CPU
        return []
    starts = [column for column in header.split("  ") if column.strip()]
    names = [column.strip() for column in starts]
    found = []
    for line in table[table.index(header) + 2 :]:
        cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
        if len(cells) != len(names):
            continue
        values = dict(zip(names, cells, strict=True))
        if values["CPU total"] == "0.000us":  # a kernel, not an operator
            name = f"`{values['Name'].removeprefix('void ')[:60]}`"
            found.append((name, values["Self CUDA"], values["Self CUDA %"], values["# of Calls"]))
    return found


def main() -> None:
    """Write the page of GPU results from their JSON file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS_FILE)
    parser.add_argument("--out", type=Path, default=PAGE)
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text(encoding="utf-8"))
    arguments.out.write_text(render(results), encoding="utf-8")
    print(arguments.out)


if __name__ == "__main__":
    main()
