"""Fine-tune a chat model to call functions with LoRA, on any number of processes from one, CPU or CUDA.

    tune run --nproc_per_node 2 recipes/lora_fc_distributed --config configs/tiny_lora.yaml [key=value ...]

This recipe decides that only adapters train, starting from a model equal to its base (``fctune/training/adapters.py``),
on the supervised tokens of conversations. The order of a run is in ``fctune/training/recipe.py``.
"""

import sys

from fctune.config.schema import RunConfig
from fctune.distributed import World
from fctune.errors import ConfigError
from fctune.training.adapters import AdapterTuning
from fctune.training.entry import Run, run_recipe

# isort: split
# After fctune, which silences a warning of torchao, one of its imports.
from torchtune.recipe_interfaces import FTRecipeInterface


class LoRAFunctionCallingRecipe(AdapterTuning, FTRecipeInterface):
    """Trains LoRA adapters on a frozen base."""

    def __init__(self, config: RunConfig, world: World, run: Run):
        if config.preference is not None:
            raise ConfigError(
                "preference: this recipe trains on conversations. Remove it (~preference), or run "
                "recipes/lora_dpo_distributed."
            )
        if config.grpo is not None:
            raise ConfigError(
                "grpo: this recipe trains on conversations. Remove it (~grpo), or run recipes/lora_grpo_distributed."
            )
        super().__init__(config, world, run)


def main() -> int:
    """Run the recipe from the command line."""
    return run_recipe(LoRAFunctionCallingRecipe, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
