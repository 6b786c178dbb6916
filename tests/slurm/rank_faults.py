"""Slows a run's steps, and holds its last rank at chosen steps until a test says what happens to it.

Tests copy this file as sitecustomize.py to a folder on the ranks' PYTHONPATH. FCTUNE_FAULTS names a folder, and
FCTUNE_FAULT_STEPS the steps, separated by colons. At each, the rank creates ``reached-STEP`` and waits for ``do-STEP``:
``exit CODE``, ``raise``, ``full`` (no later file can be written) or ``continue``.
"""

import errno
import os
import sys
import threading
import time
from pathlib import Path

PACE_S = 0.15  # so that a checkpoint is complete a few steps after it is due


def be_held(folder: Path, step: str) -> str:
    """Wait at a step, in the first launch that reaches it, and return what to do."""
    reached, order = folder / f"reached-{step}", folder / f"do-{step}"
    if reached.exists():
        return "continue"
    reached.touch()
    while not order.exists():
        time.sleep(0.02)
    return order.read_text()


def listen() -> None:
    """Follow the run's phases as soon as it has imported what announces them."""
    folder, steps = Path(os.environ["FCTUNE_FAULTS"]), os.environ["FCTUNE_FAULT_STEPS"].split(":")
    is_last_rank = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    is_full = False

    def inject(phase: str, name: str) -> None:
        nonlocal is_full
        if phase == "write" and is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if phase != "step":
            return
        time.sleep(PACE_S)
        if not is_last_rank or name not in steps:
            return
        order, _, code = be_held(folder, name).partition(" ")
        if order == "exit":
            os._exit(int(code))
        if order == "raise":
            raise ValueError("an injected defect")
        is_full = order == "full"

    while (hooks := sys.modules.get("fctune.checkpoint.fault_hooks")) is None or not hasattr(hooks, "listen"):
        time.sleep(0.02)
    hooks.listen(inject)


if "RANK" in os.environ and "FCTUNE_FAULTS" in os.environ:
    threading.Thread(target=listen, daemon=True).start()
