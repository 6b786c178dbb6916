"""Losses and gradients of rows that ranks share or whose MLPs are computed in tiles, compared with whole rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from fctune.base.distributed import World
from fctune.config.sections.adapter import AdapterConfig
from fctune.config.sections.parallel import ActivationCheckpointingConfig
from fctune.data.loader import IGNORE, Batch
from fctune.models.causal_lm import CausalLM
from fctune.parallel.activations import apply_activation_checkpointing_, compile_blocks_
from fctune.parallel.context_parallel import check_context_parallelism, share_rows_
from fctune.training.prefetch import make_inputs
from tests.models.dense_samples import LENGTHS, adapt_, draw_conversations
from tests.models.dense_samples import make_model as make_dense

CPU = torch.device("cpu")
LORA = AdapterConfig(rank=4, alpha=8, dropout=0.2, modules="all-linear")


def make_batch(*lengths: int, is_packed: bool = True) -> Batch:
    """Return one row of conversations whose supervised tokens have different weights."""
    tokens = torch.cat(draw_conversations(*lengths), 1)
    labels = tokens.roll(-1, 1)
    labels[0, torch.tensor(lengths).cumsum(0) - 1] = IGNORE
    labels[0, ::5] = IGNORE
    weights = (labels != IGNORE) * torch.linspace(0.5, 1.5, tokens.shape[1])
    return Batch(
        tokens=tokens,
        labels=labels,
        loss_weights=weights.float(),
        positions=torch.cat([torch.arange(length) for length in lengths])[None] if is_packed else None,
        lengths=(lengths,) if is_packed else None,
        rows=(0,),
        row_lengths=(sum(lengths),),
        num_tokens=sum(lengths),
        num_supervised=int((labels != IGNORE).sum()),
        weight_sum=float(weights.sum()),
    )


def pad_rows(*lengths: int, length: int) -> Batch:
    """Return unpacked rows of one conversation each, which end in padding up to a common length."""
    batches = [make_batch(one, is_packed=False) for one in lengths]

    def join(name: str, filler: int) -> Tensor:
        return torch.cat([pad(getattr(one, name), (0, length - one.num_tokens), value=filler) for one in batches])

    return Batch(
        tokens=join("tokens", 0),
        labels=join("labels", IGNORE),
        loss_weights=join("loss_weights", 0),
        positions=None,
        lengths=None,
        rows=tuple(range(len(lengths))),
        row_lengths=lengths,
        num_tokens=sum(lengths),
        num_supervised=sum(one.num_supervised for one in batches),
        weight_sum=sum(one.weight_sum for one in batches),
    )


def compute(model: CausalLM, batch: Batch) -> list[Tensor]:
    """Return the loss of the batch and the gradients, summed over the ranks that share it."""
    model.zero_grad()
    loss = model(**make_inputs(batch, model.make_bounds, group=model.context_group).arguments(CPU))
    loss.backward()
    # A rank without supervised tokens has no gradient of the head.
    results = [loss.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters())]
    if model.context_group.size > 1:
        for result in results:
            dist.all_reduce(result)
            result /= dist.get_world_size() // model.context_group.size  # groups have the same rows
    return results


BATCHES = [make_batch(*LENGTHS, 2), make_batch(37), make_batch(21, 1, 3)]
# Of phi3's conversations, those of up to 8 tokens have other factors.
BATCHES += [make_batch(40, is_packed=False), pad_rows(7, 20, length=33)]


def measure_split(
    world: World,
    model_type: str,
    batches: list[Batch],
    *,
    context: int | None = None,
    adapter: AdapterConfig | None = None,
    is_compiled: bool = False,
    mlp_tiles: int = 1,
) -> float:
    """Return the largest difference of the loss and the gradients to those of whole rows, relative to the largest.

    Args:
        world: All ranks.
        model_type: A key of ``FAMILIES``.
        batches: Batches to compare.
        context: Ranks that share each row; None: all of them.
        adapter: Adapters that train; None: all weights do.
        is_compiled: Compile the blocks, and recompute all of them.
        mlp_tiles: Tiles of the MLPs; if more than one, all blocks are recomputed.
    """
    model = make_dense(model_type).train()
    if adapter is not None:
        adapt_(model, adapter)
    whole = [compute(model, batch) for batch in batches]
    context = context or world.world_size
    check_context_parallelism(model, context, world.world_size)
    share_rows_(model, context, world.world_size, "cpu")
    if is_compiled or mlp_tiles > 1:
        config = ActivationCheckpointingConfig(fraction=1.0, mlp_tiles=mlp_tiles)
        apply_activation_checkpointing_(model, config, "cpu")
    if is_compiled:
        compile_blocks_(model)
    worst = 0.0
    for batch, expected in zip(batches, whole, strict=True):
        split = compute(model, batch)
        scale = max(float(one.abs().max()) for one in expected)
        worst = max(worst, *(float((a - b).abs().max()) / scale for a, b in zip(expected, split, strict=True)))
    return worst
