"""Steps of a fine-tuning run, shared by all recipes; a recipe chooses the trained parameters and the exports."""

from __future__ import annotations

import contextlib
import logging
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fctune.base import distributed
from fctune.base.distributed import World
from fctune.base.errors import ConfigError, DataError, DiskError
from fctune.checkpoint.hf_checkpoint import HFWeights
from fctune.checkpoint.resume import RunFacts, check_same_run
from fctune.checkpoint.saver import first_write_limit
from fctune.checkpoint.state import Checkpointer, DataCursor, TrainState
from fctune.config.intervals import format_count, is_never
from fctune.config.recipes import find_recipe_problem
from fctune.config.schema import RunConfig
from fctune.config.sections.evaluation import VALIDATION_CASES
from fctune.data.chosen_template import ChosenTemplate, read_chosen_template
from fctune.data.loader import GlobalLoader
from fctune.data.prepared_set import PreparedSet
from fctune.models.causal_lm import CausalLM
from fctune.models.export import Prompting
from fctune.models.hub import WEIGHT_FILES, digest_model
from fctune.models.run_config import resolve_base
from fctune.models.token_rows import count_parameters, trained_token_ids
from fctune.parallel.layout import ParallelLayout
from fctune.parallel.sharding import GradientSync
from fctune.runs.device import total_memory
from fctune.runs.directory import installed_versions
from fctune.runs.record import MetricsFile
from fctune.runs.sinks import SinkGroup
from fctune.tasks.evaluation.held_out import find_held_out_cases, write_held_out_cases
from fctune.tasks.evaluation.live import LiveEvaluation, check_answering_memory
from fctune.training.callbacks.base import Callback, make_callbacks
from fctune.training.callbacks.checkpoint import CheckpointCallback, DiskWait, SaveError
from fctune.training.callbacks.evaluation import EvaluationCallback
from fctune.training.callbacks.hang_watch import HangWatch
from fctune.training.callbacks.stop import StopCallback
from fctune.training.entry import AlreadyComplete, Run
from fctune.training.host_memory import HostMemoryCallback
from fctune.training.loop import build_loader, count_steps, train
from fctune.training.objective import Objective, SupervisedObjective
from fctune.training.out_of_memory import MemorySnapshot, suggest_less_memory
from fctune.training.prefetch import StepSource
from fctune.training.setup import (
    build_base,
    check_packing,
    check_space,
    check_weights,
    choose_batch_size,
    open_sinks,
    plan_parallelism,
    prepare_data,
    record_checkpointing,
    shard_and_load_,
    start_state,
    warn_of_length,
)

logger = logging.getLogger("fctune")


class FineTuning(ABC):
    """A fine-tuning run: torchtune's recipe interface over the library's training loop.

    Attributes:
        name: Name of the recipe's file; it runs the configs that ``RunConfig.recipe`` gives this name.
    """

    name: str
    model_dir: Path
    model: CausalLM
    layout: ParallelLayout
    prepared: PreparedSet
    loader: GlobalLoader
    num_steps: int
    sinks: SinkGroup
    facts: RunFacts
    watch: HangWatch
    checkpoint: CheckpointCallback

    def __init__(self, config: RunConfig, world: World, run: Run):
        if (problem := find_recipe_problem(self.name, config.recipe)) is not None:
            raise ConfigError(problem)
        self.config, self.world, self.run = config, world, run
        self.model_dir = Path(config.model.path)
        self.chat_template: ChosenTemplate | None = None
        self.state: TrainState | None = None
        self.snapshot: MemorySnapshot | None = None
        self.source: StepSource | None = None
        self.user_callbacks = make_callbacks(config)
        self.callbacks: list[Callback] = []

    @abstractmethod
    def select_trainable_(self) -> None:
        """Select the trainable parameters of the unsharded, weightless model, in place."""

    @abstractmethod
    def select_tokens_(self) -> None:
        """Select the token rows that train, which depend on the prepared data, in place."""

    @abstractmethod
    def init_trainable_(self) -> None:
        """Initialize trainable parameters that are not the base's, in place."""

    @abstractmethod
    def hf_weights(self) -> HFWeights:
        """Return the Hugging Face form of the trainable weights in elastic checkpoints."""

    @abstractmethod
    def exports(self) -> dict[str, Callable[[Path], None]]:
        """Return the functions that write the run's exports to a path, by name; every rank calls each in turn."""

    def objective(self) -> Objective:
        """Return the loss of a training step: by default that of the supervised tokens."""
        return SupervisedObjective()

    @property
    def step(self) -> int:
        """Number of optimizer steps taken so far."""
        return 0 if self.state is None else self.state.step

    def setup(self) -> None:
        """Build the model without weights, prepare the data, then load weights into shards and resume.

        What is checked in an instant comes first, and data before weights, because most runs that fail, fail there.
        Nothing of an earlier run in the directory changes before all checks have passed.

        Raises:
            AlreadyComplete: There is nothing left to do.
        """
        self.model_dir = distributed.run_on_rank_0(lambda: resolve_base(self.config))
        self.chat_template = distributed.run_on_rank_0(lambda: read_chosen_template(self.config.model))
        keeps_history = self.config.profile is not None and self.config.profile.allocations
        self.snapshot = MemorySnapshot(self.run.directory.path, self.world, keeps_history)
        self.model = build_base(self.config, self.model_dir, self.world)
        check_weights(self.model, self.model_dir)
        self.select_trainable_()
        self.prepared = self.prepare()
        self.config = choose_batch_size(self.config, self.prepared)
        self.select_tokens_()
        self.layout = plan_parallelism(self.model, self.config, self.world)
        requested_config, self.config = self.config, record_checkpointing(self.config, self.layout)
        self.loader = self.build_loader()
        self.num_steps = self.count_steps()
        warn_of_length(self.config, self.prepared, self.num_steps, self.world)
        self.facts = self.collect_facts()
        self.check_resumed()
        check_space(
            *(self.model, self.config, self.run.directory, self.num_steps, self.world), is_resumed=self.run.resumes_own
        )
        hosts = distributed.all_gather_objects(platform.node())
        if self.world.is_main:
            details: dict[str, Any] = {"parameters": count_parameters(self.model)}
            if self.model.state_layers:
                details["state_layers"] = self.model.state_layers
            is_chosen = requested_config.activation_checkpointing.fraction is None
            if is_chosen or requested_config.global_batch_tokens is not None:
                details["config"] = self.config.to_dict()
            self.run.directory.describe(num_steps=self.num_steps, data=self.prepared.describe(), hosts=hosts, **details)
        gradient_sync = self.load_checkpoint()
        self.state = start_state(self.model, self.config, self.num_steps, gradient_sync)
        self.start_callbacks(self.state)
        self.sinks = open_sinks(
            *(self.config, self.run.directory, self.num_steps, self.world, hosts), guard=self.watch.guard
        )
        for callback in self.callbacks:
            callback.on_start(self)

    def prompting(self) -> Prompting:
        """Return the chat template and switches that exports and elastic checkpoints carry."""
        has_reasoning = self.prepared.counts.reasoning > 0
        return Prompting(self.chat_template, self.config.model.template_args, has_reasoning)

    def prepare(self) -> PreparedSet:
        """Return the prepared set of the training rows."""
        return prepare_data(self.config, self.model_dir, self.chat_template, self.world)

    def build_loader(self) -> GlobalLoader:
        """Build the loader of the training split."""
        return build_loader(self.config, self.prepared)

    def count_steps(self) -> int:
        """Return the number of optimizer steps of the run."""
        return count_steps(self.config, self.loader, self.world)

    def open_source(self) -> StepSource | None:
        """Return the source of the steps' data; None for the loader."""
        return None

    def load_checkpoint(self) -> GradientSync:
        """Load the base's weights into shards and initialize the other trainable parameters."""
        gradient_sync = shard_and_load_(self.model, self.config, self.model_dir, self.world, self.layout)
        self.init_trainable_()
        check_packing(self.model, self.config, self.world)
        return gradient_sync

    def check_answering_memory(self, key: str, remedy: str) -> None:
        """Check that the complete model, which answers, fits on each GPU next to the training state.

        Args:
            key: Config key that requests answers, for the message.
            remedy: What to do if it does not fit, for the message.

        Raises:
            ConfigError: It does not fit.
        """
        device = self.world.device
        if device.type == "cuda":
            used, memory = torch.cuda.memory_allocated(device), total_memory(device, 1)
            distributed.run_on_all_ranks(lambda: check_answering_memory(self.model, used, memory, key, remedy))

    def collect_facts(self) -> RunFacts:
        """Return what each checkpoint records of the run."""
        base_digest = distributed.run_on_rank_0(lambda: digest_model(self.model_dir, WEIGHT_FILES))
        token_ids = trained_token_ids(self.model)
        return RunFacts(self.config.to_dict(), base_digest, self.num_steps, installed_versions(), token_ids)

    def check_resumed(self) -> None:
        """Check that the checkpoint to resume from is of this run, and that there is something left to do.

        Raises:
            CheckpointError: The checkpoint was saved by another run.
            DataError: The data is not that of the run.
            AlreadyComplete: There is nothing left to do.
        """
        resume = self.run.resume
        if resume is None:
            return
        distributed.run_on_all_ranks(lambda: check_same_run(resume, self.facts))
        if self.config.grpo is None:
            distributed.run_on_all_ranks(lambda: self.loader.resume_at(resume.state["loader"]))
        best, patience = resume.state["best"], self.config.eval.early_stop
        is_stopped_early = patience is not None and best is not None and best["evaluations_since"] >= patience
        has_steps = resume.checkpoint.step < self.num_steps and not is_stopped_early
        directory, names = self.run.directory, self.exports()
        if not has_steps and self.run.resumes_own and distributed.run_on_rank_0(lambda: directory.is_complete(names)):
            raise AlreadyComplete(
                f"{directory.path}: already complete after step {resume.checkpoint.step}, and exported to "
                f"{directory.export}; nothing to do. To train longer, raise epochs or max_steps; to start over, set "
                "resume=never."
            )

    def start_callbacks(self, state: TrainState) -> None:
        """Restore the state that the run resumes from, in place, begin the run and start the callbacks.

        Raises:
            CheckpointError: The checkpoint was saved by another run.
            DataError: The data is not that of the run.
        """
        config, run, world = self.config, self.run, self.world
        self.source = self.open_source()
        data = self.source if isinstance(self.source, DataCursor) else self.loader
        checkpointer = Checkpointer(state, self.hf_weights(), data, self.facts, world)
        if run.resume is not None:
            checkpointer.restore_(run.resume)

        self.watch = HangWatch(
            *(run.directory.path, world.rank, run.record_hang, config.step_timeout_s, config.compile),
            write_timeout_s=config.checkpoint.save_timeout_s,
        )
        evaluation = None
        if not is_never(config.eval.every):
            switches = config.model.template_args
            self.check_answering_memory("eval.every", "Set eval.every=0 and evaluate the run's export with fctune eval")
            cases = None
            if config.eval.cases == VALIDATION_CASES:
                cases = distributed.run_on_rank_0(
                    lambda: find_held_out_cases(config.data, self.prepared, config.eval.max_cases)
                )
            evaluation = LiveEvaluation(config.eval, self.model_dir, world, switches, self.chat_template, cases)
        self.checkpoint = CheckpointCallback(
            *(config.checkpoint, checkpointer, run.store, world), fallback=run.fallback_store, guard=self.watch.guard
        )
        self.callbacks = [self.watch, StopCallback(run.request, self.checkpoint), self.checkpoint]
        if evaluation is not None:
            self.callbacks.append(EvaluationCallback(config.eval, evaluation, state))
        if world.device.type == "cpu":
            self.callbacks.append(HostMemoryCallback())
        self.callbacks += self.user_callbacks
        run.begin()
        if run.resume is not None and run.resume.state["world_size"] != world.world_size:
            logger.info("world size: was %d, is %d", run.resume.state["world_size"], world.world_size)
            self.checkpoint.save("elastic", state.step)
        run.request.start_training()

    def train(self) -> None:
        """Take all steps of the run.

        Raises:
            DataError: None of them has changed the weights.
        """
        assert self.state is not None
        hours = self.run.directory.gpu_hours()
        with self.sinks:
            train(
                *(self.config, self.state, self.loader, self.num_steps, self.world, self.sinks, self.callbacks),
                gpu_hours=hours,
                objective=self.objective(),
                source=self.source,
            )
        steps = MetricsFile(self.run.directory.metrics)
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
        wait = DiskWait(self.config.checkpoint.max_wait_s, lambda: self.run.request.reason is not None)
        failure: SaveError | None = None
        try:
            self.checkpoint.finish(self.step, wait)
        except SaveError as error:
            failure = error
        saved = time.perf_counter()
        problems = [problem for name, write in self.exports().items() if (problem := self._export(name, write, wait))]
        if problems:
            raise self._describe_missing(problems)
        if failure is not None:
            raise SaveError(f"training is complete and exported, but {failure}", failure.checkpoint)
        if self.world.is_main:
            folder = self.run.directory.path
            try:
                write_held_out_cases(self.config.data, self.prepared, folder)
            except OSError as error:  # a full disk, on which the export has just found room
                logger.error("%s: the held-out cases cannot be written (%s)", folder, error.strerror)
            self.run.directory.describe(closing={"save_s": saved - started, "export_s": time.perf_counter() - saved})

    def _export(self, name: str, write: Callable[[Path], None], wait: DiskWait) -> str | None:
        """Write an export to the run's directory or the other disk; returns why it cannot be written."""
        folder, fallback = self.run.directory.export, self.run.fallback_dir
        limit_s = first_write_limit(sum(p.numel() * p.element_size() for p in self.model.parameters()))

        def try_in(folder: Path) -> str | None:
            try:
                with self.watch.guard(f"writing {folder / name}", limit_s):
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
        return SaveError(
            f"training is complete, but not exported: {' '.join(problems)} {self.checkpoint.describe_safe()} Free some "
            f"space in {self.run.directory.path}, or set checkpoint.fallback_dir to a directory on another disk, and "
            "re-run the same command: it resumes from there and writes the export.",
            self.run.newest_checkpoint(),
        )

    def suggest_less_memory(self) -> str:
        """Return what the planner would change to need less memory."""
        return suggest_less_memory(self.config, self.model_dir, self.world)

    def cleanup(self) -> None:
        """Wait for a running save and release threads and signal handlers."""
        for callback in reversed(self.callbacks):
            callback.close()
