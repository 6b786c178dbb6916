"""Building the parts of a run: data, model, parallelism, optimizer and metric sinks.

A model is built without memory on the meta device, then sharded, then loaded, so that no rank ever holds all of it.
"""

from __future__ import annotations

import functools
import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch._functorch import config as functorch
from torch.optim.lr_scheduler import LambdaLR

from fctune.base import distributed
from fctune.base.distributed import World
from fctune.base.errors import CheckpointError, ConfigError, DataError
from fctune.base.files import format_bytes
from fctune.base.gpus import FAILURES_PER_GPU_DAY, GPUS
from fctune.checkpoint.resume import Resume
from fctune.checkpoint.saver import Guard, first_write_limit, no_guard
from fctune.checkpoint.state import TrainState
from fctune.config.cache import prepared_root
from fctune.config.components import resolve_component
from fctune.config.intervals import AUTO, format_count, format_duration, parse_interval, parse_interval_or_auto
from fctune.config.loading import read_environment
from fctune.config.run_length import RunLength, find_length_warnings
from fctune.config.schema import LRSchedulerConfig, RunConfig
from fctune.config.sections.adapter import AdapterConfig
from fctune.config.sections.telemetry import TelemetryConfig, WandbConfig
from fctune.data.chosen_template import ChosenTemplate
from fctune.data.chunk_encoder import Counts
from fctune.data.prepared_set import (
    PreparedSet,
    describe_counts,
    list_tokens,
    open_prepared,
    prepare,
    resolve_batch_size,
)
from fctune.data.row_lengths import measure_lengths
from fctune.models.architecture import ALL_LINEAR
from fctune.models.attention import activate_flash_attention_3, choose_attention_kernel
from fctune.models.base_weights import check_base, load_base_
from fctune.models.causal_lm import CausalLM, materialize_
from fctune.models.lora import apply_lora_, count_parameters, describe_adapters, find_frozen_experts
from fctune.models.loss import chunk_rows
from fctune.models.packing_proof import prove_packing
from fctune.models.planned_model import shape_teacher
from fctune.models.precision import check_device, choose_precision, is_emulated
from fctune.models.sources import build_model, read_architecture
from fctune.models.token_choice import TokenChoice, check_vocabulary, choose_tokens, find_candidates, find_largest_token
from fctune.models.token_rows import train_tokens_
from fctune.models.untrained_tokens import Candidates
from fctune.parallel.activations import apply_activation_checkpointing_, compile_blocks_, use_float8_matmuls_
from fctune.parallel.layout import (
    Hardware,
    ParallelLayout,
    check_memory,
    choose_layout,
    suggest_smaller_weights,
)
from fctune.parallel.memory import MemoryModel
from fctune.parallel.search import choose_expert_ranks, choose_micro_batch, fit_seq_len, plan_speed
from fctune.parallel.sharding import GradientSync, reshard_, shard_
from fctune.parallel.speed import estimate_row_cost
from fctune.parallel.storage import plan_storage
from fctune.runs.device import compute_capability, describe_device, find_gpu_kind, total_memory
from fctune.runs.directory import RunDirectory
from fctune.runs.metrics import GIB, active_memory_gib
from fctune.runs.services import PrometheusSink, TensorBoardSink, WandbSink
from fctune.runs.sinks import AlertMonitor, BackgroundSink, ConsoleSink, JsonlSink, SinkGroup
from fctune.tasks.evaluation.live import check_answering_memory
from fctune.training.callbacks.checkpoint import AUTO_PAUSE_S

logger = logging.getLogger("fctune")

_PROGRESS_ROWS = 5_000
# Parameters that the optimizer updates at once. To plan a fused update of n DTensors takes torch time that grows with n
# squared: 12 s of the first step of each process for 960 of them, 0.3 s in parts.
_GROUP_SIZE = 32


def resolve_seq_len(config: RunConfig, model_dir: Path, resume: Resume | None, world: World) -> RunConfig:
    """Return the config with the row length that ``data.seq_len: auto`` stands for; unchanged with a number.

    A run that resumes has the length of its checkpoint. Otherwise rank 0 chooses it, by the rows and the memory of all
    ranks, and the others take it over. Every rank calls it.

    Raises:
        ConfigError: No length can be trained on, or ``data.overlong`` is fail and not the longest.
        DataError: The rows cannot be used.
    """
    if isinstance(config.data.seq_len, int):
        return config
    hardware = _describe_hardware(world)

    def choose() -> tuple[RunConfig, str]:
        lengths = measure_lengths(config, model_dir, _log_rows("measuring rows"))
        return fit_seq_len(config, lengths, read_architecture(model_dir, config.model.source), hardware)

    if resume is None:
        config, reason = distributed.run_on_rank_0(choose)
    else:
        reason = f"as in {resume.checkpoint.path}"
        config = replace(config, data=replace(config.data, seq_len=resume.state["config"]["data"]["seq_len"]))
    logger.info("data.seq_len: auto is %s tokens (%s)", f"{config.data.row_tokens:,}", reason)
    return config


def resolve_experts(model: CausalLM, config: RunConfig, resume: Resume | None, world: World) -> RunConfig:
    """Return the config with the ranks that ``parallel.expert: auto`` stands for; unchanged with a number.

    A run that resumes keeps the number of its checkpoint if it suits its ranks and their memory. Every rank calls it,
    with a meta model whose trainable parameters are chosen.

    Raises:
        ConfigError: A layout that does not suit the ranks, the model or the optimizer.
    """
    if isinstance(config.parallel.expert, int):
        return config
    hardware, memory = _describe_memory(model, config, world)
    kept = None if resume is None else resume.state["config"]["parallel"].get("expert")
    number, reason = distributed.run_on_rank_0(lambda: choose_expert_ranks(model, hardware, memory, kept))
    if reason is None:
        assert resume is not None
        reason = f"as in {resume.checkpoint.path}"
    logger.info("parallel.expert: auto is %s (%s)", format_count(number, "rank"), reason)
    return replace(config, parallel=replace(config.parallel, expert=number))


def resolve_micro_batch(model: CausalLM, config: RunConfig, resume: Resume | None, world: World) -> RunConfig:
    """Return the config with the packs that ``micro_batch_size: auto`` stands for; unchanged with a number.

    A run that resumes keeps the number of its checkpoint if it fits in the memory of its ranks. Every rank calls it,
    with a meta model whose trainable parameters are chosen.

    Raises:
        ConfigError: A layout that does not suit the ranks, the model or the optimizer.
    """
    if isinstance(config.micro_batch_size, int):
        return config
    hardware, memory = _describe_memory(model, config, world)

    def choose() -> tuple[int, str]:
        kept = None if resume is None else resume.state["config"]["micro_batch_size"]
        if resume is not None and isinstance(kept, int):
            tried = memory.with_micro_batch(kept)
            layout = choose_layout(tried.config, model, hardware, tried)
            needed = tried.required(world.world_size, layout.shard, layout.max_logits, layout.fraction, **layout.rows)
            if hardware.can_hold(needed):
                return kept, f"as in {resume.checkpoint.path}"
        return choose_micro_batch(model, hardware, memory)

    size, reason = distributed.run_on_rank_0(choose)
    logger.info("micro_batch_size: auto is %s (%s)", format_count(size, "pack"), reason)
    return replace(config, micro_batch_size=size)


def _log_rows(what: str) -> Callable[[Counts], None]:
    """Return a function that logs the number of rows that were read, every few thousand."""
    shown = 0

    def show(counts: Counts) -> None:
        nonlocal shown
        if counts.rows - shown >= _PROGRESS_ROWS:
            shown = counts.rows
            logger.info("%s: %s rows read", what, f"{counts.rows:,}")

    return show


def prepare_data(config: RunConfig, model_dir: Path, chat_template: ChosenTemplate | None, world: World) -> PreparedSet:
    """Return the prepared set, written by rank 0 unless it exists and memory-mapped by every rank."""
    show = _log_rows("preparing data")
    root, switches = prepared_root(config), config.model.template_args
    path = distributed.run_on_rank_0(lambda: prepare(config.data, model_dir, root, show, switches, chat_template).path)

    def open_on_rank() -> PreparedSet:
        if not path.is_dir():
            raise DataError(
                f"{path}: rank {world.rank} does not see the prepared set that rank 0 wrote. Set data.prepared_dir or "
                "FCTUNE_CACHE to a directory that all nodes share."
            )
        return open_prepared(path)

    prepared = distributed.run_on_all_ranks(open_on_rank)
    for line in describe_counts(prepared):
        logger.info("data: %s", line)
    return prepared


def choose_batch_size(config: RunConfig, prepared: PreparedSet) -> RunConfig:
    """Return the config with the packs of a step, derived from the data with ``global_batch_tokens``."""
    resolved = resolve_batch_size(config, prepared.num_tokens("train"), prepared.num_packs("train"))
    if config.global_batch_tokens is not None:
        wanted, packs = config.global_batch_tokens, resolved.global_batch_size
        logger.info("batch: %s packs a step, for global_batch_tokens=%s", f"{packs:,}", f"{wanted:,}")
    return resolved


def warn_of_length(config: RunConfig, prepared: PreparedSet | None, num_steps: int, world: World) -> None:
    """Warn once of settings that do not suit the number of steps; ``prepared`` is None for a run without rows."""
    packs = None if prepared is None else prepared.num_packs("train")
    has_validation = prepared is not None and prepared.num_packs("validation") > 0
    length = RunLength(num_steps, packs, has_validation=has_validation)
    for warning in find_length_warnings(config, length) if world.is_main else ():
        logger.warning("%s", warning)


def build_base(config: RunConfig, model_dir: Path, world: World) -> CausalLM:
    """Build the model on the meta device, in the run's precision and with the fastest attention for its device.

    Raises:
        ConfigError: A model that no source builds, or a precision that the device does not support.
    """
    device, capability = world.device, compute_capability(world.device)
    precision = choose_precision(config.precision, config.adapter is not None, device.type)

    def build() -> tuple[CausalLM, str]:
        base = "bf16" if config.adapter is None else config.adapter.base
        check_device(precision, base, capability, describe_device(device))
        architecture = read_architecture(model_dir, config.model.source)
        kernel, description = choose_attention_kernel(
            device.type, precision.compute_dtype, architecture.head_dim, capability
        )
        if kernel == "varlen" and activate_flash_attention_3(capability):
            description += ", by FlashAttention 3"
        model = build_model(architecture, config.data.row_tokens, precision, kernel)
        model.balance_routers_(config.model.router_aux_loss)
        return model, description

    model, attention = distributed.run_on_all_ranks(build)
    if precision.has_float8_matmuls:
        use_float8_matmuls_(model, is_emulated=device.type == "cpu")
        if not config.compile and world.is_main:
            logger.warning("precision=%s without compile=true is slower than bfloat16", config.precision)
    if device.type == "cpu" and is_emulated(precision.compute_dtype) and world.is_main:
        logger.warning(
            "precision=%s: this processor has no instructions for bfloat16, which takes several times as long as "
            "float32; unless memory is short, set precision=fp32",
            config.precision,
        )
    logger.info("attention: %s", attention)
    if model.attention_warning is not None and world.is_main:
        logger.warning("attention: %s", model.attention_warning)
    if model.state_layers:
        logger.info("layers with state: %s", model.state_layers)
    return model


def check_weights(model: CausalLM, model_dir: Path) -> None:
    """Compare names and shapes of the base's stored tensors with a meta model, on rank 0.

    Raises:
        CheckpointError: A file is missing or damaged, or its tensors are not those of the model.
    """

    def check() -> None:
        check_base(model, model_dir)

    distributed.run_on_rank_0(check)


def select_adapters_(model: CausalLM, adapter: AdapterConfig, world: World) -> None:
    """Freeze a meta model and add the configured adapters, in place.

    Raises:
        ConfigError: Modules that the model does not have, or that take no such adapter.
    """
    apply_lora_(model, adapter)
    if adapter.modules == ALL_LINEAR:
        for name, reason in model.architecture.unadaptable.items():
            logger.info("adapters: none on %s, because %s", name, reason)
    if counts := describe_adapters(model):
        logger.info("adapters: %s", counts)
    if world.is_main and (warning := find_frozen_experts(model)):
        logger.warning("adapters: %s", warning)


def check_data_tokens(model: CausalLM, model_dir: Path, prepared: PreparedSet | None) -> None:
    """Check, on rank 0, that a model has rows for all tokens of the data.

    Raises:
        ConfigError: The tokenizer has more tokens than the model's embedding.
    """

    def check() -> None:
        if prepared is not None and find_largest_token(model_dir) >= model.architecture.vocab_size:
            check_vocabulary(list_tokens(prepared)[1], model_dir, model.architecture)

    distributed.run_on_rank_0(check)


def select_tokens_(
    model: CausalLM, config: RunConfig, model_dir: Path, prepared: PreparedSet | None, world: World
) -> None:
    """Make the chosen token rows of a meta model with adapters trainable, in place.

    Untrained tokens are looked for in ``prepared``; without rows none are found.

    Raises:
        ConfigError: Tokens that the model does not have, or rows of a head with an adapter.
        CheckpointError: The base's files are damaged.
    """
    adapter = config.adapter
    assert adapter is not None

    def choose() -> TokenChoice:
        if prepared is None or isinstance(adapter.train_tokens, list):
            candidates = Candidates()
        else:
            candidates = find_candidates(prepared, model_dir)
        return choose_tokens(adapter, model_dir, model.architecture, candidates, config.model.add_tokens)

    choice = distributed.run_on_rank_0(choose)
    train_tokens_(model, choice.ids)
    if choice.note and world.is_main:
        logger.log(logging.WARNING if choice.is_warning else logging.INFO, "tokens: %s", choice.note)


def plan_parallelism(model: CausalLM, config: RunConfig, world: World) -> ParallelLayout:
    """Choose the parallel layout of a meta model, check its memory, and set up checkpointing and compilation, in place.

    Raises:
        ConfigError: A layout that does not fit the number of ranks, or a model that does not fit their memory.
    """
    hardware, memory = _describe_memory(model, config, world)

    def choose() -> tuple[ParallelLayout, str | None]:
        layout = choose_layout(config, model, hardware, memory)
        required = functools.partial(memory.required, world.world_size, **layout.rows)
        warning = check_memory(hardware, layout, suggest_smaller_weights(config, model), required, config.model.path)
        recomputed = layout.fraction, layout.mlp_tiles
        apply_activation_checkpointing_(model, config.activation_checkpointing, world.device.type, *recomputed)
        return layout, warning

    layout, warning = distributed.run_on_all_ranks(choose)
    model.max_logits = layout.max_logits
    model.row_cost = estimate_row_cost(memory, layout.fraction, layout.max_logits, layout.mlp_tiles)
    if config.compile:
        compile_blocks_(model)
    logger.info("layout: %s", layout)
    num_blocks, num_checkpointed = len(memory.blocks), memory.count_checkpointed(layout.fraction)
    is_chosen = config.activation_checkpointing.fraction is None
    if num_checkpointed:
        why = "chosen to fit the memory" if is_chosen else "as configured"
        logger.info("activation checkpointing: %d of %d blocks (%s)", num_checkpointed, num_blocks, why)
    else:
        logger.info("activation checkpointing: off (%s)", "memory suffices" if is_chosen else "as configured")
    if layout.mlp_tiles > 1:
        why = "chosen to fit the memory" if config.activation_checkpointing.mlp_tiles is None else "as configured"
        logger.info("MLPs computed in %d tiles of each row (%s)", layout.mlp_tiles, why)
    chunk = chunk_rows(model.architecture.vocab_size, layout.max_logits)
    logger.info("loss computed in chunks of %s", format_count(chunk, "token"))
    logger.info(
        "estimated memory per rank: %s",
        memory.required(world.world_size, layout.shard, layout.max_logits, **layout.rows),
    )
    if warning is not None and world.is_main:
        logger.warning("memory: %s", warning)
    return layout


def check_space(
    model: CausalLM, config: RunConfig, run: RunDirectory, num_steps: int, world: World, is_resumed: bool
) -> None:
    """Compare the free space of the run's disk with the planned checkpoints and export, on rank 0.

    Raises:
        ConfigError: There is no room for two checkpoints, as one is kept while the next is written, and the export.
    """

    def check() -> str | None:
        memory = MemoryModel(model, config, device_bytes=1)
        storage = plan_storage(memory, config, 1, None, disk_gb_s=1.0, failures_per_gpu_day=0.0, num_steps=num_steps)
        size, export = storage.checkpoint_bytes, storage.export_bytes
        free = shutil.disk_usage(run.path).free
        if is_resumed:  # its files are part of the plan
            free += sum(file.stat().st_size for file in run.path.rglob("*") if file.is_file())
        least = 2 * size + (export if config.checkpoint.fallback_dir is None else 0)
        planned = storage.checkpoints_bytes + export
        parts = f"a checkpoint takes {format_bytes(size)}, the export {format_bytes(export)}"
        if free < least:
            raise ConfigError(
                f"output_dir={run.path}: {format_bytes(free)} free, but the run needs at least {format_bytes(least)}: "
                f"{parts}. Free some space, or set output_dir to a larger disk."
            )
        if free < planned:
            return (
                f"{run.path}: {format_bytes(free)} free, but the run may need {format_bytes(planned)}: {parts}, and "
                f"checkpoint.keep_last={config.checkpoint.keep_last} keeps several. Free some space, or lower it."
            )
        return None

    warning = distributed.run_on_rank_0(check)
    if warning is not None and world.is_main:
        logger.warning("%s", warning)


def plan_speed_of_run(config: RunConfig, model_dir: Path, world: World) -> float | None:
    """Return the planned tokens per second and GPU of a run, which its speed is judged by; None if it is unknown."""
    kind = _find_kind(world)
    if kind is None:
        return None
    try:
        return plan_speed(config, model_dir, GPUS[kind], world.world_size // world.ranks_per_node, world.ranks_per_node)
    except (ConfigError, DataError, CheckpointError) as error:  # what a plan refuses, a run may still do
        logger.warning("this run's speed cannot be planned: %s", error)
        return None


def choose_elastic_interval(
    model: CausalLM, config: RunConfig, layout: ParallelLayout, num_steps: int, world: World
) -> float:
    """Return the seconds between elastic checkpoints that lose the least time, for a meta model, and log their reason.

    Infinite unless ``checkpoint.elastic_every`` is ``auto``.
    """
    if config.checkpoint.elastic_every != AUTO:
        return math.inf
    memory, ranks = MemoryModel(model, config, device_bytes=1), world.world_size
    storage = plan_storage(memory, config, ranks, None, 1.0, FAILURES_PER_GPU_DAY, layout.shard, num_steps)
    third = parse_interval_or_auto(AUTO).in_steps(num_steps) or 1
    interval_s = max(storage.best_interval_s, AUTO_PAUSE_S)
    logger.info(
        "elastic checkpoints: every %s, and at least every %s, a third of the run (%s fail about every %s h, and "
        "training waits %s for a save)",
        format_duration(interval_s),
        format_count(third, "step"),
        format_count(ranks, "rank"),
        f"{storage.hours_between_failures:,.0f}",
        format_duration(storage.stall_s),
    )
    return interval_s


def shard_and_load_(
    model: CausalLM, config: RunConfig, model_dir: Path, world: World, layout: ParallelLayout | None = None
) -> GradientSync:
    """Shard a meta model and load the base's weights into it, in place; adapters stay uninitialised.

    Args:
        model: Model on the meta device, with its adapters.
        config: Config of the run.
        model_dir: Hugging Face directory of the base.
        world: This rank.
        layout: Result of ``plan_parallelism``; None calls it.

    Raises:
        ConfigError: See ``plan_parallelism``.
        CheckpointError: Weights that are missing or damaged, or not those of the model.
    """
    layout = layout or plan_parallelism(model, config, world)
    gradient_sync = shard_(model, layout, config.parallel, _describe_hardware(world))
    materialize_(model, world.device, config.parallel.cpu_offload)
    distributed.run_on_all_ranks(lambda: load_base_(model, model_dir, world=world))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(count_parameters(model).values())
    logger.info(
        "model: %s parameters, %s trainable, %s, on %s x %d",
        f"{total:,}",
        f"{trained:,}",
        model.precision,
        describe_device(world.device),
        world.world_size,
    )
    return gradient_sync


def check_packing(model: CausalLM, config: RunConfig, world: World) -> None:
    """Check, for models that need it, that the conversations of packed rows stay apart in the model of this run.

    Raises:
        ConfigError: They do not; see ``prove_packing``.
    """
    if config.data.packed and model.needs_packing_proof:
        distributed.run_on_all_ranks(lambda: prove_packing(model, world.device, config.data.row_tokens))
        reshard_(model)
        logger.info("packing: conversations in packed rows have the logits of each alone")


def check_memory_to_answer(model: CausalLM, world: World, key: str, remedy: str) -> None:
    """Check that the complete model, which answers, fits on each GPU next to the training state. Every rank calls it.

    Args:
        model: Model in shards.
        world: This rank.
        key: Config key that requests answers, for the message.
        remedy: What to do if it does not fit, for the message.

    Raises:
        ConfigError: It does not fit.
    """
    device = world.device
    if device.type == "cuda":
        used, memory = torch.cuda.memory_allocated(device), total_memory(device, 1)
        distributed.run_on_all_ranks(lambda: check_answering_memory(model, used, memory, key, remedy))


def _describe_hardware(world: World) -> Hardware:
    """Return the hardware with the least memory of any rank, by which all plan; every rank calls it."""
    own = total_memory(world.device, world.ranks_per_node), _find_kind(world)
    memories, kinds = zip(*distributed.all_gather_objects(own), strict=True)
    gpu = GPUS.get(kinds[0]) if len(set(kinds)) == 1 else None
    return Hardware(world.device.type, world.world_size, world.ranks_per_node, min(memories), gpu)


def _find_kind(world: World) -> str | None:
    """Return the kind of this rank's GPU; None for a CPU or an unknown GPU."""
    return find_gpu_kind(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None


def _describe_memory(model: CausalLM, config: RunConfig, world: World) -> tuple[Hardware, MemoryModel]:
    """Return the hardware of a run and the memory of its model; every rank calls it."""
    hardware, is_cuda = _describe_hardware(world), world.device.type == "cuda"
    # Ranks must come to the same layout, so rank 0's measurement is everybody's.
    process_bytes = 0 if is_cuda else distributed.run_on_rank_0(lambda: int(active_memory_gib(world.device) * GIB))
    teacher = shape_teacher(config, world.device.type)
    options: dict[str, Any] = {"is_cuda": is_cuda, "process_bytes": process_bytes, "teacher": teacher}
    return hardware, MemoryModel(model, config, hardware.memory_bytes, **options)


def start_state(model: CausalLM, config: RunConfig, num_steps: int, gradient_sync: GradientSync) -> TrainState:
    """Create the optimizer of the trained parameters and the schedule of the run's steps."""
    component, arguments = resolve_component(config.optimizer)
    if component.__module__.startswith("torchao."):
        # They compile their step, and torch 2.13's autograd cache confuses steps of different shapes or optimizers.
        functorch.enable_autograd_cache = False
    optimizer = component(_group_parameters(model, config), **arguments)
    scheduler = LambdaLR(optimizer, lr_factor(config.lr_scheduler, num_steps))
    return TrainState(model, optimizer, scheduler, gradient_sync)


def lr_factor(config: LRSchedulerConfig, num_steps: int) -> Callable[[int], float]:
    """Return the factor on the optimizer's lr as a function of the step (from 0).

    It rises linearly over the warm-up, starting above 0, then follows half a cosine (https://arxiv.org/abs/1608.03983)
    or a line down to ``min_factor`` at the last step, or stays at 1.
    """
    warmup = parse_interval(config.warmup).in_steps(num_steps) or 0

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if config.name == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        falling = 0.5 * (1 + math.cos(math.pi * progress)) if config.name == "cosine" else 1 - progress
        return config.min_factor + (1 - config.min_factor) * falling

    return factor


def _group_parameters(model: CausalLM, config: RunConfig) -> list[dict[str, Any]]:
    """Return the trained parameters in groups with and without weight decay: norms, biases and vectors do not decay.

    As ``Trainer.get_decay_parameter_names`` of transformers has it, which TRL uses, too. All of an adapter decays.
    Each group is passed in parts of ``_GROUP_SIZE``.
    """
    decayed: list[Tensor] = []
    plain: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = config.adapter is not None or (parameter.ndim > 1 and "bias" not in name.rpartition(".")[2])
            (decayed if decays else plain).append(parameter)
    return [
        {"params": parameters[start : start + _GROUP_SIZE], **options}
        for parameters, options in ((decayed, {}), (plain, {"weight_decay": 0.0}))
        for start in range(0, len(parameters), _GROUP_SIZE)
    ]


def is_wandb_on(config: WandbConfig, environment: Mapping[str, str]) -> bool:
    """Return True if a run logs to Weights & Biases; in mode ``auto``, if there is a key."""
    return bool(environment.get("WANDB_API_KEY")) if config.mode == "auto" else config.mode != "disabled"


def open_sinks(
    config: RunConfig,
    run: RunDirectory,
    num_steps: int,
    world: World,
    hosts: Sequence[str] = (),
    guard: Guard = no_guard,
) -> SinkGroup:
    """Open the sinks of metrics and alerts on rank 0, none on other ranks.

    Args:
        config: Config of the run.
        run: Directory of the run.
        num_steps: Optimizer steps of the run.
        world: This rank.
        hosts: Machines of all ranks.
        guard: Ends the process if a write hangs.
    """
    if not world.is_main:
        return SinkGroup()
    services: list[BackgroundSink] = []
    open_service = functools.partial(BackgroundSink, rest_s=1.0)
    telemetry = config.telemetry or TelemetryConfig()
    wandb, prometheus = telemetry.wandb, telemetry.prometheus
    if wandb is not None and is_wandb_on(wandb, read_environment()):
        services.append(open_service("wandb", lambda: WandbSink(wandb, run.path, config.to_dict())))
    if telemetry.tensorboard:
        services.append(open_service("tensorboard", lambda: TensorBoardSink(run.path / "tensorboard")))
    if prometheus.port is not None:
        services.append(open_service("prometheus", lambda: PrometheusSink(prometheus, run.path.name, num_steps)))
    has_gpu = world.device.type == "cuda"
    open_alerts = functools.partial(AlertMonitor, run.path, services, hosts, has_gpu)
    alerts = BackgroundSink("alerts", open_alerts)  # closed before the services
    console = ConsoleSink(Console(), num_steps, config.log_every_n_steps)
    limit_s = first_write_limit(0)
    metrics = JsonlSink(run.metrics, lambda: guard(f"writing {run.metrics}", limit_s))
    return SinkGroup(metrics, console, alerts, *services)
