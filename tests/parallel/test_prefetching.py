"""FSDP gathers the weights of a block while those before it compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from fctune.base.distributed import World
from fctune.config.sections.parallel import ParallelConfig
from fctune.models.base_weights import load_base_
from fctune.models.causal_lm import materialize_
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model, read_architecture
from fctune.parallel.layout import Hardware, ParallelLayout
from fctune.parallel.sharding import shard_
from tests.ranks import run_ranks

NUM_BLOCKS = 3


def record_order(world: World, path: Path) -> list[str]:
    """Return the gathers and the computations of a forward and a backward pass in the order of their start."""
    model: Any = build_model(read_architecture(path), 64, PrecisionPolicy.uniform(torch.float32))
    hardware = Hardware("cpu", world.world_size, world.world_size)
    shard_(model, ParallelLayout("fsdp", 1, world.world_size, ""), ParallelConfig(mode="fsdp"), hardware)
    materialize_(model, torch.device("cpu"))
    load_base_(model, path)
    events: list[str] = []
    names = {id(module): name.rpartition(".")[2] or "ends" for name, module in model.named_modules()}
    gather = FSDPParamGroup.unshard

    def unshard(group: Any, async_op: bool = False) -> None:
        if group._all_gather_result is None and not group.is_unsharded:
            events.append(f"gather {names[id(group.modules[0])]}")
        gather(group, async_op)

    FSDPParamGroup.unshard = unshard  # type: ignore[method-assign]
    model.embedding.register_forward_hook(lambda *_: events.append("embed"))
    for index, block in enumerate(model.blocks):
        block.attn.register_forward_hook(lambda *_, index=index: events.append(f"run {index}"))
        block.mlp.register_full_backward_pre_hook(lambda *_, index=index: events.append(f"back {index}"))
    tokens = torch.arange(32)[None]
    model(tokens, labels=tokens).backward()
    return events


def test_each_block_is_gathered_before_the_one_ahead_of_it_runs(make_model: Callable[..., Path]) -> None:
    path = make_model("llama", num_hidden_layers=NUM_BLOCKS)
    for events in run_ranks(record_order, 2, path):
        forward = ["gather ends", "gather 0", "embed", "gather 1", "run 0", "gather 2", "run 1", "run 2"]
        assert events[: len(forward)] == forward
        backward = events[len(forward) :]
        for index in range(NUM_BLOCKS - 1):
            assert backward.index(f"gather {index}") < backward.index(f"back {index + 1}")
        assert backward.count("gather ends") == 0
