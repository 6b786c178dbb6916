"""A run as its recipe is given it: where it writes, what it goes on from, and whether it is asked to stop."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune import distributed
from fctune.checkpoint.portable import Portable
from fctune.checkpoint.store import CheckpointStore
from fctune.config.schema import RunConfig
from fctune.data.loader import GlobalLoader
from fctune.data.prepared_set import PreparedSet
from fctune.distributed import World
from fctune.errors import ConfigError
from fctune.evaluation.live import LiveEvaluation
from fctune.models.hub import WEIGHT_FILES, digest_model
from fctune.training.hang_watch import StepWatch
from fctune.training.keeper import Keeper
from fctune.training.loop import TrainState
from fctune.training.preemption import StopRequest
from fctune.training.recovery import Resume, check_same_run, choose_checkpoint, restore_
from fctune.training.run_directory import RunDirectory, versions

logger = logging.getLogger("fctune")


@dataclass(slots=True)
class Run:
    """One run of one recipe."""

    directory: RunDirectory
    store: CheckpointStore
    request: StopRequest
    resume: Resume | None

    def newest_checkpoint(self) -> Path | None:
        """What the run would go on from."""
        complete = self.store.complete()
        return complete[0].path if complete else None


def open_run(config: RunConfig, world: World, make_request: Callable[[RunDirectory], StopRequest]) -> Run:
    """Find out whether the output directory holds a run to go on with; otherwise start one. Every rank calls it.

    Raises:
        ConfigError: the directory cannot be written, is another run's, or is not the same one on all nodes.
        CheckpointError: there are checkpoints, and none is whole.
    """
    directory = RunDirectory(config.output_dir)
    request = make_request(directory)
    store = CheckpointStore(directory.checkpoints, config.checkpoint.keep_last, config.checkpoint.keep_every_n_steps)
    resume = choose_checkpoint(config.resume, store, world)
    is_here = resume is not None and resume.checkpoint.path.resolve().is_relative_to(store.root.resolve())

    def start() -> tuple[Path | None, list[str]]:
        directory.lock()
        if resume is not None and is_here:
            directory.go_on(config, world.world_size, resume.checkpoint.step, resume.checkpoint.path, resume.damaged)
            return None, store.sweep()
        return directory.start(config, world.world_size), []

    moved, swept = distributed.run_on_rank_0(start)
    _check_shared(directory.path, world)
    if moved is not None:
        logger.info("%s held an earlier run, which is now %s", directory.path, moved)
    if swept:
        logger.info("checkpoints: removed what an earlier run left unfinished: %s", ", ".join(swept))
    if resume is not None:
        logger.info("going on from %s, after step %d", resume.checkpoint.path, resume.checkpoint.step)
    return Run(directory, store, request, resume)


def start_keeping(
    config: RunConfig,
    run: Run,
    state: TrainState,
    prepared: PreparedSet,
    model_dir: Path,
    num_steps: int,
    portable: Portable,
    world: World,
) -> Keeper:
    """Put back what the run goes on from, in place, and keep the run from here on. Every rank calls it.

    Raises:
        CheckpointError: what is there is of another run.
        DataError: the data is not that of the run.
    """
    loader = GlobalLoader(prepared, "train", config.global_batch_size, config.seed)
    base = distributed.run_on_rank_0(lambda: digest_model(model_dir, WEIGHT_FILES))
    plain_config, installed = config.to_dict(), versions()

    def describe(step: int) -> dict[str, Any]:
        cursor = loader.state_at(step)
        return {
            "version": 1,
            "step": step,
            "epoch": cursor["epoch"],
            "loader": cursor,
            "num_steps": num_steps,
            "tokens_total": state.num_tokens,
            "best": keeper.best,
            "world_size": world.world_size,
            "parallel": plain_config["parallel"],
            "config": plain_config,
            "base_fingerprint": base,
            "versions": installed,
        }

    resume = run.resume
    if resume is not None:
        distributed.run_on_all_ranks(lambda: check_same_run(resume, config, base))
        distributed.run_on_all_ranks(lambda: loader.step_of(resume.state["loader"]))
        restore_(resume, state, world, lambda folder: portable.read_(folder, state.model))
        state.num_tokens = int(resume.state["tokens_total"])

    def leave(reason: str) -> None:
        run.directory.finish(1, reason, state.step, run.newest_checkpoint(), is_defect=True)

    watch = StepWatch(run.directory.path, world.rank, leave, config.step_timeout_s)
    evaluation = LiveEvaluation(config.eval, model_dir, world) if config.eval.every_n_steps else None
    keeper = Keeper(config, state, run.store, describe, portable.write, run.request, watch, world, evaluation)
    keeper.best = resume.state["best"] if resume is not None else None
    if resume is not None and resume.state["world_size"] != world.world_size:
        logger.info("world size: %d then, %d now", resume.state["world_size"], world.world_size)
        keeper.save("elastic", state.step)
    run.request.start_training()
    return keeper


def _check_shared(path: Path, world: World) -> None:
    """Every node must see the directory that rank 0 writes to."""
    probe = path / f".probe-{secrets.token_hex(4)}"
    name = distributed.run_on_rank_0(lambda: _touch(probe))

    def look() -> None:
        if not (path / name).exists():
            raise ConfigError(
                f"output_dir={path}: rank {world.rank} on {os.uname().nodename} does not see what rank 0 writes there. "
                "Use a directory that all nodes share."
            )

    try:
        distributed.run_on_all_ranks(look)
    finally:
        if world.is_main:
            probe.unlink(missing_ok=True)


def _touch(probe: Path) -> str:
    try:
        probe.touch()
    except OSError as error:
        raise ConfigError(f"output_dir={probe.parent}: cannot be written ({error.strerror}).") from None
    return probe.name
