"""A run whose data, layout and steps are decided and checked, before any weights are loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune.base.distributed import World
from fctune.checkpoint.resume import Resume, RunFacts
from fctune.config.schema import RunConfig
from fctune.data.chosen_template import ChosenTemplate
from fctune.data.loader import GlobalLoader
from fctune.data.prepared_set import PreparedSet
from fctune.models.causal_lm import CausalLM
from fctune.models.export import Prompting
from fctune.parallel.layout import ParallelLayout
from fctune.training.entry import Run
from fctune.training.loop import build_loader, count_steps
from fctune.training.prefetch import Prefetcher, ResumableSource
from fctune.training.setup import choose_batch_size, prepare_data


class TrainingData(ABC):
    """The rows of a prepared set, or the tasks for the model to answer, that a run trains on.

    Attributes:
        loader: Loader of the rows' training split; None for tasks.
    """

    loader: GlobalLoader | None

    @property
    def prepared(self) -> PreparedSet | None:
        """Prepared set of the rows; None for tasks."""
        return None if self.loader is None else self.loader.prepared

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what run.json records of the data."""

    @abstractmethod
    def count_steps(self, config: RunConfig, world: World) -> int:
        """Return the number of optimizer steps of the run."""

    @abstractmethod
    def check_resume(self, resume: Resume) -> None:
        """Check, before weights are loaded, that a checkpoint is of this data.

        Raises:
            DataError: It is not.
        """

    @abstractmethod
    def open_source(self, planned: PlannedRun, stop_if_requested: Callable[[], None]) -> ResumableSource:
        """Return the source of the steps' inputs. Every rank calls it, with the model in shards.

        Args:
            planned: The run.
            stop_if_requested: Ends the run as after a step; called while the source waits.
        """


class PreparedRows(TrainingData):
    """The rows of a prepared set."""

    def __init__(self, loader: GlobalLoader):
        self.loader: GlobalLoader = loader

    @property
    def prepared(self) -> PreparedSet:
        """Prepared set of the rows."""
        return self.loader.prepared

    def describe(self) -> dict[str, Any]:
        """Return the description of the prepared set."""
        return self.prepared.describe()

    def count_steps(self, config: RunConfig, world: World) -> int:
        """Return the steps of all epochs, at most ``max_steps``."""
        return count_steps(config, self.loader, world)

    def check_resume(self, resume: Resume) -> None:
        """Compare the data, the seed and the batch size with those of the checkpoint."""
        self.loader.resume_at(resume.state["loader"])

    def open_source(self, planned: PlannedRun, stop_if_requested: Callable[[], None]) -> ResumableSource:
        """Return the source that prefetches the loader's batches."""
        size, model = planned.config.micro_batch_packs, planned.model
        shape = model.make_bounds, planned.num_steps, model.context_group, model.row_cost
        return Prefetcher(self.loader, planned.world, size, *shape)


def open_prepared_rows(
    config: RunConfig, model_dir: Path, chat_template: ChosenTemplate | None, world: World
) -> tuple[RunConfig, PreparedRows]:
    """Return the rows that a config names, and the config with the packs of a step. Every rank calls it."""
    prepared = prepare_data(config, model_dir, chat_template, world)
    config = choose_batch_size(config, prepared)
    return config, PreparedRows(build_loader(config, prepared))


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run before its weights are loaded.

    Attributes:
        config: Config of the run, with the choices that the requested one left open.
        run: Its directory, and the checkpoint to resume from.
        world: This rank.
        model_dir: Hugging Face directory of the base.
        chat_template: Template of ``model.chat_template``; None is the base's own.
        model: Model on the meta device, with the parameters that train.
        data: What it trains on.
        layout: Layout over the ranks.
        num_steps: Last optimizer step.
        facts: What each checkpoint records of the run.
        hosts: Machine of each rank.
    """

    config: RunConfig
    run: Run
    world: World
    model_dir: Path
    chat_template: ChosenTemplate | None
    model: CausalLM
    data: TrainingData
    layout: ParallelLayout
    num_steps: int
    facts: RunFacts
    hosts: tuple[str, ...]

    @property
    def prompting(self) -> Prompting:
        """Chat template and switches that exports and elastic checkpoints carry."""
        prepared = self.data.prepared
        has_reasoning = prepared is not None and prepared.counts.reasoning > 0
        return Prompting(self.chat_template, self.config.model.template_args, has_reasoning)
