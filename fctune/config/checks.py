"""What the types of a config cannot say: ranges, paths, keys that exclude each other."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fctune.config.parsing import suggest

if TYPE_CHECKING:  # config reads its rules from here
    from fctune.config.schema import AdapterConfig, EvalConfig, ProfileConfig, RunConfig, SuccessConfig

# The linears a LoRA adapter can sit on, in the names of Hugging Face checkpoints.
ADAPTER_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


def resolve_component(spec: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The callable that ``_component_`` names and its keyword arguments."""
    module_name, _, name = str(spec["_component_"]).rpartition(".")
    arguments = {key: value for key, value in spec.items() if key != "_component_"}
    return getattr(importlib.import_module(module_name), name), arguments


def find_problems(config: RunConfig, problems: list[str]) -> None:
    """Append to ``problems`` what is wrong with a config whose keys and types are right."""
    config.optimizer = {"_component_": "torch.optim.AdamW", "lr": 2e-4} | config.optimizer
    _check_numbers(config, problems)
    _check_adapter(config.adapter, problems)
    _check_optimizer(config.optimizer, problems)
    _check_parallel(config, problems)
    _check_paths(config, problems)


def _check_numbers(config: RunConfig, problems: list[str]) -> None:
    for name in ("global_batch_size", "micro_batch_size", "epochs", "max_nonfinite", "log_every_n_steps"):
        if getattr(config, name) < 1:
            problems.append(f"{name}={getattr(config, name)}: expected 1 or more")
    if config.max_steps is not None and config.max_steps < 1:
        problems.append(f"max_steps={config.max_steps}: expected 1 or more, or null for no bound but epochs")
    if config.clip_grad_norm is not None and not config.clip_grad_norm > 0:
        problems.append(
            f"clip_grad_norm={config.clip_grad_norm}: expected more than 0, or null to leave gradients as they are"
        )
    data = config.data
    if not data.sources:
        problems.append("data.sources: empty; name at least one source, e.g. [{path: train.jsonl}]")
    for i, source in enumerate(data.sources):
        if not (source.weight > 0 and math.isfinite(source.weight)):
            problems.append(f"data.sources.{i}.weight={source.weight}: expected a finite number over 0")
    if not 0 <= data.validation_share < 1:
        problems.append(f"data.validation_share={data.validation_share}: expected 0 or more and under 1")
    if data.seq_len < 8:
        problems.append(f"data.seq_len={data.seq_len}: expected at least 8 tokens")
    if data.max_samples is not None and data.max_samples < 1:
        problems.append(f"data.max_samples={data.max_samples}: expected 1 or more, or null for all")
    if not (data.call_weight > 0 and math.isfinite(data.call_weight)):
        problems.append(f"data.call_weight={data.call_weight}: expected a finite number over 0")
    for name in ("every_n_steps", "elastic_every_n_steps"):
        if getattr(config.checkpoint, name) < 0:
            problems.append(f"checkpoint.{name}={getattr(config.checkpoint, name)}: expected 0 (never) or more")
    for name in ("keep_last", "keep_every_n_steps"):
        value = getattr(config.checkpoint, name)
        if value is not None and value < 1:
            problems.append(f"checkpoint.{name}={value}: expected 1 or more")
    _check_eval(config.eval, problems)
    _check_success(config.success, problems)
    _check_profile(config.profile, problems)
    price = config.price_per_gpu_hour
    if price is not None and not (price >= 0 and math.isfinite(price)):
        problems.append(f"price_per_gpu_hour={price}: expected a finite number, 0 or more, or null to tell no cost")
    port = config.telemetry.prometheus.port if config.telemetry is not None else None
    if port is not None and not 0 < port < 65536:
        problems.append(f"telemetry.prometheus.port={port}: expected 1 to 65535, or null for no endpoint")
    if config.step_timeout_s is not None and not config.step_timeout_s > 0:
        problems.append(f"step_timeout_s={config.step_timeout_s}: expected more than 0, or null to learn it")
    if config.validation.every_n_steps < 0:
        problems.append(f"validation.every_n_steps={config.validation.every_n_steps}: expected 0 (never) or more")
    scheduler = config.lr_scheduler
    if scheduler.num_warmup_steps < 0:
        problems.append(f"lr_scheduler.num_warmup_steps={scheduler.num_warmup_steps}: expected 0 or more")
    if scheduler.warmup_share is not None and not 0 <= scheduler.warmup_share < 1:
        problems.append(f"lr_scheduler.warmup_share={scheduler.warmup_share}: expected 0 or more and under 1")
    if scheduler.warmup_share is not None and scheduler.num_warmup_steps:
        problems.append("lr_scheduler: num_warmup_steps and warmup_share are both set; keep one")


def _check_eval(config: EvalConfig, problems: list[str]) -> None:
    if config.every_n_steps < 0:
        problems.append(f"eval.every_n_steps={config.every_n_steps}: expected 0 (never) or more")
    if config.every_n_steps and config.cases is None:
        problems.append("eval.cases: missing; name a JSONL file of held-out cases, or set eval.every_n_steps=0")
    if config.cases is not None and not Path(config.cases).is_file():
        problems.append(f"eval.cases={config.cases}: no such file (relative paths start at {Path.cwd()})")
    for name in ("max_cases", "max_new_tokens", "batch_size", "early_stop"):
        value = getattr(config, name)
        if value is not None and value < 1:
            problems.append(f"eval.{name}={value}: expected 1 or more")
    if not 0 < config.max_share_of_time <= 1:
        problems.append(f"eval.max_share_of_time={config.max_share_of_time}: expected over 0 and at most 1")


def _check_success(config: SuccessConfig | None, problems: list[str]) -> None:
    for name in ("min_accuracy", "min_gpu_utilization", "min_memory_share", "max_memory_share"):
        value = getattr(config, name, None)
        if value is not None and not 0 <= value <= 1:
            problems.append(f"success.{name}={value}: expected a share, 0 to 1, or null to ask nothing")


def _check_profile(config: ProfileConfig | None, problems: list[str]) -> None:
    if config is None:
        return
    if config.first_step < 1:
        problems.append(f"profile.first_step={config.first_step}: expected 1 or more")
    if config.last_step < config.first_step:
        problems.append(f"profile.last_step={config.last_step}: under profile.first_step={config.first_step}")
    if not config.ranks or min(config.ranks) < 0:
        problems.append(f"profile.ranks={config.ranks}: expected ranks, counted from 0")


def _check_adapter(adapter: AdapterConfig | None, problems: list[str]) -> None:
    if adapter is None:
        return
    if adapter.rank < 1:
        problems.append(f"adapter.rank={adapter.rank}: expected 1 or more")
    if not adapter.alpha > 0:
        problems.append(f"adapter.alpha={adapter.alpha}: expected more than 0")
    if not 0 <= adapter.dropout < 1:
        problems.append(f"adapter.dropout={adapter.dropout}: expected 0 or more and under 1")
    if not adapter.modules:
        problems.append(f"adapter.modules: empty; choose from {', '.join(ADAPTER_MODULES)}")
    for name in adapter.modules:
        if name not in ADAPTER_MODULES:
            near = suggest(name, ADAPTER_MODULES)
            problems.append(f"adapter.modules: no such module: {name}{near}; known: {', '.join(ADAPTER_MODULES)}")


def _check_parallel(config: RunConfig, problems: list[str]) -> None:
    parallel = config.parallel
    if parallel.replicate is not None and parallel.replicate < 1:
        problems.append(f"parallel.replicate={parallel.replicate}: expected 1 or more, or null for one copy a node")
    if parallel.replicate is not None and parallel.mode != "hsdp":
        problems.append(
            f"parallel.replicate={parallel.replicate}: only hsdp has copies to count, and parallel.mode is "
            f"{parallel.mode}; set parallel.mode=hsdp, or leave replicate out"
        )
    if parallel.cpu_offload and parallel.mode == "ddp":
        problems.append("parallel.cpu_offload: offloads shards, and ddp has none; set parallel.mode=fsdp or hsdp")
    checkpointing = config.activation_checkpointing
    if not 0 <= checkpointing.fraction <= 1:
        problems.append(f"activation_checkpointing.fraction={checkpointing.fraction}: expected 0 to 1")
    if checkpointing.offload and not checkpointing.fraction:
        problems.append(
            "activation_checkpointing.offload: moves what checkpointed blocks keep, and none are; set "
            "activation_checkpointing.fraction over 0"
        )
    if config.adapter is not None and config.precision in ("bf16_mixed", "float8", "float8_mixed"):
        problems.append(
            f"precision={config.precision}: is for training all weights; with adapters use bf16, which keeps them in "
            "float32, and adapter.base for how the frozen base is held"
        )


def _check_optimizer(spec: dict[str, Any], problems: list[str]) -> None:
    try:
        component, arguments = resolve_component(spec)
    except (ImportError, AttributeError, ValueError):
        problems.append(f"optimizer._component_={spec['_component_']}: cannot be imported; e.g. torch.optim.AdamW")
        return
    for key in ("lr", "weight_decay", "eps"):
        value = spec.get(key)
        if isinstance(value, str):  # YAML 1.1 reads 2e-4 as text
            with contextlib.suppress(ValueError):
                spec[key] = value = float(value)
        if value is not None and (isinstance(value, (bool, str)) or not value >= 0 or not math.isfinite(value)):
            problems.append(f"optimizer.{key}={value!r}: expected a finite number, 0 or more")
    parameters = inspect.signature(component).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for key in arguments:
        if key not in parameters:
            problems.append(
                f"optimizer.{key}: {component.__name__} takes no such argument{suggest(key, parameters, 'optimizer.')}"
            )


def _check_paths(config: RunConfig, problems: list[str]) -> None:
    path = config.model.path
    if not path.startswith("hf:"):
        root = Path(path)
        if not root.is_dir():
            problems.append(
                f"model.path={path}: no such directory; pass a Hugging Face model directory, or hf:NAME@REVISION"
            )
        elif not (root / "config.json").is_file():
            problems.append(f"model.path={path}: holds no config.json, so it is not a Hugging Face model directory")
    for i, source in enumerate(config.data.sources):
        if not source.path.startswith(("hf:", "synthetic:")) and not Path(source.path).exists():
            problems.append(
                f"data.sources.{i}.path={source.path}: no such file or directory (relative paths start at {Path.cwd()})"
            )
    output = Path(config.output_dir)
    if output.exists() and not output.is_dir():
        problems.append(f"output_dir={output}: is a file; name a directory")
