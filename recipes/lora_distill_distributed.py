"""Distill a teacher into LoRA adapters, on any number of processes from one, CPU or CUDA.

    tune run --nproc_per_node 2 recipes/lora_distill_distributed --config distill.yaml [key=value ...]

This recipe decides that LoRA adapters train, on the divergence from the teacher of the ``distill`` section
(``fctune/training/distillation.py``). The order of a run is in ``fctune/training/recipe.py``, a config in
``docs/reference/distillation.md``.
"""

import sys

from fctune.training.adapters import AdapterTuning
from fctune.training.distillation import DistillTuning
from fctune.training.entry import run_recipe

# isort: split
# After fctune, which silences a warning of torchao, one of its imports.
from torchtune.recipe_interfaces import FTRecipeInterface


class LoRADistillRecipe(DistillTuning, AdapterTuning, FTRecipeInterface):
    """Distills a teacher into LoRA adapters."""

    name = "lora_distill_distributed"


def main() -> int:
    """Run the recipe from the command line."""
    return run_recipe(LoRADistillRecipe, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
