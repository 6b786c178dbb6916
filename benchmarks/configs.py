"""Plan every shipped config on the same assumed data, and write the table of ``configs/README.md``.

    python -m benchmarks.configs configs/README.md

The plan's own assumptions apply: nothing here has run on a GPU.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from fctune.apps.plan.plan import Plan, make_plan
from fctune.apps.plan.request import PlanRequest
from fctune.base.gpus import find_gpu
from fctune.config.intervals import format_duration
from fctune.config.loading import load_config
from fctune.runs.prices import read_prices

ROWS, MEAN_TOKENS = 100_000, 700
MACHINES = {  # nodes and GPUs of each; one GPU for every other config
    "llama3_1_8b_lora": (2, 8),
    "llama3_1_8b_full": (2, 8),
    "llama3_3_70b_lora": (2, 8),
    "qwen2_7b_lora": (1, 8),
    "qwen2_5_72b_full": (8, 8),
    "qwen3_30b_a3b_lora": (1, 8),
    "qwen3_32b_lora": (1, 8),
}
BEGIN, END = "<!-- made by python -m benchmarks.configs -->", "<!-- end -->"


def describe(name: str, plan: Plan) -> str:
    """Return a row of the table."""
    assert plan.num_steps is not None
    assert plan.estimate.cost is not None
    assert plan.estimate.hours is not None
    nodes, gpus, steps, step_s = plan.request.nodes, plan.request.gpus_per_node, plan.num_steps, plan.estimate.step_s
    every = plan.save_steps or steps
    saves = (steps - 1) // every
    first = format_duration(min(every, steps) * step_s) + ("" if saves else " (at the end)")
    cost = plan.estimate.cost
    disks = (cost.shared_disk or 0) + (cost.network_disks or 0)
    machines = f"{nodes} x {gpus}" if gpus > 1 else "1"
    cells = [f"`{name}`", machines, f"{steps:,}", f"{plan.warmup_steps:,}", format_duration(plan.estimate.hours * 3600)]
    cells += [f"{saves + 1:,}", first, f"{cost.gpus:,.2f}", f"{disks:,.2f}", f"{cost.total:,.2f}"]
    return f"| {' | '.join(cells)} |"


def render() -> str:
    """Return the table of all configs of real models."""
    heads = ["config", "H100s", "steps", "warm-up", "time", "checkpoints", "first after"]
    lines = [f"| {' | '.join([*heads, 'GPUs, USD', 'disks, USD', 'total, USD'])} |", "|---" * 10 + "|"]
    for path in sorted(Path("configs").glob("*.yaml")):
        if path.stem.startswith(("tiny", "acceptance")) or path.stem.endswith(("_dpo", "_grpo")):
            continue  # rows do not decide how long these run
        nodes, gpus = MACHINES.get(path.stem, (1, 1))
        request = PlanRequest(
            gpu=find_gpu("h100", {}),
            nodes=nodes,
            gpus_per_node=gpus,
            rows=ROWS,
            mean_tokens=MEAN_TOKENS,
            prices=read_prices(),
        )
        lines.append(describe(path.stem, make_plan(load_config(path), request)))
    return "\n".join(lines)


def main() -> None:
    """Replace the table in a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    page = parser.parse_args().page
    text = page.read_text(encoding="utf-8")
    table = f"{BEGIN}\n\n{render()}\n\n{END}"
    page.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: table, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
