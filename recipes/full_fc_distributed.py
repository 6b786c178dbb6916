"""Fine-tune all weights of a chat model to call functions, on any number of processes from one, CPU or CUDA.

    tune run --nproc_per_node 2 recipes/full_fc_distributed --config configs/tiny_full.yaml [key=value ...]

What this recipe decides: every weight trains, each starts as the base's and must be there, and what is kept is the
model.
"""

import sys

from torchtune.recipe_interfaces import FTRecipeInterface

from fctune.checkpoint.portable import PortableModel
from fctune.config import RunConfig
from fctune.errors import ConfigError
from fctune.modeling.export import export_merged
from fctune.modeling.hub import resolve_model_dir
from fctune.training import distributed
from fctune.training.distributed import World
from fctune.training.entry import run_recipe
from fctune.training.loop import count_steps, train
from fctune.training.run import Run, start_keeping
from fctune.training.state import build_base, lay_out_, open_sinks, place_, prepare_data, start_state


class FullFunctionCallingRecipe(FTRecipeInterface):
    """All weights over the ranks; the loop and the step are the library's."""

    def __init__(self, config: RunConfig, world: World, run: Run):
        if config.adapter is not None:
            raise ConfigError(
                "adapter: this recipe trains all weights. Leave it out (~adapter), or run recipes/lora_fc_distributed."
            )
        self.config, self.world, self.run = config, world, run
        self.state = self.keeper = None

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return 0 if self.state is None else self.state.step

    def setup(self) -> None:
        """The model's shape, which costs nothing; the data, where most runs that fail do; then weights into shards."""
        self.model_dir = distributed.on_main(lambda: resolve_model_dir(self.config.model.path))
        self.model = build_base(self.config, self.model_dir, self.world)
        lay_out_(self.model, self.config, self.world)
        self.prepared = prepare_data(self.config, self.model_dir, self.world)
        self.num_steps = count_steps(self.config, self.prepared, self.world)
        if self.world.is_main:
            self.run.directory.describe(num_steps=self.num_steps, data=self.prepared.describe())
        self.load_checkpoint()
        self.state = start_state(self.model, self.config, self.num_steps)
        self.keeper = start_keeping(
            self.config,
            self.run,
            self.state,
            self.prepared,
            self.model_dir,
            self.num_steps,
            PortableModel(self.model.architecture, self.model_dir),
            self.world,
        )
        self.sinks = open_sinks(self.config, self.run.directory, self.num_steps, self.world)

    def load_checkpoint(self) -> None:
        """The base's weights into the shards."""
        place_(self.model, self.config, self.model_dir, self.world)

    def train(self) -> None:
        """All steps of the run."""
        with self.sinks:
            train(self.config, self.state, self.prepared, self.num_steps, self.world, self.sinks, self.keeper)

    def save_checkpoint(self) -> None:
        """The last checkpoint, and the model for whoever serves it, where the LoRA recipe leaves its merged one."""
        self.keeper.finish(self.state.step)
        export_merged(self.model, self.model_dir, self.run.directory.export / "merged", self.world.is_main)

    def cleanup(self) -> None:
        """Wait for a save that still runs."""
        if self.keeper is not None:
            self.keeper.close()


def main() -> int:
    """Run the recipe from the command line."""
    return run_recipe(FullFunctionCallingRecipe, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
