"""What a step measures: time by part and by rank, tokens by kind, FLOPs by convention, memory."""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
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
    """

    num_parameters: int
    num_layers: int
    attention_dim: int
    is_frozen: bool

    def weights(self, num_tokens: int) -> int:
        """What the weights cost: 2N a token forward, 2N for gradients of activations, 2N for those of weights.

        6N when all train (https://arxiv.org/abs/2204.02311), 4N over a frozen base. Recomputing activations is not
        counted: it is not the work that was asked for.
        """
        return (4 if self.is_frozen else 6) * self.num_parameters * num_tokens

    def attention(self, num_pairs: int) -> int:
        """What attention costs over ``num_pairs`` of a query and a key that it may see: 4d forward, 8d backward."""
        return 12 * self.num_layers * self.attention_dim * num_pairs

    def dense_attention(self, num_tokens: int, seq_len: int) -> int:
        """The same as PaLM and torchtitan count it: every key of a row of ``seq_len``, also those that are masked."""
        return self.attention(num_tokens * seq_len)


class StepClock:
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


def describe_skew(seconds: Sequence[float]) -> dict[str, Any]:
    """How evenly the ranks work, from the seconds each took: the slowest one's over the median, and which it is.

    Ranks that wait for one another within the span, as sharded ones do at each block, hide a slow one among them.
    """
    slowest = max(range(len(seconds)), key=lambda rank: seconds[rank])
    median = statistics.median(seconds)
    return {"compute_skew": seconds[slowest] / median if median > 0 else 1.0, "slowest_rank": slowest}


def peak_memory_gib(device: torch.device) -> float:
    """Most memory held so far: allocated on a CUDA device, or resident of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB  # kilobytes on Linux


class SpikeFinder:
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
