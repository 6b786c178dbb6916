"""Fine-tune a chat model to call functions with LoRA, on any number of processes from one, CPU or CUDA.

    tune run --nproc_per_node 2 recipes/lora_fc_distributed --config configs/tiny_lora.yaml [key=value ...]

This recipe decides that only adapters train, starting from a model equal to its base (``fctune/training/adapters.py``),
on the supervised tokens of conversations. The order of a run is in ``fctune/training/recipe.py``.
"""

import sys

from fctune.training.adapters import AdapterTuning
from fctune.training.entry import run_recipe

# isort: split
# After fctune, which silences a warning of torchao, one of its imports.
from torchtune.recipe_interfaces import FTRecipeInterface


class LoRAFunctionCallingRecipe(AdapterTuning, FTRecipeInterface):
    """Trains LoRA adapters on a frozen base."""

    name = "lora_fc_distributed"


def main() -> int:
    """Run the recipe from the command line."""
    return run_recipe(LoRAFunctionCallingRecipe, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
