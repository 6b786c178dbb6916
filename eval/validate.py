"""Check an exported model: ``fctune validate``.

python -m eval.validate DIR [--like MODEL] [--format NAME] [--suite smoke | --no-calls] [--json FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fctune.cli.eval_options import run_module


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fctune validate``; returns its exit code."""
    return run_module("validate", "python -m eval.validate", argv)


if __name__ == "__main__":
    sys.exit(main())
