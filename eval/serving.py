"""Measure accuracy as servers' own parsers read a model's answers: ``fctune parser-accuracy``.

python -m eval.serving DIR --suite smoke [--vllm-python PATH] [--sglang-python PATH]
python -m eval.serving DIR --suite synthetic --results FILE     # answers that eval.tool_calls has written
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fctune.cli.eval_options import run_module


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fctune parser-accuracy``; returns its exit code."""
    return run_module("parser-accuracy", "python -m eval.serving", argv)


if __name__ == "__main__":
    sys.exit(main())
