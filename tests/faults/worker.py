"""The LoRA recipe under a launcher, with a fault in its first life.

    torchrun ... -m tests.faults.worker PHASE COUNT KIND RANK CONFIG-ARGUMENTS...

KIND is kill, raise, or slow:SECONDS (that phase takes so long). After a restart by the launcher nothing is put in.
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
    """Run it."""
    phase, count, kind, rank, *argv = sys.argv[1:]
    seen = Counter[str]()

    def listen(reached: str, name: str) -> None:
        seen[reached] += 1
        if reached != phase or seen[reached] != int(count) or os.environ["RANK"] != rank:
            return
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "raise":
            raise RuntimeError("a fault that was put in")
        if kind.startswith("slow:"):
            time.sleep(float(kind.removeprefix("slow:")))

    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        fault_hooks.listen(listen)
    return run_recipe(LoRAFunctionCallingRecipe, argv)


if __name__ == "__main__":
    sys.exit(main())
