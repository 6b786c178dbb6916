"""Out-of-memory reports: a snapshot of the allocations, and settings that would fit according to the planner."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fctune.base.distributed import World
from fctune.base.gpus import find_gpu
from fctune.config.schema import RunConfig
from fctune.models.planned_model import find_architecture
from fctune.parallel.footprint import GIB
from fctune.parallel.layout import list_mlp_tiles
from fctune.parallel.memory import Peak, Setting
from fctune.parallel.search import LayoutSearch, Variant, format_overrides, list_overrides
from fctune.runs.device import peak_tflops, total_memory

logger = logging.getLogger("fctune")

_MAX_ENTRIES = 100_000  # allocations recorded: some tens of MB of host memory
_NUM_REMEDIES = 3
_UNKNOWN_TFLOPS = 300.0  # of an unknown GPU; remedies are ranked by speed, for which any value will do


class MemorySnapshot:
    """Writes a snapshot of a GPU's memory when an allocation fails, once.

    https://pytorch.org/memory_viz displays the file in the browser. It contains the stack of each allocation only if
    ``profile.allocations`` records them, which costs time at every allocation.

    Args:
        folder: The run's directory.
        world: This rank; on CPU nothing is written.
        keeps_history: Record the stack of each allocation.
    """

    def __init__(self, folder: Path, world: World, keeps_history: bool):
        self.file = folder / f"out-of-memory-rank-{world.rank}.pickle"
        self._is_done = False
        if world.device.type == "cuda":
            if keeps_history:
                torch.cuda.memory._record_memory_history(max_entries=_MAX_ENTRIES, device=world.device)
            torch._C._cuda_attach_out_of_memory_observer(self._write)  # type: ignore[attr-defined]

    def _write(self, device: int, num_requested: int, num_total: int, num_free: int) -> None:
        """Called by torch's allocator before it raises."""
        if self._is_done:
            return
        self._is_done = True
        try:
            torch.cuda.memory._dump_snapshot(str(self.file))  # type: ignore[no-untyped-call]
            logger.warning(
                "out of memory: allocations are recorded in %s (open it at https://pytorch.org/memory_viz)", self.file
            )
        except Exception as error:  # must not hide the allocator's error
            logger.warning("out of memory, and %s cannot be written: %s", self.file, error)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that memory is full: of the CUDA or CPU allocator, or of cuBLAS and NCCL."""
    # torch raises a plain RuntimeError for the CPU allocator, cuBLAS and NCCL, without a code.
    is_typed = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_typed or any(sign in str(error) for sign in ("can't allocate memory", "out of memory", "ALLOC_FAILED"))


def suggest_less_memory(config: RunConfig, model_dir: Path, world: World) -> str:
    """Describe the planned memory of a run that ran out of it, and the settings that fit."""
    try:
        return _format_plan(_search_layouts(config, model_dir, world), config)
    except Exception as error:  # must not hide the run's error
        return f"The planner has no advice ({type(error).__name__}: {' '.join(str(error).split())})."


def _search_layouts(config: RunConfig, model_dir: Path, world: World) -> LayoutSearch:
    memory = total_memory(world.device, world.ranks_per_node)
    tflops = peak_tflops(world.device) or _UNKNOWN_TFLOPS
    gpu = find_gpu("this device", {"--gpu-memory-gib": memory / GIB, "--tflops": tflops})
    nodes = max(1, world.world_size // world.ranks_per_node)
    if world.device.type == "cpu":
        config = replace(config, precision=config.precision or "fp32")
    config = replace(config, model=replace(config.model, add_tokens=[]))  # which this directory has
    architecture, _, _ = find_architecture(config.model.path, str(model_dir), config.model.source)
    return LayoutSearch(config, architecture, model_dir, gpu, nodes, world.ranks_per_node)


def _format_plan(search: LayoutSearch, config: RunConfig) -> str:
    setting, _ = search.configured()
    peak, device_bytes = search.memory.peak(setting), search.gpu.memory_bytes
    parts: dict[str, Any] = peak.footprint.to_json()
    total = parts.pop("total")
    largest = sorted(parts.items(), key=lambda part: part[1], reverse=True)[:4]
    shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest if size)
    lines = [
        f"The planner expects {total / GIB:.1f} of {device_bytes / GIB:.1f} GiB per rank, with the peak at the "
        f"{peak.phase} ({shown})."
    ]
    if total <= device_bytes:
        lines.append("According to the plan the run fits; check what else uses memory on this device.")
    nodes = search.world_size // search.gpus_per_node
    variants = search.variants(nodes)
    # The run may need more than planned, so more ranks to a row and tiles are options even if the plan fits.
    if (context := search.find_larger_context(setting)) is not None:
        variants += search.variants(nodes, context)
    if (tiles := list_mlp_tiles(config, search.architecture)[-1]) > setting.mlp_tiles:
        variants += search.variants(nodes, setting.context, tiles)
    fitting = sorted((v for v in variants if v.fits), key=lambda v: v.tokens_per_s_per_gpu, reverse=True)
    remedies = [text for variant in fitting if (text := _format_variant(variant, setting, peak, search.config))]
    lines += [f"Settings that fit, fastest first: {'; or '.join(remedies[:_NUM_REMEDIES])}."] if remedies else []
    if not remedies:
        helping = search.list_remedies([variant.peak for variant in variants] or [peak])
        lines.append(f"No layout of these ranks fits; what may help: {', '.join(helping)}.")
    lines.append("fctune plan --config FILE shows the complete plan.")
    return " ".join(lines)


def _format_variant(variant: Variant, setting: Setting, peak: Peak, config: RunConfig) -> str:
    """Return the keys that a variant changes; empty if it needs no less memory than the run."""
    num_bytes = variant.peak.footprint.total
    if num_bytes >= peak.footprint.total:
        return ""
    current = {
        "parallel.mode": "auto" if setting.mode == "none" else setting.mode,
        "parallel.replicate": setting.replicate,
        "activation_checkpointing.fraction": config.activation_checkpointing.fraction,
        "micro_batch_size": config.micro_batch_size,
    }
    overrides = list_overrides(config, variant.setting)
    changes = {key: value for key, value in overrides.items() if key not in current or value != current[key]}
    return f"{format_overrides(changes)} ({num_bytes / GIB:.1f} GiB)" if changes else ""
