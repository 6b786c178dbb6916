"""Time and peak memory of the loss of supervised positions and its gradient under a frozen head, on the CPU.

    python -m benchmarks.loss [--rows 512] [--chunks 128,256,512] [--pairs 3] [--checkout DIR] [--out FILE]

Hidden states and heads are random, in bfloat16, in the sizes of Qwen2.5 0.5B (a vocabulary of 151,936) and of Gemma 3
270M (262,144). Each measurement is a process of its own; those to compare take turns, and ``--checkout`` measures the
code of another checkout too. ``plain`` is ``cross_entropy`` of all logits at once. Memory is the highest resident
memory above what the process holds before the first loss, and time is CPU time, of one thread, the lower of two steps.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"Qwen2.5 0.5B": (896, 151_936), "Gemma 3 270M": (640, 262_144)}


def measure(way: str, width: int, num_vocab: int, num_rows: int) -> dict[str, float]:
    """Measure one way in this process; returns CPU seconds of a loss with its gradient, and MiB."""
    import torch
    from torch.nn.functional import cross_entropy, linear

    from fctune.models.loss import supervised_losses

    torch.manual_seed(0)
    part = (torch.randn(1024, width) * width**-0.5).bfloat16()
    head = part.repeat(num_vocab // 1024 + 1, 1)[:num_vocab]
    hidden = torch.randn(1, num_rows, width, dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, num_vocab, (1, num_rows))
    options: dict[str, Any] = {} if way in ("plain", "default") else {"max_logits": int(way) * num_vocab}

    def step() -> float:
        began = time.process_time()
        if way == "plain":
            loss = cross_entropy(linear(hidden[0], head).float(), labels[0], reduction="sum")
        else:
            loss = supervised_losses(hidden, lambda x, _: linear(x, head), num_vocab, labels, **options).sum()
        (loss / num_rows).backward()
        return time.process_time() - began

    linear(hidden[0, :64].detach(), head[:4096])  # loads kernels
    before = _peak_mib()
    step()
    seconds = min(step() for _ in range(2))
    return {"seconds": seconds, "peak_mib": _peak_mib() - before}


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(way: str, name: str, num_rows: int, checkout: Path) -> dict[str, float]:
    """Measure one way in a process that imports the code of a checkout."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, __file__, "--one", way, "--name", name, "--rows", str(num_rows)]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure all ways in turns, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512, help="supervised positions")
    parser.add_argument("--chunks", default="128,256,512", help="positions at a time, in addition to the default")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--only", default="", metavar="WORDS", help="part of the models' names")
    parser.add_argument("--checkout", type=Path, metavar="DIR", help="another checkout to compare with")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, *SIZES[arguments.name], arguments.rows)))
        return
    ways = [("plain", ROOT), ("default", ROOT), *((chunk, ROOT) for chunk in arguments.chunks.split(",") if chunk)]
    if arguments.checkout:
        ways.insert(1, ("default", arguments.checkout.resolve()))
    result: dict[str, Any] = {"date": f"{datetime.date.today()}", "rows": arguments.rows, "models": {}}
    for name in (name for name in SIZES if arguments.only in name):
        found: dict[str, list[dict[str, float]]] = {}
        for _ in range(arguments.pairs):
            for way, checkout in ways:
                label = way if checkout == ROOT else f"{way} before"
                found.setdefault(label, []).append(run(way, name, arguments.rows, checkout))
        result["models"][name] = found
        for label, runs in found.items():
            median = {key: statistics.median(one[key] for one in runs) for key in runs[0]}
            print(f"{name:14} {label:16} {median['seconds']:6.2f} s {median['peak_mib']:8,.0f} MiB", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
