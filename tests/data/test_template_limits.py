"""Limits on what rendering a template may use: what other threads use does not count."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from fctune.data.template_limits import RenderingBudget, TemplateLimitError


def render(work: Callable[[], None], growth: int) -> None:
    """Do some work between two checks, while the memory of the process grows."""
    sizes = iter([10**9, 10**9 + growth])
    budget = RenderingBudget(lambda: next(sizes))
    budget.start()
    time.sleep(0.11)  # longer than a rendering without checks
    budget.tick()
    work()
    budget.tick("text")


def compute() -> None:
    start = time.thread_time()
    while time.thread_time() - start < 0.1:
        pass


def wait_for_another_thread() -> None:
    other = threading.Thread(target=compute)
    other.start()
    other.join()


def test_memory_that_others_use_while_a_rendering_waits_is_not_its_own() -> None:
    render(wait_for_another_thread, growth=2**30)
    with pytest.raises(TemplateLimitError, match="more than 512 MiB of memory"):
        render(compute, growth=2**30)
    render(compute, growth=2**28)
