"""Measurements of a step: FLOPs, spans of time, step-time statistics, loss spikes, memory, and figures of all ranks."""

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

from fctune.models.architecture import AttentionLayer, sum_attention

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class FlopCounter:
    """Counter of training FLOPs by the conventions of different projects; a multiply-add counts as two.

    Args:
        num_parameters: Parameters of the model without adapters, including the embedding (as NeMo counts); of experts
            only those that a token chooses.
        attention_layers: The layers that attend.
        is_frozen: The base is frozen, so that backward computes no gradients of its weights.
        num_head: Weights of the output head, which is applied to supervised tokens only.
        num_embedding: Weights of the embedding, which is a look-up; 0 if they are tied to the head.
        num_adapter: Weights of adapters.
        recomputed: Share of the blocks' matrix products that backward recomputes.
        recomputed_attention: Share of their attention that backward recomputes.
        num_reference: Forward passes of the frozen base in addition to the training pass.
    """

    num_parameters: int
    attention_layers: tuple[AttentionLayer, ...]
    is_frozen: bool
    num_head: int = 0
    num_embedding: int = 0
    num_adapter: int = 0
    recomputed: float = 0.0
    recomputed_attention: float = 0.0
    num_reference: int = 0

    def weights(self, num_tokens: int) -> int:
        """Count the model FLOPs of the weights: 2N per token forward, 2N for activation and 2N for weight gradients.

        That is 6N for full training (https://arxiv.org/abs/2204.02311) and 4N over a frozen base, plus 2N for a pass of
        the reference. Recomputation is not counted, because the model does not require it.
        """
        return ((4 if self.is_frozen else 6) + 2 * self.num_reference) * self.num_parameters * num_tokens

    def attention(self, num_tokens: int, num_pairs: int) -> float:
        """Count the FLOPs of attention, 4d forward and 8d backward for each pair of a query and a visible key.

        Args:
            num_tokens: Tokens.
            num_pairs: Pairs of a token and one of its conversation that it sees without a window.
        """
        return (12 + 4 * self.num_reference) * self._sum_attention(num_tokens, num_pairs)

    def hardware(self, num_slots: int, num_tokens: int, num_supervised: int, num_pairs: int) -> float:
        """Count the FLOPs that the device computes, with padding, recomputation and the head at supervised tokens only.

        This is the HFU of https://arxiv.org/abs/2205.05198 (appendix A) for these blocks. The softmax, norms and the
        optimizer update are not counted.
        """
        times = (4 if self.is_frozen else 6) + 2 * self.num_reference
        blocks = self.num_parameters - self.num_head - self.num_embedding
        again = 2 * self.recomputed * (blocks + self.num_adapter)
        products = num_slots * (times * blocks + 6 * self.num_adapter + again)
        attention = self.attention(num_tokens, num_pairs)
        attention += 4 * self._sum_attention(num_tokens, num_pairs) * self.recomputed_attention
        return products + num_supervised * times * self.num_head + attention

    def dense_attention(self, num_tokens: int, seq_len: int) -> float:
        """Count attention as PaLM and torchtitan do: all ``seq_len`` keys of a row, including masked ones."""
        width = sum(layer.width for layer in self.attention_layers)
        return (12 + 4 * self.num_reference) * width * num_tokens * seq_len

    def _sum_attention(self, num_tokens: int, num_pairs: int) -> float:
        return sum_attention(self.attention_layers, num_pairs / num_tokens) * num_tokens if num_tokens else 0.0


class SpanTimer:
    """Timer of one span per step; on CUDA it uses events, so that the host never waits for it.

    ``last_s`` is the length in seconds of the last settled span, NaN before the first.
    """

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"
        self._begin: Any = None
        self._spans: deque[tuple[Any, Any]] = deque()  # that have not settled
        self.last_s = math.nan

    def start(self) -> None:
        """Mark the start of the span on the device or, without CUDA, on the clock."""
        self._begin = self._now()

    def stop(self) -> None:
        """Mark the end of the span; ``settle`` reads its length."""
        self._spans.append((self._begin, self._now()))

    def settle(self) -> None:
        """Read the oldest span's length into ``last_s``; call it once the host has waited for work that followed it."""
        begin, end = self._spans.popleft()
        self.last_s = float(begin.elapsed_time(end) / 1000 if self._is_cuda else end - begin)

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def measure_skew(seconds: Sequence[float]) -> dict[str, Any]:
    """Compare the slowest rank's time with the median rank's: the metrics ``compute_skew`` and ``slowest_rank``.

    The median of an even number of ranks is the lower of the two middle ones, so that of two ranks the slower is
    compared with the other one. Sharded ranks wait for each other at every block, which hides a slow one among them.

    Args:
        seconds: Time that each rank took, by rank.
    """
    slowest = max(range(len(seconds)), key=lambda rank: seconds[rank])
    median = statistics.median_low(seconds)
    return {"compute_skew": seconds[slowest] / median if median > 0 else 1.0, "slowest_rank": slowest}


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory so far: allocated on a CUDA device, else resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB  # kilobytes on Linux


def active_memory_gib(device: torch.device) -> float:
    """Return the memory in use now: active on a CUDA device, else resident memory of this process."""
    if device.type == "cuda":
        return float(torch.cuda.memory_stats(device)["active_bytes.all.current"]) / GIB
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / GIB


class StepTimeStats:
    """Step-time percentiles over the last steps, without the first ones, which compile and allocate memory.

    Args:
        num_kept: Number of recent steps to keep.
        num_skipped: Number of first steps to ignore.
    """

    def __init__(self, num_kept: int = 1000, num_skipped: int = 3) -> None:
        self._times: deque[float] = deque(maxlen=num_kept)
        self._num_left = num_skipped

    def add(self, seconds: float) -> None:
        """Add the duration of one step."""
        if self._num_left:
            self._num_left -= 1
        else:
            self._times.append(seconds)

    def describe(self) -> dict[str, float]:
        """Return the median and the 99th percentile (nearest rank) as metrics; empty before the first counted step."""
        if not self._times:
            return {}
        times = sorted(self._times)
        return {
            "step_time_p50_s": statistics.median(times),
            "step_time_p99_s": times[math.ceil(0.99 * len(times)) - 1],
        }


class SpikeDetector:
    """Detector of losses far above the preceding ones.

    The limit is Hampel's: 10 median absolute deviations above the median of the last 50 losses. It must be exceeded on
    the linear and on the logarithmic scale, because the noise of small batches is skewed and grows with the loss, and
    by a tenth of the median and 0.1 nats, because a loss near zero varies by large factors in healthy runs. Where the
    50 vary too much, as in the steep fall at the start, the limit is 8 times the median of the last 20, and at least
    1 nat above it. The first 20 steps are never spikes.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=50)

    def check(self, loss: float) -> float | None:
        """Return the limit that this loss exceeds, None if it is not a spike, and add the loss to the history."""
        limit = self._limit() if len(self._losses) >= 20 else math.inf
        self._losses.append(loss)
        return limit if loss > limit else None

    def _limit(self) -> float:
        middle, spread = _median_and_deviation(self._losses)
        limits = [middle + 10 * spread, middle + 0.1 * abs(middle), middle + 0.1]
        if min(self._losses) > 0:
            log_middle, log_spread = _median_and_deviation([math.log(loss) for loss in self._losses])
            limits.append(math.exp(min(log_middle + 10 * log_spread, 100.0)))
        recent = statistics.median(list(self._losses)[-20:])
        return min(max(limits), max(8 * recent, recent + 1))


def _median_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the median absolute deviation from it."""
    middle = statistics.median(values)
    return middle, statistics.median(abs(value - middle) for value in values)


@dataclass(frozen=True, slots=True)
class RankMetrics:
    """Figures of one rank since it last reported them; NaN where it has none."""

    data_s: float = math.nan  # time waiting for data
    save_wait_s: float = math.nan  # time waiting for saves
    memory_active_gib: float = math.nan  # now
    memory_reserved_gib: float = math.nan  # now
    peak_memory_gib: float = math.nan  # since the start
    num_alloc_retries: float = math.nan  # since the start
    gpu_utilization: float = math.nan
    gpu_temperature_c: float = math.nan
    gpu_power_w: float = math.nan

    def to_row(self) -> list[float]:
        """Return the figures as numbers in field order, to send in a collective."""
        return list(astuple(self))

    @classmethod
    def from_row(cls, row: Sequence[float]) -> RankMetrics:
        """Restore the figures from ``to_row``."""
        return cls(*row)


def aggregate_ranks(figures: Sequence[RankMetrics]) -> dict[str, Any]:
    """Aggregate the figures of all ranks into metrics, leaving out those that no rank has."""

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
