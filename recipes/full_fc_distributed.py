"""Fine-tune all weights of a chat model to call functions, on any number of processes from one, CPU or CUDA.

    tune run --nproc_per_node 2 recipes/full_fc_distributed --config configs/tiny_full.yaml [key=value ...]

What this recipe decides: every weight trains, each starts as the base's and must be there, and what is kept is the
model. The order of a run is in ``fctune/training/recipe.py``.
"""

import sys
from collections.abc import Callable

from torchtune.recipe_interfaces import FTRecipeInterface

from fctune.checkpoint.portable import PortableModel
from fctune.config.schema import RunConfig
from fctune.distributed import World
from fctune.errors import ConfigError
from fctune.models.export import export_merged
from fctune.training.entry import run_recipe
from fctune.training.recipe import FineTuning
from fctune.training.run import Run


class FullFunctionCallingRecipe(FineTuning, FTRecipeInterface):
    """All weights over the ranks; the loop and the step are the library's."""

    def __init__(self, config: RunConfig, world: World, run: Run):
        if config.adapter is not None:
            raise ConfigError(
                "adapter: this recipe trains all weights. Leave it out (~adapter), or run recipes/lora_fc_distributed."
            )
        super().__init__(config, world, run)

    def select_trainable_(self) -> None:
        """All of them, as the model is built."""

    def init_trainable_(self) -> None:
        """All are of the base."""

    def portable(self) -> PortableModel:
        """The model, as Hugging Face has it."""
        return PortableModel(self.model.architecture, self.model_dir)

    def exports(self) -> list[Callable[[], None]]:
        """The model for whoever serves it, where the LoRA recipe leaves its merged one."""
        out = self.run.directory.export / "merged"
        return [lambda: export_merged(self.model, self.model_dir, out, self.world.is_main)]


def main() -> int:
    """Run the recipe from the command line."""
    return run_recipe(FullFunctionCallingRecipe, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
