"""Fine-tune all weights of a chat model to call functions, on any number of processes from one, CPU or CUDA.

    tune run --nproc_per_node 2 recipes/full_fc_distributed --config configs/tiny_full.yaml [key=value ...]

This recipe decides that every weight trains from the base's value, and that the model is exported
(``fctune/training/full_weights.py``). The order of a run is in ``fctune/training/recipe.py``.
"""

import sys

from fctune.training.entry import run_recipe
from fctune.training.full_weights import FullTuning

# isort: split
# After fctune, which silences a warning of torchao, one of its imports.
from torchtune.recipe_interfaces import FTRecipeInterface


class FullFunctionCallingRecipe(FullTuning, FTRecipeInterface):
    """Trains all weights of a base on supervised rows."""

    name = "full_fc_distributed"


def main() -> int:
    """Run the recipe from the command line."""
    return run_recipe(FullFunctionCallingRecipe, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
