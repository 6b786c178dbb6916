"""Stands in for the commands of a cluster: jobs are processes of the fake trainer on this machine.

Installed as ``sbatch``, ``squeue``, ``sky`` and ``ssh`` by ``install``; FAKE_JOBS is the folder that lists the jobs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

NAMES = ("sbatch", "squeue", "sky", "ssh")


def install(folder: Path) -> None:
    """Write the commands into a folder, to be put first on the path."""
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} {name} "$@"\n')
        (folder / name).chmod(0o755)


def main(name: str, words: list[str]) -> int:
    jobs = Path(os.environ["FAKE_JOBS"])
    with open(jobs.with_suffix(".log"), "a") as log:
        log.write(json.dumps([name, *words]) + "\n")
    if name == "ssh":
        words = words[next(i for i, word in enumerate(words) if word == "desk") + 1 :]
        return subprocess.run(["sh", "-c", " ".join(words)], check=False).returncode
    if name == "sbatch":
        options = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
        study = Path(os.environ["FCTUNE_SWEEP"])
        for number in options["array"].partition("%")[0].split(","):
            log_file = Path(options["output"].replace("%3a", f"{int(number):03d}"))
            start(jobs, f"{options['job-name']}_{number}", study / "configs" / f"{int(number):03d}.yaml", log_file)
        print(1)
    elif name == "squeue":
        print("\n".join(list_alive(jobs)))
    elif words[:2] == ["jobs", "launch"]:
        if "refuse" in words:
            print("ValueError: no resource matches", file=sys.stderr)
            return 1
        config = next(word.partition("=")[2] for word in words if word.startswith("CONFIG="))
        start(jobs, words[words.index("--name") + 1], Path(config), jobs.with_suffix(".out"))
    else:
        print("a line of SkyPilot's own")
        print(json.dumps([{"job_name": job} for job in list_alive(jobs)]))
    return 0


def start(jobs: Path, name: str, config: Path, log_file: Path) -> None:
    trainer = Path(__file__).with_name("fake_trainer.py")
    with open(log_file, "a") as log:
        child = subprocess.Popen(
            [sys.executable, str(trainer), "--config", str(config), "--nproc", "1"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    (jobs / name).write_text(str(child.pid))


def list_alive(jobs: Path) -> list[str]:
    return sorted(path.name for path in jobs.iterdir() if is_alive(int(path.read_text())))


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
