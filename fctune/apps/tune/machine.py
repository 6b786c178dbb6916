"""Machine that a tune runs on: its GPUs, or its processors described as one GPU."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from fctune.base.errors import ConfigError
from fctune.base.gpus import GIB, GPUS, Gpu
from fctune.config.intervals import format_count

_CPU = "CPU"
# The products that are timed: a pack's tokens by a hidden size. Single ones are much faster than those of a run, except
# where a dtype is emulated: a pack would take seconds, at the same rate as few tokens.
_TIMED_TOKENS, _TIMED_DIM = 2048, 1024
_EMULATED_TOKENS = 64
_TIMED_S = 0.3
_MUCH_FASTER = 2.0  # the rest of a step is not faster in bfloat16


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs, or the processors.

    Attributes:
        num_gpus: GPUs to use; 0 for the processors.
        gpu: One of them; of the processors, their memory and the rates of matrix products timed here.
        is_known: The GPU is in the table, so that time and cost can be planned.
    """

    num_gpus: int
    gpu: Gpu
    is_known: bool = True

    @property
    def num_processes(self) -> int:
        """Ranks to train with."""
        return max(1, self.num_gpus)

    @property
    def name(self) -> str:
        """Number and kind of the GPUs, without the memory that happens to be free."""
        return f"{format_count(self.num_gpus, 'GPU')} ({self.gpu.name})" if self.num_gpus else "no GPU"

    @property
    def prefers_bf16(self) -> bool:
        """True for processors that multiply bfloat16 matrices much faster than others, as those with AMX do."""
        return not self.num_gpus and self.gpu.bf16_tflops > _MUCH_FASTER * (self.gpu.fp32_tflops or 0.0)

    def describe(self) -> str:
        """Return the machine in a few words."""
        memory = f"{self.gpu.memory_bytes / GIB:.1f} GiB"
        if not self.num_gpus:
            return f"no GPU, {memory} of free memory"
        return f"{format_count(self.num_gpus, 'GPU')} ({self.gpu.name}, {memory})"


def find_machine(num_gpus: int | None) -> Machine:
    """Return the GPUs of this machine, or its processors if it has none or 0 GPUs are asked for.

    Raises:
        ConfigError: More GPUs are asked for than there are.
    """
    import torch

    found = torch.cuda.device_count()
    wanted = found if num_gpus is None else num_gpus
    if wanted > found:
        there = f"{format_count(found, 'GPU')} here" if found else "no GPU here that PyTorch can use"
        raise ConfigError(
            f"--gpus {wanted}: there is {there}. "
            f"Pass {f'--gpus {found} or fewer' if found else '--gpus 0'}, or run the command on a larger machine."
        )
    if not wanted:
        return Machine(0, _describe_processors())
    from fctune.runs.device import find_gpu_kind

    properties = torch.cuda.get_device_properties(0)
    kind = find_gpu_kind(properties.name)
    # Of an unknown GPU only the memory is used; the rates are stand-ins that no time is printed from.
    gpu = replace(GPUS[kind or "a100"], memory_bytes=int(properties.total_memory))
    return Machine(wanted, gpu if kind else replace(gpu, name=properties.name), kind is not None)


def _describe_processors() -> Gpu:
    """Describe the processors as a GPU with the memory that is free now, and the rates that they reach now."""
    import psutil
    import torch

    from fctune.models.precision import is_emulated

    tflops = {}
    for dtype in (torch.float32, torch.bfloat16):
        num_tokens, dim = _EMULATED_TOKENS if is_emulated(dtype) else _TIMED_TOKENS, _TIMED_DIM
        tokens, weight = torch.ones(num_tokens, dim, dtype=dtype), torch.ones(dim, dim, dtype=dtype)
        tokens @ weight  # the first one prepares
        products, started = 0, time.perf_counter()
        while (seconds := time.perf_counter() - started) < _TIMED_S:
            tokens @ weight
            products += 1
        tflops[dtype] = products * 2 * num_tokens * dim**2 / seconds / 1e12
    memory = int(psutil.virtual_memory().available)
    rates = (tflops[torch.bfloat16], None, tflops[torch.float32])
    return Gpu(_CPU, memory, *rates, 20, 20, 1, "this machine", "this machine")
