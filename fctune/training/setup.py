"""The pieces of a run, built in the order that sharding asks for: shape, cut, then fill."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from torch._functorch import config as functorch

from fctune import distributed
from fctune.checkpoint.state import TrainState
from fctune.config.components import resolve_component
from fctune.config.schema import RunConfig, TelemetryConfig
from fctune.data.encoding import Counts
from fctune.data.prepared_set import PreparedSet, describe_counts, open_prepared, prepare, prepared_root
from fctune.distributed import World
from fctune.models.attention import choose_attention_kernel
from fctune.models.precision import check_device, choose_precision
from fctune.models.torchtune.architecture import read_architecture
from fctune.models.torchtune.build import CausalLM, build_model, materialize_
from fctune.models.torchtune.weights import load_base_
from fctune.parallel.activations import apply_activation_checkpointing_, compile_blocks_, use_float8_matmuls_
from fctune.parallel.sharding import (
    Hardware,
    ParallelLayout,
    check_layout,
    check_memory,
    choose_parallel_layout,
    shard_,
)
from fctune.planner.memory import MemoryModel
from fctune.telemetry.alert_monitor import AlertMonitor
from fctune.telemetry.background import BackgroundSink
from fctune.telemetry.device import compute_capability, describe_device, total_memory
from fctune.telemetry.services import PrometheusSink, TensorBoardSink, WandbSink
from fctune.telemetry.sinks import ConsoleSink, JsonlSink, SinkGroup
from fctune.training.run_directory import RunDirectory
from fctune.training.schedule import build_scheduler

logger = logging.getLogger("fctune")

_PROGRESS_ROWS = 5_000


def prepare_data(config: RunConfig, model_dir: Path, world: World) -> PreparedSet:
    """The prepared set, written by rank 0 where it is not there yet and mapped by every rank."""
    shown = 0

    def show(counts: Counts) -> None:
        nonlocal shown
        if counts.rows - shown >= _PROGRESS_ROWS:
            shown = counts.rows
            logger.info("preparing data: %s rows read", f"{counts.rows:,}")

    path = distributed.run_on_rank_0(lambda: prepare(config.data, model_dir, prepared_root(config), show).path)
    prepared = distributed.run_on_all_ranks(lambda: open_prepared(path))
    for line in describe_counts(prepared):
        logger.info("data: %s", line)
    return prepared


def build_base(config: RunConfig, model_dir: Path, world: World) -> CausalLM:
    """Build the model on the meta device, in the precision of the run, with the fastest attention of its device."""
    device, capability = world.device, compute_capability(world.device)
    precision = choose_precision(config.precision, config.adapter is not None, device.type)

    def build() -> CausalLM:
        base = "bf16" if config.adapter is None else config.adapter.base
        check_device(precision, base, device.type, capability, describe_device(device))
        return build_model(read_architecture(model_dir), config.data.seq_len, precision.weight_dtype)

    model = distributed.run_on_all_ranks(build)
    model.precision = precision
    if precision.has_float8_matmuls:
        use_float8_matmuls_(model)
        if not config.compile and world.is_main:
            logger.warning("precision=%s without compile=true is slower than bfloat16", config.precision)
    head_dim = model.architecture.head_dim
    model.kernel, described = choose_attention_kernel(device.type, precision.compute_dtype, head_dim, capability)
    logger.info("attention: %s", described)
    return model


def plan_parallelism(model: CausalLM, config: RunConfig, world: World) -> None:
    """Decide how a shaped model will lie on the ranks and how its blocks run, before anything takes time or memory.

    Raises:
        ConfigError: a layout that does not fit the ranks, or a model that does not fit their memory.
    """
    has_adapter = config.adapter is not None
    hardware = _describe_hardware(world)
    memory = MemoryModel(model, config, hardware.memory_bytes, is_cuda=world.device.type == "cuda")
    need = functools.partial(memory.required, world.world_size)

    def choose() -> tuple[ParallelLayout, str | None]:
        layout = choose_parallel_layout(config.parallel, hardware, has_adapter, need)
        check_layout(config, model, layout.mode, layout.shard)
        warning = check_memory(hardware, layout, has_adapter, need, config.model.path)
        apply_activation_checkpointing_(model, config.activation_checkpointing, world.device.type)
        return layout, warning

    model.layout, warning = distributed.run_on_all_ranks(choose)
    if config.compile:
        compile_blocks_(model)
    logger.info("layout: %s", model.layout)
    logger.info("memory by estimate, a rank: %s", need(model.layout.shard))
    if warning is not None and world.is_main:
        logger.warning("memory: %s", warning)


def shard_and_load_(model: CausalLM, config: RunConfig, model_dir: Path, world: World) -> None:
    """Lay a shaped model over the ranks and fill it with the base's weights; adapters are left unfilled.

    Raises:
        ConfigError: as ``plan_parallelism``, which is called where it was not.
        CheckpointError: weights that are not all there, or not those of the model.
    """
    if model.layout is None:
        plan_parallelism(model, config, world)
    shard_(model, model.layout, config.parallel, model.precision, _describe_hardware(world))
    materialize_(model, world.device, config.parallel.cpu_offload)
    distributed.run_on_all_ranks(lambda: load_base_(model, model_dir))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    held, computed = (
        str(dtype).removeprefix("torch.") for dtype in (model.precision.weight_dtype, model.precision.compute_dtype)
    )
    logger.info(
        "model: %s parameters, %s trained, %s, on %s x %d",
        f"{total:,}",
        f"{trained:,}",
        held if held == computed else f"{held} computed in {computed}",
        describe_device(world.device),
        world.world_size,
    )


def _describe_hardware(world: World) -> Hardware:
    memory = total_memory(world.device, world.ranks_per_node)
    return Hardware(world.device.type, world.world_size, world.ranks_per_node, memory)


def start_state(model: CausalLM, config: RunConfig, num_steps: int) -> TrainState:
    """The state before the first step: optimizer over what trains, schedule over the run's steps."""
    component, arguments = resolve_component(config.optimizer)
    if component.__module__.startswith("torchao."):
        # They compile their step, and torch 2.13's cache of such takes that of one shape or optimizer for another's.
        functorch.enable_autograd_cache = False
    optimizer = component([p for p in model.parameters() if p.requires_grad], **arguments)
    return TrainState(model, optimizer, build_scheduler(optimizer, config.lr_scheduler, num_steps))


def open_sinks(
    config: RunConfig, run: RunDirectory, num_steps: int, world: World, hosts: Sequence[str] = ()
) -> SinkGroup:
    """Where metrics and alerts go; nowhere on ranks that do not write. ``hosts`` are the ranks' machines, in order."""
    if not world.is_main:
        return SinkGroup()
    services: list[BackgroundSink] = []
    open_service = functools.partial(BackgroundSink, rest_s=1.0)
    telemetry = config.telemetry or TelemetryConfig()
    wandb, prometheus = telemetry.wandb, telemetry.prometheus
    if wandb is not None and wandb.mode != "disabled":
        services.append(open_service("wandb", lambda: WandbSink(wandb, run.path, config.to_dict())))
    if telemetry.tensorboard:
        services.append(open_service("tensorboard", lambda: TensorBoardSink(run.path / "tensorboard")))
    if prometheus.port is not None:
        services.append(open_service("prometheus", lambda: PrometheusSink(prometheus, run.path.name, num_steps)))
    watchman = BackgroundSink("alerts", lambda: AlertMonitor(run.path, services, hosts))  # closed before those it tells
    console = ConsoleSink(Console(), num_steps, config.log_every_n_steps)
    return SinkGroup(JsonlSink(run.metrics), console, watchman, *services)
