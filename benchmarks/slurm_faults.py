"""Keep what the tests of faults on a real Slurm have measured as a dated result, and make its table.

make test-slurm-faults && python -m benchmarks.slurm_faults && python -m benchmarks.cluster_pages
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.training import RESULTS, describe_machine

MEASURED = Path("runs/slurm_faults.json")  # written by tests/slurm/test_slurm_faults.py


def make_fault_table() -> str:
    """Return the table of the newest result."""
    result: dict[str, Any] = json.loads(max(RESULTS.glob("slurm_faults_*.json")).read_text(encoding="utf-8"))
    lines = [
        "| fault | exit code | restarted by | lost steps | starts again after, s | node left out |",
        "|---|---|---|---|---|---|",
    ]
    for fault in result["faults"]:
        started = "-" if fault["started_s"] is None else fault["started_s"]
        left_out = fault["left_out"] or "none"
        cells = (fault["fault"], fault["code"], fault["restarted_by"], fault["lost_steps"], started, left_out)
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Write the dated result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    date = datetime.datetime.now()
    parser.add_argument("--out", type=Path, default=RESULTS / f"slurm_faults_{date:%Y-%m-%d}.json")
    options = parser.parse_args()
    if not MEASURED.exists():
        print(f"{MEASURED}: does not exist; run make test-slurm-faults first", file=sys.stderr)
        return 2
    version = subprocess.run(["slurmd", "-V"], capture_output=True, text=True, check=False).stdout.strip()
    result = {
        "date": f"{date:%Y-%m-%d %H:%M}",
        "machine": describe_machine(),
        "slurm": version,
        "faults": json.loads(MEASURED.read_text(encoding="utf-8")),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
