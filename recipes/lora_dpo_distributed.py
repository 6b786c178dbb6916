"""Train LoRA adapters on preference pairs (DPO, IPO, SimPO, ORPO), on any number of processes from one, CPU or CUDA.

    tune run --nproc_per_node 2 recipes/lora_dpo_distributed --config configs/tiny_dpo.yaml [key=value ...]

This recipe decides that only adapters train (``fctune/training/adapters.py``), on the loss of the ``preference``
section (``fctune/training/preference.py``), whose reference is the base with its adapter switched off. To continue from
a supervised run, make its merged export the base. The order of a run is in ``fctune/training/recipe.py``.
"""

import sys

from fctune.training.adapters import AdapterTuning
from fctune.training.entry import run_recipe
from fctune.training.preference import PreferenceObjective

# isort: split
# After fctune, which silences a warning of torchao, one of its imports.
from torchtune.recipe_interfaces import FTRecipeInterface


class LoRAPreferenceRecipe(AdapterTuning, FTRecipeInterface):
    """Trains LoRA adapters on preference pairs."""

    name = "lora_dpo_distributed"

    def objective(self) -> PreferenceObjective:
        """Return the loss of preference pairs."""
        assert self.requested_config.preference is not None
        return PreferenceObjective(self.requested_config.preference)


def main() -> int:
    """Run the recipe from the command line."""
    return run_recipe(LoRAPreferenceRecipe, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
