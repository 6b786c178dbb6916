"""The time limit of a step follows the steps before it, with room for compilation."""

from __future__ import annotations

from pathlib import Path

import pytest

from fctune.training.callbacks.hang_watch import HangWatch


@pytest.mark.parametrize(("is_compiled", "limit_s"), [(False, 120.0), (True, 600.0)])
def test_a_compiled_run_may_compile_within_a_step(is_compiled: bool, limit_s: float, tmp_path: Path) -> None:
    watch = HangWatch(tmp_path, 0, lambda reason, code: None, is_compiled=is_compiled)
    try:
        assert watch.limit_s == 1800.0
        for step in range(5):
            watch.on_step_start(step)
            watch.after_optimizer_update(step)
        assert watch.limit_s == limit_s
    finally:
        watch.close()
