"""A Python for the commands that tests start: each runs in a fork of one process that has made the slow imports.

A command of its own interpreter spends 3 to 15 s of a processor on imports. Commands that test imports, the death of a
parent or the terminal's Ctrl-C still start one, by ``sys.executable``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from benchmarks.warm_python import WarmPython

ROOT = Path(__file__).resolve().parents[1]
_PATH = "FCTUNE_TESTS_WARM_PYTHON"  # set by the process that starts the workers of pytest-xdist, which share a server

MODULES = (
    *("fctune.cli", "fctune.training.launcher", "torch.distributed.launcher.api", "torch.distributed.run"),
    *("fctune.training.entry", "fctune.training.adapters", "fctune.models.export", "fctune.apps.preflight.preflight"),
    *("fctune.models.transformers.modules", "fctune.models.transformers.build", "fctune.models.torchtune.build"),
    *("recipes.lora_fc_distributed", "recipes.full_fc_distributed", "recipes.lora_grpo_distributed"),
    *("recipes.lora_dpo_distributed", "recipes.lora_distill_distributed", "recipes.full_distill_distributed"),
    *("recipes.cluster_acceptance", "eval.tool_calls", "fctune.engines.local"),
)

_server: WarmPython | None = None


def start() -> None:
    """Start the server without waiting for it."""
    global _server
    folder = Path(tempfile.mkdtemp(prefix="fctune-warm-"))  # a socket's path is at most 108 bytes
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    _server = WarmPython(folder, MODULES, {**os.environ, "PYTHONPATH": path})
    os.environ[_PATH] = str(_server.start())


def stop() -> None:
    """End the server, if this process has started it."""
    if _server is not None:
        _server.close()
        shutil.rmtree(Path(os.environ.pop(_PATH)).parent)


def warm_python() -> str:
    """Return the path of an interpreter for ``-m MODULE`` and ``-c CODE``."""
    if _PATH not in os.environ:
        start()
    return os.environ[_PATH]
