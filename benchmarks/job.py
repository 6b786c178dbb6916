"""Training job of a benchmark, run in this process with fctune, torchtune's stock recipes, or TRL with PEFT.

Each tool trains through its own recipe or trainer, on a model directory and rows from ``workload``. A recorder only
observes it: the time and loss of each step, and its number of positions, tokens without padding, and supervised tokens,
meaning those that fctune supervises. torchtune also trains on the header before each assistant turn; those tokens are
counted separately.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import resource
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LEARNING_RATE, WEIGHT_DECAY, CLIP = 2e-4, 0.01, 1.0
RANK, ALPHA = 16, 32


@dataclass(frozen=True, slots=True)
class Job:
    """Settings of a run; ``rows_a_step`` counts packs (conversations if ``packed`` is False) over all ranks."""

    tool: str  # fctune, torchtune, trl
    model_dir: str
    rows_dir: str
    seq_len: int
    rows_a_step: int
    packed: bool = True
    micro_batch_size: int = 1  # per rank
    dtype: str = "fp32"  # fp32 or bf16; for fctune any precision
    compile: bool = False
    threads: int = 2  # per rank
    ranks: int = 1
    distributed: bool = False  # use torchtune's distributed recipe even on one rank
    adapter: bool = True
    base: str = "bf16"  # fctune only: storage of the frozen base
    config: str | None = None  # fctune only: a file of configs/ that decides all but model, rows and steps
    checkpointed: float | None = 0.0  # share of the blocks; other tools support only 0 and 1; None: fctune chooses
    mlp_tiles: int | None = 1  # fctune only; None: it chooses
    device: str = "cpu"
    has_weights: bool = True  # otherwise weights are drawn on the device
    attention: str | None = None  # TRL only: transformers' name of the kernel
    liger: bool = False  # TRL only: fused kernels, on CUDA
    save_every: int = 0  # fctune only: steps between asynchronous saves
    profile_to: str | None = None  # file for the table of one step's kernels
    warmup: int = 1
    steps: int = 4  # including warm-up

    @property
    def name(self) -> str:
        """Label for tables: the settings that differ within a sweep."""
        parts = [f"{self.ranks}x{self.threads} threads", f"micro-batch {self.micro_batch_size}", self.dtype]
        parts += ["packed" if self.packed else "unpacked"] + ["compiled"] * self.compile
        return ", ".join(parts + ["distributed recipe"] * (self.distributed and self.ranks == 1))

    def replace(self, **changes: Any) -> Job:
        """Return a copy with changes."""
        return dataclasses.replace(self, **changes)


@dataclass(slots=True)
class Recorder:
    """Records a run: counts by micro-batch, for this rank; end times and losses by step."""

    job: Job
    ends: list[float] = field(default_factory=list)
    cpu_ends: list[float] = field(default_factory=list)  # CPU time of this process
    losses: list[float] = field(default_factory=list)
    counts: list[tuple[int, int, int, int]] = field(default_factory=list)  # all, not padding, supervised, trained
    counts_at: list[int] = field(default_factory=list)  # number of micro-batches at the end of each step
    start_mib: float = 0.0
    begun: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    def begin(self) -> None:
        """Mark the start of training, after loading."""
        self.start_mib = _resident_mib()
        self.begun = time.perf_counter()

    def count(self, places: int, real: int, supervised: int, trained: int | None = None) -> None:
        """Record the token counts of a micro-batch."""
        self.counts.append((places, real, supervised, supervised if trained is None else trained))

    def end_step(self) -> None:
        """Record the end of a step."""
        if self.job.device == "cuda":
            torch.cuda.synchronize()
            if len(self.ends) + 1 == self.job.warmup:
                torch.cuda.reset_peak_memory_stats()  # exclude the peak of loading
        self.ends.append(time.perf_counter())
        self.cpu_ends.append(time.process_time())
        self.counts_at.append(len(self.counts))

    def result(self) -> dict[str, Any]:
        """Return this rank's sums over the steps after the warm-up, and values by step for the loss curve."""
        first = self.job.warmup
        by_step: list[list[int]] = []
        for start, stop in zip([0, *self.counts_at], self.counts_at, strict=False):
            by_step.append([sum(column) for column in zip(*self.counts[start:stop], strict=True)])
        places, real, supervised, trained = (sum(column) for column in zip(*by_step[first:], strict=True))
        is_cuda = self.job.device == "cuda"
        peak = torch.cuda.max_memory_allocated() / 2**20 if is_cuda else _peak_mib()
        return {
            "seconds": self.ends[-1] - self.ends[first - 1],
            "step_s": [after - before for before, after in zip(self.ends, self.ends[1:], strict=False)],
            "cpu_s": self.cpu_ends[-1] - self.cpu_ends[first - 1] if self.cpu_ends else 0.0,
            "places": places,
            "real": real,
            "supervised": supervised,
            "trained": trained,
            "supervised_by_step": [counts[2] for counts in by_step],
            "losses": self.losses,
            "setup_s": time.time() - psutil.Process().create_time() - (time.perf_counter() - self.begun),
            "first_step_s": self.ends[0] - self.begun,
            "peak_mib": peak,
            "start_mib": self.start_mib,
            **self.extra,
        }


def run(job: Job) -> dict[str, Any]:
    """Train in this process and return this rank's result."""
    torch.set_num_threads(job.threads)
    recorder = Recorder(job)
    tool = importlib.import_module(f"benchmarks.train_{job.tool}")
    tool.train(job, recorder)
    return recorder.result()


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def to_json(job: Job) -> str:
    """Serialize a job for another process."""
    return json.dumps(asdict(job))
