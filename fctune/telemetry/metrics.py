"""What a step measures: time by part and by rank, tokens by kind, FLOPs by convention, memory."""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class FlopCounter:
    """Floating-point operations of training, as different projects count them; a multiply-add is two.

    Args:
        num_parameters: of the model without adapters, the embedding's among them (as NeMo counts).
        num_layers: blocks.
        attention_dim: heads times their size.
        is_frozen: whether the base does not train: backward then computes no gradients of its weights.
        num_head: weights of the head, which meets supervised tokens alone.
        num_embedding: weights of the embedding, which is a look-up; 0 where it is the head's.
        num_adapter: weights of adapters.
        recomputed: share of the blocks' products that are computed again in backward.
        recomputed_attention: share of their attention that is.
    """

    num_parameters: int
    num_layers: int
    attention_dim: int
    is_frozen: bool
    num_head: int = 0
    num_embedding: int = 0
    num_adapter: int = 0
    recomputed: float = 0.0
    recomputed_attention: float = 0.0

    def weights(self, num_tokens: int) -> int:
        """What the weights cost: 2N a token forward, 2N for gradients of activations, 2N for those of weights.

        6N when all train (https://arxiv.org/abs/2204.02311), 4N over a frozen base. Recomputing activations is not
        counted: it is not the work that was asked for.
        """
        return (4 if self.is_frozen else 6) * self.num_parameters * num_tokens

    def attention(self, num_pairs: int) -> int:
        """What attention costs over ``num_pairs`` of a query and a key that it may see: 4d forward, 8d backward."""
        return 12 * self.num_layers * self.attention_dim * num_pairs

    def hardware(self, num_slots: int, num_supervised: int, num_pairs: int) -> float:
        """What the device computes for it: padding and what is recomputed count, and the head at supervised tokens.

        As HFU of https://arxiv.org/abs/2205.05198 (appendix A), by what these blocks compute. The softmax, norms and
        the update are not counted.
        """
        times = 4 if self.is_frozen else 6
        blocks = self.num_parameters - self.num_head - self.num_embedding
        again = 2 * self.recomputed * (blocks + self.num_adapter)
        products = num_slots * (times * blocks + 6 * self.num_adapter + again)
        attention = self.attention(num_pairs) * (1 + self.recomputed_attention / 3)
        return products + num_supervised * times * self.num_head + attention

    def dense_attention(self, num_tokens: int, seq_len: int) -> int:
        """The same as PaLM and torchtitan count it: every key of a row of ``seq_len``, also those that are masked."""
        return self.attention(num_tokens * seq_len)


class SpanTimer:
    """Times a span of each step: on CUDA by events, for which the host waits nowhere, else by the wall clock.

    ``last_s`` is the length of the last span that is settled, NaN before the first.
    """

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"
        self._begin: Any = None
        self._end: Any = None
        self.last_s = math.nan

    def start(self) -> None:
        """Begin the span."""
        self._begin = self._now()

    def stop(self) -> None:
        """End the span."""
        self._end = self._now()

    def settle(self) -> None:
        """Read the span's length, once the host has waited for work that came after it."""
        span = self._begin.elapsed_time(self._end) / 1000 if self._is_cuda else self._end - self._begin
        self.last_s = float(span)

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def measure_skew(seconds: Sequence[float]) -> dict[str, Any]:
    """How evenly the ranks work, from the seconds each took: the slowest one's over the median, and which it is.

    Of an even number of ranks the median is the lower of the two in the middle, so that of two ranks the slower is held
    to the other, and not to what both took. Ranks that wait for one another within the span, as sharded ones do at each
    block, hide a slow one among them.
    """
    slowest = max(range(len(seconds)), key=lambda rank: seconds[rank])
    median = statistics.median_low(seconds)
    return {"compute_skew": seconds[slowest] / median if median > 0 else 1.0, "slowest_rank": slowest}


def peak_memory_gib(device: torch.device) -> float:
    """Most memory held so far: allocated on a CUDA device, or resident of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB  # kilobytes on Linux


def active_memory_gib(device: torch.device) -> float:
    """Memory held now: in use on a CUDA device, or resident of this process."""
    if device.type == "cuda":
        return float(torch.cuda.memory_stats(device)["active_bytes.all.current"]) / GIB
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / GIB


class StepTimeStats:
    """How long the last steps took, but for the first ones: compilation and first touches of memory are no measure."""

    def __init__(self, num_kept: int = 1000, num_first: int = 3) -> None:
        self._times: deque[float] = deque(maxlen=num_kept)
        self._num_left = num_first

    def add(self, seconds: float) -> None:
        """One more step."""
        if self._num_left:
            self._num_left -= 1
        else:
            self._times.append(seconds)

    def describe(self) -> dict[str, float]:
        """Median and 99th percentile (nearest rank); nothing before there are steps to tell of."""
        if not self._times:
            return {}
        times = sorted(self._times)
        return {
            "step_time_p50_s": statistics.median(times),
            "step_time_p99_s": times[math.ceil(0.99 * len(times)) - 1],
        }


class SpikeDetector:
    """Finds losses that stand out from those before them.

    A spike is over the median of the last 50 by more than 8 times their median absolute deviation (Hampel's rule), and
    by a tenth of that median at least. The first 20 steps have none.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=50)

    def is_spike(self, loss: float) -> bool:
        """Whether the next loss stands out; it is remembered either way."""
        found = False
        if len(self._losses) >= 20:
            middle = statistics.median(self._losses)
            spread = statistics.median(abs(other - middle) for other in self._losses)
            found = loss - middle > max(8 * spread, 0.1 * abs(middle))
        self._losses.append(loss)
        return found


@dataclass(frozen=True, slots=True)
class RankMetrics:
    """One rank's since it last told them; NaN where it has no such figure."""

    data_s: float = math.nan  # waited for data
    save_wait_s: float = math.nan  # waited for saves
    memory_active_gib: float = math.nan  # now
    memory_reserved_gib: float = math.nan  # now
    peak_memory_gib: float = math.nan  # since the start
    num_alloc_retries: float = math.nan  # since the start
    gpu_utilization: float = math.nan
    gpu_temperature_c: float = math.nan
    gpu_power_w: float = math.nan

    def to_row(self) -> list[float]:
        """The numbers in their order, for a collective."""
        return list(astuple(self))

    @classmethod
    def from_row(cls, row: Sequence[float]) -> RankMetrics:
        """What ``to_row`` gave."""
        return cls(*row)


def aggregate_ranks(figures: Sequence[RankMetrics]) -> dict[str, Any]:
    """The metrics of all ranks together; without those that no rank has."""

    def over(reduce: Callable[[list[float]], float], name: str) -> float | None:
        values = [value for one in figures if not math.isnan(value := getattr(one, name))]
        return reduce(values) if values else None

    found = {
        "data_time_max_s": over(max, "data_s"),
        "save_wait_max_s": over(max, "save_wait_s"),
        "memory_active_gib": over(max, "memory_active_gib"),
        "memory_reserved_gib": over(max, "memory_reserved_gib"),
        "peak_memory_max_gib": over(max, "peak_memory_gib"),
        "alloc_retries": over(sum, "num_alloc_retries"),
        "gpu_utilization": over(statistics.fmean, "gpu_utilization"),
        "gpu_utilization_min": over(min, "gpu_utilization"),
        "gpu_temperature_c": over(max, "gpu_temperature_c"),
        "gpu_power_w": over(sum, "gpu_power_w"),
    }
    return {name: value for name, value in found.items() if value is not None}
