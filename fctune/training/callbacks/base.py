"""Hooks of the training loop, and the order in which they are called."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from fctune.base.errors import ConfigError
from fctune.config.components import resolve_component
from fctune.config.schema import RunConfig

if TYPE_CHECKING:
    from fctune.base.distributed import World
    from fctune.checkpoint.state import TrainState
    from fctune.models.causal_lm import CausalLM


class StartedRun(Protocol):
    """A run that is set up, as its callbacks see it."""

    @property
    def config(self) -> RunConfig:
        """Config of the run, with what was chosen for it."""

    @property
    def world(self) -> World:
        """Ranks of the run, and this one."""

    @property
    def model(self) -> CausalLM:
        """Model, sharded and with its weights."""

    @property
    def state(self) -> TrainState:
        """Training state: step, optimizer, schedule."""


class Callback:
    """Training-loop hooks; all are no-ops by default.

    Every rank calls every hook at the same step. In each step the loop calls, for all callbacks in order:

    1. ``on_step_start``: the batch is ready, the forward pass starts.
    2. ``before_optimizer_update``: gradients are reduced and clipped, weights are about to change.
    3. ``after_optimizer_update``: weights have changed, unless the step was not finite.
    4. ``step_costs``: the step's own metrics are being computed.
    5. ``measure``: the loop has added the validation loss, if it is due.
    6. ``on_step_end``: the state may be saved or the run stopped.

    The metrics of a step are written before its ``on_step_end``, or on a GPU, where the host does not wait for each
    step, during the next one; a save writes them before. If the step was not finite and ends the run, that is found
    then, too: no later update has changed the weights.

    ``on_start`` is called once, before the first step, and ``close`` once, in reverse order, when training has ended.
    """

    def on_start(self, run: StartedRun) -> None:
        """Called when the run is set up, before the first step."""

    def on_step_start(self, step: int) -> None:
        """Called before the forward pass of ``step`` (from 1)."""

    def before_optimizer_update(self, step: int) -> None:
        """Called when the weights are about to change."""

    def after_optimizer_update(self, step: int) -> None:
        """Called when the weights have changed."""

    def waiting(self, step: int) -> AbstractContextManager[None]:
        """Return a context to wait in for the results of a step, outside of steps."""
        return nullcontext()

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


def make_callbacks(config: RunConfig) -> list[Callback]:
    """Return the callbacks that a config names.

    Raises:
        ConfigError: A component is not a callback, or refuses its arguments.
    """
    callbacks: list[Callback] = []
    for index, spec in enumerate(config.callbacks):
        key = f"callbacks.{index}._component_={spec['_component_']}"
        component, arguments = resolve_component(spec)
        if not isinstance(component, type) or not issubclass(component, Callback):
            raise ConfigError(f"{key}: expected a subclass of {Callback.__module__}.Callback.")
        try:
            callbacks.append(component(**arguments))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{key}: refuses its arguments ({error}).") from error
    return callbacks
