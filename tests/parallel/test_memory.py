"""Planned state compared with real shards to the byte, activations with what autograd keeps, peaks with a tracker.

The tracker is torch's and runs this project's step on fake tensors: small shapes by default; with ``-m slow`` models of
1, 8 and 70 billion parameters, 10 to 90 seconds each. Neither the formulas nor their constants were fitted to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from benchmarks.planner import CASES, Case, compare
from fctune.base.distributed import World
from fctune.config.schema import RunConfig
from fctune.models.attention import make_bounds
from fctune.models.causal_lm import materialize_
from fctune.models.lora import apply_lora_, init_adapters_
from fctune.models.planned_model import shape_model
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model, read_architecture
from fctune.parallel.activations import apply_activation_checkpointing_
from fctune.parallel.block_memory import count_block_activations
from fctune.parallel.footprint import SAFE_SHARE
from fctune.parallel.memory import MemoryModel, Setting
from fctune.training.setup import build_base, shard_and_load_, start_state
from tests.models.expert_samples import quantize_to_mxfp4, save_base
from tests.parallel.sample_plans import GIB, WIDE, parse_small_config
from tests.ranks import run_ranks

ADAPTER = {"rank": 4, "alpha": 8, "modules": ["q_proj", "o_proj", "down_proj"]}


def measure_state(world: World, raw: dict[str, Any], model_dir: Path) -> dict[str, int]:
    """Return the bytes that this rank holds after one step with the recipes' own functions."""
    config = parse_small_config(raw)
    model = build_base(config, model_dir, world)
    if config.adapter is not None:
        apply_lora_(model, config.adapter)
    gradient_sync = shard_and_load_(model, config, model_dir, world)
    init_adapters_(model, 0)
    state = start_state(model, config, 1, gradient_sync)
    tokens = torch.arange(64)[None]
    model(tokens=tokens, labels=tokens).backward()
    state.optimizer.step()

    def local(tensor: torch.Tensor) -> int:
        part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return part.numel() * part.element_size()

    named = dict(model.named_parameters())
    moments = [t for values in state.optimizer.state.values() for t in values.values()]
    return {
        "parameters": sum(local(p) for n, p in named.items() if "lora_" not in n),
        "adapters": sum(local(p) for n, p in named.items() if "lora_" in n),
        "gradients": sum(local(p.grad) for p in named.values() if p.grad is not None),
        "optimizer": sum(local(t) for t in moments),
        "buffers": sum(local(b) for b in model.buffers()),
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("world_size", "family", "raw"),
    [
        (2, "llama", {"precision": "bf16_mixed", "parallel": {"mode": "fsdp"}}),
        (2, "qwen2", {"precision": "bf16", "parallel": {"mode": "ddp"}, "adapter": ADAPTER}),
        (4, "qwen2", {"precision": "bf16", "parallel": {"mode": "fsdp"}, "adapter": ADAPTER}),
        (4, "llama", {"precision": "bf16_mixed", "parallel": {"mode": "hsdp", "replicate": 2}}),
    ],
    ids=str,
)
def test_planned_state_equals_real_shards_to_the_byte(
    world_size: int, family: str, raw: dict[str, Any], make_model: Callable[..., Path]
) -> None:
    # No number of ranks divides these rows, so that shards are uneven.
    model_dir = make_model(family, intermediate_size=90)
    raw = raw | {"model": {"path": str(model_dir)}}
    held = run_ranks(measure_state, world_size, raw, model_dir)[0]  # the first rank's shard is the largest
    config = parse_small_config(raw)
    memory = MemoryModel(shape_model(config, read_architecture(model_dir)), config, 80 * GIB)
    mode = config.parallel.mode
    copies = {"fsdp": 1, "ddp": world_size, "hsdp": config.parallel.replicate or 1}[mode]
    state = memory.device_state(Setting(mode, copies, world_size // copies, 0.0, 1))
    planned = {name: getattr(state, name) for name in ("parameters", "adapters", "gradients", "optimizer")}
    assert planned | {"buffers": memory.buffers} == held


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("parallel", "raw"),
    [
        # Two groups of two ranks.
        pytest.param({"mode": "fsdp", "expert": 2}, {"precision": "bf16_mixed"}, id="full", marks=pytest.mark.thorough),
        pytest.param(
            {"mode": "hsdp", "replicate": 2, "expert": 4},
            {"precision": "bf16", "adapter": ADAPTER | {"modules": ["q_proj", "experts.down_proj"]}},
            id="lora",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            {"mode": "fsdp", "expert": 2},
            {"precision": "bf16", "adapter": ADAPTER | {"modules": ["q_proj"], "base": "mxfp4"}},
            id="4 bits",
        ),
    ],
)
def test_planned_state_of_spread_experts_is_what_four_ranks_hold(
    parallel: dict[str, Any], raw: dict[str, Any], tmp_path: Path
) -> None:
    model_dir = save_base("qwen3_moe", tmp_path / "qwen3", num_experts=4)
    if raw.get("adapter", {}).get("base") == "mxfp4":
        plain = save_base("gpt_oss", tmp_path / "gpt_oss", num_experts=4)
        model_dir = quantize_to_mxfp4(plain, tmp_path / "packed")
    raw = raw | {"model": {"path": str(model_dir)}, "parallel": parallel}
    held = run_ranks(measure_state, 4, raw, model_dir)[0]
    config = parse_small_config(raw)
    model = shape_model(config, read_architecture(model_dir))
    memory = MemoryModel(model, config, 80 * GIB)
    copies = parallel.get("replicate", 1)
    setting = Setting(parallel["mode"], copies, 4 // copies, 0.0, 1)
    state = memory.device_state(setting)
    planned = {name: getattr(state, name) for name in ("parameters", "adapters", "gradients", "optimizer")}
    assert planned | {"buffers": memory.buffers} == held
    # Experts stay where they are: FSDP gathers the other weights alone.
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    gathered = sum(block.numel for block in memory.blocks) + memory.root.numel
    assert gathered + experts == sum(t.numel for t in memory.all.tensors)


def keep_of_block(config: RunConfig, model_dir: Path, dtype: torch.dtype, num_tokens: int) -> int:
    """Return the bytes that autograd keeps for one real block's forward, without weights."""
    model = build_model(read_architecture(model_dir), 2048, PrecisionPolicy.uniform(dtype))
    if config.adapter is not None:
        apply_lora_(model, config.adapter)
    materialize_(model, torch.device("cpu"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    apply_activation_checkpointing_(model, config.activation_checkpointing, "cpu")
    positions = torch.arange(num_tokens)[None]
    model.token_keys.set_rows(torch.zeros(1, dtype=torch.int64), num_tokens)
    hidden = torch.randn(1, num_tokens, model.architecture.embed_dim, dtype=dtype, requires_grad=True)
    kept: dict[int, int] = {}
    alive: list[torch.Tensor] = []
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    forward = next(iter(model.blocks)).forward
    if config.compile:  # partitioned into kept and recomputed tensors as for CUDA, then run eagerly
        torch._dynamo.reset()
        forward = torch.compile(forward, backend="aot_eager_decomp_partition")
    bounds = make_bounds(((num_tokens,),), "per_document") if config.compile else None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = forward(hidden, mask=bounds, input_pos=positions)
    del out
    return sum(kept.values())


@pytest.mark.parametrize(
    ("raw", "policy"),
    [
        ({}, None),
        ({"adapter": ADAPTER}, None),
        ({"adapter": ADAPTER | {"dropout": 0.1}}, None),
        ({}, "block"),
    ],
    ids=str,
)
def test_planned_activations_equal_what_autograd_keeps(
    raw: dict[str, Any], policy: str | None, make_model: Callable[..., Path]
) -> None:
    model_dir = make_model("llama", **(WIDE | {"num_key_value_heads": 4}))
    checkpointing = {"fraction": 1.0, "policy": policy} if policy else {}
    extra = {"model": {"path": str(model_dir)}, "precision": "fp32", "activation_checkpointing": checkpointing}
    config = parse_small_config(raw | extra)
    activations = count_block_activations(read_architecture(model_dir), config, 4)
    planned = activations.kept_policy_block * 512 if policy == "block" else activations.total(512)
    assert planned == keep_of_block(config, model_dir, torch.float32, 512)


@pytest.mark.parametrize("mlp_tiles", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "raw",
    [
        pytest.param({}, marks=pytest.mark.thorough),
        {"adapter": {"rank": 4}},
        pytest.param({"adapter": {"rank": 4, "dropout": 0.1}}, marks=pytest.mark.thorough),
        pytest.param({"adapter": {"rank": 4, "modules": ["q_proj", "v_proj"]}}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_planned_activations_of_compiled_blocks_equal_what_the_partitioner_keeps(
    raw: dict[str, Any], mlp_tiles: int, make_model: Callable[..., Path]
) -> None:
    model_dir = make_model("llama", **WIDE)
    raw = raw | {"activation_checkpointing": {"mlp_tiles": mlp_tiles}}
    config = parse_small_config(raw | {"model": {"path": str(model_dir)}, "precision": "bf16", "compile": True})
    planned = count_block_activations(read_architecture(model_dir), config, 2).total(512, mlp_tiles)
    # Dropout's token keys, and the row's bounds.
    tolerance = 16 * 512 if config.adapter is not None and config.adapter.dropout else 64
    if mlp_tiles > 1:
        tolerance += 4 * 512  # of the norm, to compute the MLP's input again
    assert abs(planned - keep_of_block(config, model_dir, torch.bfloat16, 512)) <= tolerance


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_dora_keeps_no_more_than_planned(is_compiled: bool, make_model: Callable[..., Path]) -> None:
    model_dir = make_model("llama", **WIDE)
    adapter = {"rank": 4, "dora": True}
    config = parse_small_config({"model": {"path": str(model_dir)}, "precision": "fp32", "adapter": adapter})
    config.compile = is_compiled
    planned = count_block_activations(read_architecture(model_dir), config, 4).total(512)
    kept = keep_of_block(config, model_dir, torch.float32, 512)
    assert kept <= 1.01 * planned
    assert is_compiled or planned == pytest.approx(kept, rel=0.01)


def test_memory_grows_with_batch_and_shard_size_and_shrinks_with_checkpointing(make_model: Callable[..., Path]) -> None:
    config = parse_small_config({"model": {"path": str(make_model("llama"))}, "precision": "bf16_mixed"})
    model = shape_model(config, read_architecture(make_model("llama")))
    memory = MemoryModel(model, config, 80 * GIB)
    setting = Setting("fsdp", 1, 8, 0.5, 2, 2)
    peak = memory.peak(setting).footprint.total
    assert memory.peak(replace(setting, micro_batch_size=3)).footprint.total > peak
    assert memory.peak(replace(setting, shard=4)).footprint.total > peak
    assert memory.peak(replace(setting, fraction=0.0)).footprint.total > peak
    assert memory.peak(replace(setting, fraction=1.0)).footprint.total < peak


def test_the_largest_micro_batch_fits_and_one_more_does_not(make_model: Callable[..., Path]) -> None:
    model_dir = make_model("llama")
    config = parse_small_config({"model": {"path": str(model_dir)}, "precision": "bf16_mixed"})
    memory = MemoryModel(shape_model(config, read_architecture(model_dir)), config, int(1.75 * GIB))
    setting = Setting("fsdp", 1, 2, 0.0, 1)
    largest = memory.largest_micro_batch(setting, 4096, 8192)
    assert 1 < largest < 4096

    def need(size: int) -> int:
        tried = replace(setting, micro_batch_size=size, accumulation=-(-8192 // (size * 2)))
        return memory.peak(tried).footprint.total

    assert need(largest) <= SAFE_SHARE * memory.device_bytes < need(largest + 1)


def test_as_few_blocks_are_checkpointed_as_memory_needs(make_model: Callable[..., Path]) -> None:
    model_dir = make_model("llama", num_hidden_layers=16)
    raw = {"model": {"path": str(model_dir)}, "precision": "bf16", "adapter": ADAPTER, "micro_batch_size": 64}
    config = parse_small_config(raw)
    architecture = read_architecture(model_dir)
    model = shape_model(config, architecture)

    def need(fraction: float) -> int:
        fixed = parse_small_config(raw | {"activation_checkpointing": {"fraction": fraction}})
        return MemoryModel(model, fixed, None).required(8, 1).total

    sizes = [need(step / 8) for step in range(9)]
    assert sizes == sorted(sizes, reverse=True)
    for step, size in enumerate(sizes):
        memory = MemoryModel(model, config, math.ceil(size / SAFE_SHARE))
        assert memory.choose_fraction(8, 1) == step / 8
        assert memory.required(8, 1).total == size
    assert MemoryModel(model, config, 1).choose_fraction(8, 1) == 1.0, "nothing fits: as little as possible"
    assert MemoryModel(model, config, None).choose_fraction(8, 1) == 0.0, "the memory is unknown"


LORA = {"adapter": {"rank": 8}, "precision": "bf16"}


FULL = {"precision": "bf16_mixed"}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("raw", "setting"),
    [
        pytest.param(FULL, Setting("fsdp", 1, 4, 0.5, 2), marks=pytest.mark.thorough),
        pytest.param(FULL, Setting("hsdp", 2, 2, 1.0, 1, 2), marks=pytest.mark.thorough),
        (LORA, Setting("fsdp", 1, 4, 1.0, 2)),
        pytest.param(LORA, Setting("fsdp", 1, 4, 0.0, 4, context=4), marks=pytest.mark.thorough),
        pytest.param(LORA, Setting("fsdp", 1, 4, 1.0, 2, mlp_tiles=8), marks=pytest.mark.thorough),
        pytest.param(FULL, Setting("fsdp", 1, 4, 0.0, 4, context=2, mlp_tiles=8), marks=pytest.mark.slow),
        pytest.param(FULL, Setting("fsdp", 1, 4, 0.5, 4, context=2), marks=pytest.mark.slow),
        pytest.param(LORA, Setting("none", 1, 1, 0.0, 2), marks=pytest.mark.thorough),
        pytest.param(
            {"adapter": {"rank": 8, "base": "nf4"}, "precision": "bf16"},
            Setting("none", 1, 1, 1.0, 2),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_the_planned_peak_of_a_small_model_is_within_a_twentieth_of_the_trackers(
    raw: dict[str, Any], setting: Setting, make_model: Callable[..., Path]
) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 4, "num_attention_heads": 8}
    model_dir = make_model("llama", **sizes, max_position_embeddings=4096, vocab_size=2048)
    assert compare(Case(str(model_dir), setting, raw))["error"] == pytest.approx(0, abs=0.05)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("raw", "setting", "beta", "vocab_size"),
    [
        (LORA | {"precision": "fp32"}, Setting("none", 1, 1, 1.0, 2), 1.0, 2048),
        (LORA | {"precision": "fp32"}, Setting("none", 1, 1, 1.0, 2), 0.5, 60_000),
        (FULL, Setting("fsdp", 1, 4, 0.5, 2), 0.0, 2048),
    ],
    ids=str,
)
def test_the_planned_peak_of_a_distillation_is_within_a_twentieth_of_the_trackers(
    raw: dict[str, Any], setting: Setting, beta: float, vocab_size: int, make_model: Callable[..., Path]
) -> None:
    shared = {"max_position_embeddings": 4096, "vocab_size": vocab_size, "num_attention_heads": 8}
    student = make_model("llama", hidden_size=512, intermediate_size=1792, num_hidden_layers=4, **shared)
    teacher = make_model("llama", hidden_size=1024, intermediate_size=2048, num_hidden_layers=3, **shared)
    distill = {"teacher": str(teacher), "on_policy_share": 0.0, "beta": beta}
    case = Case(str(student), setting, raw | {"distill": distill})
    assert compare(case)["error"] == pytest.approx(0, abs=0.05)


SIZES = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 4}


SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096}


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": False},
    "gemma3_text": {"sliding_window": 64, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("raw", "setting"),
    [
        (FULL, Setting("fsdp", 1, 4, 0.5, 2)),
        (LORA, Setting("none", 1, 1, 0.0, 2)),
        (LORA, Setting("fsdp", 1, 4, 1.0, 2)),
    ],
    ids=str,
)
def test_the_planned_peak_of_a_model_from_transformers_is_within_a_tenth_of_the_trackers(
    raw: dict[str, Any], setting: Setting, family: str, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(family, **SIZES | FAMILIES[family]).save_pretrained(tmp_path)
    assert compare(Case(str(tmp_path), setting, raw))["error"] == pytest.approx(0, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_planned_peak_is_within_a_twentieth_of_the_trackers(name: str) -> None:
    """Of long rows, which activations decide, within a fiftieth."""
    assert compare(CASES[name])["error"] == pytest.approx(0, abs=0.02 if "long" in name else 0.05)
