"""Context parallelism: ranks that share each row of a batch; see ``fctune.models.context_exchange``."""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh

from fctune.base.errors import ConfigError
from fctune.models.causal_lm import CausalLM
from fctune.models.context_exchange import ContextGroup, count_repeats

_ROWS, _CONTEXT = "rows", "context"


def check_context_parallelism(model: CausalLM, num_ranks: int, world_size: int) -> None:
    """Check that groups of ranks can share the rows of a model.

    Raises:
        ConfigError: A number that does not divide the ranks or the heads, or layers that carry state along a row.
    """
    if num_ranks == 1:
        return
    key, name = f"parallel.context={num_ranks}", f"model_type={model.architecture.model_type!r}"
    if world_size % num_ranks:
        raise ConfigError(f"{key}: does not divide the {world_size} ranks of this run; use a number that does.")
    if model.state_layers:
        raise ConfigError(
            f"{key}: a row of {name} cannot be split over ranks, because some layers carry state along it "
            f"({model.state_layers}); leave it out, and use activation_checkpointing for long rows."
        )
    if not _divides_heads(model, num_ranks):
        fitting = [str(num) for num in range(1, world_size + 1) if can_share_rows(model, num, world_size)]
        counts = " and ".join(f"{heads} heads with {kv} of keys" for heads, kv in sorted(_count_heads(model)))
        raise ConfigError(f"{key}: does not divide the attention of {name}, {counts}; use {' or '.join(fitting)}.")


def can_share_rows(model: CausalLM, num_ranks: int, world_size: int) -> bool:
    """Return whether ``check_context_parallelism`` accepts a number of ranks."""
    fits = world_size % num_ranks == 0 and not model.state_layers and _divides_heads(model, num_ranks)
    return num_ranks == 1 or fits


def _divides_heads(model: CausalLM, num_ranks: int) -> bool:
    return all(count_repeats(heads, kv, num_ranks) is not None for heads, kv in _count_heads(model))


def _count_heads(model: CausalLM) -> set[tuple[int, int]]:
    """Return the numbers of query and key heads that occur."""
    return {(layer.num_heads, layer.num_kv_heads) for layer in model.attention_layers}


def share_rows_(model: CausalLM, num_ranks: int, world_size: int, device_type: str) -> None:
    """Make groups of ranks share the rows of a model's batches, in place. Every rank calls it.

    Args:
        model: Model to train.
        num_ranks: Ranks of a group. They are consecutive, so that on one node tokens do not cross the network.
        world_size: Ranks of the run.
        device_type: ``cpu`` or ``cuda``.
    """
    mesh = init_device_mesh(device_type, (world_size // num_ranks, num_ranks), mesh_dim_names=(_ROWS, _CONTEXT))
    name = mesh.get_group(_CONTEXT).group_name
    model.context_group = ContextGroup(mesh.get_local_rank(_CONTEXT), num_ranks, name)
