"""Waiting for commands that run in processes of their own."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any


def wait_until(holds: Callable[[], Any], process: subprocess.Popen[str], timeout_s: float = 120) -> Any:
    """Return the first true value of ``holds``; fails if the process ends or time runs out before."""
    deadline = time.monotonic() + timeout_s
    while not (value := holds()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value
