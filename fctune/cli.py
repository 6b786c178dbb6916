"""The ``fctune`` command: thin over the library; what it prints, the library returns."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fctune.errors import CheckpointError, ConfigError, DataError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 done, 1 a failed check, 2 wrong usage, config or input."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except (ConfigError, DataError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has seen enough
        return 0
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fctune", description="Fine-tune chat models to call functions.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    data = commands.add_parser("data", help="datasets: look at them, make them").add_subparsers(
        required=True, metavar="COMMAND"
    )
    synthetic = data.add_parser("synthetic", help="write rows, or held-out cases, of the synthetic set")
    synthetic.add_argument("split", choices=("train", "shuffled", "pretrain", "cases"))
    synthetic.add_argument("--rows", type=int, required=True)
    synthetic.add_argument("--seed", type=int, default=42)
    synthetic.add_argument("--out", type=Path, required=True, help="JSONL")
    synthetic.set_defaults(run=_write_synthetic)
    return parser


def _write_synthetic(arguments: argparse.Namespace) -> int:
    from fctune.data.synthetic import iter_cases, iter_conversations

    if arguments.rows < 1:
        raise ConfigError(f"--rows {arguments.rows}: expected 1 or more.")
    if arguments.split == "cases":
        rows = (case.to_json() for case in iter_cases(arguments.rows, arguments.seed))
    else:
        rows = (c.to_openai() for c in iter_conversations(arguments.split, arguments.rows, arguments.seed))
    try:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with open(arguments.out, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    except OSError as error:
        raise ConfigError(f"--out {arguments.out}: cannot be written ({error.strerror}).") from None
    Console().print(f"{arguments.rows:,} rows in {arguments.out}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
