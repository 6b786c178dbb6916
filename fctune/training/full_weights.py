"""Fine-tuning of all weights with any loss: what trains, how it is saved, and the export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fctune.checkpoint.hf_checkpoint import HFModelWeights
from fctune.models.causal_lm import CausalLM
from fctune.models.export import export_merged
from fctune.training.planned_run import PlannedRun, TrainingData
from fctune.training.recipe import FineTuning


class FullTuning(FineTuning):
    """A run that trains every weight from the base's value, and exports the model."""

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
        """Return the export of the model, under the name of a LoRA run's merged model."""
        return {
            "merged": lambda out: export_merged(
                planned.model, self.model_dir, out, is_writer=self.world.is_main, prompting=planned.prompting
            )
        }
