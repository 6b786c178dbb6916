"""Load-balancing loss of transformers' mixtures of experts, for the models whose own code has it."""

from __future__ import annotations

import sys
from typing import Any

from fctune.base.errors import ConfigError
from fctune.models.architecture import Architecture
from fctune.models.router_balance import RouterBalance
from fctune.models.transformers.architecture import TransformersArchitecture
from fctune.models.transformers.experts import find_router_class
from fctune.models.transformers.model_config import read_text_config


def make_router_balance(decoder: Any, architecture: Architecture, coefficient: float | None) -> RouterBalance | None:
    """Observe the routers of a decoder for the load-balancing loss, in place; None if the run has no such loss.

    Args:
        decoder: transformers' model.
        architecture: Architecture of the model.
        coefficient: Factor on the loss; None takes that of config.json if it sets ``output_router_logits``, as
            transformers does.

    Raises:
        ConfigError: A coefficient for a model that has no such loss.
    """
    assert isinstance(architecture, TransformersArchitecture)
    # The same function in all models that have one, see ``RouterBalance``.
    has_loss = hasattr(sys.modules[type(decoder).__module__], "load_balancing_loss_func")
    kind, index = find_router_class(decoder)
    routers = [module for module in decoder.modules() if kind is not None and isinstance(module, kind)]
    if coefficient is None:
        config = read_text_config(architecture.where, architecture.config_json)
        is_set = has_loss and routers and getattr(config, "output_router_logits", False)
        coefficient = float(config.router_aux_loss_coef) if is_set else 0.0
    if not coefficient:
        return None
    if not has_loss or not routers:
        how = "balances its experts by a bias, which stays as it is" if routers else "has no routers to balance"
        raise ConfigError(
            f"model.router_aux_loss={coefficient:g}: model_type={architecture.model_type!r} {how}; leave it out."
        )
    balance = RouterBalance(coefficient, decoder.num_experts, decoder.num_experts_per_tok)
    for router in routers:
        balance.observe_(router, index)
    return balance
