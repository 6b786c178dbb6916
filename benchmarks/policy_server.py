"""Train a policy on answers of a real vLLM that dies and comes back, with a trainer that is killed and resumes.

    python -m benchmarks.policy_server --model DIR --cases FILE --test FILE --out DIR [--steps 24] [key=value ...]

FCTUNE_VLLM_PYTHON names the Python with vLLM. The server is killed after a third of the steps and started again
``--outage`` seconds later; the trainer is killed after two thirds and the same command resumes it. The result has the
reward over the steps, the staleness, the ratio between trainer and server, the shares of time, what became of every
answer, and the test cases before and after (McNemar's exact test).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from benchmarks.real_server import CPU_SETTINGS
from fctune.tasks.evaluation.paired import compare_rows
from fctune.tasks.evaluation.results import read_rows

POLL_S = 0.2
# Without chunked prefills: vLLM 0.32 on a CPU dies of a chunk of a request with a seed ("does not use offset").
SERVER_WORDS = (
    "--host 127.0.0.1 --enforce-eager --dtype float32 --max-model-len 2048 --max-num-seqs 64 "
    "--no-enable-chunked-prefill"
)
TIMES = ("generation_time_s", "judging_time_s", "publish_time_s", "data_time_s", "step_time_s")


@dataclass
class Server:
    """``fctune serve`` with adapters; ``kill`` ends vLLM as a crash does."""

    model: Path
    python: str
    port: int
    rank: int
    log: Path
    options: str = ""
    ready_s: list[float] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    def start(self, limit_s: float = 900.0) -> None:
        """Start it and wait until it is healthy."""
        command = [sys.executable, "-u", "-m", "fctune.cli", "serve", str(self.model), "--adapters", str(self.rank)]
        command += ["--name", "policy", "--python", self.python, "--port", str(self.port)]
        command.append(f"--vllm={SERVER_WORDS} {self.options}")
        began, size = time.monotonic(), self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                command, env=CPU_SETTINGS | os.environ, stdout=out, stderr=subprocess.STDOUT
            )
        while b"ready after" not in self.log.read_bytes()[size:]:
            if self.process.poll() is not None or time.monotonic() - began > limit_s:
                raise SystemExit(f"the server did not start: {self.log}")
            time.sleep(POLL_S)
        self.ready_s.append(time.monotonic() - began)

    def kill(self) -> None:
        """Kill vLLM with all of its processes, without a chance to clean up."""
        assert self.process is not None
        for child in psutil.Process(self.process.pid).children():
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        self.process.wait(60)

    def stop(self) -> None:
        """Ask it to end."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(90)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, break both sides once, and write ``result.json``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="merged export of a supervised run")
    parser.add_argument("--cases", type=Path, required=True, help="cases to learn from")
    parser.add_argument("--test", type=Path, help="cases to measure before and after")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--steps", type=int, default=24, help="default: %(default)s")
    parser.add_argument("--port", type=int, default=8191, help="default: %(default)s")
    parser.add_argument("--rank", type=int, default=32, help="rank of the adapters; default: %(default)s")
    parser.add_argument("--outage", type=float, default=10.0, help="seconds without server; default: %(default)s")
    parser.add_argument("--vllm", default="", metavar="OPTIONS", help="further options of vLLM")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of tiny_grpo")
    arguments = parser.parse_intermixed_args(argv)
    python = os.environ.get("FCTUNE_VLLM_PYTHON", "")
    if not python:
        parser.error("FCTUNE_VLLM_PYTHON does not name a Python with vLLM")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # servers end with this process
    arguments.out.mkdir(parents=True, exist_ok=True)
    result = run(arguments, python)
    (arguments.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print("\n".join(describe(result)))
    return 0


def run(arguments: argparse.Namespace, python: str) -> dict[str, Any]:
    """Train while server and trainer are killed once each; returns everything measured."""
    run_dir, log = arguments.out / "run", arguments.out / "train.log"
    command = [sys.executable, "-m", "fctune.cli", "train", "tiny_grpo", f"output_dir={run_dir}"]
    command += [f"model.path={arguments.model}", f"grpo.cases={arguments.cases}", f"adapter.rank={arguments.rank}"]
    command += ["grpo.engine=server", f"grpo.server.url=http://127.0.0.1:{arguments.port}", "checkpoint.every=1"]
    command += ["epochs=100", f"max_steps={arguments.steps}", *arguments.overrides]
    server = Server(
        arguments.model, python, arguments.port, arguments.rank, arguments.out / "server.log", arguments.vllm
    )
    began = time.monotonic()
    with ExitStack() as stack:
        stack.callback(server.stop)
        server.start()
        trainings = [Training(command, log)]
        stack.callback(lambda: trainings[-1].kill())
        restart = threading.Timer(arguments.outage, server.start)
        trainings[-1].wait_for(run_dir, arguments.steps // 3)
        server.kill()
        killed_server = count_steps(run_dir)
        restart.start()
        trainings[-1].wait_for(run_dir, 2 * arguments.steps // 3)
        restart.join()
        trainings[-1].kill()
        killed_trainer = count_steps(run_dir)
        trainings.append(Training(command, log))
        code = trainings[-1].process.wait()
    if code:
        raise SystemExit(f"training ended with code {code}: {log}")
    wall_s = time.monotonic() - began
    said = [line for line in log.read_text().splitlines() if "server at" in line]
    summary = summarize(run_dir) | {
        "command": shlex.join(sys.argv),
        "wall_s": wall_s,
        "server_ready_s": server.ready_s,
        "server_killed_after_step": killed_server,
        "trainer_killed_after_step": killed_trainer,
        "said": said,
    }
    if arguments.test is not None:
        summary["test"] = measure(arguments, run_dir / "export" / "merged")
    return summary


class Training:
    """A training process, with all of its ranks."""

    def __init__(self, command: Sequence[str], log: Path):
        with log.open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)

    def wait_for(self, run_dir: Path, steps: int) -> None:
        """Wait until so many steps are done."""
        while count_steps(run_dir) < steps:
            if self.process.poll() is not None:
                raise SystemExit(f"training ended with code {self.process.returncode} before step {steps}")
            time.sleep(POLL_S)

    def kill(self) -> None:
        """Kill the launcher and all ranks, without a chance to clean up."""
        if self.process.poll() is None:
            launcher = psutil.Process(self.process.pid)
            for process in (launcher, *launcher.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()


def count_steps(run_dir: Path) -> int:
    """Return the number of steps in the metrics."""
    file = run_dir / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def summarize(run_dir: Path) -> dict[str, Any]:
    """Return what the run's own records say about steps and answers."""
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    answers = Counter((row["batch"], row["case_id"], row["sample"]) for row in rows)
    names = (
        *("step", "reward_mean", "pass_rate", "staleness", "ratio_mean", "ratio_max", "ratio_capped_share"),
        *("engine_gap", "answers", "answers_failed", "groups_dropped", "answer_tokens_mean", "entropy", *TIMES),
    )
    steps = [{name: one[name] for name in names if name in one} for one in metrics]
    tokens = sum(sum(row["is_generated"]) for row in rows)
    return {
        "num_steps": len(metrics),
        "are_steps_complete": [one["step"] for one in metrics] == list(range(1, len(metrics) + 1)),
        "num_answers": len(rows),
        "num_counted_twice": sum(count > 1 for count in answers.values()),
        "num_lost": sum(one["answers"] for one in metrics) - len(rows),
        "num_failed": sum(row["error"] is not None for row in rows),
        "versions": sorted({row["version"] for row in rows}),
        "generated_tokens": tokens,
        "steps": steps,
    }


def measure(arguments: argparse.Namespace, tuned: Path) -> dict[str, Any]:
    """Answer the test cases with the start and the result, in process, and compare them."""
    files = []
    for name, model in (("before", arguments.model), ("after", tuned)):
        files.append(arguments.out / f"{name}.jsonl")
        command = [sys.executable, "-m", "fctune.cli", "eval", "--model", str(model), "--cases", str(arguments.test)]
        command += ["--max-new-tokens", "128", "--batch-size", "256", "--out", str(files[-1])]
        subprocess.run(command, check=True)
    compared = compare_rows(read_rows(files[0]), read_rows(files[1]))
    return {
        one.category: {
            "n": one.n,
            "right_before": one.num_right_before,
            "right": one.num_right_after,
            "difference": one.difference,
            "p_value": one.p_value,
        }
        for one in compared
    }


def describe(result: dict[str, Any]) -> list[str]:
    """Return the result as lines of Markdown."""
    steps = result["steps"]
    third = max(1, len(steps) // 3)
    lines = [
        f"{result['num_steps']} steps in {result['wall_s']:.0f} s, {result['num_answers']:,} answers "
        f"({result['generated_tokens']:,} tokens), server ready after "
        f"{', '.join(f'{seconds:.0f}' for seconds in result['server_ready_s'])} s",
        f"server killed after step {result['server_killed_after_step']}, trainer after step "
        f"{result['trainer_killed_after_step']}; counted twice: {result['num_counted_twice']}, lost: "
        f"{result['num_lost']}, failed: {result['num_failed']}",
        *result["said"],
        "",
        "| steps | reward | staleness | ratio, mean | ratio, largest | engine_gap | capped |",
        "|---|---|---|---|---|---|---|",
    ]
    for first in range(0, len(steps), third):
        part = steps[first : first + third]
        cells = [f"{part[0]['step']} to {part[-1]['step']}", f"{fmean(one['reward_mean'] for one in part):.3f}"]
        cells.append(f"{fmean(one['staleness'] for one in part):.2f}")
        cells.append(f"{fmean(one['ratio_mean'] for one in part):.4f}")
        cells.append(f"{max(one['ratio_max'] for one in part):.3f}")
        cells.append(f"{fmean(one['engine_gap'] for one in part):.4f}")
        cells.append(f"{fmean(one['ratio_capped_share'] for one in part):.2%}")
        lines.append(f"| {' | '.join(cells)} |")
    sums = {name: sum(one.get(name, 0.0) for one in steps) for name in TIMES}
    lines += ["", ", ".join(f"{name} {seconds:,.1f}" for name, seconds in sums.items())]
    for category, one in result.get("test", {}).items():
        change, low, high = one["difference"]
        lines.append(
            f"{category} ({one['n']}): {one['right_before'] / one['n']:.1%} to {one['right'] / one['n']:.1%}, "
            f"{change:+.1%} ({low:+.1%} to {high:+.1%}), p {one['p_value']:.2g}"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
