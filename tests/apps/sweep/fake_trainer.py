"""Stands in for ``fctune train``: writes a run's files without a model, in a tenth of a second.

python tests/apps/sweep/fake_trainer.py --config FILE --nproc N

It takes 20 steps. The validation loss of run NNN is ``|log10(lr) + 3|`` plus ``1 / step``. FAKE_FAULTS is JSON:
run name -> list of faults, one an attempt ("crash", "config", "kill"; "" is none). FAKE_STEP_S is the seconds of a
step. FAKE_HOLD is JSON: learning rates whose runs wait after step 6 until they are stopped.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import yaml

STEPS = 20

requests: list[int] = []
signal.signal(signal.SIGTERM, lambda number, frame: requests.append(number))


def main() -> int:
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    config = yaml.safe_load(Path(options["--config"]).read_text())
    output = Path(config["output_dir"])
    output.mkdir(parents=True, exist_ok=True)
    lock = open(output / ".lock", "a")  # noqa: SIM115 (held until the end)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(output / "attempts.jsonl", "a") as file:
        seen = {"gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "nproc": options["--nproc"], "at": time.time()}
        file.write(json.dumps(seen) + "\n")
    attempt = len((output / "attempts.jsonl").read_text().splitlines())
    faults = json.loads(os.environ.get("FAKE_FAULTS", "{}")).get(output.name.rpartition("-")[2], [])
    fault = faults[attempt - 1] if attempt <= len(faults) else ""
    started = "2026-01-01T00:00:00Z"
    (output / "run.json").write_text(json.dumps({"config": config, "num_steps": STEPS, "started_at": started}))
    metrics = output / "metrics.jsonl"
    first = 1 + len(metrics.read_text().splitlines()) if metrics.exists() else 1
    rate = float(config["optimizer"]["lr"])
    step_s = float(os.environ.get("FAKE_STEP_S", "0.005"))
    holds = rate in json.loads(os.environ.get("FAKE_HOLD", "[]"))
    for step in range(first, STEPS + 1):
        time.sleep(step_s)
        while holds and step > 6 and not requests and not (output / "stop").exists():
            time.sleep(0.01)
        row = {
            "step": step,
            "loss": 1 / step,
            "validation_loss": abs(math.log10(rate) + 3) + 1 / step,
            "step_time_s": 0.1,
        }
        with open(metrics, "a") as file:
            file.write(json.dumps(row) + "\n")
        if fault == "kill" and step == first + 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault in ("crash", "config") and step == first + 3:
            return finish(output, {"crash": 1, "config": 2}[fault], f"an injected {fault}", step)
        if requests or (output / "stop").exists():
            return finish(output, 75, "stopped", step)
    return finish(output, 0, "completed", STEPS)


def finish(output: Path, code: int, reason: str, step: int) -> int:
    (output / "exit.json").write_text(json.dumps({"code": code, "reason": reason, "step": step, "checkpoint": None}))
    print(reason)
    return code


if __name__ == "__main__":
    sys.exit(main())
