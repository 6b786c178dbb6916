"""Training steps and a checkpoint of a run's config, with random weights and random tokens."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fctune.apps.acceptance.config import TrainingConfig
from fctune.apps.acceptance.fault_injection import FaultInjector
from fctune.apps.acceptance.session import Session
from fctune.base import distributed
from fctune.base.distributed import World
from fctune.base.errors import ConfigError
from fctune.checkpoint.sharded import read_shards_, write_shards
from fctune.checkpoint.state import TrainState
from fctune.checkpoint.tensors import collect_tensors
from fctune.config.schema import RunConfig
from fctune.data.loader import Batch, GlobalStep, StepTotals
from fctune.models.causal_lm import CausalLM, materialize_
from fctune.models.frozen_experts import iter_frozen_experts
from fctune.models.frozen_linear import copy_rows_, is_scale, rows_of_shard
from fctune.models.hub import resolve_model_dir
from fctune.models.lora import apply_lora_, init_adapters_, is_adapter
from fctune.models.run_config import load_run_config
from fctune.models.sources import read_architecture
from fctune.parallel.layout import Hardware, ParallelLayout
from fctune.parallel.sharding import shard_
from fctune.runs.device import total_memory
from fctune.runs.metrics import FlopCounter, peak_memory_gib
from fctune.training.meter import count_flops
from fctune.training.objective import SupervisedObjective
from fctune.training.prefetch import StepData, make_inputs
from fctune.training.setup import build_base, plan_parallelism, start_state
from fctune.training.step import launch_step


def load_run(config: TrainingConfig, folder: Path) -> tuple[RunConfig, Path]:
    """Load the run's config and return it with the directory of its model's config.json.

    If the acceptance config specifies an architecture, its config.json is written to ``folder``.

    Raises:
        ConfigError: The run's config is invalid or leaves the length of its rows open, or its architecture is not
            supported.
    """
    overrides = list(config.overrides)
    if config.architecture:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config.architecture), encoding="utf-8")
        overrides.append(f"model.path={folder}")
    run = load_run_config(config.config, overrides)
    if not isinstance(run.data.seq_len, int):
        raise ConfigError(
            f"data.seq_len={run.data.seq_len}: these steps have random tokens, and no rows to choose by. Add a length "
            "to training.overrides, such as data.seq_len=4096."
        )
    if not isinstance(run.micro_batch_size, int):
        raise ConfigError(
            "micro_batch_size=auto: is chosen for a number of ranks, and these steps compare several. Add a number to "
            "training.overrides, such as micro_batch_size=2."
        )
    model_dir = resolve_model_dir(run.model.path)
    read_architecture(model_dir)
    return run, model_dir


def build_state(run: RunConfig, model_dir: Path, world: World) -> tuple[TrainState, ParallelLayout]:
    """Build the run's model with random weights, sharded over the current process group, and its optimizer."""
    model = build_base(run, model_dir, world)
    if run.adapter is not None:
        apply_lora_(model, run.adapter)
    layout = plan_parallelism(model, run, world)
    memory = total_memory(world.device, world.ranks_per_node)
    hardware = Hardware(world.device.type, world.world_size, world.ranks_per_node, memory)
    gradient_sync = shard_(model, layout, run.parallel, hardware)
    materialize_(model, world.device, run.parallel.cpu_offload)
    init_random_weights_(model, run.seed)
    if run.adapter is not None:
        init_adapters_(model, run.seed)
    model.train()
    return start_state(model, run, 1_000, gradient_sync), layout


def init_random_weights_(model: CausalLM, seed: int) -> None:
    """Fill the base's weights with small random numbers and its norms with ones, in place, a tensor at a time."""
    device = next(parameter.device for parameter in model.parameters())
    generator = torch.Generator(device).manual_seed(seed)
    experts = dict(iter_frozen_experts(model))
    for weight in experts.values():
        weight.init_random_(generator)
    for name, parameter in list(model.named_parameters()):
        if is_adapter(name) or is_scale(name) or name.rpartition(".")[0] in experts:
            continue
        rows = rows_of_shard(parameter)
        shape = (rows.stop - rows.start, *parameter.shape[1:])
        is_norm = len(shape) == 1 and not name.endswith("bias")
        values = torch.ones(shape, device=device)
        copy_rows_(model, name, values if is_norm else values.normal_(std=0.02, generator=generator))


def measure_steps(
    session: Session,
    config: TrainingConfig,
    run: RunConfig,
    model_dir: Path,
    world: World,
    faults: FaultInjector,
    sample: dict[str, Any],
) -> TrainState:
    """Time each step after the warmup, with one micro-batch per rank, into ``sample``; return the trained state."""
    session.time_left()
    session.enter("building the model", session.limits.build_s)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    state, layout = build_state(run, model_dir, world)
    data = _make_step(run, state.model, world)
    tokens = data.totals.num_tokens // world.world_size
    flops: FlopCounter = count_flops(state.model)
    sample |= {
        "seconds": [],
        "losses": [],
        "tokens": tokens,
        "flops": flops.weights(tokens) + flops.dense_attention(tokens, run.data.row_tokens),
        "layout": str(layout),
        "seq_len": run.data.row_tokens,
        "micro_batch_size": run.micro_batch_packs,
    }
    for step in range(config.warmup + config.steps):
        session.time_left()
        session.enter(f"training step {step + 1}", session.limits.build_s if not step else None)
        started = time.perf_counter()
        faults.delay("slow_compute")
        result = launch_step(
            *(state.model, state.optimizer, data, world, state.gradient_sync, SupervisedObjective()),
            clip_grad_norm=run.clip_grad_norm,
        ).read()
        sample["losses"].append(result.loss if math.isfinite(result.loss) else None)
        if step >= config.warmup:
            sample["seconds"].append(float(f"{time.perf_counter() - started:.5g}"))
        sample["peak_memory_gib"] = peak_memory_gib(world.device)
    return state


def measure_checkpoint(
    session: Session, state: TrainState, folder: Path, max_bytes: int, sample: dict[str, Any]
) -> None:
    """Time saving trained weights and optimizer as shards, from device to flushed disk, and loading them.

    The results go to ``sample``; nothing is written if all ranks together would need more than ``max_bytes``.
    """
    group = distributed.new_cpu_group()
    session.remove_at_exit(folder)
    live = collect_tensors(state.model, state.optimizer)
    local = [t.to_local() if isinstance(t, DTensor) else t for t in live.values()]
    mine = sum(t.numel() * t.element_size() for t in local)
    sample["bytes"] = total = int(sum(distributed.all_gather_objects(mine, group)))
    if total > max_bytes:
        sample["skipped"] = (
            f"needs {total / 2**30:.1f} GiB of the shared disk, but only {max_bytes / 2**30:.1f} GiB may be used "
            "(storage.max_share_of_free)"
        )
        return
    folder.mkdir(parents=True, exist_ok=True)
    session.time_left()
    session.enter("saving a checkpoint", session.limits.build_s)
    distributed.barrier()
    started = time.perf_counter()
    copies = {name: tensor.cpu() for name, tensor in live.items()}
    write_shards(folder, copies, group)
    sample["save_s"] = time.perf_counter() - started
    session.time_left()
    session.enter("loading a checkpoint", session.limits.build_s)
    distributed.barrier()
    started = time.perf_counter()
    read_shards_(folder, copies)
    sample["load_s"] = time.perf_counter() - started


def list_shard_sizes(run: RunConfig, model_dir: Path, world: World) -> dict[str, int]:
    """Return the bytes that sharding gathers for one block of the run's model and for the rest of it."""
    model = build_base(run, model_dir, world)
    if run.adapter is not None:
        apply_lora_(model, run.adapter)
    width = model.precision.compute_dtype.itemsize
    block = sum(p.numel() for p in next(iter(model.blocks)).parameters()) * width
    blocks = sum(p.numel() for part in model.blocks for p in part.parameters()) * width
    rest = sum(p.numel() for p in model.parameters()) * width - blocks
    return {"one block of the model": block, "rest of the model": rest}


def _make_step(run: RunConfig, model: CausalLM, world: World) -> StepData:
    """Build one micro-batch of random tokens per group of ranks, all supervised except the first of each row."""
    rows, length, group = run.micro_batch_packs, run.data.row_tokens, model.context_group
    share, num_shares = group.find_share(world)
    generator = torch.Generator().manual_seed(run.seed + share)
    tokens = torch.randint(model.architecture.vocab_size, (rows, length), generator=generator)
    labels = tokens.roll(-1, dims=1)
    labels[:, -1] = -100
    weights = (labels != -100).float()
    is_packed = run.data.packed
    batch = Batch(
        tokens=tokens,
        labels=labels,
        loss_weights=weights,
        positions=torch.arange(length).expand(rows, -1).contiguous() if is_packed else None,
        lengths=((length,),) * rows if is_packed else None,
        rows=tuple(range(share * rows, (share + 1) * rows)),
        row_lengths=(length,) * rows,
        num_tokens=rows * length,
        num_supervised=int(weights.sum()),
        weight_sum=float(weights.sum()),
    )
    n = num_shares
    pairs = n * rows * length * (length + 1) // 2
    totals = StepTotals(n * batch.num_tokens, n * batch.num_supervised, n * batch.weight_sum, pairs)
    is_pinned = world.device.type == "cuda"
    inputs = make_inputs(batch, model.make_bounds, seed=run.seed, step=1, is_pinned=is_pinned, group=group)
    return StepData(GlobalStep(1, 0, tuple(range(n * rows)), "random"), totals, [inputs])
