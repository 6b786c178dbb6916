"""``fctune train``: fine-tune a model on this machine's processes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from fctune.base.processes import check_srun_tasks
from fctune.cli.parser import add_config_arguments
from fctune.config.intervals import format_count
from fctune.config.shipped import shipped_dir
from fctune.models.run_config import load_run_config


def add_commands(commands: Any) -> None:
    """Add ``fctune train`` to the command."""
    train = commands.add_parser(
        "train",
        help="fine-tune a model",
        description="Fine-tune a model: adapters if the config has an `adapter` section, otherwise all weights; on "
        "preference pairs if it has a `preference` section, on its own answers if it has a `grpo` section, and on a "
        "teacher's distributions if it has a `distill` section.",
        epilog="Ctrl-C or SIGTERM saves and stops; the same command resumes. Exit codes: 0 done, 1 failed, 2 wrong "
        "usage, config or data, 74 the disk is full or hangs, 75 stopped and saved, 76 a GPU, node or network failed.",
    )
    add_config_arguments(train)
    train.add_argument(
        "--nproc", type=int, metavar="N", help="processes; default: one per GPU of this machine, or 1 without GPUs"
    )
    train.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    if arguments.nproc is not None and arguments.nproc < 1:
        arguments.command_parser.error(f"--nproc {arguments.nproc}: expected 1 or more")
    if arguments.nproc is None:
        check_srun_tasks("--nproc")
    config = load_run_config(arguments.config, arguments.overrides)
    from fctune.training.launcher import count_gpus, launch_recipe

    num_processes = arguments.nproc
    if num_processes is None:
        num_gpus = count_gpus()
        num_processes = num_gpus or 1
        found = format_count(num_gpus, "GPU") if num_gpus else "no GPU found"
        _show(f"{format_count(num_processes, 'process', 'processes')} ({found}); choose with --nproc")
    command_line = ["--config", str(arguments.config), *arguments.overrides]
    return launch_recipe(
        shipped_dir("recipes") / f"{config.recipe}.py", command_line, num_processes, Path(config.output_dir), _show
    )


def _show(line: str) -> None:
    print(f"fctune train: {line}", file=sys.stderr, flush=True)
