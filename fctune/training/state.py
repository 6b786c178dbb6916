"""The pieces of a run, built in the order that sharding asks for: shape, cut, then fill."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from rich.console import Console

from fctune.config import RunConfig, resolve_component
from fctune.data.encode import Counts
from fctune.data.prepared import PreparedSet, describe_counts, open_prepared, prepare, prepared_root
from fctune.modeling.architecture import read_architecture
from fctune.modeling.build import CausalLM, build_model, materialize_
from fctune.modeling.shard import shard_
from fctune.modeling.weights import load_base_
from fctune.telemetry.sinks import ConsoleSink, JsonlSink, Sinks
from fctune.training import distributed
from fctune.training.distributed import World
from fctune.training.loop import TrainState
from fctune.training.run_directory import RunDirectory
from fctune.training.schedule import build_scheduler

logger = logging.getLogger("fctune")

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def prepare_data(config: RunConfig, model_dir: Path, world: World) -> PreparedSet:
    """The prepared set, written by rank 0 where it is not there yet and mapped by every rank."""

    def show(counts: Counts) -> None:
        if counts.rows % 5000 == 0:
            logger.info("preparing data: %s rows read", f"{counts.rows:,}")

    path = distributed.on_main(lambda: prepare(config.data, model_dir, prepared_root(config), show).path)
    prepared = distributed.agree(lambda: open_prepared(path))
    for line in describe_counts(prepared):
        logger.info("data: %s", line)
    return prepared


def build_base(config: RunConfig, model_dir: Path, world: World) -> CausalLM:
    """The model's shape, on the meta device, in the precision of the run."""
    dtype = _DTYPES[config.precision or ("bf16" if world.device.type == "cuda" else "fp32")]

    def build() -> CausalLM:
        return build_model(read_architecture(model_dir), config.data.seq_len, dtype)

    return distributed.agree(build)


def place_(model: CausalLM, config: RunConfig, model_dir: Path, world: World) -> None:
    """Shard a shaped model over the ranks and fill it with the base's weights; adapters are left unfilled."""
    mode = shard_(model, config.parallel, world.device.type, world.world_size)
    materialize_(model, world.device)
    distributed.agree(lambda: load_base_(model, model_dir))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    logger.info(
        "model: %s parameters, %s trained, %s, %s on %s x %d",
        f"{total:,}",
        f"{trained:,}",
        str(model.head_weight().dtype).removeprefix("torch."),
        {"none": "unsharded", "fsdp": "FSDP"}[mode],
        world.device.type,
        world.world_size,
    )


def start_state(model: CausalLM, config: RunConfig, num_steps: int) -> TrainState:
    """The state before the first step: optimizer over what trains, schedule over the run's steps."""
    component, arguments = resolve_component(config.optimizer)
    optimizer = component([p for p in model.parameters() if p.requires_grad], **arguments)
    return TrainState(model, optimizer, build_scheduler(optimizer, config.lr_scheduler, num_steps))


def open_sinks(config: RunConfig, run: RunDirectory, num_steps: int, world: World) -> Sinks:
    """Where metrics go; nowhere on ranks that do not write."""
    if not world.is_main:
        return Sinks()
    return Sinks(JsonlSink(run.metrics), ConsoleSink(Console(), num_steps, config.log_every_n_steps))
