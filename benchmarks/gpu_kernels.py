"""Liger's fused loss and norm compared with ours on a GPU, in the sizes of Llama 3.1 8B.

    python -m benchmarks.gpu_kernels [--toy]

Prints one JSON line: milliseconds of forward and backward together, the lower of runs in turns; the bytes allocated
above the inputs at the peak; and the errors of the gradients of hidden states, relative to float32. The loss is that
of 4,096 positions, of which a fifth or all are supervised, under a frozen head; the norm is compiled, as in a block.
Without a GPU or without the package, ``not_run`` says why.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from fctune.models.loss import MAX_LOGITS, supervised_losses
from fctune.models.norms import rms_norm

EPS = 1e-5


def compare_losses(num_rows: int, width: int, num_vocab: int, repeats: int) -> dict[str, Any]:
    """Compare the losses of ``num_rows`` supervised positions, summed."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    head = torch.randn(num_vocab, width, device="cuda", dtype=torch.bfloat16) * width**-0.5
    hidden = torch.randn(1, num_rows, width, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, num_vocab, (1, num_rows), device="cuda")
    positions = torch.arange(num_rows, device="cuda")

    def ours(max_logits: int) -> Callable[[Tensor], Tensor]:
        return lambda x: supervised_losses(
            x, lambda rows, _: linear(rows, head), num_vocab, labels, None, positions, max_logits
        ).sum()

    def liger(x: Tensor) -> Tensor:
        found = LigerFusedLinearCrossEntropyFunction.apply(x[0], head, labels[0], None, None, -100, 0.0, 0.0, "sum")
        loss: Tensor = found[0] if isinstance(found, tuple) else found
        return loss

    exact = hidden.float().requires_grad_()
    ours_exact = supervised_losses(exact, lambda x, _: linear(x, head.float()), num_vocab, labels, None, positions)
    ours_exact.sum().backward()
    ways = {"ours": ours(MAX_LOGITS), "ours, 8 times the logits": ours(8 * MAX_LOGITS), "liger": liger}
    ways["torch, all logits"] = lambda x: cross_entropy(linear(x[0], head).float(), labels[0], reduction="sum")
    assert exact.grad is not None
    return _take_turns(ways, hidden, exact.grad, repeats)


def compare_norms(num_rows: int, width: int, repeats: int) -> dict[str, Any]:
    """Compare the norms of ``num_rows`` positions."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    weight = torch.rand(width, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(1, num_rows, width, device="cuda", dtype=torch.bfloat16)
    up = torch.randn_like(hidden)
    compiled = torch.compile(lambda x: rms_norm(x, weight, EPS))
    exact = hidden.float().requires_grad_()
    rms_norm(exact, weight.float(), EPS).backward(up.float())
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "ours": lambda x: (compiled(x) * up).sum(),
        "liger": lambda x: (LigerRMSNormFunction.apply(x, weight, EPS) * up).sum(),
    }
    assert exact.grad is not None
    return _take_turns(ways, hidden, exact.grad, repeats)


def _take_turns(
    ways: dict[str, Callable[[Tensor], Tensor]], hidden: Tensor, exact: Tensor, repeats: int
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for repeat in range(repeats + 1):  # the first compiles
        for name, compute in ways.items():
            x = hidden.clone().requires_grad_()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, began = torch.cuda.memory_allocated(), time.perf_counter()
            compute(x).backward()
            torch.cuda.synchronize()
            milliseconds = 1e3 * (time.perf_counter() - began)
            assert x.grad is not None
            row = found.setdefault(name, {"ms": milliseconds})
            row["ms"] = round(milliseconds if repeat <= 1 else min(row["ms"], milliseconds), 3)
            row["peak_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
            row["error"] = float(f"{float((x.grad.float() - exact).norm() / exact.norm()):.2g}")
    return found


def find_obstacle() -> str | None:
    """Return why the comparison cannot run here; None if it can."""
    if not torch.cuda.is_available():
        return "Liger's kernels need a GPU, and there is none"
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed: pip install liger-kernel"
    return None


def main() -> None:
    """Print the comparison as one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--toy", action="store_true", help="small sizes")
    arguments = parser.parse_args()
    if (obstacle := find_obstacle()) is not None:
        print(json.dumps({"not_run": obstacle}))
        return
    rows, width, vocab, repeats = (256, 64, 1000, 1) if arguments.toy else (4096, 4096, 128_256, 5)
    losses = {f"{count:,} of {rows:,}": compare_losses(count, width, vocab, repeats) for count in (rows // 5, rows)}
    print(json.dumps({"losses": losses, "norm": compare_norms(rows, width, repeats)}))


if __name__ == "__main__":
    main()
