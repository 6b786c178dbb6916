"""Limits on what rendering a chat template may cost: templates come with models, and are programs."""

from __future__ import annotations

import operator
import resource
import time
from collections.abc import Callable
from typing import Any

_MAX_NUMBER = 10**7  # of a template's arithmetic and constants, which could be a width or a count
_MAX_LENGTH = 10**8
_FREE_S = 0.1  # wall time of a rendering without checks
_MAX_CPU_S = 2.0
_MAX_GROWTH_BYTES = 2**29
_MIN_GROWTH_S = 0.05  # no thread fills that memory in less time of its own: 10 GB/s
_PAGE_BYTES = resource.getpagesize()
_MAX_POWER = 64
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {"*": operator.mul, "**": operator.pow}


class TemplateLimitError(Exception):
    """A template exceeds a limit on time, memory or the size of a value."""


def _read_resident_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:  # only Linux has it; elsewhere the time limit remains
        return 0


class RenderingBudget:
    """Limits the time and memory of a rendering, checked whenever the template enters a loop's or a macro's body.

    The system counts memory by process, so other threads may have caused its growth. It is held against a rendering
    only if that has computed for as long as it would take to fill this memory; one that waits for a busy machine or
    another thread has not.

    Args:
        read_bytes: Returns the memory of this process.
    """

    def __init__(self, read_bytes: Callable[[], int] = _read_resident_bytes):
        self._read_bytes = read_bytes

    def start(self) -> None:
        """Reset the time and memory used, before a template is rendered."""
        self._free_until = time.monotonic() + _FREE_S
        self._cpu_start_s: float | None = None
        self._start_bytes = 0

    def tick(self, text: str = "") -> str:
        """Return the text; raise ``TemplateLimitError`` if the rendering has used up its time or memory."""
        if time.monotonic() < self._free_until:
            return text
        if self._cpu_start_s is None:
            self._cpu_start_s, self._start_bytes = time.thread_time(), self._read_bytes()
            return text
        used_s = time.thread_time() - self._cpu_start_s
        if used_s > _MAX_CPU_S:
            raise TemplateLimitError(f"it takes more than {_MAX_CPU_S:.0f} s")
        if used_s > _MIN_GROWTH_S and self._read_bytes() - self._start_bytes > _MAX_GROWTH_BYTES:
            raise TemplateLimitError(f"it takes more than {_MAX_GROWTH_BYTES // 2**20:,} MiB of memory")
        return text


def apply_operator(context: Any, name: str, left: Any, right: Any) -> Any:
    """Apply ``*`` or ``**`` to values of a template unless the result would be unreasonably large."""
    if name == "**" and isinstance(left, int) and isinstance(right, int) and abs(left) > 1 and right > _MAX_POWER:
        raise TemplateLimitError(f"it computes {left} ** {right}")
    for text, count in ((left, right), (right, left)):
        if isinstance(text, str | list | tuple) and isinstance(count, int) and len(text) * count > _MAX_LENGTH:
            raise TemplateLimitError(f"it repeats a value to a length of {len(text) * count:,}")
    result = OPERATORS[name](left, right)
    check_number(result)
    return result


def check_number(value: Any) -> None:
    """Raise ``TemplateLimitError`` for an integer that is unreasonably large as a width or a count."""
    if isinstance(value, int) and abs(value) > _MAX_NUMBER:
        raise TemplateLimitError(f"it uses a number above {_MAX_NUMBER:,}")
