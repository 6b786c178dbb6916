"""The rows of ``benchmarks.gpu``: each measures one thing within a time limit."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_tests import run_tests
from benchmarks.job import Job, to_json
from benchmarks.training import ROOT, measure
from benchmarks.workload import PUBLIC, SHAPES, Shape, write_model, write_public_model, write_rows
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Conversation, Message

NO_TIME = "no time left"
_LONG = "long_"  # and the length of the conversations, of a directory of rows

# Shows an unfinished result of a row.
Report = Callable[[dict[str, Any]], None]
# Runs a row within a limit in seconds.
Row = Callable[[float, Report], dict[str, Any]]


class Bench:
    """The benchmark rows by name, each with its time limit."""

    def __init__(self, folder: Path, is_toy: bool):
        self.folder, self.is_toy = folder, is_toy
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.num_gpus = max(1, torch.cuda.device_count())
        self.passed_tests: list[str] = []  # by an earlier run; left out
        self._writing = threading.Lock()
        if not is_toy and self.device == "cpu":
            raise SystemExit("no CUDA device; --toy runs every row on the CPU")

    def rows(self) -> dict[str, tuple[float, Row]]:
        """Return name -> (time limit in seconds, function that runs the row), the most valuable rows first."""
        lora, full = self.lora(), self.full()
        ours = {"compile": not self.is_toy}
        tune = {"tool": "torchtune", "compile": not self.is_toy}
        is_cuda = self.device == "cuda"
        lacks_liger = _find_missing("liger_kernel") if is_cuda else None
        lacks_fla = _find_missing("fla") if is_cuda else None
        trl = {"tool": "trl", "liger": is_cuda and lacks_liger is None, "attention": "sdpa"}
        none_and_all = [{"checkpointed": 0.0}, {"checkpointed": 1.0}]
        return {
            "lora_8b_float8": (240, self.best([lora.replace(**ours, base="float8")])),
            "lora_8b": (240, self.best([lora.replace(**ours)])),
            "lora_qwen3_8b": (240, self.best([self.shipped("qwen3_8b").replace(**ours)])),
            "lora_8b_trl": (360, self.best([lora.replace(**trl, **part) for part in none_and_all], lacks_liger)),
            "lora_8b_torchtune": (360, self.best([lora.replace(**tune, **part) for part in none_and_all])),
            "lora_qwen3_30b_a3b": (300, self.best(self.compiled_and_not("qwen3_30b_a3b"))),
            "lora_8b_32k": (240, self.best([self.long(32_768).replace(**ours, warmup=self.warmup(2), steps=6)])),
            "lora_gpt_oss_20b": (300, self.best(self.compiled_and_not("gpt_oss_20b"))),
            "lora_qwen3_5_9b": (300, self.best(self.compiled_and_not("qwen3_5_9b"), lacks_fla)),
            "full_8b_float8": (240, self.best([full.replace(**ours, dtype="float8")])),
            "lora_8b_128k": (420, self.best([self.long(131_072).replace(**ours, warmup=1, steps=2)])),
            "save_lora_8b": (240, self.stall(lora.replace(**ours))),
            "inference_3b": (240, self.inference),
            "correctness": (240, lambda limit, report: self.call(["-m", "benchmarks.gpu_correctness"], limit)),
            "lora_8b_dense": (240, self.best([lora.replace(**ours, rows_dir=self.path("dense"))])),
            "lora_8b_shipped": (240, self.best([lora.replace(**ours, config="llama3_1_8b_lora.yaml")])),
            "full_8b": (240, self.best([full.replace(**ours)])),
            "lora_8b_nf4": (240, self.best([lora.replace(**ours, base="nf4")])),
            "tests": (900, self.tests),
            "planner": (420, self.plans()),
            "acceptance": (300, self.acceptance),
            "profile_lora_8b": (180, self.profile(lora.replace(**ours))),
            "liger": (180, self.liger),
            "full_8b_torchtune": (300, self.best([full.replace(**tune, ranks=1)])),
            "full_8b_trl": (300, self.best([full.replace(**trl, ranks=1)], lacks_liger)),
            "profile_full_8b": (180, self.profile(full.replace(**ours))),
            "full_8b_master": (240, self.best([full.replace(**ours, dtype="bf16_mixed")])),
            "save_full_3b": (300, self.stall(full.replace(**ours, model_dir=self.path("3b")))),
        }

    # --- jobs ---

    def lora(self) -> Job:
        """LoRA of rank 16 on all linears: 4,096 tokens, packed, bfloat16."""
        return self.job("8b", 4_096).replace(micro_batch_size=2, rows_a_step=4)

    def full(self) -> Job:
        """Full fine-tuning on all GPUs: 8,192 tokens, packed, bfloat16 throughout, all blocks checkpointed."""
        job = self.job("8b", 8_192).replace(adapter=False, checkpointed=1.0, micro_batch_size=1)
        return job.replace(ranks=self.num_gpus, rows_a_step=2 * self.num_gpus)

    def shipped(self, model: str) -> Job:
        """LoRA of a public model by the config that fctune has for it, of which the model and the rows are replaced."""
        return self.job(model, 4_096).replace(config=f"{model}_lora.yaml", rows_a_step=4)

    def compiled_and_not(self, model: str) -> list[Job]:
        """LoRA of a public model by its config, compiled and not."""
        job = self.shipped(model)
        return [job.replace(compile=not self.is_toy), job]

    def long(self, seq_len: int) -> Job:
        """LoRA of rank 16 on conversations of almost ``seq_len`` tokens; fctune chooses recomputed blocks and tiles."""
        job = self.job("8b", seq_len).replace(checkpointed=None, mlp_tiles=None, rows_a_step=1)
        return job.replace(rows_dir=self.path(f"{_LONG}{job.seq_len}"))

    def job(self, model: str, seq_len: int) -> Job:
        """Return the settings that all rows share."""
        return Job(
            tool="fctune",
            model_dir=self.path(model),
            rows_dir=self.path("synthetic"),
            seq_len=min(seq_len // 8, 2_048) if self.is_toy else seq_len,
            rows_a_step=2,
            dtype="bf16",
            threads=1 if self.device == "cpu" else 4,
            device=self.device,
            has_weights=False,
            warmup=self.warmup(3),
            steps=2 if self.is_toy else 11,
        )

    def warmup(self, steps: int) -> int:
        """Return the number of steps to leave out of the measurement, or 1 with ``--toy``."""
        return 1 if self.is_toy else steps

    def shape(self, name: str) -> Shape:
        """Return the shape of a model, or the toy's with ``--toy``."""
        return SHAPES["toy" if self.is_toy else name]

    def path(self, name: str) -> str:
        """Return the path of a directory with a model or rows, which ``measure`` writes."""
        return str(self.folder / name)

    # --- inputs ---

    def write_model(self, name: str) -> Path:
        """Write a model directory without weights, unless it exists, and return its path."""
        folder = self.folder / name
        with self._writing:
            if not (folder / "config.json").exists():
                num_texts = 300 if self.is_toy else 1_000
                if name in PUBLIC:
                    write_public_model(folder, PUBLIC[name], is_small=self.is_toy, num_texts=num_texts)
                else:
                    write_model(folder, self.shape(name), has_weights=False, num_texts=num_texts)
        return folder

    def write_rows(self, name: str) -> None:
        """Write rows, unless they exist: synthetic ones, ones with long answers (``dense``), or long conversations."""
        from fctune.data.synthetic import iter_conversations

        folder, model_dir = self.folder / name, self.write_model("8b")
        with self._writing:
            if (folder / "counts.json").exists():
                return
            seq_len = 512 if self.is_toy else 4_096
            if name == "dense":
                rows = _iter_turns(iter_conversations("train", 1_000, 2))
            elif name.startswith(_LONG):
                seq_len = int(name.removeprefix(_LONG))
                turns = _iter_turns(iter_conversations("train", 20_000, 3), num_asked=4)
                rows = itertools.islice(_join(turns, ChatTemplate(model_dir), seq_len), 4)
            else:
                rows = iter_conversations("train", 200 if self.is_toy else 2_000, 1)
            write_rows(folder, model_dir, rows, seq_len)

    def measure(self, job: Job, limit: float) -> dict[str, Any]:
        """Write what a job reads and measure it within a limit (seconds)."""
        ends = time.monotonic() + limit
        self.write_model(Path(job.model_dir).name)
        self.write_rows(Path(job.rows_dir).name)
        return measure(job, ends - time.monotonic())

    def measure_each(self, jobs: list[Job], limit: float) -> Iterator[tuple[Job, dict[str, Any]]]:
        """Yield each job with its measurements, or with an error if too little of the limit (seconds) remains.

        No job takes the time of those after it, at least a minute or an equal part each.
        """
        ends, kept = time.monotonic() + limit, min(60.0, limit / len(jobs))
        for index, job in enumerate(jobs):
            left = ends - time.monotonic() - kept * (len(jobs) - index - 1)
            yield job, self.measure(job, left) if left > 20 else {"error": NO_TIME}

    # --- kinds of rows ---

    def best(self, jobs: list[Job], lacks: str | None = None) -> Row:
        """Measure several settings and report the fastest; the result lists all of them.

        Args:
            jobs: Settings; with ``--toy``, only the first are run.
            lacks: What a complete measurement lacks on this machine.
        """
        jobs = jobs[:1] if self.is_toy else jobs

        def run(limit: float, report: Report) -> dict[str, Any]:
            found: list[dict[str, Any]] = []
            good: list[tuple[Job, dict[str, Any]]] = []
            result: dict[str, Any] = {"ok": False, "tried": found}
            for job, one in self.measure_each(jobs, limit):
                found.append(_describe_job(job) | one)
                found[-1].pop("supervised_by_step", None)
                if "error" not in one:
                    good.append((job, found[-1]))
                if not good:
                    continue
                fastest = max(good, key=lambda pair: pair[1]["real_per_s"])
                result = {"ok": True} | self.describe(*fastest) | {"tried": found}
                num_run = sum(one.get("error") != NO_TIME for one in found)
                missing = [lacks] if lacks else []
                missing += [f"{len(jobs) - num_run} of {len(jobs)} settings"] if num_run < len(jobs) else []
                result |= {"not_run": "; ".join(missing)} if missing else {}
                if len(found) < len(jobs):
                    report(result)
            return result

        return run

    def describe(self, job: Job, found: dict[str, Any]) -> dict[str, Any]:
        """Return throughput, peak memory and FLOP rates of a run, for each GPU."""
        if job.tool == "fctune":
            parameters, attention = found["parameters"], found["attention_flops"]
        else:  # a model of Llama's shape
            shape = self.shape(Path(job.model_dir).name)
            parameters, attention = shape.num_parameters, 12 * shape.layers * shape.width * job.seq_len
        factor = 4 if job.adapter else 6
        weights = factor * parameters
        rate = found["real_per_s"] / job.ranks
        return {
            "tokens_per_s": round(rate, 1),
            "supervised_per_s": round(found["supervised_per_s"] / job.ranks, 1),
            "padding_share": round(found["padding_share"], 4),
            "peak_gib": round(found["peak_mib"] / job.ranks / 1024, 2),
            "gpus": job.ranks,
            "compiled": job.compile,
            "setup_s": round(found["setup_s"], 1),
            "first_step_s": round(found["first_step_s"], 1),
            "losses": found["losses"],
            f"tflops_{factor}N": round(weights * rate / 1e12, 3),
            f"tflops_{factor}N_and_dense_attention": round((weights + attention) * rate / 1e12, 3),
            "parameters": parameters,
        }

    def plans(self) -> Row:
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

        def run(limit: float, report: Report) -> dict[str, Any]:
            rows = []
            for job, found in self.measure_each(jobs, limit):
                row = _describe_job(job)
                row |= {"error": found["error"]} if "error" in found else _plan(job, found)
                rows.append(row)
            compared = [row["over"] for row in rows if "over" in row]
            worst = max(compared, key=abs, default=None)
            return {"ok": len(compared) == len(rows), "peak_over_worst": worst, "tried": rows}

        return run

    def tests(self, limit: float, report: Report) -> dict[str, Any]:
        """Run the tests that need a GPU; failures are in the results as they happen."""
        # Tests of clusters import packages that a GPU machine need not have, and none needs a GPU.
        on_gpus = ["-m", "gpu", "--ignore=tests/sky", "--ignore=tests/slurm"]
        chosen = ["tests/gpu/test_current_device.py", "-m", "not gpu"] if self.is_toy else on_gpus
        file = self.folder / f"tests-{time.time_ns()}.jsonl"
        return run_tests(chosen, file, limit, self.passed_tests, report)

    def acceptance(self, limit: float, report: Report) -> dict[str, Any]:
        """Run the acceptance test on this machine and compare its figures with independent ones."""
        flags = ["--machine", *(["--toy"] if self.is_toy else []), "--out", str(self.folder / "acceptance.json")]
        return self.call(["-m", "benchmarks.acceptance", *flags], limit)

    def inference(self, limit: float, report: Report) -> dict[str, Any]:
        """Measure loading and generation of the 3B shape."""
        flags = ["--model", str(self.write_model("3b")), *(["--toy"] if self.is_toy else [])]
        return self.call(["-m", "benchmarks.gpu_inference", *flags], limit)

    def liger(self, limit: float, report: Report) -> dict[str, Any]:
        """Compare Liger's fused loss and norm with ours."""
        return self.call(["-m", "benchmarks.gpu_kernels", *(["--toy"] if self.is_toy else [])], limit)

    def profile(self, job: Job) -> Row:
        """Profile one step; the result is its table of kernels by time."""

        def run(limit: float, report: Report) -> dict[str, Any]:
            file = self.folder / "profile.txt"
            found = self.measure(job.replace(profile_to=str(file)), limit)
            if "error" in found:
                return {"ok": False, "error": found["error"]}
            lines = file.read_text().splitlines()
            return {"ok": True, "step_s": found["step_s"], "table": lines}

        return run

    def stall(self, job: Job) -> Row:
        """Measure the wall time that each asynchronous save adds: a run with saves minus one without, per save."""

        def run(limit: float, report: Report) -> dict[str, Any]:
            ends = time.monotonic() + limit
            plain = self.measure(job, ends - time.monotonic())
            saving = self.measure(job.replace(save_every=max(1, job.warmup)), ends - time.monotonic())
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


def _iter_turns(conversations: Iterable[Conversation], num_asked: int = 0) -> Iterator[Conversation]:
    """Yield conversations of one turn, whose answer is the text of one and whose question that of ``num_asked``."""
    texts = (json.dumps(conversation.to_openai(), ensure_ascii=False) for conversation in conversations)
    for answer in texts:
        asked = "\n".join(itertools.islice(texts, num_asked)) or "Continue."
        yield Conversation((Message("user", content=asked), Message("assistant", content=answer)))


def _join(conversations: Iterable[Conversation], template: ChatTemplate, seq_len: int) -> Iterator[Conversation]:
    """Yield conversations of as many turns as ``seq_len`` tokens hold."""
    messages: tuple[Message, ...] = ()
    num_tokens = 0
    for conversation in conversations:
        (encoded,) = template.encode(conversation)
        if messages and num_tokens + len(encoded.tokens) >= seq_len:
            yield Conversation(messages)
            messages, num_tokens = (), 0
        messages, num_tokens = messages + conversation.messages, num_tokens + len(encoded.tokens)


def _find_missing(package: str) -> str | None:
    """Return a message if a package is not installed."""
    return None if find_spec(package) else f"{package} is not installed"


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
    checkpointed, mlp_tiles = found["checkpointed"], found["mlp_tiles"]
    share = found["supervised"] / found["places"]
    model = shape_model(config, read_architecture(job.model_dir))
    # A run chooses its logits before it knows which share of its data is supervised.
    device_bytes = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    memory = MemoryModel(model, config, device_bytes)
    logits = memory.choose_max_logits(1, 1, checkpointed, mlp_tiles=mlp_tiles)
    num_micro_batches = job.rows_a_step // job.micro_batch_size
    shares = checkpointed, job.micro_batch_size, num_micro_batches
    setting = Setting("none", 1, 1, *shares, logits, mlp_tiles=mlp_tiles)
    peak = MemoryModel(model, config, None, share).peak(setting)
    planned = (peak.footprint.total - peak.footprint.context - peak.footprint.fragmentation) / 2**30
    measured = found["peak_mib"] / 1024
    return {
        "measured_gib": round(measured, 3),
        "planned_gib": round(planned, 3),
        "over": round(planned / measured - 1, 4),
        "phase": peak.phase,
    }
