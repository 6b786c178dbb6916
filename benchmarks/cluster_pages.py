"""Plan the runs that the pages about clusters describe, and write the results into these pages, with measured tables.

    python -m benchmarks.cluster_pages

The plan's own assumptions apply: nothing here has run on a GPU. A part of a page stands between a line that names it
and ``<!-- end -->``; the rest of the page is written by hand.
"""

from __future__ import annotations

import functools
import io
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path

from benchmarks.kernels import make_table as make_kernel_table
from benchmarks.planner import make_speed_table
from benchmarks.slurm_faults import make_fault_table
from fctune.apps.plan.plan import Plan, make_plan
from fctune.apps.plan.request import PlanRequest
from fctune.apps.plan.table import print_plan
from fctune.base.gpus import find_gpu
from fctune.base.terminal import Terminal
from fctune.cli import make_parser
from fctune.cli.parser import resolve_config_arguments
from fctune.config.intervals import parse_interval
from fctune.config.loading import load_config
from fctune.runs.prices import read_prices

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    *("docs/plan.md", "docs/results.md", "docs/clusters.md", "docs/operate.md", "docs/reliability.md"),
    "docs/reference/long-rows.md",
)
BEGIN, END = "<!-- made by python -m benchmarks.cluster_pages: {} -->", "<!-- end -->"

LARGE = "--config configs/qwen2_5_72b_full.yaml --nodes 8 --gpu h100 --rows 3000000 --mean-tokens 1200"
DEMO = "--config configs/llama3_1_8b_lora.yaml --nodes 2 --gpu h100 --rows 120000 --mean-tokens 800 epochs=1"
FULL = "--config configs/llama3_1_8b_full.yaml --nodes 2 --gpu h100 --rows 120000 --mean-tokens 800"
LARGE_LINES = ("8 x 8 h100", "fits:", "fastest", "13,", "cost:", "checkpoint:", "a failure", "space on")
BUDGET = 3000  # GPU-hours of the 72B run
REST_H = 1.0  # assumed: acceptance test and evaluation
PAID_H = 100 / 60  # GPU nodes in the demo: from 0:10 to 1:50
MONTH_H = 730
DISK_TIB = 4  # shared filesystem of infra/nebius


@functools.cache
def plan(command: str) -> Plan:
    """Return the plan that ``fctune plan`` makes of these arguments."""
    arguments, rest = make_parser().parse_known_args(["plan", *shlex.split(command)])
    resolve_config_arguments(arguments, rest, ())
    request = PlanRequest(
        gpu=find_gpu(arguments.gpu, {}),
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        rows=arguments.rows,
        mean_tokens=arguments.mean_tokens,
        prices=read_prices(),
    )
    return make_plan(load_config(ROOT / arguments.config, arguments.overrides), request)


def show(command: str, *shown: str) -> str:
    """Return the command and its output; of the lines, only those that start with a word of ``shown``, if any."""
    written = io.StringIO()
    console = Terminal(file=written, width=400, soft_wrap=True, highlight=False, no_color=True)
    print_plan(console, plan(command))
    lines = [line.rstrip() for line in written.getvalue().rstrip().splitlines()]
    if shown:
        kept = ["..." if not line.startswith(shown) else line for line in lines]
        lines = [line for i, line in enumerate(kept) if line != "..." or i == 0 or kept[i - 1] != "..."]
    return "\n".join(["```console", f"$ fctune plan {command}", *lines, "```"])


def make_memory_table() -> str:
    """Explain each part of a GPU's memory with the figures of the full fine-tuning of 8B on 2 x 8."""
    parts = plan(FULL).peak.footprint
    rows = [
        ("parameters", "4 N / S bytes; a frozen base in bfloat16: 2 N / S", parts.parameters),
        ("gradients", "4 T / S", parts.gradients),
        ("optimizer", "8 T / S", parts.optimizer),
        ("gathered weights", "the blocks in use, in bfloat16; 0 with DDP", parts.gathered),
        ("unreduced gradients", "those of a block, before they are reduced", parts.reducing),
        (
            "activations",
            "tokens per micro-batch x layers x (attention and MLP), less what checkpointing recomputes",
            parts.activations,
        ),
        (
            "recomputed activations and temporaries",
            "one block, and the logits of supervised tokens",
            parts.working + parts.logits,
        ),
        ("CUDA, NCCL, fragmentation", "assumed", parts.context + parts.fragmentation),
        ("**peak**", "", parts.total),
    ]
    shards = plan(FULL).setting.shard
    lines = [f"| part | formula | Llama 3.1 8B, full, 2 x 8 (S = {shards}) |", "|---|---|---|"]
    for name, formula, size in rows:
        figure = f"{size / 2**30:.2f} GiB"
        lines.append(f"| {name} | {formula} | {f'**{figure}**' if name.startswith('**') else figure} |")
    return "\n".join(lines)


def make_budget() -> str:
    """Hold the 72B plan to its budget of GPU-hours."""
    planned = plan(LARGE)
    made, gpus = planned.estimate, planned.search.world_size
    hours, ends, storage, startup_s = made.hours, planned.hours_range, made.storage, made.startup.total_s
    assert hours is not None
    assert ends is not None
    startup, rest = gpus * startup_s / 3600, gpus * REST_H
    total, most = gpus * hours + rest, gpus * ends[1] + rest
    expected, quickest, slowest = (gpus * value - startup for value in (hours, *ends))
    assert most <= BUDGET, f"{most:,.0f} GPU-hours at the slow end of the range, of {BUDGET:,}"
    saves = ((planned.num_steps or 1) - 1) // (planned.save_steps or 1) + 1
    failures = hours / storage.hours_between_failures
    millions = [
        math.floor((BUDGET - startup - rest) / value * planned.request.rows / 1e5) / 10  # type: ignore[operator]
        for value in (expected, slowest)
    ]
    size, write_min = storage.checkpoint_bytes / 2**30, storage.save_s / 60
    every_min = parse_interval(planned.config.checkpoint.every).seconds / 60  # type: ignore[operator]
    best_min = storage.best_interval_s // 600 * 10
    need = 1024 * math.ceil(storage.total_bytes / 2**30 / 1024 + 0.5)  # with half a TiB to spare
    return f"""| | GPU-hours |
|---|---|
| training | {expected:,.0f} ({quickest:,.0f} to {slowest:,.0f} over the plan's range) |
| of which {saves:,} checkpoints, {storage.stall_s:.2f} s of waiting each, and {failures:.2f} failures expected | \
{expected * storage.lost_share:,.0f} |
| start-up: {startup_s / 60:.0f} minutes on {gpus} GPUs | {startup:,.0f} |
| acceptance test before, evaluation after: an hour, assumed | {rest:,.0f} |
| **total** | **{total:,.0f}; at most {most:,.0f}** |

So the budget of {BUDGET:,} holds with {BUDGET - most:,.0f} GPU-hours to spare at the slow end of the range. It is
enough for {millions[0]:.1f} million such rows as planned and {millions[1]:.1f} million at the slow end. The disk
matters as much as the time: a checkpoint has {size:,.0f} GiB and takes {write_min:.0f} minutes at 1 GB/s, of the
{every_min:.0f} minutes between two. Save every {best_min:.0f} minutes, as the plan proposes
(`checkpoint.every={best_min:.0f}min`), give the filesystem {need / 1024:.0f} TiB (`shared_filesystem_gib = {need}`),
and measure its rate with `sky/acceptance.yaml` first."""


def make_demo_cost() -> str:
    """Compute the demo's cost at list prices."""
    planned, prices = plan(DEMO), read_prices()
    gpu_hour, shared = prices.gpu_hour["h100"].price, prices.shared_gib_month.price
    assert gpu_hour is not None
    assert shared is not None
    assert planned.estimate.hours is not None
    assert planned.estimate.cost is not None
    gpus = planned.search.world_size
    disk = shared * DISK_TIB * 1024 * 2 / MONTH_H
    return f"""At the list prices of `fctune plan` ({gpu_hour:g} USD per GPU-hour; pass yours with `--price`):

| | GPU-hours | USD |
|---|---|---|
| GPU nodes from 0:10 to 1:50 | {gpus * PAID_H:.1f} | {gpus * PAID_H * gpu_hour:.2f} |
| of which start-up and training | {gpus * planned.estimate.hours:.1f} | {planned.estimate.cost.gpus:.2f} |
| shared filesystem of {DISK_TIB} TiB, two hours | | {disk:.2f} |
| CPU nodes, addresses | | not counted |"""


def make_gpus_table() -> str:
    """Plan two configs on growing numbers of GPUs."""
    heads = ["config", "GPUs", "batch", "layout, replicas x shards", "memory per GPU", "step", "checkpoint"]
    heads += ["failure every", "save every", "disk"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for config, gpus in (
        *(("llama3_1_8b_full", number) for number in (16, 64, 128)),
        ("qwen2_5_72b_full", 64),
    ):
        made = plan(f"--config configs/{config}.yaml --nodes {gpus // 8} --rows 120000 --mean-tokens 800")
        setting, storage = made.setting, made.estimate.storage
        layout = f"{setting.mode.upper()}, {setting.replicate} x {setting.shard}"
        cells = [f"`{config}`", str(gpus), str(made.config.global_batch_size), layout]
        cells += [f"{made.peak.footprint.total / 2**30:.0f} GiB", f"{made.estimate.time.total_s:.2f} s"]
        cells += [f"{storage.checkpoint_bytes / 1e9:.0f} GB", f"{storage.hours_between_failures:,.0f} h"]
        cells += [f"{storage.best_interval_s / 60:.0f} min", f"{storage.total_bytes / 1e12:.1f} TB"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def make_context_table() -> str:
    """Plan long rows that one rank has alone or that ranks share, with and without tiles, and what a run chooses."""
    contexts = ((1, 1), (1, 8), (2, 1), (8, 1), (8, 8))
    heads = [f"{context}, tiles" if tiles > 1 else str(context) for context, tiles in contexts]
    lines = [f"| config | GPUs | tokens of a row | {' | '.join(heads)} | chosen |", "|---" * 9 + "|"]
    for config, nodes, lengths in (
        ("llama3_1_8b_lora", 1, tuple(2**power for power in range(13, 18))),
        ("llama3_3_70b_lora", 2, (32768, 131072)),
        ("gpt_oss_20b_lora", 1, (65536,)),
    ):
        for length in lengths:
            command = f"--config configs/{config}.yaml --nodes {nodes} micro_batch_size=1 global_batch_size=16"
            command += f" data.seq_len={length}"
            chosen = plan(f"{command} activation_checkpointing.fraction=null")
            setting = chosen.setting
            cells = [f"`{config}`", str(chosen.search.world_size), f"{length:,}"]
            for context, tiles in contexts:
                if tiles > 1 and not chosen.search.architecture.has_mlps:
                    cells.append("-")
                    continue
                shape = "parallel.mode=fsdp activation_checkpointing.fraction=1"
                shape += f" parallel.context={context} activation_checkpointing.mlp_tiles={tiles}"
                cells.append(_describe_size(plan(f"{command} {shape}")))
            how = f"{setting.context}{', tiles' if setting.mlp_tiles > 1 else ''}, {setting.fraction:.0%}"
            lines.append(f"| {' | '.join(cells)} | {_describe_size(chosen)}: {how} |")
    return "\n".join(lines)


def _describe_size(made: Plan) -> str:
    size = f"{made.peak.footprint.total / 2**30:.0f}"
    return f"{size}/{made.estimate.time.total_s:.0f}" if made.fits else f"{size}/-"


def make_idle_table() -> str:
    """Compute a cluster's cost per day."""
    prices = read_prices()
    gpu_hour, shared, network = prices.gpu_hour["h100"].price, prices.shared_gib_month.price, prices.network_gib_month
    assert gpu_hour is not None
    assert shared is not None
    assert network.price is not None
    disks = network.price * 2 * 2000 * 24 / MONTH_H
    return f"""| | USD |
|---|---|
| 2 x 8 H100, busy or idle | {gpu_hour * 16 * 24:,.0f} |
| shared filesystem of {DISK_TIB} TiB | {shared * DISK_TIB * 1024 * 24 / MONTH_H:,.0f} |
| network SSDs of two pods, 2,000 GiB each | {disks:,.0f} |
| CPU nodes, addresses, the control plane | look them up |"""


PARTS: dict[str, Callable[[], str]] = {
    "speeds": make_speed_table,
    "kernels": make_kernel_table,
    "memory": make_memory_table,
    "72b": lambda: show(LARGE, *LARGE_LINES),
    "budget": make_budget,
    "demo cost": make_demo_cost,
    "demo plan": lambda: show(DEMO, "2 x 8 h100", "fits:", "start-up:", "184 steps", "cost:"),
    "gpus": make_gpus_table,
    "idle": make_idle_table,
    "long rows": make_context_table,
    "slurm faults": make_fault_table,
}


def render(text: str) -> str:
    """Return a page with its parts made anew."""
    pattern = re.escape(BEGIN).replace(re.escape("{}"), "([^>]+)") + ".*?" + END

    def make(match: re.Match[str]) -> str:
        return f"{BEGIN.format(match[1])}\n\n{PARTS[match[1]]()}\n\n{END}"

    return re.sub(pattern, make, text, flags=re.DOTALL)


def main() -> None:
    """Write all parts of all pages."""
    for name in PAGES:
        page = ROOT / name
        page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
