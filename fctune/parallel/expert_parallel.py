"""Expert parallelism: each rank of a group holds a part of the experts, and tokens travel to them.

Other weights are sharded over all ranks as without it. With several groups of ranks, each holds all experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fctune.base.errors import ConfigError
from fctune.models.architecture import EXPERT_ADAPTERS
from fctune.models.causal_lm import CausalLM
from fctune.models.expert_exchange import EXPERT_EXCHANGE, ExpertExchange
from fctune.models.frozen_experts import iter_frozen_experts

_REPLICATE, _EXPERT = "expert_replicate", "expert"


def check_expert_parallelism(model: CausalLM, num_ranks: int, world_size: int) -> None:
    """Check that the experts of a model can be spread over groups of ranks.

    Raises:
        ConfigError: A dense model, or a number that does not divide the ranks or the experts.
    """
    if num_ranks == 1:
        return
    key = f"parallel.expert={num_ranks}"
    owners = [owner for _, owner in _iter_owners(model)]
    if not owners:
        raise ConfigError(f"{key}: this model has no experts that can be spread over ranks; leave it out.")
    if world_size % num_ranks:
        raise ConfigError(f"{key}: does not divide the {world_size} ranks of this run; use a number that does.")
    for owner in owners:
        if owner.num_experts % num_ranks:
            raise ConfigError(f"{key}: does not divide the {owner.num_experts} experts; use a number that does.")


def spread_experts_(model: CausalLM, num_ranks: int, device_type: str) -> set[nn.Parameter]:
    """Make each rank hold its part of the experts of a meta model, in place; returns the parameters concerned.

    Args:
        model: Model on the meta device, with its adapters.
        num_ranks: Ranks of a group, over which the experts are spread.
        device_type: ``cpu`` or ``cuda``.
    """
    num_groups = dist.get_world_size() // num_ranks
    # The ranks of a group are consecutive, so that on one node tokens do not cross the network.
    mesh = init_device_mesh(device_type, (num_groups, num_ranks), mesh_dim_names=(_REPLICATE, _EXPERT))
    spread: set[nn.Parameter] = set()
    for _, owner in _iter_owners(model):
        for module, name, parameter in _iter_parameters(owner):
            part = nn.Parameter(_take_part(parameter, mesh), requires_grad=parameter.requires_grad)
            module.register_parameter(name, part)
            spread.add(part)
        setattr(owner, EXPERT_EXCHANGE, ExpertExchange(mesh.get_group(_EXPERT)))
    return spread


def find_expert_parameters(model: CausalLM) -> set[nn.Parameter]:
    """Return the parameters with one part per expert, adapters among them, which ``spread_experts_`` spreads."""
    return {p for _, owner in _iter_owners(model) for _, _, p in _iter_parameters(owner)}


def is_spread(parameter: Tensor) -> bool:
    """Return whether a parameter is one that ``spread_experts_`` has made."""
    return isinstance(parameter, DTensor) and _EXPERT in (parameter.device_mesh.mesh_dim_names or ())


@torch.no_grad()
def reduce_expert_gradients_(model: CausalLM) -> None:
    """Reduce the gradients of spread experts over the ranks that hold the same ones, in place.

    A gradient has the sum over the tokens of its group, while those of other weights are means over all ranks.
    """
    for parameter in model.parameters():
        if is_spread(parameter) and parameter.grad is not None:
            gradient: Any = parameter.grad
            local, mesh = gradient.to_local(), gradient.device_mesh
            local.div_(mesh.size())
            if mesh[_REPLICATE].size() > 1:
                dist.all_reduce(local, group=mesh.get_group(_REPLICATE))


def _iter_owners(model: CausalLM) -> Iterator[tuple[str, Any]]:
    """Iterate over the modules that hold experts, by path."""
    for path in dict.fromkeys(weight.path for weight in model.expert_weights()):
        yield path, model.get_submodule(path)


def _iter_parameters(owner: Any) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Iterate over the parameters that have one part per expert: the module's own, in 4 bits or not, and adapters'."""
    adapters = getattr(owner, EXPERT_ADAPTERS, {})
    frozen = (module for _, module in iter_frozen_experts(owner))
    for module in (owner, *frozen, *adapters.values()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            yield module, name, parameter


def _take_part(parameter: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a meta DTensor of the parameter's shape, of which each rank of a group has an equal part of the rows."""
    rows = len(parameter) // mesh[_EXPERT].size()
    local = torch.empty(rows, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    return DTensor.from_local(
        local, mesh, [Replicate(), Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
