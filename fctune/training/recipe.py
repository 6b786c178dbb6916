"""The order of a fine-tuning run, once; what differs between recipes is theirs to fill in."""

from __future__ import annotations

import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from fctune import distributed
from fctune.checkpoint.portable import Portable
from fctune.config.schema import RunConfig
from fctune.data.prepared_set import PreparedSet
from fctune.distributed import World
from fctune.models.hub import resolve_model_dir
from fctune.models.torchtune.build import CausalLM
from fctune.telemetry.sinks import SinkGroup
from fctune.training.keeper import Keeper
from fctune.training.loop import TrainState, count_steps, train
from fctune.training.out_of_memory import MemorySnapshot, suggest_less_memory
from fctune.training.run import Run, start_keeping
from fctune.training.setup import build_base, open_sinks, plan_parallelism, prepare_data, shard_and_load_, start_state


class FineTuning(ABC):
    """A run of a recipe: torchtune's recipe interface over the library's loop."""

    model_dir: Path
    model: CausalLM
    prepared: PreparedSet
    num_steps: int
    sinks: SinkGroup

    def __init__(self, config: RunConfig, world: World, run: Run):
        self.config, self.world, self.run = config, world, run
        self.model_dir = Path(config.model.path)
        self.state: TrainState | None = None
        self.snapshot: MemorySnapshot | None = None
        self.keeper: Keeper | None = None

    @abstractmethod
    def select_trainable_(self) -> None:
        """Decide which parameters of the shaped model train, in place."""

    @abstractmethod
    def init_trainable_(self) -> None:
        """Give values to what trains and is not of the base, in place."""

    @abstractmethod
    def portable(self) -> Portable:
        """The form of what trains in an elastic checkpoint."""

    @abstractmethod
    def exports(self) -> Sequence[Callable[[], None]]:
        """What writes each thing that is left for others at the end; all ranks call them in turn."""

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return 0 if self.state is None else self.state.step

    def setup(self) -> None:
        """The model's shape, which costs nothing; the data, where most runs that fail do; then weights into shards."""
        self.model_dir = distributed.run_on_rank_0(lambda: resolve_model_dir(self.config.model.path))
        keeps_history = self.config.profile is not None and self.config.profile.allocations
        self.snapshot = MemorySnapshot(self.run.directory.path, self.world, keeps_history)
        self.model = build_base(self.config, self.model_dir, self.world)
        self.select_trainable_()
        plan_parallelism(self.model, self.config, self.world)
        self.prepared = prepare_data(self.config, self.model_dir, self.world)
        self.num_steps = count_steps(self.config, self.prepared, self.world)
        hosts = distributed.all_gather_objects(platform.node())
        if self.world.is_main:
            self.run.directory.describe(num_steps=self.num_steps, data=self.prepared.describe(), hosts=hosts)
        self.load_checkpoint()
        self.state = start_state(self.model, self.config, self.num_steps)
        self.keeper = start_keeping(
            self.config,
            self.run,
            self.state,
            self.prepared,
            self.model_dir,
            self.num_steps,
            self.portable(),
            self.world,
        )
        self.sinks = open_sinks(self.config, self.run.directory, self.num_steps, self.world, hosts)

    def load_checkpoint(self) -> None:
        """The base's weights into the shards, and what trains beside them."""
        shard_and_load_(self.model, self.config, self.model_dir, self.world)
        self.init_trainable_()

    def train(self) -> None:
        """All steps of the run."""
        assert self.state is not None
        hours = self.run.directory.gpu_hours()
        with self.sinks:
            train(self.config, self.state, self.prepared, self.num_steps, self.world, self.sinks, self.keeper, hours)

    def save_checkpoint(self) -> None:
        """The last checkpoint, and what is left for others."""
        assert self.keeper is not None
        started = time.perf_counter()
        self.keeper.finish(self.step)
        saved = time.perf_counter()
        for export in self.exports():
            distributed.run_on_all_ranks(export)
        if self.world.is_main:
            self.run.directory.describe(closing={"save_s": saved - started, "export_s": time.perf_counter() - saved})

    def suggest_less_memory(self) -> str:
        """What the planner would change where memory was too little."""
        return suggest_less_memory(self.config, self.model_dir, self.world)

    def cleanup(self) -> None:
        """Wait for a save that still runs."""
        if self.keeper is not None:
            self.keeper.close()
