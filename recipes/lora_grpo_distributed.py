"""Train LoRA adapters on verdicts of the model's own answers (GRPO), on any number of processes from one, CPU or CUDA.

    tune run --nproc_per_node 2 recipes/lora_grpo_distributed --config configs/tiny_grpo.yaml [key=value ...]

This recipe decides that only adapters train, on the loss of the ``grpo`` section
(``fctune/training/policy_gradient.py``). What is asked and what generates is in ``fctune/training/reinforcement.py``,
and the order of a run in ``fctune/training/recipe.py``. To continue from a supervised run, make its merged export the
base.
"""

import sys

from fctune.training.entry import run_recipe
from fctune.training.reinforcement import PolicyTuning

# isort: split
# After fctune, which silences a warning of torchao, one of its imports.
from torchtune.recipe_interfaces import FTRecipeInterface


class LoRAPolicyRecipe(PolicyTuning, FTRecipeInterface):
    """Trains LoRA adapters on verdicts of the model's own answers."""

    name = "lora_grpo_distributed"


def main() -> int:
    """Run the recipe from the command line."""
    return run_recipe(LoRAPolicyRecipe, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
