"""From a command line to a recipe that runs, and from whatever ends it to one report and an exit code."""

from __future__ import annotations

import argparse
import logging
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from fctune.config import RunConfig, load_config
from fctune.errors import ConfigError
from fctune.training import distributed
from fctune.training.distributed import UserError, World
from fctune.training.loop import NonFiniteError
from fctune.training.run_directory import RunDirectory

logger = logging.getLogger("fctune")


class Recipe(Protocol):
    """What the entry needs of a recipe: torchtune's recipe interface, as far as it is called."""

    step: int  # optimizer steps taken

    def setup(self) -> None:
        """Everything before the first step."""

    def train(self) -> None:
        """All steps."""

    def save_checkpoint(self) -> None:
        """What is kept at the end."""

    def cleanup(self) -> None:
        """Let go of files."""


def run_recipe(make: Callable[[RunConfig, World, RunDirectory], Recipe], argv: Sequence[str]) -> int:
    """Run a recipe to its end; returns the exit code: 0 done, 1 the run failed, 2 wrong usage, config or data.

    A user's error is agreed on by all ranks and reported once, by rank 0; any other error is a traceback of the rank
    that met it. Either way ``exit.json`` says why the run ended.
    """
    world = distributed.start_world()
    _start_logging(world)
    run: RunDirectory | None = None
    recipe: Recipe | None = None
    try:
        config = distributed.agree(lambda: _read_command_line(argv))
        run = _start_run(config, world)
        recipe = make(config, world, run)
        recipe.setup()
        recipe.train()
        recipe.save_checkpoint()
        recipe.cleanup()
        code, reason = 0, "completed"
    except UserError as error:
        code, reason = 2, str(error)
    except NonFiniteError as error:
        code, reason = 1, str(error)
    except Exception as error:  # a defect, ours or a library's: other ranks may be waiting in a collective
        traceback.print_exc()
        if run is not None:
            run.finish(1, f"rank {world.rank}: {type(error).__name__}: {error}", recipe.step if recipe else 0)
        return 1
    if world.is_main:
        if code:
            print(f"\n{reason}\n", file=sys.stderr, flush=True)
        if run is not None:
            run.finish(code, reason, recipe.step if recipe else 0)
    distributed.stop_world()
    return code


def _read_command_line(argv: Sequence[str]) -> RunConfig:
    parser = argparse.ArgumentParser(prog="tune run recipes/<recipe>", add_help=False, exit_on_error=False)
    parser.add_argument("--config")
    try:
        known, overrides = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}. Usage: --config FILE [key=value ...]") from None
    if known.config is None:
        raise ConfigError("no config. Usage: tune run recipes/<recipe> --config FILE [key=value ...]")
    return load_config(Path(known.config), overrides)


def _start_run(config: RunConfig, world: World) -> RunDirectory:
    run = RunDirectory(config.output_dir)
    moved = distributed.on_main(lambda: run.start(config, world.world_size))
    if moved is not None:
        logger.info("%s held an earlier run, which is now %s", run.path, moved)
    return run


def _start_logging(world: World) -> None:
    """Rank 0 speaks; the others only of warnings."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if world.is_main else logging.WARNING)
