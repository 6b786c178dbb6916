"""Experts kept in 4 or 8 bits: what they hold, compute, keep for backward and export; on one rank and on several."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import pad
from torchao.dtypes.nf4tensor import to_nf4
from torchao.quantization.quant_primitives import (
    _choose_scale_float8,
    _dequantize_affine_float8,
    _quantize_affine_float8,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fctune.base.distributed import World
from fctune.base.errors import CheckpointError, ConfigError
from fctune.config.sections.adapter import AdapterConfig
from fctune.config.sections.parallel import ActivationCheckpointingConfig, ParallelConfig
from fctune.models.base_weights import check_base, load_base_
from fctune.models.causal_lm import CausalLM, materialize_
from fctune.models.export import export_adapter, export_merged
from fctune.models.frozen_experts import (
    Float8Experts,
    FrozenExperts,
    Mxfp4Experts,
    Nf4Experts,
    iter_frozen_experts,
)
from fctune.models.frozen_linear import FrozenLinear
from fctune.models.lora import apply_lora_, describe_adapters, find_frozen_experts, init_adapters_, is_adapter
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model, read_architecture
from fctune.parallel.activations import apply_activation_checkpointing_, compile_blocks_
from fctune.parallel.layout import Hardware, choose_parallel_layout
from fctune.parallel.sharding import shard_
from fctune.tasks.evaluation.live import check_answering_memory
from fctune.training.meter import count_flops
from tests.models.expert_samples import draw_b_, draw_ids, quantize_to_mxfp4, save_base
from tests.models.model_samples import load_model, load_reference
from tests.ranks import run_ranks

# Linears share scales among 16,384 weights; those of an expert are filled up to a multiple of them.
WIDE = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 96, "num_experts": 4}
ADAPTER = AdapterConfig(rank=3, alpha=6.0, modules=["q_proj", "experts.gate_up_proj", "experts.down_proj"])

Kind = Literal["nf4", "mxfp4", "float8"]
CASES: list[tuple[Kind, str]] = [("nf4", "qwen3_moe"), ("nf4", "gpt_oss"), ("mxfp4", "gpt_oss")]
CASES += [("float8", "qwen3_moe"), ("float8", "gpt_oss")]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    folder = tmp_path_factory.mktemp("bases")
    plain = {kind: save_base(kind, folder / kind, **WIDE) for kind in ("qwen3_moe", "gpt_oss")}
    packed = quantize_to_mxfp4(plain["gpt_oss"], folder / "packed")
    converted = {(base, kind): path for base in ("nf4", "float8") for kind, path in plain.items()}
    return converted | {("mxfp4", "gpt_oss"): packed}


def read_expected(kind: str, path: Path, name: str, original: Tensor) -> Tensor:
    """Return the weight of experts as torchao or transformers dequantises it."""
    if kind == "float8":
        is_transposed = "gpt_oss" in str(path)  # inputs come first
        rows = original.transpose(1, 2).float() if is_transposed else original.float()
        rows = rows.contiguous()
        scales = _choose_scale_float8(rows, (1, 1, rows.shape[2]))
        restored: Tensor = _dequantize_affine_float8(_quantize_affine_float8(rows, scales), scales, original.dtype)
        return restored.transpose(1, 2) if is_transposed else restored
    if kind == "mxfp4":
        stored = load_file(path / "model.safetensors")
        unpacked: Tensor = convert_moe_packed_tensors(
            stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=original.dtype
        )
        return unpacked
    experts = []
    for weight in original:
        flat = pad(weight.flatten(), (0, -weight.numel() % 16_384))
        experts.append(to_nf4(flat).get_original_weight()[: weight.numel()].view_as(weight))
    return torch.stack(experts)


def make_pair(kind: Kind, path: Path, dtype: torch.dtype, **changes: Any) -> tuple[CausalLM, CausalLM]:
    """Return a model with experts in 4 or 8 bits, and one whose weights are what these stand for.

    Linears in 8 bits would round what they read, so they have the dtype of the run.
    """
    adapter = replace(ADAPTER, base=kind, **changes)
    ours, plain = load_model(path, adapter, dtype), load_model(path, replace(adapter, base="bf16"), dtype)
    parameters = dict(plain.named_parameters())
    with torch.no_grad():
        for name, weight in parameters.items():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                weight.copy_(read_expected(kind, path, name.removeprefix("decoder."), weight.detach()))
        for name, module in ours.named_modules():
            if isinstance(module, FrozenLinear):
                if kind == "float8" and module.base_dtype == "float8":
                    module.weight = nn.Parameter(module.dequantized_weight().to(dtype), requires_grad=False)
                    module.base_dtype = "bf16"
                    del module.weight_scale
                parameters[f"{name}.weight"].copy_(module.dequantized_weight())
    return ours, plain


def run(model: CausalLM, tokens: Tensor) -> dict[str, Tensor]:
    """Return the loss and the gradients of all adapters."""
    model.zero_grad()
    keys = torch.arange(len(tokens))
    loss = model.train()(tokens, labels=tokens, row_keys=keys)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "family"), CASES)
def test_experts_hold_what_torchao_and_transformers_dequantise(
    kind: Kind, family: str, dtype: torch.dtype, bases: dict[Any, Path]
) -> None:
    ours, plain = make_pair(kind, bases[kind, family], dtype)
    found = dict(iter_frozen_experts(ours))
    assert len(found) == 4
    for path, weight in found.items():
        assert torch.equal(weight.dequantized_weight(), plain.get_parameter(path)), path


def test_every_byte_and_scale_of_mxfp4_is_dequantised_as_by_transformers() -> None:
    weight = Mxfp4Experts(torch.empty(2, 512, 256, dtype=torch.bfloat16), is_transposed=True)
    weight.init_buffers_()
    blocks, scales = weight.parts
    blocks.copy_(torch.arange(256, dtype=torch.uint8).view(16, 16))
    # The format gives the last scale, 255, to NaN.
    scales.copy_(torch.arange(256).clamp(max=254)[:, None].expand(scales.shape[1:]))
    assert torch.equal(weight.dequantized_weight(), convert_moe_packed_tensors(blocks, scales))


@pytest.mark.parametrize(("kind", "family"), CASES)
def test_loss_and_gradients_are_those_of_dequantised_experts(
    kind: Kind, family: str, bases: dict[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fctune.models.frozen_experts.CHUNK_ELEMENTS", 3 * 96 * 256 + 1)  # experts in two parts
    # In float32, some processors sum the products of both in another order, which differs by more than the bound.
    ours, plain = make_pair(kind, bases[kind, family], torch.float64, dropout=0.1)
    tokens = draw_ids(2, 20)
    found, expected = run(ours, tokens), run(plain, tokens)
    assert found.keys() == expected.keys()
    assert len(found) == 1 + 2 * 3 * 2
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6 * float(value.abs().max()), msg=name)
        assert float(value.abs().max()) > 0


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "family", "policy"), [(*case, None) for case in CASES] + [(*CASES[2], "block"), (*CASES[2], "op")]
)
def test_no_dequantised_expert_is_kept_for_backward(
    kind: Kind, family: str, policy: Any, is_compiled: bool, bases: dict[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ours, plain = make_pair(kind, bases[kind, family], torch.bfloat16)
    if policy is not None:
        config = ActivationCheckpointingConfig(fraction=0.5, policy=policy)
        apply_activation_checkpointing_(ours, config, "cpu")
    if is_compiled:
        backend = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
        monkeypatch.setattr(torch, "compile", backend)
        compile_blocks_(ours)
        compile_blocks_(plain)  # which rounds in fewer places, too
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    tokens = draw_ids(2, 20)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        found = run(ours, tokens)
    expected = run(plain, tokens)
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=2e-3, atol=0)
    assert found.keys() == expected.keys()
    sizes = {weight.num_weights for _, weight in iter_frozen_experts(ours)}
    wide = [t for t in kept if t.is_floating_point() and t.element_size() > 1]
    assert not [(t.dtype, t.shape) for t in wide if t.numel() in sizes]
    assert any(t.dtype is (torch.float8_e4m3fn if kind == "float8" else torch.uint8) for t in kept)
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize(("kind", "family"), CASES)
def test_merged_exports_and_adapters_compute_what_was_trained(
    kind: Kind, family: str, bases: dict[Any, Path], tmp_path: Path
) -> None:
    path = bases[kind, family]
    ours, plain = make_pair(kind, path, torch.float32)
    tokens = draw_ids(2, 20)
    with torch.no_grad():
        expected = ours(tokens)
    export_merged(ours, path, tmp_path / "merged", is_writer=True)
    with torch.no_grad():
        found = load_reference(tmp_path / "merged")(tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for name, model in (("ours", ours), ("plain", plain)):
        export_adapter(model, ADAPTER, str(path), path, tmp_path / name, is_writer=True)
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "plain")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())


def compute_on_ranks(world: World, kind: Kind, path: Path, parallel: ParallelConfig) -> dict[str, Any]:
    model = build_model(read_architecture(path), 256, PrecisionPolicy.uniform(torch.float32))
    apply_lora_(model, replace(ADAPTER, base=kind))
    hardware = Hardware("cpu", world.world_size, world.world_size)
    shard_(model, choose_parallel_layout(parallel, hardware, True, lambda _: None), parallel, hardware)  # type: ignore[arg-type, return-value]
    materialize_(model, world.device)
    load_base_(model, path)
    init_adapters_(model, 0)
    draw_b_(model)
    found = run(model, draw_ids(2, 20))
    held = sum(
        part.to_local().numel() if hasattr(part, "to_local") else part.numel()
        for _, weight in iter_frozen_experts(model)
        for part in weight.parts
    )
    export_merged(model, path, path.parent / f"merged-{kind}-{parallel.expert}", is_writer=world.is_main)
    return {"loss": found["loss"], "held": held}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "family"), [CASES[0], CASES[2], CASES[3]])
@pytest.mark.parametrize("spread", [1, 2])
def test_two_ranks_compute_and_export_what_one_does(
    kind: Kind, family: str, spread: int, bases: dict[Any, Path]
) -> None:
    path = bases[kind, family]
    one = load_model(path, replace(ADAPTER, base=kind))
    draw_b_(one)
    expected = run(one, draw_ids(2, 20))["loss"]
    parallel = ParallelConfig(mode="fsdp", expert=spread)
    results = run_ranks(compute_on_ranks, 2, kind, path, parallel)
    total = sum(part.numel() for _, weight in iter_frozen_experts(one) for part in weight.parts)
    for result in results:
        torch.testing.assert_close(result["loss"], expected, rtol=1e-5, atol=0)
        assert result["held"] == total // 2
    export_merged(one, path, path.parent / f"merged-{kind}-one-{spread}", is_writer=True)
    folders = (f"merged-{kind}-{spread}", f"merged-{kind}-one-{spread}")
    found, wanted = (load_file(path.parent / folder / "model.safetensors") for folder in folders)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_experts_in_4_bits_count_as_the_weights_that_they_stand_for(bases: dict[Any, Path]) -> None:
    ours, plain = make_pair("mxfp4", bases["mxfp4", "gpt_oss"], torch.bfloat16)
    assert describe_adapters(ours) == describe_adapters(plain)
    assert count_flops(ours) == count_flops(plain)
    frozen = replace(ADAPTER, modules=["q_proj"])
    path = bases["mxfp4", "gpt_oss"]
    warnings = [find_frozen_experts(load_model(path, replace(frozen, base=base))) for base in ("mxfp4", "bf16")]
    assert warnings[0] == warnings[1]
    assert warnings[0] is not None


@pytest.mark.parametrize("kind", [Nf4Experts, Mxfp4Experts, Float8Experts])
def test_a_rank_without_experts_dequantises_none(kind: type[FrozenExperts]) -> None:
    weight = kind(torch.empty(0, 96, 256, dtype=torch.bfloat16), is_transposed=kind is Mxfp4Experts)
    if kind is not Float8Experts:
        weight.init_buffers_()  # type: ignore[operator]
    assert weight.dequantized_weight().shape == (0, 96, 256)


def test_answering_takes_the_memory_of_dequantised_experts(bases: dict[Any, Path]) -> None:
    path = bases["nf4", "qwen3_moe"]
    ours, plain = (load_model(path, replace(ADAPTER, base=base), torch.bfloat16) for base in ("nf4", "bf16"))
    num_bytes = 2 * sum(p.numel() for name, p in plain.named_parameters() if not is_adapter(name))
    for model in (ours, plain):
        check_answering_memory(model, 0, num_bytes, "eval.every", "")
        with pytest.raises(ConfigError, match=r"eval\.every: answering needs the complete model"):
            check_answering_memory(model, 0, num_bytes - 1, "eval.every", "")


def test_mxfp4_is_refused_where_no_checkpoint_stores_it(bases: dict[Any, Path], tmp_path: Path) -> None:
    adapter = replace(ADAPTER, base="mxfp4")
    with pytest.raises(ConfigError, match=r"adapter\.base=mxfp4: keeps experts as a checkpoint stores them in MXFP4"):
        load_model(bases["nf4", "gpt_oss"], adapter)
    # The config.json of a base whose weights were exported dequantised.
    packed = quantize_to_mxfp4(bases["nf4", "gpt_oss"], tmp_path / "packed")
    (packed / "model.safetensors").write_bytes((bases["nf4", "gpt_oss"] / "model.safetensors").read_bytes())
    model = build_model(read_architecture(packed), 256, PrecisionPolicy.uniform(torch.bfloat16))
    apply_lora_(model, adapter)
    with pytest.raises(CheckpointError, match=r"experts\.\w+ is not stored in MXFP4"):
        check_base(model, packed)


def test_only_experts_are_kept_in_mxfp4(bases: dict[Any, Path]) -> None:
    model = load_model(bases["mxfp4", "gpt_oss"], replace(ADAPTER, base="mxfp4"), torch.bfloat16)
    kinds = {type(module) for module in model.modules() if isinstance(module, FrozenExperts | FrozenLinear)}
    assert Mxfp4Experts in kinds
    stored = {p.dtype for name, p in model.named_parameters() if not p.requires_grad and ".experts." not in name}
    assert stored == {torch.bfloat16}
