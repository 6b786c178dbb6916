"""Benchmark run of fctune, with the recipe's own setup and loop."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from benchmarks.job import ALPHA, CLIP, LEARNING_RATE, MODULES, RANK, WEIGHT_DECAY, Job, Recorder

ROOT = Path(__file__).resolve().parents[1]


def fctune_config(job: Job, out: Path) -> dict[str, Any]:
    """Return the config of the run: the job's settings, or those of its file in ``configs/``."""
    rows = {"sources": [{"path": str(Path(job.rows_dir) / "rows.jsonl")}], "validation_share": 0.0}
    config: dict[str, Any] = _read_shipped(job.config) if job.config is not None else _settings_of(job)
    config["data"] |= rows | {"seq_len": job.seq_len}
    return config | {
        "output_dir": str(out),
        "model": {"path": job.model_dir},
        "compile": job.compile,
        "global_batch_size": job.rows_a_step,
        "epochs": 1_000,
        "max_steps": job.steps,
        "checkpoint": {"every": job.save_every, "elastic_every": 0, "keep_last": 1},
        "validation": {"every": 0},
        "resume": "never",
    }


def _settings_of(job: Job) -> dict[str, Any]:
    config: dict[str, Any] = {
        "data": {"packed": job.packed},
        "precision": job.dtype,
        "micro_batch_size": job.micro_batch_size,
        "optimizer": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "fused": True},
        "lr_scheduler": {"name": "constant"},
        "clip_grad_norm": CLIP,
        "activation_checkpointing": {"fraction": job.checkpointed, "mlp_tiles": job.mlp_tiles},
    }
    if job.adapter:
        config["adapter"] = {"rank": RANK, "alpha": ALPHA, "modules": MODULES, "base": job.base}
    return config


def _read_shipped(name: str) -> dict[str, Any]:
    from fctune.config.loading import compose_config
    from fctune.config.schema import RunConfig

    values: dict[str, Any] = compose_config(ROOT / "configs" / name, RunConfig).values
    values.pop("eval", None)
    return values


def train(job: Job, recorder: Recorder) -> None:
    """Run the recipe's setup and loop, without the final save and exports."""
    from fctune.base import distributed
    from fctune.config.loading import parse_config
    from fctune.config.schema import RunConfig
    from fctune.runs.sinks import JsonlSink, SinkGroup
    from fctune.training.entry import choose_start, open_run
    from fctune.training.host_memory import reuse_freed_memory
    from fctune.training.meter import count_flops
    from recipes.full_fc_distributed import FullFunctionCallingRecipe
    from recipes.lora_fc_distributed import LoRAFunctionCallingRecipe

    if not job.has_weights:
        _draw_weights_of_fctune()
    problems: list[str] = []
    launch = os.getppid() if job.ranks > 1 else os.getpid()  # all ranks share one directory
    parsed = parse_config(fctune_config(job, Path(job.rows_dir) / "out" / f"fctune-{launch}"), problems)
    assert not problems, problems
    config: RunConfig = parsed  # type: ignore[assignment]
    world = distributed.init_distributed()
    if world.device.type == "cpu":
        reuse_freed_memory()
    run = open_run(config, world)
    choose_start(run, config)
    profiler = _Profiler(job)
    times = {"steps": [0]}

    class Listener:
        def write(self, metrics: dict[str, Any]) -> None:
            real, supervised = metrics["tokens_total"], metrics["tokens_supervised"]
            recorder.count(real + metrics["tokens_padding"], real, supervised)
            recorder.losses.append(metrics["loss"])
            recorder.end_step()
            times["steps"][0] += 1
            profiler.after(times["steps"][0])

        def close(self) -> None:
            profiler.close()

    class Measured(LoRAFunctionCallingRecipe if job.adapter else FullFunctionCallingRecipe):  # type: ignore[misc]
        def open_sinks(self, *_: object) -> SinkGroup:
            return SinkGroup(JsonlSink(run.directory.metrics), Listener()) if world.is_main else SinkGroup()

    recipe = Measured(config, world, run)
    recipe.setup()
    recorder.begin()
    recipe.train()
    training = recipe.training
    layout, kernel = training.planned.layout, training.model.attention_kernel
    costs = training.checkpoint.costs
    recorder.extra |= {"layout": str(layout), "attention": kernel, "stall_s": costs.wait_s + costs.start_s}
    recorder.extra |= {"num_saves": costs.num_saves, "checkpointed": layout.fraction, "mlp_tiles": layout.mlp_tiles}
    flops = count_flops(training.model)
    recorder.extra |= {"parameters": flops.num_parameters, "attention_flops": flops.dense_attention(1, job.seq_len)}
    if not world.is_main:  # the main rank's counts cover all ranks
        recorder.ends = [0.0] * job.steps
        recorder.counts, recorder.counts_at = [(0, 0, 0, 0)] * job.steps, list(range(1, job.steps + 1))
    if job.save_every:
        last = training.checkpoint.saver.finish()
        recorder.extra["save"] = None if last is None else {"bytes": last.num_bytes, "seconds": last.seconds}
        if last is not None and last.error is not None:
            raise RuntimeError(last.error)
    recipe.cleanup()
    distributed.shutdown_distributed()


def _draw_weights_of_fctune() -> None:
    """Replace loading the base by random weights, drawn tensor by tensor and rounded to the run's dtype."""
    from fctune.models.causal_lm import CausalLM
    from fctune.models.frozen_experts import iter_frozen_experts
    from fctune.models.frozen_linear import copy_rows_, is_scale, rows_of_shard
    from fctune.models.lora import is_adapter
    from fctune.training import recipe, setup

    def draw_base_(model: CausalLM, model_dir: object, world: object = None) -> None:
        device = next(p.device for p in model.parameters() if p.device.type != "meta")
        experts = dict(iter_frozen_experts(model))
        for weight in experts.values():
            weight.init_random_(torch.Generator(device).manual_seed(0))
        for name, parameter in list(model.named_parameters()):
            if is_adapter(name) or is_scale(name) or name.rpartition(".")[0] in experts:
                continue
            rows = rows_of_shard(parameter)
            shape = (rows.stop - rows.start, *parameter.shape[1:])
            is_norm = len(shape) == 1
            drawn = torch.ones(shape, device=device) if is_norm else torch.randn(shape, device=device) * 0.02
            copy_rows_(model, name, drawn)

    for module, name, replacement in (
        (setup, "load_base_", draw_base_),
        (recipe, "check_weights", lambda *_: None),
        (recipe, "digest_model", lambda *_: "random"),
    ):
        getattr(module, name)  # a name that is gone must not be set
        setattr(module, name, replacement)


class _Profiler:
    """Profiles the last step of a run, if the job requests it."""

    def __init__(self, job: Job):
        self._job = job
        self._profiler: Any = None

    def after(self, step: int) -> None:
        """Start or stop the profiler after a step."""
        from torch.profiler import ProfilerActivity, profile

        if self._job.profile_to is None:
            return
        is_cuda = self._job.device == "cuda"
        if step == self._job.steps - 1:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_cuda
            self._profiler = profile(activities=activities)
            self._profiler.__enter__()
        elif self._profiler is not None:
            self._profiler.__exit__(None, None, None)
            key = "self_device_time_total" if is_cuda else "self_cpu_time_total"
            table = self._profiler.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=70)
            Path(self._job.profile_to).write_text(table)
            self._profiler = None

    def close(self) -> None:
        """Do nothing: the profile is written after the last step."""
