"""From a command line to a recipe that runs, and from whatever ends it to one report and an exit code."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fctune import distributed
from fctune.config.schema import RunConfig
from fctune.distributed import USER_ERRORS, World
from fctune.errors import ConfigError, DataError
from fctune.models.run_config import load_run_config
from fctune.runs.record import read_run
from fctune.runs.success import format_criteria, judge_run
from fctune.telemetry.device import describe_device, total_memory
from fctune.training.loop import NonFiniteError
from fctune.training.out_of_memory import is_out_of_memory
from fctune.training.preemption import STOPPED, Stopped, StopRequest
from fctune.training.run import Run, open_run
from fctune.training.run_directory import RunDirectory

logger = logging.getLogger("fctune")

_USAGE = "tune run recipes/<recipe> --config FILE [key=value ...]"


class Recipe(Protocol):
    """What the entry needs of a recipe: torchtune's recipe interface, as far as it is called."""

    step: int  # optimizer steps taken

    def setup(self) -> None:
        """Everything before the first step."""

    def train(self) -> None:
        """All steps."""

    def save_checkpoint(self) -> None:
        """What is kept at the end."""

    def suggest_less_memory(self) -> str:
        """What to change where memory was too little."""

    def cleanup(self) -> None:
        """Let go of files, threads and signals; called however the run ended, unless by a defect."""


def run_recipe(make: Callable[[RunConfig, World, Run], Recipe], argv: Sequence[str]) -> int:
    """Run a recipe to its end; returns the exit code.

    0 done, 1 the run failed, 2 wrong usage, config or data, 75 asked to stop and saved: run the same command to go on.

    A user's error is agreed on by all ranks and reported once, by rank 0; any other error is a traceback of the rank
    that met it. Either way ``exit.json`` says why the run ended.
    """
    world = distributed.init_distributed()
    _start_logging(world)
    run: Run | None = None
    recipe: Recipe | None = None
    checkpoint: Path | None = None
    try:
        config = distributed.run_on_all_ranks(lambda: load_run_config(*read_command_line(argv, _USAGE)))
        run = open_run(config, world, lambda directory: _hear_requests(directory, world))
        if world.is_main:
            _describe_start(run.directory, world, argv)
        recipe = make(config, world, run)
        recipe.setup()
        recipe.train()
        recipe.save_checkpoint()
        code, reason = 0, "completed"
    except USER_ERRORS as error:
        code, reason = 2, str(error)
    except NonFiniteError as error:
        code, reason = 1, str(error)
    except Stopped as stopped:
        code, reason, checkpoint = STOPPED, str(stopped), stopped.checkpoint
    except Exception as error:  # a defect, ours or a library's: other ranks may be waiting in a collective
        traceback.print_exc()
        get_error_handler().record_exception(error)  # for the launcher, which reports the first rank's that failed
        if run is not None:
            reason = f"rank {world.rank}: {type(error).__name__}: {error}"
            if recipe is not None and is_out_of_memory(error):
                reason += f"\n{recipe.suggest_less_memory()}"
                print(f"\n{reason}\n", file=sys.stderr, flush=True)
            run.directory.finish(1, reason, recipe.step if recipe else 0, run.newest_checkpoint(), True)
            run.directory.unlock()
        return 1
    if recipe is not None:
        recipe.cleanup()
    if world.is_main:
        if code:
            print(f"\n{reason}\n", file=sys.stderr, flush=True)
        if run is not None:
            run.directory.finish(code, reason, recipe.step if recipe else 0, checkpoint or run.newest_checkpoint())
            _describe_end(run.directory, has_thresholds=code == 0 and config.success is not None)
            run.directory.unlock()
    distributed.shutdown_distributed()
    return code


def _describe_start(directory: RunDirectory, world: World, argv: Sequence[str]) -> None:
    """The command and the device into run.json."""
    memory = total_memory(world.device, world.ranks_per_node) / 2**30 if world.device.type == "cuda" else None
    device = describe_device(world.device)
    directory.describe(command=[sys.argv[0], *argv], device=device, device_memory_gib=memory)


def _describe_end(directory: RunDirectory, has_thresholds: bool) -> None:
    """When the run ended, into run.json; where thresholds are asked for, also whether it reached them."""
    try:
        directory.describe(finished_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    except OSError as error:
        logger.error("%s: when the run ended is not in it (%s)", directory.path / "run.json", error.strerror)
        return
    if not has_thresholds:  # reading all metrics again is not free
        return
    try:
        record = read_run(directory.path)
    except DataError as error:
        logger.warning("success: not judged: %s", error)
        return
    judged = judge_run(record)
    directory.describe(success=[asdict(one) for one in judged])
    for line in format_criteria(judged):
        logger.info("success: %s", line)


def read_command_line(argv: Sequence[str], usage: str) -> tuple[Path, list[str]]:
    """The config's file and the overrides that a recipe is called with.

    Raises:
        ConfigError: no config, or a flag that is none.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--config")
    try:
        known, overrides = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}. Usage: {usage}") from None
    if known.config is None:
        raise ConfigError(f"no config. Usage: {usage}")
    return Path(known.config), overrides


def _hear_requests(directory: RunDirectory, world: World) -> StopRequest:
    def leave(reason: str) -> None:
        if world.is_main:
            directory.finish(STOPPED, reason, 0)

    return StopRequest(directory.stop_file if world.is_main else None, leave)


def _start_logging(world: World) -> None:
    """Rank 0 speaks; the others only of warnings."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if world.is_main else logging.WARNING)
