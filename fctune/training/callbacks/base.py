"""Hooks of the training loop, and the order in which they are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Callback:
    """Training-loop hooks; all are no-ops by default.

    Every rank calls every hook at the same step. In each step the loop calls, for all callbacks in order:

    1. ``on_step_start``: the batch is ready, the forward pass starts.
    2. ``before_optimizer_update``: gradients are reduced and clipped, weights are about to change.
    3. ``after_optimizer_update``: weights have changed, unless the step was not finite.
    4. ``step_costs``: the step's own metrics are being computed.
    5. ``measure``: the loop has added the validation loss, if it is due.
    6. ``on_step_end``: the metrics are written; the state may be saved or the run stopped.

    ``close`` is called once, in reverse order, when training has ended.
    """

    def on_step_start(self, step: int) -> None:
        """Called before the forward pass of ``step`` (from 1)."""

    def before_optimizer_update(self, step: int) -> None:
        """Called when the weights are about to change."""

    def after_optimizer_update(self, step: int) -> None:
        """Called when the weights have changed."""

    def step_costs(self) -> Mapping[str, float]:
        """Return metrics of what this callback cost since the last call, in seconds."""
        return {}

    def measure(self, step: int, is_last: bool) -> dict[str, Any]:
        """Return metrics to add to those of ``step``."""
        return {}

    def on_step_end(self, step: int, is_last: bool) -> bool:
        """Called when the metrics of ``step`` are written; returns True to end training early."""
        return False

    def close(self) -> None:
        """Release threads, buffers and signal handlers."""
