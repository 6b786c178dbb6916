"""Measure inference speed: ``fctune throughput``.

python -m eval.throughput --model BASE --model TUNED [--model http://HOST:PORT] [--widths 1,8,32]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fctune.cli.eval_options import run_module


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fctune throughput``; returns its exit code."""
    return run_module("throughput", "python -m eval.throughput", argv)


if __name__ == "__main__":
    sys.exit(main())
