"""Measure the first and second start of a compiled run, with an empty and a filled compiler cache.

    python -m benchmarks.compile_cache [--config tiny_lora] [--out FILE] [KEY=VALUE ...]

Both runs take the same two steps from the start with the tiny base, on one rank on the CPU. For each, it
reports the CPU time of the run with all its processes, the wall time of the run and of its first step, and the bytes in
the cache (TORCHINDUCTOR_CACHE_DIR). Other load on the machine changes wall times, but hardly CPU times.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.training import ROOT, describe_machine


def start(config: str, overrides: list[str], folder: Path, name: str) -> dict[str, Any]:
    """Run two compiled steps in ``folder``; returns the times."""
    output, cache = folder / name, folder / "cache"
    command = [sys.executable, "-m", "fctune.cli", "train", config, "--nproc", "1", "compile=true", "max_steps=2"]
    command += [f"output_dir={output}", "telemetry.tensorboard=false", "checkpoint.every=0", *overrides]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    began = time.perf_counter()
    with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{name} start failed:\n{(folder / f'{name}.log').read_text(encoding='utf-8')[-3000:]}")
    first = json.loads((output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
    return {
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "clock_s": round(time.perf_counter() - began, 1),
        "first_step_s": round(first["step_time_s"], 1),
        "cache_mib": round(sum(file.stat().st_size for file in cache.rglob("*") if file.is_file()) / 2**20, 1),
    }


def main() -> None:
    """Run both starts, print their times and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tiny_lora")
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"date": f"{datetime.datetime.now():%Y-%m-%d %H:%M}", "machine": describe_machine()}
    result |= {"config": arguments.config, "overrides": arguments.overrides}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "second"):
            result[name] = start(arguments.config, arguments.overrides, Path(folder), name)
            print(name, json.dumps(result[name]), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
