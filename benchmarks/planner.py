"""Planned peak memory compared with torch's memory tracker on this project's step, and planned speed with an H100's.

    python -m benchmarks.planner [--only 8b_lora,1b] [--out benchmarks/results/planner_DATE.json]
    python -m benchmarks.planner --speeds    # the rows of benchmarks/results/gpu.json; shown in docs/plan.md

The tracker (torch.distributed._tools, FSDPMemTracker) runs the recipes' model, layout and step on tensors that have
shapes and no memory, over a group that sends nothing, and counts every storage: some 10 to 60 seconds a configuration.
It runs on the CPU's operators, so three things are put in place of what only CUDA has: packed rows attend by
``varlen_attn`` as on CUDA, a norm and the log-softmax keep what CUDA's kernels keep, and numbers of the loss that the
host would read are left out. Nothing is compiled, and neither CUDA's context, the allocator's losses nor NCCL's buffers
are counted: the planner's figures here are without these three, too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_early_stop

from benchmarks.job import Job
from benchmarks.train_fctune import fctune_config
from benchmarks.training import RESULTS, ROOT, describe_machine
from benchmarks.workload import PUBLIC
from fctune.base.distributed import World
from fctune.base.gpus import find_gpu
from fctune.config.loading import parse_config
from fctune.config.schema import RunConfig
from fctune.data.loader import GlobalStep, StepTotals
from fctune.models import loss
from fctune.models.architecture import Architecture
from fctune.models.causal_lm import CausalLM, materialize_
from fctune.models.frozen_linear import copy_rows_, is_nf4
from fctune.models.planned_model import find_architecture, shape_model, shape_teacher
from fctune.models.torchtune import layers
from fctune.parallel.activations import apply_activation_checkpointing_
from fctune.parallel.layout import Hardware, ParallelLayout
from fctune.parallel.memory import MemoryModel, Setting
from fctune.parallel.sharding import GradientSync, shard_
from fctune.parallel.speed import count_flops, estimate_step_time
from fctune.training import step
from fctune.training.distillation import DistillObjective
from fctune.training.objective import Objective, SupervisedObjective
from fctune.training.prefetch import Inputs, StepData
from fctune.training.setup import start_state

GIB = 1024**3
DEVICE = 80 * GIB


class FusedNorm(torch.autograd.Function):
    """Norm that keeps the same tensors as CUDA's fused kernel: its input, its weight and a float32 per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Return a tensor of the right shape with arbitrary values."""
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return gradients of the right shapes with arbitrary values."""
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None


@contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """Start a process group that sends nothing, as rank 0, whose shards are the largest."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _simulated_cuda(world_size: int) -> Iterator[None]:
    """Replace what only CUDA has and what fake tensors cannot compute."""
    from torch.distributed.tensor import _sharding_prop
    from torchtune.models.llama3_1._position_embeddings import Llama3ScaledRoPE

    rows = [[1.0, 1.0, 0.0, 0.0, 0.0, 0.0]] * world_size
    with ExitStack() as stack:
        for target, name, value in (
            (layers, "rms_norm", lambda x, weight, eps: FusedNorm.apply(x, weight)),
            # CUDA's kernel reads 16-bit logits and writes float32, without a copy in between.
            (loss, "log_softmax", lambda x, dim, dtype: x.new_empty(x.shape, dtype=dtype)),
            (step, "_exchange", lambda *_: rows),
            (Llama3ScaledRoPE, "apply_scaling", lambda self, frequencies, *_: frequencies),
            # DTensor derives shapes in a separate fake mode, which the tracker then knows to ignore.
            (_sharding_prop, "detect_fake_mode", lambda *_: None),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield


def track_peak(config: RunConfig, architecture: Architecture, setting: Setting) -> dict[str, int]:
    """Return the peak bytes of two steps on rank 0, by the tracker's kinds and in total."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed.fsdp import FSDPModule

    world = World(0, setting.world_size, 0, torch.device("cpu"), setting.shard)
    # The tracker loses modules that recomputation leaves by an exception, if that happens twice over.
    stops_early = set_checkpoint_early_stop(setting.mlp_tiles == 1)
    with fake_process_group(setting.world_size), _simulated_cuda(setting.world_size), stops_early:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        model = shape_model(config, architecture, "varlen")
        apply_activation_checkpointing_(model, config.activation_checkpointing, "cuda", mlp_tiles=setting.mlp_tiles)
        name: Any = setting.mode
        layout = ParallelLayout(name, setting.replicate, setting.shard, "", context=setting.context)
        hardware = Hardware("cpu", setting.world_size, setting.shard, DEVICE)
        # The tracker follows modules, and fails where one is differentiated within the forward pass, as the loss does.
        head: Any = model.head
        model.project = lambda hidden, _=None: getattr(head, "forward", head)(hidden)  # type: ignore[method-assign, assignment]
        gradient_sync = shard_(model, layout, config.parallel, hardware)
        data = _make_step(config, model, setting)
        teacher = shape_teacher(config, kernel="varlen")
        objective: Objective = (
            SupervisedObjective() if config.distill is None else DistillObjective(config.distill, teacher)
        )
        with mode:
            materialize_(model, torch.device("cpu"))
            if teacher is not None:
                materialize_(teacher, torch.device("cpu"))
                teacher.requires_grad_(False)
            for name, parameter in list(model.named_parameters()):
                if is_nf4(parameter):  # has its memory from when it is filled
                    copy_rows_(model, name, torch.empty(parameter.shape, dtype=parameter.dtype))
            data = _without_memory(data, mode)
            state = start_state(model, config, 10, gradient_sync)
            if isinstance(model, FSDPModule):
                tracker: Any = FSDPMemTracker(model, state.optimizer)
            else:
                tracker = MemTracker()
                # It hooks the gradient of every parameter, which fails for frozen ones.
                count = tracker._track_module_params_and_buffers
                tracker._track_module_params_and_buffers = lambda module, **_: count(module, install_grad_hooks=False)
                tracker.track_external(model, state.optimizer)
            if teacher is not None:
                tracker.track_external(*teacher.parameters(), *teacher.buffers())

            class TrackedSync(GradientSync):
                def defer(self, is_deferred: bool) -> None:
                    tracker.reset_mod_stats()  # it follows each module through one forward
                    super().defer(is_deferred)

            sync = TrackedSync(model, gradient_sync.num_copies, gradient_sync.holds_gradients)
            with tracker:
                for _ in range(2):  # the optimizer has its state from the second on
                    step.launch_step(
                        *(model, state.optimizer, data, world, sync, objective),
                        clip_grad_norm=config.clip_grad_norm,
                    ).read()
        snapshot = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
        return {getattr(kind, "value", str(kind)): int(size) for kind, size in snapshot.items()}


def _make_step(config: RunConfig, model: CausalLM, setting: Setting) -> StepData:
    """Make packs of one fully supervised conversation each."""
    rows, length = setting.micro_batch_size, config.data.row_tokens // setting.context
    bounds = model.make_bounds(((length * setting.context,),) * rows)
    inputs = Inputs(
        tokens=torch.zeros(rows, length, dtype=torch.int64),
        labels=torch.zeros(rows, length, dtype=torch.int64),
        loss_weights=torch.ones(rows, length),
        supervised=torch.arange(rows * length),
        row_keys=torch.arange(rows),
        row_lengths=torch.full((rows,), length),
        positions=torch.arange(length).expand(rows, -1).contiguous(),
        bounds=replace(bounds, group=model.context_group),
    )
    tokens = rows * length
    totals = StepTotals(tokens, tokens, float(tokens), tokens * (length * setting.context + 1) // 2)
    return StepData(GlobalStep(1, 0, (), ""), totals, [inputs] * setting.accumulation)


def _without_memory(data: StepData, mode: Any) -> StepData:
    first = data.inputs[0]
    tensors = {f.name: getattr(first, f.name) for f in fields(first) if isinstance(getattr(first, f.name), Tensor)}
    assert first.bounds is not None
    bounds = replace(first.bounds, ends=mode.from_tensor(first.bounds.ends))
    fake = replace(first, bounds=bounds, **{name: mode.from_tensor(tensor) for name, tensor in tensors.items()})
    return replace(data, inputs=[fake] * len(data.inputs))


@dataclass(frozen=True, slots=True)
class Case:
    """A model with its config and setting, and rows of ``seq_len`` tokens."""

    model: str
    setting: Setting
    config: dict[str, Any]
    seq_len: int = 4096


def _cases() -> dict[str, Case]:
    """Three sizes, adapters and all weights, no block, half of them and all of them recomputed; variants; long rows."""
    lora = {"adapter": {"rank": 16}, "precision": "bf16"}
    full = {"precision": "bf16_mixed"}
    op = {"activation_checkpointing": {"policy": "op"}}
    layouts = {
        "1b": ("hf:meta-llama/Llama-3.2-1B", {"lora": ("fsdp", 1, 8, 4), "full": ("fsdp", 1, 8, 4)}),
        "8b": ("hf:meta-llama/Llama-3.1-8B", {"lora": ("fsdp", 1, 8, 2), "full": ("fsdp", 1, 8, 2)}),
        "70b": ("hf:meta-llama/Llama-3.1-70B", {"lora": ("hsdp", 2, 8, 1), "full": ("fsdp", 1, 64, 1)}),
    }
    cases: dict[str, Case] = {}
    for size, (model, by_kind) in layouts.items():
        for kind, (mode, replicate, shard, packs) in by_kind.items():
            for name, fraction in (("none", 0.0), ("half", 0.5), ("all", 1.0)):
                setting = Setting(mode, replicate, shard, fraction, packs)
                cases[f"{size}_{kind}_{name}"] = Case(model, setting, lora if kind == "lora" else full)
    model = "hf:meta-llama/Llama-3.1-8B"
    dropped = lora | {"adapter": {"rank": 64, "dropout": 0.1}}
    return cases | {
        "8b_lora_alone": Case(model, Setting("none", 1, 1, 0.5, 2), lora),
        "8b_nf4_alone": Case(model, Setting("none", 1, 1, 1.0, 2), {"adapter": {"rank": 16, "base": "nf4"}}),
        "8b_lora_dropout": Case(model, Setting("fsdp", 1, 8, 0.5, 2), dropped),
        "8b_lora_op": Case(model, Setting("fsdp", 1, 8, 1.0, 2), lora | op),
        "8b_full_op": Case(model, Setting("fsdp", 1, 8, 1.0, 2), full | op),
        "8b_full_hsdp_twice": Case(model, Setting("hsdp", 2, 8, 1.0, 1, 2), full),
        "8b_lora_hsdp_twice": Case(model, Setting("hsdp", 2, 8, 0.5, 1, 2), lora),
        "8b_lora_context": Case(model, Setting("fsdp", 1, 8, 0.5, 4, context=4), lora),
        "70b_lora_context": Case(layouts["70b"][0], Setting("hsdp", 2, 8, 1.0, 2, context=2), lora),
        "8b_full_bf16": Case(model, Setting("fsdp", 1, 8, 1.0, 1), {"precision": "bf16"}),
        "8b_lora_long": Case(model, Setting("fsdp", 1, 8, 1.0, 1, context=8), lora, 131072),
        "8b_lora_long_tiles": Case(model, Setting("fsdp", 1, 8, 0.0, 1, context=8, mlp_tiles=8), lora, 131072),
        "8b_lora_long_both": Case(model, Setting("fsdp", 1, 8, 1.0, 1, mlp_tiles=8), lora, 65536),
    }


CASES = _cases()


def make_config(case: Case) -> RunConfig:
    """Return the config of a case."""
    setting = case.setting
    checkpointing = case.config.get("activation_checkpointing", {}) | {"fraction": setting.fraction}
    problems: list[str] = []
    raw = case.config | {
        "output_dir": "runs/planner",
        "model": {"path": case.model},
        "data": {"sources": [{"path": "synthetic:train:10"}], "seq_len": case.seq_len},
        "micro_batch_size": setting.micro_batch_size,
        "global_batch_size": setting.micro_batch_size * setting.world_size * setting.accumulation,
        "activation_checkpointing": checkpointing,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4, "fused": True},
    }
    config = parse_config(raw, problems)
    if config is None:
        raise ValueError(problems)
    return config


def compare(case: Case) -> dict[str, Any]:
    """Return both peaks of a case in GiB, by part, and the planner's relative error."""
    config = make_config(case)
    architecture, _, _ = find_architecture(case.model)
    started = time.perf_counter()
    tracked = track_peak(config, architecture, case.setting)
    tracking_s = time.perf_counter() - started
    started = time.perf_counter()
    memory = MemoryModel(shape_model(config, architecture), config, DEVICE, teacher=shape_teacher(config))
    peak = memory.peak(case.setting)
    planned = peak.footprint.total - peak.footprint.context - peak.footprint.fragmentation
    return {
        "tracker_gib": round(tracked["Total"] / GIB, 3),
        "planner_gib": round(planned / GIB, 3),
        "error": round(planned / tracked["Total"] - 1, 4),
        "phase": peak.phase,
        "planner": {name: round(size / GIB, 3) for name, size in peak.footprint.to_json().items() if size},
        "tracker": {name: round(size / GIB, 3) for name, size in tracked.items() if size},
        "tracking_s": round(tracking_s, 1),
        "planning_s": round(time.perf_counter() - started, 3),
    }


# Tokens that a token of the benchmark's rows attends to on average: rows of 266 and 301 tokens, encoded as
# ``benchmarks.gpu_rows`` writes them.
PAIRS_PER_TOKEN = {"synthetic": 143.5, "dense": 161.2}


def read_gpu_results() -> dict[str, Any]:
    """Return the rows measured on a GPU, by name."""
    found: dict[str, Any] = json.loads((RESULTS / "gpu.json").read_text(encoding="utf-8"))
    return found


def compare_speeds(results: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return planned and measured tokens per second, without padding, of fctune's training rows on an H100.

    Rows of other conversations than those whose attention is known are left out.
    """
    gpu, speeds = find_gpu("h100"), {}
    for name, row in results.items():
        tried = [run for run in row["tried"] if "error" not in run] if row.get("tokens_per_s") else []
        if not tried or "H100" not in row["device"]["gpu"]:
            continue
        run = max(tried, key=lambda run: float(run["real_per_s"]))
        job = Job(**run["job"])
        if job.tool != "fctune" or job.rows_dir not in PAIRS_PER_TOKEN:
            continue
        raw = fctune_config(job, Path("runs"))
        model_name = PUBLIC.get(job.model_dir, "meta-llama/Llama-3.1-8B")
        raw["model"], raw["data"]["sources"] = {"path": f"hf:{model_name}"}, [{"path": "hf:some/rows"}]
        problems: list[str] = []
        config = parse_config(raw, problems)
        assert config is not None, problems
        share = run["supervised"] / run["places"]
        model = shape_model(config, find_architecture(config.model.path)[0])
        memory = MemoryModel(model, config, gpu.memory_bytes, share)
        checkpointed = run.get("checkpointed", job.checkpointed)
        setting = memory.with_accumulation(Setting("none", 1, 1, checkpointed, config.micro_batch_packs))
        logits = memory.choose_max_logits(1, 1, checkpointed)
        pairs = PAIRS_PER_TOKEN[job.rows_dir]
        flops = count_flops(memory, checkpointed, share, pairs, logits, setting.micro_batch_size)
        time = estimate_step_time(memory, gpu, setting, flops, job.rows_a_step, 1)
        planned = job.rows_a_step * job.seq_len * (1 - run["padding_share"]) / time.total_s
        speeds[name] = planned, float(run["real_per_s"])
    return speeds


def make_speed_table() -> str:
    """Return the table of planned and measured speeds for the documentation."""
    lines = ["| row | planned tokens/s | measured | plan against measurement |", "|---|---|---|---|"]
    for name, (planned, measured) in compare_speeds(read_gpu_results()).items():
        lines.append(f"| `{name}` | {planned:,.0f} | {measured:,.0f} | {planned / measured - 1:+.1%} |")
    return "\n".join(lines)


def main() -> None:
    """Compare all cases, each in a separate process, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="comma-separated prefixes of case names; default: all")
    parser.add_argument("--one", choices=CASES, help="compare one case in this process and print JSON")
    default = ROOT / "benchmarks" / "results" / f"planner_{datetime.date.today()}.json"
    parser.add_argument("--out", type=Path, default=default, help="results of other cases in it are kept")
    parser.add_argument("--speeds", action="store_true", help="compare planned speeds with the rows of gpu.json")
    arguments = parser.parse_args()
    if arguments.speeds:
        print(make_speed_table())
        return
    if arguments.one:
        print(json.dumps(compare(CASES[arguments.one])))
        return
    found: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    rows: dict[str, Any] = found.get("cases", {})
    for name in CASES:
        if not name.startswith(tuple(arguments.only.split(","))):
            continue
        command = [sys.executable, "-m", "benchmarks.planner", "--one", name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr.strip().splitlines()[-1]}")
        rows[name] = json.loads(done.stdout.strip().splitlines()[-1])
        row = rows[name]
        print(
            f"{name:<20} tracker {row['tracker_gib']:>8.2f} GiB  planner {row['planner_gib']:>8.2f} GiB  "
            f"{row['error']:+.1%}  ({row['tracking_s']:.0f} s)",
            flush=True,
        )
    found = {"date": f"{datetime.datetime.now():%Y-%m-%d %H:%M}", "machine": describe_machine(), "cases": rows}
    found["versions"] = {"torch": torch.__version__, "python": sys.version.split()[0]}
    found["configurations"] = {name: asdict(CASES[name]) for name in rows if name in CASES}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
