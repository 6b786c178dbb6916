"""Fine-tune a chat model to call functions with LoRA, on any number of processes from one, CPU or CUDA.

    tune run --nproc_per_node 2 recipes/lora_fc_distributed --config configs/tiny_lora.yaml [key=value ...]

What this recipe decides: adapters alone train, they start as noise and zero so that the model starts as its base, the
base's weights must all be there, and what is kept is the merged model and the adapter. The order of a run is in
``fctune/training/recipe.py``.
"""

import sys
from collections.abc import Callable

from torchtune.recipe_interfaces import FTRecipeInterface

from fctune.checkpoint.portable import PortableAdapter
from fctune.config.schema import RunConfig
from fctune.distributed import World
from fctune.errors import ConfigError
from fctune.models.export import export_adapter, export_merged
from fctune.models.lora import apply_lora_, init_adapters_
from fctune.training.entry import run_recipe
from fctune.training.recipe import FineTuning
from fctune.training.run import Run


class LoRAFunctionCallingRecipe(FineTuning, FTRecipeInterface):
    """Adapters over the ranks; the loop and the step are the library's."""

    def __init__(self, config: RunConfig, world: World, run: Run):
        if config.adapter is None:
            raise ConfigError("adapter: missing; this recipe trains adapters. Add e.g. adapter: {rank: 16, alpha: 32}.")
        super().__init__(config, world, run)
        self.adapter = config.adapter

    def select_trainable_(self) -> None:
        """The base is frozen, and adapters stand beside its linears."""
        apply_lora_(self.model, self.adapter)

    def init_trainable_(self) -> None:
        """Adapters equal at any world size."""
        init_adapters_(self.model, self.config.seed)

    def portable(self) -> PortableAdapter:
        """The adapter, as PEFT has it."""
        return PortableAdapter(self.model.architecture, self.adapter, self.config.model.path, self.model_dir)

    def exports(self) -> list[Callable[[], None]]:
        """The merged model for whoever serves it, the adapter for whoever has the base."""
        writes, out, base = self.world.is_main, self.run.directory.export, self.config.model.path
        return [
            lambda: export_merged(self.model, self.model_dir, out / "merged", writes),
            lambda: export_adapter(self.model, self.adapter, base, self.model_dir, out / "adapter", writes),
        ]


def main() -> int:
    """Run the recipe from the command line."""
    return run_recipe(LoRAFunctionCallingRecipe, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
