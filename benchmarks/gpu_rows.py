"""The rows of ``benchmarks.gpu``: each measures one thing within a time limit."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_tests import run_tests
from benchmarks.job import Job, to_json
from benchmarks.training import ROOT, measure
from benchmarks.workload import SHAPES, Shape, write_model, write_rows


class Bench:
    """The benchmark rows by name, each with its time limit."""

    def __init__(self, folder: Path, is_toy: bool):
        self.folder, self.is_toy = folder, is_toy
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.num_gpus = max(1, torch.cuda.device_count())
        self.passed_tests: list[str] = []  # by an earlier run; left out
        self.progress: Callable[[str, dict[str, Any]], None] = lambda name, line: None
        if not is_toy and self.device == "cpu":
            raise SystemExit("no CUDA device; --toy runs every row on the CPU")

    def rows(self) -> dict[str, tuple[float, Callable[[float], dict[str, Any]]]]:
        """Return name -> (time limit in seconds, function that runs the row within a limit)."""
        lora, full = self.lora(), self.full()
        ours = {"compile": not self.is_toy}
        fp8 = lora.replace(**ours, base="float8")
        tune = {"tool": "torchtune", "compile": not self.is_toy}
        trl = {"tool": "trl", "liger": self.device == "cuda", "attention": "sdpa"}
        none_and_all = [{"checkpointed": 0.0}, {"checkpointed": 1.0}]
        return {
            "correctness": (240, lambda limit: self.call(["-m", "benchmarks.gpu_correctness"], limit)),
            "lora_8b_shipped": (240, self.best([lora.replace(**ours, config="llama3_1_8b_lora.yaml")])),
            "lora_8b": (240, self.best([lora.replace(**ours)])),
            "lora_8b_dense": (240, self.best([lora.replace(**ours, rows_dir=self.dense_dir())])),
            "lora_8b_float8": (240, self.best([fp8])),
            "full_8b": (240, self.best([full.replace(**ours)])),
            "full_8b_float8": (240, self.best([full.replace(**ours, dtype="float8")])),
            "lora_8b_nf4": (240, self.best([lora.replace(**ours, base="nf4")])),
            "tests": (900, self.tests),
            "planner": (420, self.plans()),
            "save_lora_8b": (240, self.stall(lora.replace(**ours))),
            "acceptance": (300, self.acceptance),
            "inference_3b": (240, self.inference),
            "profile_lora_8b": (180, self.profile(lora.replace(**ours))),
            "liger": (180, self.liger),
            "lora_8b_torchtune": (360, self.best([lora.replace(**tune, **part) for part in none_and_all])),
            "lora_8b_trl": (360, self.best([lora.replace(**trl, **part) for part in none_and_all])),
            "full_8b_torchtune": (300, self.best([full.replace(**tune, ranks=1)])),
            "full_8b_trl": (300, self.best([full.replace(**trl, ranks=1)])),
            "profile_full_8b": (180, self.profile(full.replace(**ours))),
            "full_8b_master": (240, self.best([full.replace(**ours, dtype="bf16_mixed")])),
            "save_full_3b": (300, self.stall(full.replace(**ours, model_dir=self.model_dir("3b")))),
        }

    # --- jobs ---

    def lora(self) -> Job:
        """LoRA of rank 16 on all linears: 4,096 tokens, packed, bfloat16."""
        return self.job("8b", 4_096).replace(micro_batch_size=2, rows_a_step=4)

    def full(self) -> Job:
        """Full fine-tuning on all GPUs: 8,192 tokens, packed, bfloat16 throughout, all blocks checkpointed."""
        job = self.job("8b", 8_192).replace(adapter=False, checkpointed=1.0, micro_batch_size=1)
        return job.replace(ranks=self.num_gpus, rows_a_step=2 * self.num_gpus)

    def job(self, shape: str, seq_len: int) -> Job:
        """Return the settings that all rows share."""
        seq_len = seq_len // 8 if self.is_toy else seq_len
        return Job(
            tool="fctune",
            model_dir=self.model_dir(shape),
            rows_dir=self.rows_dir("synthetic"),
            seq_len=seq_len,
            rows_a_step=2,
            dtype="bf16",
            threads=1 if self.device == "cpu" else 4,
            device=self.device,
            has_weights=False,
            warmup=1 if self.is_toy else 3,
            steps=2 if self.is_toy else 11,
        )

    def shape(self, name: str) -> Shape:
        """Return the shape of a model, or the toy's with ``--toy``."""
        return SHAPES["toy" if self.is_toy else name]

    def model_dir(self, name: str) -> str:
        """Write a model directory without weights, unless it exists, and return its path."""
        folder = self.folder / name
        if not (folder / "config.json").exists():
            write_model(folder, self.shape(name), has_weights=False, num_texts=300 if self.is_toy else 1_000)
        return str(folder)

    def rows_dir(self, name: str) -> str:
        """Write the synthetic rows (``dense``: as long answers), unless they exist, and return their directory."""
        from fctune.data.conversation import Conversation, Message
        from fctune.data.synthetic import iter_conversations

        folder = self.folder / name

        def answers() -> Iterator[Conversation]:
            for conversation in iter_conversations("train", 1_000, 2):
                text = json.dumps(conversation.to_openai(), ensure_ascii=False)
                yield Conversation((Message("user", content="Continue."), Message("assistant", content=text)))

        if not (folder / "rows.jsonl").exists():
            rows = answers() if name == "dense" else iter_conversations("train", 200 if self.is_toy else 2_000, 1)
            write_rows(folder, Path(self.model_dir("8b")), rows, 512 if self.is_toy else 4_096)
        return str(folder)

    def dense_dir(self) -> str:
        """Return the directory of rows in which nearly every token is supervised."""
        return self.rows_dir("dense")

    # --- kinds of rows ---

    def best(self, jobs: list[Job]) -> Callable[[float], dict[str, Any]]:
        """Measure several settings and report the fastest; the result lists all of them."""

        def run(limit: float) -> dict[str, Any]:
            found, good = [], []
            for job, one in measure_each(jobs[:1] if self.is_toy else jobs, limit):
                found.append(_describe_job(job) | one)
                found[-1].pop("supervised_by_step", None)
                if "error" not in one:
                    good.append((job, found[-1]))
            if not good:
                return {"ok": False, "tried": found}
            fastest = max(good, key=lambda pair: pair[1]["real_per_s"])
            return {"ok": True} | self.describe(*fastest) | {"tried": found}

        return run

    def describe(self, job: Job, found: dict[str, Any]) -> dict[str, Any]:
        """Return throughput, peak memory and FLOP rates of a run, for each GPU."""
        sizes = json.loads((Path(job.model_dir) / "config.json").read_text())
        shape = self.shape(Path(job.model_dir).name)
        factor = 4 if job.adapter else 6
        weights = factor * shape.num_parameters
        attention = 12 * sizes["num_hidden_layers"] * sizes["hidden_size"] * job.seq_len
        rate = found["real_per_s"] / job.ranks
        return {
            "tokens_per_s": round(rate, 1),
            "supervised_per_s": round(found["supervised_per_s"] / job.ranks, 1),
            "padding_share": round(found["padding_share"], 4),
            "peak_gib": round(found["peak_mib"] / job.ranks / 1024, 2),
            "gpus": job.ranks,
            "setup_s": round(found["setup_s"], 1),
            "first_step_s": round(found["first_step_s"], 1),
            "losses": found["losses"],
            f"tflops_{factor}N": round(weights * rate / 1e12, 3),
            f"tflops_{factor}N_and_dense_attention": round((weights + attention) * rate / 1e12, 3),
            "parameters": shape.num_parameters,
        }

    def plans(self) -> Callable[[float], dict[str, Any]]:
        """Compare measured with planned peak memory: LoRA at three lengths and full fine-tuning, recomputed to
        different shares, mostly eager; the longest rows with MLPs in tiles.
        """
        short = {"warmup": 1, "steps": 3}
        lora = self.job("8b", 4_096).replace(**short, micro_batch_size=2)
        long = self.job("8b", 8_192).replace(**short, micro_batch_size=2, checkpointed=1.0)
        full = self.job("3b", 4_096).replace(**short, adapter=False)
        jobs = [lora, full.replace(dtype="bf16_mixed"), lora.replace(checkpointed=0.5), long]
        jobs += [full.replace(checkpointed=0.5), lora.replace(base="nf4"), lora.replace(compile=True)]
        tiled = self.job("8b", 32_768).replace(**short, mlp_tiles=8)
        jobs += [tiled.replace(checkpointed=1.0), tiled.replace(checkpointed=0.5, compile=True)]
        jobs = jobs[:2] if self.is_toy else jobs

        def run(limit: float) -> dict[str, Any]:
            rows = []
            for job, found in measure_each(jobs, limit):
                row = _describe_job(job)
                row |= {"error": found["error"]} if "error" in found else _plan(job, found)
                rows.append(row)
            compared = [row["over"] for row in rows if "over" in row]
            worst = max(compared, key=abs, default=None)
            return {"ok": len(compared) == len(rows), "peak_over_worst": worst, "tried": rows}

        return run

    def tests(self, limit: float) -> dict[str, Any]:
        """Run the tests that need a GPU; failures are in the results as they happen."""
        # Tests of clusters import packages that a GPU machine need not have, and none needs a GPU.
        on_gpus = ["-m", "gpu", "--ignore=tests/sky", "--ignore=tests/slurm"]
        chosen = ["tests/gpu/test_current_device.py", "-m", "not gpu"] if self.is_toy else on_gpus
        file = self.folder / f"tests-{time.time_ns()}.jsonl"
        return run_tests(chosen, file, limit, self.passed_tests, lambda line: self.progress("tests", line))

    def acceptance(self, limit: float) -> dict[str, Any]:
        """Run the acceptance test on this machine and compare its figures with independent ones."""
        flags = ["--machine", *(["--toy"] if self.is_toy else []), "--out", str(self.folder / "acceptance.json")]
        return self.call(["-m", "benchmarks.acceptance", *flags], limit)

    def inference(self, limit: float) -> dict[str, Any]:
        """Measure loading and generation of the 3B shape."""
        flags = ["--model", self.model_dir("3b"), *(["--toy"] if self.is_toy else [])]
        return self.call(["-m", "benchmarks.gpu_inference", *flags], limit)

    def liger(self, limit: float) -> dict[str, Any]:
        """Compare Liger's fused loss and norm with ours."""
        return self.call(["-m", "benchmarks.gpu_kernels", *(["--toy"] if self.is_toy else [])], limit)

    def profile(self, job: Job) -> Callable[[float], dict[str, Any]]:
        """Profile one step; the result is its table of kernels by time."""

        def run(limit: float) -> dict[str, Any]:
            file = self.folder / "profile.txt"
            found = measure(job.replace(profile_to=str(file)), limit)
            if "error" in found:
                return {"ok": False, "error": found["error"]}
            lines = file.read_text().splitlines()
            return {"ok": True, "step_s": found["step_s"], "table": lines}

        return run

    def stall(self, job: Job) -> Callable[[float], dict[str, Any]]:
        """Measure the wall time that each asynchronous save adds: a run with saves minus one without, per save."""

        def run(limit: float) -> dict[str, Any]:
            ends = time.monotonic() + limit
            plain = measure(job, ends - time.monotonic())
            saving = measure(job.replace(save_every=max(1, job.warmup)), ends - time.monotonic())
            for found in (plain, saving):
                if "error" in found:
                    return {"ok": False, "error": found["error"]}
            num_saves = max(1, saving["num_saves"])
            added = (saving["seconds"] - plain["seconds"]) / num_saves
            mine = {key: saving[key] for key in ("stall_s", "num_saves", "save", "step_s")}
            return {"ok": True, "added_s_a_save": round(added, 4), "plain_step_s": plain["step_s"]} | mine

        return run

    def call(self, command: list[str], limit: float) -> dict[str, Any]:
        """Run a program; return its last line if that is JSON, otherwise the end of its output."""
        try:
            done = subprocess.run(
                [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit
            )
        except subprocess.TimeoutExpired:
            return {"ok": False, "error": f"timed out after {limit:.0f} s"}
        lines = (done.stdout + done.stderr).strip().splitlines()
        found: dict[str, Any] = {"ok": done.returncode == 0}
        with suppress(ValueError, IndexError):
            return {**found, **json.loads(done.stdout.strip().splitlines()[-1])}
        return found | {"output": lines[-25:]}


def measure_each(jobs: list[Job], limit: float) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Yield each job with its measurements, or with an error if too little of the limit (seconds) remains."""
    ends = time.monotonic() + limit
    for job in jobs:
        left = ends - time.monotonic()
        yield job, measure(job, left) if left > 20 else {"error": "no time left"}


def _describe_job(job: Job) -> dict[str, Any]:
    """Return the settings of a job for the results, which name its directories without this machine's paths."""
    named = job.replace(model_dir=Path(job.model_dir).name, rows_dir=Path(job.rows_dir).name)
    return {"settings": job.name, "job": json.loads(to_json(named))}


def _plan(job: Job, found: dict[str, Any]) -> dict[str, Any]:
    """Compare the planner's peak for a job on one rank, tensors only, with the measured one.

    On the CPU, the measured peak is that of the process, so the comparison means nothing.
    """
    from benchmarks.train_fctune import fctune_config
    from fctune.config.loading import parse_config
    from fctune.config.schema import RunConfig
    from fctune.models.planned_model import shape_model
    from fctune.models.sources import read_architecture
    from fctune.parallel.memory import MemoryModel, Setting

    config = parse_config(fctune_config(job, Path(job.rows_dir)), [])
    assert isinstance(config, RunConfig)
    share = found["supervised"] / found["places"]
    model = shape_model(config, read_architecture(job.model_dir))
    # A run chooses its logits before it knows which share of its data is supervised.
    device_bytes = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    memory = MemoryModel(model, config, device_bytes)
    logits = memory.choose_max_logits(1, 1, job.checkpointed, mlp_tiles=job.mlp_tiles)
    num_micro_batches = job.rows_a_step // job.micro_batch_size
    shares = job.checkpointed, job.micro_batch_size, num_micro_batches
    setting = Setting("none", 1, 1, *shares, logits, mlp_tiles=job.mlp_tiles)
    peak = MemoryModel(model, config, None, share).peak(setting)
    planned = (peak.footprint.total - peak.footprint.context - peak.footprint.fragmentation) / 2**30
    measured = found["peak_mib"] / 1024
    return {
        "measured_gib": round(measured, 3),
        "planned_gib": round(planned, 3),
        "over": round(planned / measured - 1, 4),
        "phase": peak.phase,
    }
