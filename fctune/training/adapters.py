"""Fine-tuning of adapters with any loss: selection and initialisation of parameters, and exports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fctune.base.distributed import World
from fctune.checkpoint.hf_checkpoint import HFAdapterWeights
from fctune.config.schema import RunConfig
from fctune.models.causal_lm import CausalLM
from fctune.models.export import export_adapter, export_merged
from fctune.models.lora import init_adapters_
from fctune.models.token_rows import init_token_rows_, trained_token_ids
from fctune.training.entry import Run
from fctune.training.planned_run import PlannedRun, TrainingData
from fctune.training.recipe import FineTuning
from fctune.training.setup import select_adapters_, select_tokens_


class AdapterTuning(FineTuning):
    """A run that trains adapters on a frozen base, and exports the adapter and the merged model."""

    def __init__(self, config: RunConfig, world: World, run: Run):
        super().__init__(config, world, run)
        assert config.adapter is not None
        self.adapter = config.adapter

    def select_trainable_(self, model: CausalLM) -> None:
        """Freeze the base and add an adapter to each selected linear."""
        select_adapters_(model, self.adapter, self.world)

    def select_tokens_(self, model: CausalLM, data: TrainingData) -> None:
        """Train the rows of untrained tokens."""
        select_tokens_(model, self.requested_config, self.model_dir, data.prepared, self.world)

    def init_trainable_(self, model: CausalLM) -> None:
        """Initialize the adapters from the seed and token rows from the base, equally at any world size."""
        init_adapters_(model, self.requested_config.seed)
        # A policy has to start as its reference, which is the base without any of what trains.
        init_token_rows_(model, self.model_dir, separates=not self.requested_config.has_reference)

    def hf_weights(self, planned: PlannedRun) -> HFAdapterWeights:
        """Return the form of elastic checkpoints: a PEFT adapter."""
        model, base = planned.model, planned.config.model.path
        return HFAdapterWeights(
            *(model.architecture, self.adapter, base, self.model_dir),
            prompting=planned.prompting,
            token_ids=trained_token_ids(model),
        )

    def exports(self, planned: PlannedRun) -> dict[str, Callable[[Path], None]]:
        """Return the exports: the merged model, and the adapter to use with the base."""
        model, writes, base = planned.model, self.world.is_main, planned.config.model.path
        return {
            "merged": lambda out: export_merged(model, self.model_dir, out, writes, prompting=planned.prompting),
            "adapter": lambda out: export_adapter(
                *(model, self.adapter, base, self.model_dir, out, writes), prompting=planned.prompting
            ),
        }
