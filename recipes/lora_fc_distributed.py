"""Fine-tune a chat model to call functions with LoRA, on any number of processes from one, CPU or CUDA.

    tune run --nproc_per_node 2 recipes/lora_fc_distributed --config configs/tiny_lora.yaml [key=value ...]

What this recipe decides: adapters alone train, they start as noise and zero so that the model starts as its base, the
base's weights must all be there, and what is kept is the merged model and the adapter.
"""

import sys

from torchtune.recipe_interfaces import FTRecipeInterface

from fctune.checkpoint.portable import PortableAdapter
from fctune.config import RunConfig
from fctune.errors import ConfigError
from fctune.modeling.export import export_adapter, export_merged
from fctune.modeling.hub import resolve_model_dir
from fctune.modeling.lora import apply_lora_, init_adapters_
from fctune.training import distributed
from fctune.training.distributed import World
from fctune.training.entry import run_recipe
from fctune.training.loop import count_steps, train
from fctune.training.run import Run, start_keeping
from fctune.training.state import build_base, lay_out_, open_sinks, place_, prepare_data, start_state


class LoRAFunctionCallingRecipe(FTRecipeInterface):
    """Adapters over the ranks; the loop and the step are the library's."""

    def __init__(self, config: RunConfig, world: World, run: Run):
        if config.adapter is None:
            raise ConfigError("adapter: missing; this recipe trains adapters. Add e.g. adapter: {rank: 16, alpha: 32}.")
        self.config, self.world, self.run, self.adapter = config, world, run, config.adapter
        self.state = self.keeper = None

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return 0 if self.state is None else self.state.step

    def setup(self) -> None:
        """The model's shape, which costs nothing; the data, where most runs that fail do; then weights into shards."""
        self.model_dir = distributed.on_main(lambda: resolve_model_dir(self.config.model.path))
        self.model = build_base(self.config, self.model_dir, self.world)
        apply_lora_(self.model, self.adapter)
        lay_out_(self.model, self.config, self.world)
        self.prepared = prepare_data(self.config, self.model_dir, self.world)
        self.num_steps = count_steps(self.config, self.prepared, self.world)
        if self.world.is_main:
            self.run.directory.describe(num_steps=self.num_steps, data=self.prepared.describe())
        self.load_checkpoint()
        self.state = start_state(self.model, self.config, self.num_steps)
        adapter = PortableAdapter(self.model.architecture, self.adapter, self.config.model.path, self.model_dir)
        self.keeper = start_keeping(
            self.config,
            self.run,
            self.state,
            self.prepared,
            self.model_dir,
            self.num_steps,
            adapter,
            self.world,
        )
        self.sinks = open_sinks(self.config, self.run.directory, self.num_steps, self.world)

    def load_checkpoint(self) -> None:
        """The base's weights into the shards; fresh adapters beside them."""
        place_(self.model, self.config, self.model_dir, self.world)
        init_adapters_(self.model, self.config.seed)

    def train(self) -> None:
        """All steps of the run."""
        with self.sinks:
            train(self.config, self.state, self.prepared, self.num_steps, self.world, self.sinks, self.keeper)

    def save_checkpoint(self) -> None:
        """The last checkpoint; the merged model for whoever serves it, the adapter for whoever has the base."""
        self.keeper.finish(self.state.step)
        writes, out = self.world.is_main, self.run.directory.export
        export_merged(self.model, self.model_dir, out / "merged", writes)
        export_adapter(self.model, self.adapter, self.config.model.path, self.model_dir, out / "adapter", writes)

    def cleanup(self) -> None:
        """Wait for a save that still runs."""
        if self.keeper is not None:
            self.keeper.close()


def main() -> int:
    """Run the recipe from the command line."""
    return run_recipe(LoRAFunctionCallingRecipe, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
