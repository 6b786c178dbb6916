"""Measure inference speed: time to first token, tokens per second and memory, by batch size or by concurrency."""

from __future__ import annotations

import contextlib
import re
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fctune.data.conversation import Conversation
from fctune.engines.local import LocalEngine
from fctune.engines.server import ServerEngine

# Writing 5 resets this process's peak resident size; see proc(5).
_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class Speed:
    """One measurement with ``width`` prompts at a time.

    Attributes:
        width: Batch size in process, or requests in flight at a server.
        num_prompts: Number of prompts.
        num_tokens: New tokens of all prompts.
        total_s: Seconds for all prompts.
        first_s: Median time to first token, in seconds.
        first_p95_s: 95th percentile of the time to first token.
        decode_per_s: Median tokens per second of one prompt after its first token; None for a single token.
        memory_bytes: Peak GPU memory, or peak resident size of this process without a GPU; None for a server.
    """

    width: int
    num_prompts: int
    num_tokens: int
    total_s: float
    first_s: float
    first_p95_s: float
    decode_per_s: float | None
    memory_bytes: int | None

    @property
    def tokens_per_s(self) -> float:
        """New tokens of all prompts per second."""
        return self.num_tokens / self.total_s


def measure_in_process(engine: LocalEngine, prompts: Sequence[Conversation], width: int, num_new_tokens: int) -> Speed:
    """Measure batches of ``width`` prompts, each answered with exactly ``num_new_tokens`` tokens."""
    encoded = [engine.template.encode_prompt(prompt) for prompt in prompts]
    _reset_memory(engine.device)
    first, decode, num_tokens = [], [], 0
    start = _now(engine.device)
    for position in range(0, len(encoded), width):
        batch = encoded[position : position + width]
        clock = _Clock(engine.device)
        begun = _now(engine.device)
        generated = engine.generate(
            batch, num_new_tokens, min_new_tokens=num_new_tokens, logits_processor=_as_list(clock)
        )
        ended = _now(engine.device)
        assert clock.first is not None
        first += [clock.first - begun] * len(batch)
        num_tokens += generated.numel()
        if num_new_tokens > 1:
            decode.append((num_new_tokens - 1) / (ended - clock.first))
    total_s = _now(engine.device) - start
    return _to_speed(width, first, decode, num_tokens, total_s, _peak_memory(engine.device))


def measure_endpoint(engine: ServerEngine, prompts: Sequence[Conversation], width: int, num_new_tokens: int) -> Speed:
    """Measure streamed answers with ``width`` requests in flight.

    A server that does not support ``ignore_eos`` may end answers early; tokens are counted as they arrive.
    """
    with ThreadPoolExecutor(width) as pool:
        start = time.perf_counter()
        timings = list(pool.map(lambda prompt: engine.time_answer(prompt, num_new_tokens), prompts))
        total_s = time.perf_counter() - start
    decode = [
        (t.num_tokens - 1) / (t.total_s - t.first_s) for t in timings if t.num_tokens > 1 and t.total_s > t.first_s
    ]
    num_tokens = sum(timing.num_tokens for timing in timings)
    return _to_speed(width, [timing.first_s for timing in timings], decode, num_tokens, total_s, None)


def measure_rounds(
    measures: Sequence[Callable[[], Speed]], num_rounds: int, on_speed: Callable[[int, Speed], None]
) -> list[Speed]:
    """Run all measurements in several rounds and return each one's round of median speed.

    Measurements take turns, so that other load on the machine affects them alike. The first round is a warm-up and is
    discarded.

    Args:
        measures: The measurements.
        num_rounds: Number of rounds after the warm-up.
        on_speed: Called with the index and the result of each measurement.
    """
    rounds: list[list[Speed]] = [[] for _ in measures]
    for number in range(num_rounds + 1):
        for index, measure in enumerate(measures):
            speed = measure()
            on_speed(index, speed)
            rounds[index] += [speed] if number else []
    return [sorted(found, key=lambda speed: speed.tokens_per_s)[len(found) // 2] for found in rounds]


class _Clock:
    """A logits processor that records the time of the first token's logits and changes nothing."""

    def __init__(self, device: torch.device):
        self._device = device
        self.first: float | None = None

    def __call__(self, tokens: Tensor, logits: Tensor) -> Tensor:
        if self.first is None:
            self.first = _now(self._device)
        return logits


def _as_list(processor: Any) -> Any:
    from transformers import LogitsProcessorList

    return LogitsProcessorList([processor])


def _to_speed(
    width: int, first: Sequence[float], decode: Sequence[float], num_tokens: int, total_s: float, memory: int | None
) -> Speed:
    ordered = sorted(first)
    return Speed(
        width=width,
        num_prompts=len(first),
        num_tokens=num_tokens,
        total_s=total_s,
        first_s=statistics.median(ordered),
        first_p95_s=ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        decode_per_s=statistics.median(decode) if decode else None,
        memory_bytes=memory,
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _reset_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # not Linux, or not permitted: the peak is then that of the process so far
        _CLEAR_REFS.write_text("5")


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    except OSError:
        found = None
    kib = int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib * 1024
