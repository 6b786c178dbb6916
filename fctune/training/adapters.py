"""Fine-tuning of adapters with any loss: selection and initialisation of parameters, and exports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fctune.base.distributed import World
from fctune.checkpoint.hf_checkpoint import HFAdapterWeights
from fctune.config.schema import RunConfig
from fctune.models.export import export_adapter, export_merged
from fctune.models.lora import init_adapters_
from fctune.models.token_rows import init_token_rows_, trained_token_ids
from fctune.training.entry import Run
from fctune.training.recipe import FineTuning
from fctune.training.setup import select_adapters_, select_tokens_


class AdapterTuning(FineTuning):
    """A run that trains adapters on a frozen base, and exports the adapter and the merged model."""

    def __init__(self, config: RunConfig, world: World, run: Run):
        super().__init__(config, world, run)
        assert config.adapter is not None
        self.adapter = config.adapter

    def select_trainable_(self) -> None:
        """Freeze the base and add an adapter to each selected linear."""
        select_adapters_(self.model, self.adapter, self.world)

    def select_tokens_(self) -> None:
        """Train the rows of untrained tokens."""
        select_tokens_(self.model, self.config, self.model_dir, self.prepared, self.world)

    def init_trainable_(self) -> None:
        """Initialize the adapters from the seed and token rows from the base, equally at any world size."""
        init_adapters_(self.model, self.config.seed)
        init_token_rows_(self.model, self.model_dir)

    def hf_weights(self) -> HFAdapterWeights:
        """Return the form of elastic checkpoints: a PEFT adapter."""
        model = self.config.model
        return HFAdapterWeights(
            *(self.model.architecture, self.adapter, model.path, self.model_dir),
            prompting=self.prompting(),
            token_ids=trained_token_ids(self.model),
        )

    def exports(self) -> dict[str, Callable[[Path], None]]:
        """Return the exports: the merged model, and the adapter to use with the base."""
        writes, base = self.world.is_main, self.config.model.path
        return {
            "merged": lambda out: export_merged(
                *(self.model, self.model_dir, out, writes),
                prompting=self.prompting(),
            ),
            "adapter": lambda out: export_adapter(
                *(self.model, self.adapter, base, self.model_dir, out, writes),
                prompting=self.prompting(),
            ),
        }
