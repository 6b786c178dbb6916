"""Steps of a fine-tuning run, shared by all recipes; a recipe chooses the trained parameters and the exports."""

from __future__ import annotations

import contextlib
import logging
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fctune.base import distributed
from fctune.base.distributed import World
from fctune.base.errors import ConfigError, DataError, DiskError
from fctune.checkpoint.hf_checkpoint import HFWeights
from fctune.checkpoint.resume import Resume, RunFacts, check_same_run
from fctune.checkpoint.saver import Guard, first_write_limit
from fctune.checkpoint.state import Checkpointer, TrainState
from fctune.config.intervals import format_count, is_never
from fctune.config.recipes import find_recipe_problem
from fctune.config.schema import RunConfig
from fctune.config.sections.evaluation import VALIDATION_CASES
from fctune.data.chosen_template import read_chosen_template
from fctune.models.causal_lm import CausalLM
from fctune.models.hub import WEIGHT_FILES, digest_model
from fctune.models.run_config import resolve_base
from fctune.models.token_rows import count_parameters, trained_token_ids
from fctune.parallel.sharding import GradientSync
from fctune.runs.directory import installed_versions
from fctune.runs.record import MetricsFile
from fctune.runs.sinks import SinkGroup
from fctune.tasks.evaluation.held_out import find_held_out_cases, write_held_out_cases
from fctune.tasks.evaluation.live import LiveEvaluation
from fctune.training.callbacks.base import Callback, make_callbacks
from fctune.training.callbacks.checkpoint import CheckpointCallback, DiskWait, SaveError
from fctune.training.callbacks.evaluation import EvaluationCallback, is_patience_exhausted
from fctune.training.callbacks.hang_watch import HangWatch
from fctune.training.callbacks.stop import StopCallback
from fctune.training.entry import AlreadyComplete, Run
from fctune.training.host_memory import HostMemoryCallback
from fctune.training.loop import train
from fctune.training.objective import Objective, SupervisedObjective
from fctune.training.out_of_memory import MemorySnapshot, suggest_less_memory
from fctune.training.planned_run import PlannedRun, TrainingData, open_prepared_rows
from fctune.training.prefetch import ResumableSource
from fctune.training.response_check import check_response_template
from fctune.training.setup import (
    build_base,
    check_data_tokens,
    check_memory_to_answer,
    check_packing,
    check_space,
    check_weights,
    choose_elastic_interval,
    open_sinks,
    plan_parallelism,
    plan_speed_of_run,
    resolve_experts,
    resolve_micro_batch,
    resolve_seq_len,
    shard_and_load_,
    start_state,
    warn_of_length,
)

logger = logging.getLogger("fctune")


@dataclass(frozen=True, slots=True)
class Training:
    """A run with its weights loaded; its callbacks see it as ``StartedRun``.

    Attributes:
        planned: The run as it was planned, with the model in shards now.
        state: State that training changes.
        source: Source of the steps' inputs.
        watch: Ends the process if a step or a write hangs.
        checkpoint: Saves the state.
        stop: Stops the run on request.
        callbacks: These three and all others, in the order of the loop's calls.
    """

    planned: PlannedRun
    state: TrainState
    source: ResumableSource
    watch: HangWatch
    checkpoint: CheckpointCallback
    stop: StopCallback
    callbacks: tuple[Callback, ...]

    @property
    def config(self) -> RunConfig:
        """Config of the run, with what was chosen for it."""
        return self.planned.config

    @property
    def world(self) -> World:
        """Ranks of the run, and this one."""
        return self.planned.world

    @property
    def model(self) -> CausalLM:
        """Model, sharded and with its weights."""
        return self.planned.model


class FineTuning(ABC):
    """A fine-tuning run: torchtune's recipe interface over the library's training loop.

    A recipe overrides the hooks, which get the model or the planned run and keep nothing. Of the run itself only
    ``setup`` keeps something: the training that the next methods continue.

    Attributes:
        name: Name of the recipe's file; it runs the configs that ``RunConfig.recipe`` gives this name.
        requested_config: Config as the user wrote it, with a number of tokens for ``data.seq_len: auto`` once it is
            planned; that of a planned run has what was chosen for the other open keys, too.
    """

    name: str

    def __init__(self, config: RunConfig, world: World, run: Run):
        if (problem := find_recipe_problem(self.name, config.recipe)) is not None:
            raise ConfigError(problem)
        self.requested_config, self.world, self.run = config, world, run
        self._user_callbacks = make_callbacks(config)
        self.model_dir = distributed.run_on_rank_0(lambda: resolve_base(config))
        self.chat_template = distributed.run_on_rank_0(lambda: read_chosen_template(config.model))
        keeps_history = config.profile is not None and config.profile.allocations
        self._snapshot = MemorySnapshot(run.directory.path, world, keeps_history)
        self._training: Training | None = None  # until setup has ended
        self._resources = contextlib.ExitStack()

    @abstractmethod
    def select_trainable_(self, model: CausalLM) -> None:
        """Select the trainable parameters of a meta model, in place."""

    @abstractmethod
    def select_tokens_(self, model: CausalLM, data: TrainingData) -> None:
        """Select the token rows of a meta model that train, which depend on the data, in place."""

    @abstractmethod
    def init_trainable_(self, model: CausalLM) -> None:
        """Initialize trainable parameters that are not the base's, in place."""

    @abstractmethod
    def hf_weights(self, planned: PlannedRun) -> HFWeights:
        """Return the Hugging Face form of the trainable weights in elastic checkpoints."""

    @abstractmethod
    def exports(self, planned: PlannedRun) -> dict[str, Callable[[Path], None]]:
        """Return the functions that write the run's exports to a path, by name; every rank calls each in turn."""

    def objective(self) -> Objective:
        """Return the loss of a training step: by default that of the supervised tokens."""
        return SupervisedObjective()

    def open_data(self) -> tuple[RunConfig, TrainingData]:
        """Return the config with the size of a step's batch, and the data: by default the rows of ``data``."""
        return open_prepared_rows(self.requested_config, self.model_dir, self.chat_template, self.world)

    def open_source(self, planned: PlannedRun) -> ResumableSource:
        """Return the source of the steps' inputs; the model is in shards, with its weights."""
        return planned.data.open_source(planned, self._stop_if_requested)

    def open_sinks(self, planned: PlannedRun, guard: Guard) -> SinkGroup:
        """Open what receives the metrics of each step."""
        directory, num_steps = self.run.directory, planned.num_steps
        return open_sinks(planned.config, directory, num_steps, self.world, planned.hosts, guard=guard)

    @property
    def step(self) -> int:
        """Number of optimizer steps taken so far."""
        return 0 if self._training is None else self._training.state.step

    @property
    def training(self) -> Training:
        """The training that ``setup`` has prepared."""
        assert self._training is not None, "setup comes first"
        return self._training

    def setup(self) -> None:
        """Build the model without weights, prepare the data, then load weights into shards and resume.

        What is checked in an instant comes first, and data before weights, because most runs that fail, fail there.
        Nothing of an earlier run in the directory changes before all checks have passed.

        Raises:
            AlreadyComplete: There is nothing left to do.
        """
        planned = self.plan()
        self.check(planned)
        self._training = training = self.start(planned)
        self.begin(training)
        for callback in training.callbacks:
            callback.on_start(training)

    def plan(self) -> PlannedRun:
        """Build the model without weights, open the data, and decide layout and steps."""
        self.requested_config = resolve_seq_len(self.requested_config, self.model_dir, self.run.resume, self.world)
        model = build_base(self.requested_config, self.model_dir, self.world)
        check_weights(model, self.model_dir)
        self.select_trainable_(model)
        config, data = self.open_data()
        check_data_tokens(model, self.model_dir, data.prepared)
        self.select_tokens_(model, data)
        config = resolve_experts(model, config, self.run.resume, self.world)
        config = resolve_micro_batch(model, config, self.run.resume, self.world)
        layout = plan_parallelism(model, config, self.world)
        checkpointing = config.activation_checkpointing
        checkpointing = replace(checkpointing, fraction=layout.fraction, mlp_tiles=layout.mlp_tiles)
        parallel = replace(config.parallel, context=layout.context)
        config = replace(config, activation_checkpointing=checkpointing, parallel=parallel)
        num_steps = data.count_steps(config, self.world)
        warn_of_length(config, data.prepared, num_steps, self.world)
        base_digest = distributed.run_on_rank_0(lambda: digest_model(self.model_dir, WEIGHT_FILES))
        return PlannedRun(
            config=config,
            run=self.run,
            world=self.world,
            model_dir=self.model_dir,
            chat_template=self.chat_template,
            model=model,
            data=data,
            layout=layout,
            num_steps=num_steps,
            facts=RunFacts(config.to_dict(), base_digest, num_steps, installed_versions(), trained_token_ids(model)),
            hosts=tuple(distributed.all_gather_objects(platform.node())),
        )

    def check(self, planned: PlannedRun) -> None:
        """Check the checkpoint to resume from and the disk's space, and record the plan in run.json.

        Raises:
            ConfigError: The disk is too small.
            CheckpointError: The checkpoint was saved by another run.
            DataError: The data is not that of the run.
            AlreadyComplete: There is nothing left to do.
        """
        config, model, num_steps, directory = planned.config, planned.model, planned.num_steps, self.run.directory
        if self.run.resume is not None:
            self._check_resume(planned, self.run.resume)
        check_space(model, config, directory, num_steps, self.world, is_resumed=self.run.resumes_own)
        if self.world.is_main:
            details: dict[str, Any] = {"parameters": count_parameters(model)}
            if planned.data.loader is not None:
                details["steps_per_epoch"] = planned.data.loader.steps_per_epoch
            if (planned_speed := plan_speed_of_run(config, self.model_dir, self.world)) is not None:
                details["planned_tokens_per_s_per_gpu"] = round(planned_speed, 1)
            if model.state_layers:
                details["state_layers"] = model.state_layers
            requested = self.run.config
            checkpointing = requested.activation_checkpointing
            chosen = checkpointing.fraction, checkpointing.mlp_tiles, requested.parallel.context
            is_chosen = None in chosen or requested.data.seq_len != config.data.seq_len
            is_chosen |= requested.micro_batch_size != config.micro_batch_size
            is_chosen |= requested.parallel.expert != config.parallel.expert
            if is_chosen or config.global_batch_tokens is not None:
                details["config"] = config.to_dict()
            data, hosts = planned.data.describe(), list(planned.hosts)
            directory.describe(num_steps=num_steps, data=data, hosts=hosts, **details)

    def _check_resume(self, planned: PlannedRun, resume: Resume) -> None:
        distributed.run_on_all_ranks(lambda: check_same_run(resume, planned.facts))
        distributed.run_on_all_ranks(lambda: planned.data.check_resume(resume))
        is_stopped_early = is_patience_exhausted(planned.config.eval, resume.state["best"])
        has_steps = resume.checkpoint.step < planned.num_steps and not is_stopped_early
        directory, names = self.run.directory, self.exports(planned)
        if not has_steps and self.run.resumes_own and distributed.run_on_rank_0(lambda: directory.is_complete(names)):
            longer = "raise eval.early_stop or set it to null" if is_stopped_early else "raise epochs or max_steps"
            raise AlreadyComplete(
                f"{directory.path}: already complete after step {resume.checkpoint.step}, and exported to "
                f"{directory.export}; nothing to do. To train longer, {longer}; to start over, set resume=never."
            )

    def load_checkpoint(self, planned: PlannedRun) -> GradientSync:
        """Load the base's weights into shards and initialize the other trainable parameters."""
        model, config = planned.model, planned.config
        gradient_sync = shard_and_load_(model, config, self.model_dir, self.world, planned.layout)
        self.init_trainable_(model)
        check_packing(model, config, self.world)
        return gradient_sync

    def start(self, planned: PlannedRun) -> Training:
        """Load the weights, restore the state that the run resumes from, and build the callbacks.

        Raises:
            CheckpointError: The checkpoint was saved by another run.
            DataError: The data is not that of the run.
        """
        config, run, world = planned.config, self.run, self.world
        elastic_s = choose_elastic_interval(planned.model, config, planned.layout, planned.num_steps, world)
        state = start_state(planned.model, config, planned.num_steps, self.load_checkpoint(planned))
        source = self.open_source(planned)
        weights = self.hf_weights(planned)
        weights.prepare(state.model)
        checkpointer = Checkpointer(state, weights, source, planned.facts, world)
        if run.resume is not None:
            checkpointer.restore_(run.resume)
        watch = HangWatch(
            run.directory.path,
            world.rank,
            run.record_hang,
            timeout_s=config.step_timeout_s,
            is_compiled=config.compile,
            write_timeout_s=config.checkpoint.save_timeout_s,
            num_ranks=world.world_size,
        )
        self._resources.callback(watch.close)
        evaluation = None if is_never(config.eval.every) else self._open_evaluation(planned)
        checkpoint = CheckpointCallback(
            config.checkpoint,
            checkpointer,
            run.store,
            world,
            fallback=run.fallback_store,
            guard=watch.guard,
            elastic_s=elastic_s,
        )
        stop = StopCallback(run.request, checkpoint, config.resume)
        callbacks: list[Callback] = [watch, stop, checkpoint]
        if evaluation is not None:
            callbacks.append(EvaluationCallback(config.eval, evaluation, state))
        if world.device.type == "cpu":
            callbacks.append(HostMemoryCallback())
        callbacks += self._user_callbacks
        for callback in callbacks[1:]:
            self._resources.callback(callback.close)
        return Training(planned, state, source, watch, checkpoint, stop, tuple(callbacks))

    def begin(self, training: Training) -> None:
        """Begin the run in its directory; from here on, a request stops it after a step."""
        resume = self.run.resume
        self.run.begin()
        if resume is not None and resume.state["world_size"] != self.world.world_size:
            logger.info("world size: was %d, is %d", resume.state["world_size"], self.world.world_size)
            training.checkpoint.save("elastic", training.state.step)
        self.run.request.start_training()

    def _open_evaluation(self, planned: PlannedRun) -> LiveEvaluation:
        """Return the evaluation of the model in training.

        Raises:
            ConfigError: The model that answers does not fit on the GPUs.
            DataError: No case is held out.
        """
        config, prepared = planned.config, planned.data.prepared
        check_memory_to_answer(
            *(planned.model, self.world, "eval.every"),
            remedy="Set eval.every=0 and evaluate the run's export with fctune eval",
        )
        cases = None
        if config.eval.cases == VALIDATION_CASES:
            assert prepared is not None  # the config's check
            cases = distributed.run_on_rank_0(lambda: find_held_out_cases(config.data, prepared, config.eval.max_cases))
        switches = config.model.template_args
        return LiveEvaluation(config.eval, self.model_dir, self.world, switches, self.chat_template, cases)

    def _stop_if_requested(self) -> None:
        """Save and stop as after a step, while training waits for something else.

        Raises:
            Stopped: A stop was requested.
        """
        if self._training is not None:
            self._training.stop.on_step_end(self.step, is_last=False)

    def train(self) -> None:
        """Take all steps of the run that are left; none after an early stop.

        Raises:
            DataError: None of them has changed the weights.
        """
        training, directory = self.training, self.run.directory
        planned = training.planned
        if is_patience_exhausted(planned.config.eval, training.state.best):  # a resumed run that lacks its exports
            logger.info("stopped early before; eval.early_stop allows no further steps after step %d", self.step)
            return
        hours = directory.gpu_hours()
        with self.open_sinks(planned, training.watch.guard) as sinks:
            train(
                *(planned.config, training.state, planned.data.loader, planned.num_steps, self.world, sinks),
                callbacks=training.callbacks,
                gpu_hours=hours,
                objective=self.objective(),
                source=training.source,
            )
        steps = MetricsFile(directory.metrics)
        if (reason := distributed.run_on_rank_0(lambda: self.describe_nothing_learned(steps))) is not None:
            raise DataError(reason)

    def describe_nothing_learned(self, steps: MetricsFile) -> str | None:
        """Return why no step has changed the weights; None if one did, or if the file lacks the run's first steps."""
        steps.update()
        norms = steps.column("grad_norm")
        if not steps.steps or steps.steps[0] != 1 or any(norm is not None for norm in norms):
            return None
        return (
            f"nothing was learned: loss or gradient norm was not finite in all of {format_count(len(norms), 'step')}, "
            "which were skipped. Lower optimizer.lr; on_nonfinite=stop ends the run at the first such step."
        )

    def save_checkpoint(self) -> None:
        """Save the last checkpoint and write the exports, waiting for space or using the other disk if there is none.

        Raises:
            SaveError: Some of it cannot be written.
        """
        started = time.perf_counter()
        training, directory = self.training, self.run.directory
        planned, checkpoint = training.planned, training.checkpoint
        wait = DiskWait(planned.config.checkpoint.max_wait_s, lambda: self.run.request.reason is not None)
        failure: SaveError | None = None
        try:
            checkpoint.finish(self.step, wait)
        except SaveError as error:
            failure = error
        saved = time.perf_counter()
        exports = self.exports(planned)
        problems = [problem for name, write in exports.items() if (problem := self._export(name, write, wait))]
        if problems:
            raise self._describe_missing(problems)
        if failure is not None:
            raise SaveError(f"training is complete and exported, but {failure}", failure.checkpoint)
        if self.world.is_main:
            if (prepared := planned.data.prepared) is not None:
                try:
                    write_held_out_cases(planned.config.data, prepared, directory.path)
                except OSError as error:  # a full disk, on which the export has just found room
                    logger.error("%s: the held-out cases cannot be written (%s)", directory.path, error.strerror)
            directory.describe(
                closing={"save_s": saved - started, "export_s": time.perf_counter() - saved},
                response_template=check_response_template(planned, [directory.export / name for name in exports]),
            )

    def _export(self, name: str, write: Callable[[Path], None], wait: DiskWait) -> str | None:
        """Write an export to the run's directory or the other disk; returns why it cannot be written."""
        folder, fallback = self.run.directory.export, self.run.fallback_dir
        watch, model = self.training.watch, self.training.model
        limit_s = first_write_limit(sum(p.numel() * p.element_size() for p in model.parameters()))

        def try_in(folder: Path) -> str | None:
            try:
                with watch.guard(f"writing {folder / name}", limit_s):
                    distributed.run_on_all_ranks(lambda: write(folder / name))
            except DiskError as error:
                return str(error)
            return None

        if self.world.is_main and (folder / name).is_symlink():  # to the other disk, by an earlier launch
            (folder / name).unlink()
        while (problem := try_in(folder)) is not None:
            if not wait.pause(problem.removesuffix(".")):
                break
        if problem is None or fallback is None:
            return problem
        if (another := try_in(fallback / "export")) is not None:
            return f"{problem} {another}"
        logger.info("%s is written to %s", name, fallback / "export" / name)
        if self.world.is_main:
            with contextlib.suppress(OSError):  # the disk has no room for the link either
                folder.mkdir(exist_ok=True)
                (folder / name).symlink_to((fallback / "export" / name).resolve())
        return None

    def _describe_missing(self, problems: Sequence[str]) -> SaveError:
        safe = self.training.checkpoint.describe_safe()
        return SaveError(
            f"training is complete, but not exported: {' '.join(problems)} {safe} Free some "
            f"space in {self.run.directory.path}, or set checkpoint.fallback_dir to a directory on another disk, and "
            "re-run the same command: it resumes from there and writes the export.",
            self.run.newest_checkpoint(),
        )

    def suggest_less_memory(self) -> str:
        """Return what the planner would change to need less memory."""
        config = self.requested_config if self._training is None else self._training.config
        return suggest_less_memory(config, self.model_dir, self.world)

    def cleanup(self) -> None:
        """Wait for a running save and release threads and signal handlers."""
        self._resources.close()
