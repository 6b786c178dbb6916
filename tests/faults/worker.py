"""Runs the LoRA recipe under a launcher, with a fault before the first restart.

    torchrun ... -m tests.faults.worker PHASE COUNT KIND RANK CONFIG-ARGUMENTS...

KIND is kill, raise, or slow:SECONDS, which delays the phase. No fault is injected after a restart by the launcher.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter

from fctune.checkpoint import fault_hooks
from fctune.training.entry import run_recipe
from recipes.lora_fc_distributed import LoRAFunctionCallingRecipe


def main() -> int:
    """Run the recipe from the command line."""
    phase, count, kind, rank, *argv = sys.argv[1:]
    seen = Counter[str]()

    def inject(fired: str, name: str) -> None:
        seen[fired] += 1
        if fired != phase or seen[fired] != int(count) or os.environ["RANK"] != rank:
            return
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "raise":
            raise RuntimeError("an injected fault")
        if kind.startswith("slow:"):
            time.sleep(float(kind.removeprefix("slow:")))

    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        fault_hooks.listen(inject)
    return run_recipe(LoRAFunctionCallingRecipe, argv)


if __name__ == "__main__":
    sys.exit(main())
