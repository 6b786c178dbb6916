"""Running a recipe from a command line: opening the run, reporting how it ended, and the exit code."""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fctune import distributed
from fctune.checkpoint.resume import Resume, choose_checkpoint
from fctune.checkpoint.store import CheckpointStore
from fctune.config.schema import RunConfig
from fctune.distributed import USER_ERRORS, World
from fctune.errors import ConfigError, DataError
from fctune.evaluation.leaks import HELD_OUT_FILE
from fctune.launcher_watch import end_with_launcher, watch_launcher
from fctune.models.run_config import load_run_config
from fctune.runs.record import read_run
from fctune.runs.success import format_criteria, judge_run
from fctune.telemetry.device import describe_device, total_memory
from fctune.terminal import LogHandler, escape_controls
from fctune.training.callbacks.stop import STOPPED, Stopped, StopRequest
from fctune.training.host_memory import reuse_freed_memory
from fctune.training.loop import NonFiniteError
from fctune.training.out_of_memory import is_out_of_memory
from fctune.training.peers import RankProcess, describe_process, find_killed_rank, is_lost_connection
from fctune.training.run_directory import RunDirectory, find_typed_command

logger = logging.getLogger("fctune")

_DEATH_S = 2.0  # a killed rank closes its connections before it ends
_USAGE = "tune run recipes/<recipe> --config FILE [key=value ...]"


class Recipe(Protocol):
    """The methods of torchtune's recipe interface that are called here."""

    step: int  # optimizer steps taken

    def setup(self) -> None:
        """Prepare everything before the first step."""

    def train(self) -> None:
        """Train from the restored step to the end, with saves and measurements when they are due."""

    def save_checkpoint(self) -> None:
        """Save the last state and write the exports."""

    def suggest_less_memory(self) -> str:
        """Return settings that need less memory."""

    def cleanup(self) -> None:
        """Release files, threads and signal handlers; not called after a crash."""


@dataclass(slots=True)
class Run:
    """A recipe's output directory, the checkpoint to resume from, and requests to stop."""

    directory: RunDirectory
    store: CheckpointStore
    world: World
    peers: Sequence[RankProcess]
    resume: Resume | None = None
    recipe: Recipe | None = None
    is_open: bool = False  # this run has locked the directory, so ranks may write to it
    is_started: bool = False  # run.json describes this run
    request: StopRequest = field(init=False)

    def __post_init__(self) -> None:
        stop_file = self.directory.stop_file if self.world.is_main else None
        self.request = StopRequest(stop_file, self._record_stop)
        watch_launcher(self._record_lost_launcher)

    @property
    def step(self) -> int:
        """Number of optimizer steps that the run has taken."""
        return self.recipe.step if self.recipe else 0

    def newest_checkpoint(self) -> Path | None:
        """Return the checkpoint that a re-run would resume from."""
        complete = self.store.list_complete()
        return complete[0].path if complete else None

    def record_crash(self, reason: str, is_consequence: bool = False) -> None:
        """Write exit.json unless another rank gave a cause already."""
        if self.is_open:
            self.directory.finish(1, reason, self.step, self.newest_checkpoint(), True, is_consequence)

    def _record_stop(self, reason: str) -> None:
        killed = find_killed_rank(self.peers)
        if killed is not None:  # the launcher stops the other ranks
            self.record_crash(killed)
        elif self.is_open:
            checkpoint = self.newest_checkpoint()
            self.directory.finish(STOPPED, reason, self.step, checkpoint, is_crash=not self.world.is_main)

    def _record_lost_launcher(self) -> None:
        self.record_crash(f"rank {self.world.rank} on {os.uname().nodename}: its launcher died")


def run_recipe(make: Callable[[RunConfig, World, Run], Recipe], argv: Sequence[str]) -> int:
    """Run a recipe and return the exit code.

    0: completed; 1: failed; 2: wrong usage, config or data; 75: stopped on request and saved, so that re-running the
    same command resumes it.

    All ranks agree on a user's error, and rank 0 reports it once; any other error is a traceback of the rank that
    raised it. In every case ``exit.json`` records why the run ended.
    """
    end_with_launcher()
    world = distributed.init_distributed()
    if world.device.type == "cpu":
        reuse_freed_memory()
    _start_logging(world)
    run: Run | None = None
    recipe: Recipe | None = None
    checkpoint: Path | None = None
    try:
        config = distributed.run_on_all_ranks(lambda: load_run_config(*read_command_line(argv, _USAGE)))
        run = open_run(config, world)
        start_run(run, config)
        if world.is_main:
            _record_start(run.directory, world, argv)
        run.recipe = recipe = make(config, world, run)
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
    except Exception as error:  # a bug, here or in a library: other ranks may be waiting in a collective
        traceback.print_exc()
        get_error_handler().record_exception(error)  # for the launcher, which reports the first rank to fail
        if run is not None:
            _record_crash(run, world, error)
        return 1
    if recipe is not None:
        recipe.cleanup()
    if world.is_main:
        if code:
            print(f"\n{escape_controls(reason)}\n", file=sys.stderr, flush=True)
        if run is not None:
            run.directory.finish(code, reason, run.step, checkpoint or run.newest_checkpoint())
            if run.is_started:
                _record_end(run.directory, is_judged=code == 0 and config.success is not None)
            if code == 0:
                _log_next_steps(run.directory, config)
            run.directory.unlock()
    distributed.shutdown_distributed()
    return code


def open_run(config: RunConfig, world: World) -> Run:
    """Lock the output directory, and start listening for stop requests. Every rank calls it.

    Raises:
        ConfigError: The directory cannot be written or is in use by another run.
    """
    store = CheckpointStore(
        Path(config.output_dir) / "checkpoints", config.checkpoint.keep_last, config.checkpoint.keep_every_n_steps
    )
    peers = distributed.all_gather_objects(describe_process(world.rank))
    run = Run(RunDirectory(config.output_dir), store, world, peers)
    distributed.run_on_rank_0(run.directory.lock)
    run.is_open = True
    return run


def start_run(run: Run, config: RunConfig) -> None:
    """Resume the run in the output directory if it has checkpoints; otherwise start one. Every rank calls it.

    Raises:
        ConfigError: The directory cannot be written, or is not shared by all nodes.
        CheckpointError: There are checkpoints, and all are damaged.
    """
    directory, store, world = run.directory, run.store, run.world
    run.resume, not_used = choose_checkpoint(config.resume, store, world)
    resume = run.resume
    is_own = resume is not None and resume.checkpoint.path.resolve().is_relative_to(store.root.resolve())

    def start() -> tuple[Path | None, list[str]]:
        if resume is not None and is_own:
            directory.resume(config, world.world_size, resume.checkpoint.step, resume.checkpoint.path, not_used)
            return None, store.sweep()
        return directory.start(config, world.world_size, not_used), []

    moved, swept = distributed.run_on_rank_0(start)
    run.is_started = True
    _check_shared(directory.path, world)
    if moved is not None:
        reason = "" if config.resume != "auto" else ", because it has no complete checkpoint to resume from"
        logger.info("%s held an earlier run, which was moved to %s%s", directory.path, moved, reason)
    if swept:
        logger.info("checkpoints: deleted the incomplete ones of an earlier run: %s", ", ".join(swept))
    if resume is not None:
        logger.info("resuming from %s, after step %d", resume.checkpoint.path, resume.checkpoint.step)


def read_command_line(argv: Sequence[str], usage: str) -> tuple[Path, list[str]]:
    """Return the config file and the overrides of a recipe's command line.

    Raises:
        ConfigError: No config is named, or a flag is malformed.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--config")
    try:
        known, overrides = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}. Usage: {usage}") from None
    if known.config is None:
        raise ConfigError(f"--config is missing. Usage: {usage}")
    return Path(known.config), overrides


def _start_logging(world: World) -> None:
    """Log everything on rank 0 and only warnings on other ranks."""
    logger.handlers = [LogHandler(erases_line=not world.is_main)]
    logger.propagate = False
    logger.setLevel(logging.INFO if world.is_main else logging.WARNING)


def _record_start(directory: RunDirectory, world: World, argv: Sequence[str]) -> None:
    memory_gib = total_memory(world.device, world.ranks_per_node) / 2**30 if world.device.type == "cuda" else None
    device = describe_device(world.device)
    directory.describe(
        command=find_typed_command() or [sys.argv[0], *argv], device=device, device_memory_gib=memory_gib
    )


def _record_crash(run: Run, world: World, error: Exception) -> None:
    reason = f"rank {world.rank}: {type(error).__name__}: {error}"
    if is_lost_connection(error):
        killed = find_killed_rank(run.peers, _DEATH_S)
        cause = killed or "another rank ended first; its log has the cause"
        run.record_crash(f"{cause}. {reason}", is_consequence=killed is None)
    else:
        if run.recipe is not None and is_out_of_memory(error):
            reason += f"\n{run.recipe.suggest_less_memory()}"
            print(f"\n{escape_controls(reason)}\n", file=sys.stderr, flush=True)
        run.record_crash(reason)
    run.directory.unlock()


def _record_end(directory: RunDirectory, is_judged: bool) -> None:
    """Record in run.json when the run ended and, if success criteria are configured, which of them it met."""
    try:
        directory.describe(finished_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    except OSError as error:
        logger.error("%s: finished_at cannot be written (%s)", directory.path / "run.json", error.strerror)
        return
    if not is_judged:  # reading all metrics again takes time
        return
    try:
        record = read_run(directory.path)
    except DataError as error:
        logger.warning("success: not judged: %s", error)
        return
    criteria = judge_run(record)
    directory.describe(success=[asdict(criterion) for criterion in criteria])
    for line in format_criteria(criteria):
        logger.info("success: %s", line)


def _log_next_steps(directory: RunDirectory, config: RunConfig) -> None:
    """Log where the exports of a completed run are, and commands that evaluate, report and serve it.

    The cases are the run's own: a model of its size need not be able to answer any others.
    """
    for name, content in (("merged", "merged model"), ("adapter", "adapter")):
        if (directory.export / name).is_dir():
            logger.info("%s: %s", content, directory.export / name)
    adapter = _read_adapter_config(directory.export / "adapter")
    if adapter.get("trainable_token_indices"):
        logger.info("the adapter has trained token rows, which PEFT loads and vLLM does not: serve the merged model")
    if adapter.get("target_parameters"):
        logger.info(
            "the adapter changes experts, in the form of PEFT 0.18, which servers ignore: serve the merged model"
        )
    run = shlex.quote(str(directory.path))
    named = [str(directory.path / HELD_OUT_FILE), config.eval.cases, "" if config.grpo is None else config.grpo.cases]
    cases = next((shlex.quote(path) for path in named if Path(path).is_file()), None)
    logger.info("evaluate it: fctune eval --model %s %s", run, "--suite smoke" if cases is None else f"--cases {cases}")
    logger.info("report on it: fctune report %s --out %s", run, shlex.quote(str(directory.path / "report.html")))
    logger.info("serve it: fctune serve %s", run)


def _read_adapter_config(adapter: Path) -> dict[str, Any]:
    """Read PEFT's config of an exported adapter; empty if there is none."""
    file = adapter / "adapter_config.json"
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return content


def _check_shared(path: Path, world: World) -> None:
    """Check that every node sees the directory that rank 0 writes to."""
    name = distributed.run_on_rank_0(lambda: _create_probe(path))

    def check() -> None:
        if not (path / name).exists():
            raise ConfigError(
                f"output_dir={path}: rank {world.rank} on {os.uname().nodename} does not see what rank 0 writes there. "
                "Use a directory that all nodes share."
            )

    try:
        distributed.run_on_all_ranks(check)
    finally:
        if world.is_main:
            (path / name).unlink(missing_ok=True)


def _create_probe(path: Path) -> str:
    name = f".probe-{secrets.token_hex(4)}"
    try:
        (path / name).touch()
    except OSError as error:
        raise ConfigError(f"output_dir={path}: cannot be written ({error.strerror}). Set another one.") from None
    return name
