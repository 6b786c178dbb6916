"""Measure whether a model calls the right function with the right arguments: ``fctune eval``.

python -m eval.tool_calls --model MODEL --suite smoke|synthetic|bfcl|FILE [--out FILE]
torchrun --nproc_per_node 8 -m eval.tool_calls --model MODEL --suite bfcl
tune run --nproc_per_node 8 eval/tool_calls --config FILE
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fctune.cli.eval_options import run_module


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fctune eval``; returns its exit code."""
    return run_module("eval", "python -m eval.tool_calls", argv)


if __name__ == "__main__":
    sys.exit(main())
