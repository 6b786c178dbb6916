"""Compare two evaluations of the same cases: ``fctune compare``.

python -m eval.compare BEFORE.jsonl AFTER.jsonl [--show 5] [--lenient] [--json FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fctune.cli.eval_options import run_module


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fctune compare``; returns its exit code."""
    return run_module("compare", "python -m eval.compare", argv)


if __name__ == "__main__":
    sys.exit(main())
