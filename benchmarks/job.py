"""One run of one tool in this process, for the benchmarks: this project, torchtune's stock recipes, TRL with PEFT.

Each trains through its own entry (recipe or trainer), from a model directory and rows of ``workload``, and is only
listened to: when a step ended, its loss, how many places, real tokens and supervised tokens it had. A supervised token
is one that this project supervises. torchtune trains the header before each assistant turn too; those tokens are
counted apart.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LEARNING_RATE, WEIGHT_DECAY, CLIP = 2e-4, 0.01, 1.0
RANK, ALPHA = 16, 32


@dataclass(frozen=True, slots=True)
class Job:
    """One run. ``rows_a_step`` are packs, or conversations where ``packed`` is False, over all ranks."""

    tool: str  # fctune, torchtune, trl
    model_dir: str
    rows_dir: str
    seq_len: int
    rows_a_step: int
    packed: bool = True
    micro_batch_size: int = 1  # of a rank
    dtype: str = "fp32"  # fp32, bf16; of this project any precision
    compile: bool = False
    threads: int = 2  # of a rank
    ranks: int = 1
    distributed: bool = False  # torchtune's recipe for several ranks, also on one
    adapter: bool = True
    base: str = "bf16"  # of this project: how the frozen base is held
    checkpointed: float = 0.0  # share of the blocks; the others know all or none
    device: str = "cpu"
    has_weights: bool = True  # else they are drawn on the device
    attention: str | None = None  # of TRL: transformers' name
    liger: bool = False  # of TRL: its fused kernels, CUDA only
    save_every: int = 0  # of this project: steps between asynchronous saves
    profile_to: str | None = None  # a file for the table of one step's kernels
    warmup: int = 1
    steps: int = 4  # warm-up among them

    @property
    def name(self) -> str:
        """For tables: what differs between the cells of a sweep."""
        parts = [f"{self.ranks}x{self.threads} threads", f"micro-batch {self.micro_batch_size}", self.dtype]
        parts += ["packed" if self.packed else "unpacked"] + ["compiled"] * self.compile
        return ", ".join(parts + ["distributed recipe"] * (self.distributed and self.ranks == 1))

    def but(self, **changes: Any) -> Job:
        """The same with changes."""
        return replace(self, **changes)


@dataclass(slots=True)
class Recorder:
    """Listens to a run. Counts are this rank's, by micro-batch; ends and losses are by step."""

    job: Job
    ends: list[float] = field(default_factory=list)
    cpu_ends: list[float] = field(default_factory=list)  # the same in CPU time of this process
    losses: list[float] = field(default_factory=list)
    counts: list[tuple[int, int, int, int]] = field(default_factory=list)  # places, real, supervised, trained
    counts_at: list[int] = field(default_factory=list)  # micro-batches seen when each step ended
    start_mib: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    def begin(self) -> None:
        """Everything is loaded; the first step comes next."""
        self.start_mib = _resident_mib()

    def count(self, places: int, real: int, supervised: int, trained: int | None = None) -> None:
        """A micro-batch."""
        self.counts.append((places, real, supervised, supervised if trained is None else trained))

    def end_step(self) -> None:
        """A step is done."""
        if self.job.device == "cuda":
            torch.cuda.synchronize()
            if len(self.ends) + 1 == self.job.warmup:
                torch.cuda.reset_peak_memory_stats()  # what loading took is over
        self.ends.append(time.perf_counter())
        self.cpu_ends.append(time.process_time())
        self.counts_at.append(len(self.counts))

    def result(self) -> dict[str, Any]:
        """Of this rank; sums over steps after the warm-up, and by step for the curve of the loss."""
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
            "peak_mib": peak,
            "start_mib": self.start_mib,
            **self.extra,
        }


def run(job: Job) -> dict[str, Any]:
    """Train, in this process; the result of this rank."""
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
    """For another process."""
    return json.dumps(asdict(job))
