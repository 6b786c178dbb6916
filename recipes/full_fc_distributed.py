"""Fine-tune all weights of a chat model to call functions, on any number of processes from one, CPU or CUDA.

    tune run --nproc_per_node 2 recipes/full_fc_distributed --config configs/tiny_full.yaml [key=value ...]

This recipe decides that every weight trains from the base's value, and that the model is exported. The order of a run
is in ``fctune/training/recipe.py``.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from fctune.checkpoint.hf_checkpoint import HFModelWeights
from fctune.models.causal_lm import CausalLM
from fctune.models.export import export_merged
from fctune.training.entry import run_recipe
from fctune.training.planned_run import PlannedRun, TrainingData
from fctune.training.recipe import FineTuning

# isort: split
# After fctune, which silences a warning of torchao, one of its imports.
from torchtune.recipe_interfaces import FTRecipeInterface


class FullFunctionCallingRecipe(FineTuning, FTRecipeInterface):
    """Trains all weights of a base on supervised rows."""

    name = "full_fc_distributed"

    def select_trainable_(self, model: CausalLM) -> None:
        """Leave every parameter trainable, as built."""

    def select_tokens_(self, model: CausalLM, data: TrainingData) -> None:
        """Do nothing: the rows of all tokens train."""

    def init_trainable_(self, model: CausalLM) -> None:
        """Do nothing: every parameter is loaded from the base."""

    def hf_weights(self, planned: PlannedRun) -> HFModelWeights:
        """Return the form of elastic checkpoints: a Hugging Face model."""
        return HFModelWeights(planned.model.architecture, self.model_dir, planned.prompting)

    def exports(self, planned: PlannedRun) -> dict[str, Callable[[Path], None]]:
        """Return the export of the model, under the name of the LoRA recipe's merged model."""
        return {
            "merged": lambda out: export_merged(
                planned.model, self.model_dir, out, is_writer=self.world.is_main, prompting=planned.prompting
            )
        }


def main() -> int:
    """Run the recipe from the command line."""
    return run_recipe(FullFunctionCallingRecipe, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
