"""Evaluation while training: tool-call accuracy on held-out cases, the best step, and early stopping."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fctune.checkpoint.state import TrainState
from fctune.config.sections.evaluation import EvalConfig
from fctune.tasks.evaluation.live import LiveEvaluation
from fctune.training.callbacks.base import Callback

logger = logging.getLogger("fctune")


class EvaluationCallback(Callback):
    """Measures tool-call accuracy at intervals, keeps track of the best step, and ends training without progress.

    Args:
        config: Interval, share of time and patience.
        evaluation: Measures the model.
        state: State of the run; ``best`` is updated.
    """

    def __init__(self, config: EvalConfig, evaluation: LiveEvaluation, state: TrainState):
        self.config, self.evaluation, self.state = config, evaluation, state

    def measure(self, step: int, is_last: bool) -> dict[str, Any]:
        """Return ``eval_*`` metrics if an evaluation is due; ``eval_skipped`` if it would exceed its share of time.

        The last step is always evaluated.
        """
        if not self.state.timers.is_due("evaluation", self.config.every, step) and not is_last:
            return {}
        if not is_last and not self.evaluation.is_within_budget():
            return {"eval_skipped": "max_share_of_time"}
        self.state.wait()
        metrics = self.evaluation.measure(self.state.model)
        best = self.state.best
        if best is None or metrics["eval_accuracy"] > best["accuracy"]:
            self.state.best = {"step": step, "accuracy": metrics["eval_accuracy"], "evaluations_since": 0}
        else:
            self.state.best = {**best, "evaluations_since": best["evaluations_since"] + 1}
        return metrics

    def on_step_end(self, step: int, is_last: bool) -> bool:
        """Return True if the last ``eval.early_stop`` evaluations did not improve the accuracy."""
        best = self.state.best
        if best is None or not is_patience_exhausted(self.config, best):
            return False
        logger.info("early stop: accuracy has not improved since step %d", best["step"])
        return True


def is_patience_exhausted(config: EvalConfig, best: Mapping[str, Any] | None) -> bool:
    """Return True if the last ``eval.early_stop`` evaluations did not improve on the best one."""
    return config.early_stop is not None and best is not None and best["evaluations_since"] >= config.early_stop
