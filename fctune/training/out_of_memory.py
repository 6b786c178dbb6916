"""When memory is full: what lay where, in a file, and what the planner would change."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fctune.config.schema import RunConfig
from fctune.distributed import World
from fctune.gpus import find_gpu
from fctune.parallel.footprint import GIB
from fctune.planner.plan import Plan, Variant, list_remedies, make_plan
from fctune.planner.plan_request import PlanRequest
from fctune.telemetry.device import peak_tflops, total_memory

logger = logging.getLogger("fctune")

_MAX_ENTRIES = 100_000  # allocations that are remembered: some tens of MB of the host's memory
_NUM_REMEDIES = 3
_UNKNOWN_TFLOPS = 300.0  # of a GPU that is not known: ways that fit are ranked by speed, in which it is a factor


class MemorySnapshot:
    """Writes what lies where in a GPU's memory at the moment when it is full, once.

    The file is opened at https://pytorch.org/memory_viz, which reads it in the browser. It holds who asked for each
    block only where ``profile.allocations`` has them remembered, which costs time at every allocation.

    Args:
        folder: the run's directory.
        world: this rank; on CPU there is nothing to write.
        keeps_history: whether to remember who asked for each block.
    """

    def __init__(self, folder: Path, world: World, keeps_history: bool):
        self.file = folder / f"out-of-memory-rank-{world.rank}.pickle"
        self._is_done = False
        if world.device.type == "cuda":
            if keeps_history:
                torch.cuda.memory._record_memory_history(max_entries=_MAX_ENTRIES, device=world.device)
            torch._C._cuda_attach_out_of_memory_observer(self._write)  # type: ignore[attr-defined]

    def _write(self, device: int, num_asked: int, num_total: int, num_free: int) -> None:
        """Called by torch's allocator, before it raises."""
        if self._is_done:
            return
        self._is_done = True
        try:
            torch.cuda.memory._dump_snapshot(str(self.file))  # type: ignore[no-untyped-call]
            logger.warning(
                "memory is full: what lies where is in %s (open it at https://pytorch.org/memory_viz)", self.file
            )
        except Exception as error:  # the error that is to be seen is the allocator's
            logger.warning("memory is full, and %s cannot be written: %s", self.file, error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is of memory that is full: of an allocator, CUDA's or the CPU's, or beside it, as NCCL's."""
    is_typed = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_typed or any(sign in str(error) for sign in ("can't allocate memory", "out of memory", "ALLOC_FAILED"))


def suggest_less_memory(config: RunConfig, model_dir: Path, world: World) -> str:
    """What the planner says of a run that ran out of memory: where it went by plan, and what fits.

    Args:
        config: of the run.
        model_dir: with the model's config.json.
        world: the ranks, and the device of this one.
    """
    try:
        return _tell(_plan(config, model_dir, world), config)
    except Exception as error:  # an opinion: what went wrong is told without it
        return f"The planner has no view of it ({type(error).__name__}: {' '.join(str(error).split())})."


def _plan(config: RunConfig, model_dir: Path, world: World) -> Plan:
    memory = total_memory(world.device, world.ranks_per_node)
    tflops = peak_tflops(world.device) or _UNKNOWN_TFLOPS
    gpu = find_gpu("this device", {"--gpu-memory-gib": memory / GIB, "--tflops": tflops})
    nodes = max(1, world.world_size // world.ranks_per_node)
    if world.device.type == "cpu":
        config = replace(config, precision=config.precision or "fp32")
    return make_plan(
        config, PlanRequest(gpu=gpu, nodes=nodes, gpus_per_node=world.ranks_per_node, model=str(model_dir))
    )


def _tell(plan: Plan, config: RunConfig) -> str:
    parts: dict[str, Any] = plan.peak.footprint.to_json()
    total = parts.pop("total")
    largest = sorted(parts.items(), key=lambda part: part[1], reverse=True)[:4]
    shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest if size)
    lines = [
        f"By plan a rank needs {total / GIB:.1f} of {plan.request.gpu.memory_bytes / GIB:.1f} GiB, most at the "
        f"{plan.peak.phase} ({shown})."
    ]
    if plan.fits:
        lines.append("So by plan it fits: see what else holds memory on this device.")
    fitting = sorted((v for v in plan.variants if v.fits), key=lambda v: v.tokens_per_s_per_gpu, reverse=True)
    remedies = [text for variant in fitting if (text := _tell_variant(variant, plan, config))]
    lines += [f"What fits, the fastest first: {'; or '.join(remedies[:_NUM_REMEDIES])}."] if remedies else []
    if not remedies:
        lines.append(f"No layout of these ranks fits by plan; what may help: {', '.join(list_remedies(plan))}.")
    lines.append("fctune plan --config FILE shows all of it.")
    return " ".join(lines)


def _tell_variant(variant: Variant, plan: Plan, config: RunConfig) -> str:
    """The keys that a variant changes; empty where it asks for as much as what ran out."""
    setting, held = variant.setting, variant.peak.footprint.total
    if held >= plan.peak.footprint.total:
        return ""
    changes = []
    if setting.mode not in ("none", plan.setting.mode):
        changes.append(f"parallel.mode={setting.mode}")
    if setting.fraction != config.activation_checkpointing.fraction:
        changes.append(f"activation_checkpointing.fraction={setting.fraction:g}")
    if setting.micro_batch_size != config.micro_batch_size:
        changes.append(f"micro_batch_size={setting.micro_batch_size}")
    return f"{' '.join(changes)} ({held / GIB:.1f} GiB)" if changes else ""
