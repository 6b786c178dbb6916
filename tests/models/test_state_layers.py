"""Hybrid models: layers that carry state keep the conversations of packed rows apart, on any kind of batch."""

from __future__ import annotations

import inspect
import itertools
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.qwen3_5 import modeling_qwen3_5

from fctune.base.errors import ConfigError
from fctune.config.sections.adapter import AdapterConfig
from fctune.config.sections.parallel import ActivationCheckpointingConfig
from fctune.models.attention import DocumentBounds, make_bounds
from fctune.models.base_weights import load_base_
from fctune.models.causal_lm import CausalLM, materialize_
from fctune.models.export import export_adapter, export_merged
from fctune.models.lora import apply_lora_, init_adapters_
from fctune.models.packing_proof import prove_packing
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model, read_architecture
from fctune.models.transformers import state_layers
from fctune.models.transformers.build import TransformersCausalLM
from fctune.parallel.activations import apply_activation_checkpointing_
from tests.models.hybrid_samples import HYBRIDS, save_hybrid

# Rows of unequal conversations, with lengths of zero, as every batch of a compiled run has as many.
LENGTHS = [[5, 17, 3, 39, 0], [20, 20, 0, 21, 3]]
SMALL = ["qwen3_5_text", "lfm2", "bamba"]
SLOW = [model_type for model_type in HYBRIDS if model_type not in SMALL]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a tiny model of each family, named by its model_type."""
    folder = tmp_path_factory.mktemp("hybrids")
    for model_type in HYBRIDS:
        save_hybrid(model_type, folder / model_type)
    return folder


def load(path: Path, adapter: AdapterConfig | None = None, dtype: torch.dtype = torch.float64) -> TransformersCausalLM:
    model = build_model(read_architecture(path, "transformers"), 128, PrecisionPolicy.uniform(dtype))
    assert isinstance(model, TransformersCausalLM)
    if adapter is not None:
        apply_lora_(model, adapter)
    materialize_(model, torch.device("cpu"))
    load_base_(model, path)
    if adapter is not None:
        init_adapters_(model, 0)
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter.data.normal_(std=0.1, generator=generator)
    return model


def draw() -> tuple[Tensor, Tensor]:
    """Return the tokens of packed rows and their positions, ``[2, 64]``."""
    tokens = torch.randint(3, 96, (2, 64), generator=torch.Generator().manual_seed(1))
    return tokens, torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])


def conversations() -> list[tuple[int, slice]]:
    """Return row and place of each conversation."""
    found = []
    for row, lengths in enumerate(LENGTHS):
        at = 0
        for length in filter(None, lengths):
            found.append((row, slice(at, at + length)))
            at += length
    return found


def gradients(model: CausalLM) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.sample(5)
@pytest.mark.parametrize("model_type", HYBRIDS)
def test_packed_conversations_equal_each_alone(bases: Path, model_type: str) -> None:
    model = load(bases / model_type)
    assert HYBRIDS[model_type][0] in model.state_layers
    tokens, positions = draw()
    packed = model(tokens, positions, model.make_bounds(LENGTHS))
    weights = torch.randn(packed.shape, generator=torch.Generator().manual_seed(2), dtype=packed.dtype)
    (packed * weights).sum().backward()
    found = gradients(model)
    for row, place in conversations():
        alone = model(tokens[row : row + 1, place])
        torch.testing.assert_close(packed[row, place], alone[0], rtol=0, atol=1e-9)
        (alone * weights[row : row + 1, place]).sum().backward()
    # Nemotron-H returns logits in float32, whatever its dtype.
    tolerance = 1e-4 if model_type == "nemotron_h" else 1e-9
    for name, expected in gradients(model).items():
        torch.testing.assert_close(found[name], expected, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_the_proof_at_start_accepts_each_family(bases: Path, model_type: str) -> None:
    prove_packing(load(bases / model_type, dtype=torch.float32), torch.device("cpu"), 128)


@pytest.mark.sample(3)
@pytest.mark.parametrize("model_type", HYBRIDS)
def test_the_proof_names_a_layer_that_sees_the_neighbour(
    bases: Path, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_layers, "find_state_layers", lambda block: iter(()))
    model = load(bases / model_type, dtype=torch.float32)
    assert model.state_layers == ""
    with pytest.raises(ConfigError, match=rf"in {HYBRIDS[model_type][0]} \(.*data\.packed=false"):
        prove_packing(model, torch.device("cpu"), 128)


@pytest.mark.parametrize("model_type", SMALL)
def test_padding_at_the_end_of_a_row_changes_no_real_token(bases: Path, model_type: str) -> None:
    model = load(bases / model_type)
    tokens, _ = draw()
    padded = tokens.clone()
    padded[1, 20:] = 0
    expected = torch.cat([model(tokens[:1])[0], model(tokens[1:, :20])[0]])
    found = model(padded)
    torch.testing.assert_close(torch.cat([found[0], found[1, :20]]), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("model_type", SMALL)
def test_adapters_inside_layers_with_state_drop_the_tokens_of_the_row(bases: Path, model_type: str) -> None:
    """Dropout is a function of row and position, wherever the layers compute a token."""
    adapter = AdapterConfig(rank=2, alpha=4.0, dropout=0.5, modules="all-linear")
    model = load(bases / model_type, adapter).train()
    layers = [layer for block in model.blocks for layer in state_layers.find_state_layers(block)]
    assert all(any(name.endswith("lora_a") for name, _ in layer.named_parameters()) for layer in layers)
    tokens, positions = draw()
    row_keys = torch.tensor([7, 8])
    packed = model(tokens, positions, model.make_bounds(LENGTHS), row_keys=row_keys)
    model.token_keys.set_rows(row_keys, tokens.shape[1])
    keys = model.token_keys.value
    assert keys is not None
    for row, place in conversations():
        model.token_keys.value = keys[row : row + 1, place]
        alone = model(tokens[row : row + 1, place])
        torch.testing.assert_close(packed[row, place], alone[0], rtol=0, atol=1e-9)


@pytest.mark.sample(3)
@pytest.mark.parametrize("policy", [pytest.param("block", marks=pytest.mark.slow), "op"])
@pytest.mark.parametrize("is_lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("model_type", [*SMALL, *(pytest.param(t, marks=pytest.mark.slow) for t in SLOW)])
def test_five_steps_on_packed_rows_equal_five_on_padded_rows(
    bases: Path, model_type: str, is_lora: bool, policy: Literal["block", "op"]
) -> None:
    """The packed model also recomputes its activations."""

    def make() -> tuple[CausalLM, torch.optim.Optimizer]:
        model = load(bases / model_type, AdapterConfig(rank=2, alpha=4.0, modules="all-linear") if is_lora else None)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return model.train(), torch.optim.AdamW(trained, lr=1e-2)

    (packed, packed_optimizer), (padded, padded_optimizer) = make(), make()
    config = ActivationCheckpointingConfig(fraction=1.0, policy=policy)
    apply_activation_checkpointing_(packed, config, "cpu")
    places = conversations()
    length = max(place.stop - place.start for _, place in places)
    _, positions = draw()
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        tokens, labels = (torch.randint(3, 96, (2, 64), generator=generator) for _ in range(2))
        rows, row_labels = torch.zeros(len(places), length, dtype=torch.int64), torch.full((len(places), length), -100)
        for index, (row, place) in enumerate(places):
            rows[index, : place.stop - place.start] = tokens[row, place]
            row_labels[index, : place.stop - place.start] = labels[row, place]
        losses = [
            packed(tokens, positions, packed.make_bounds(LENGTHS), labels=labels),
            padded(rows, labels=row_labels),
        ]
        for loss, optimizer in zip(losses, (packed_optimizer, padded_optimizer), strict=True):
            (loss / 128).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-9, atol=0)
    for (name, one), other in zip(packed.named_parameters(), padded.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.sample(5)
@pytest.mark.parametrize("model_type", HYBRIDS)
def test_exports_have_the_logits_of_the_adapted_model(bases: Path, model_type: str, tmp_path: Path) -> None:
    adapter, base = AdapterConfig(rank=2, alpha=4.0, modules="all-linear"), bases / model_type
    model = load(base, adapter, torch.float32).eval()
    tokens, _ = draw()
    expected = model(tokens)
    export_merged(model, base, tmp_path / "merged", is_writer=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    torch.testing.assert_close(merged(tokens).logits, expected, rtol=0, atol=2e-4)
    export_adapter(model, adapter, str(base), base, tmp_path / "adapter", is_writer=True)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(adapted(tokens).logits, expected, rtol=0, atol=2e-4)


def test_stacks_hold_every_token_once_and_little_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        lengths = torch.randint(0, 200, (12,), generator=generator)
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        plan = state_layers._plan_stacks(ends.tolist(), torch.device("cpu"), 1)
        flat = torch.cat([stack.flatten() for stack in plan.stacks])
        assert torch.equal(flat[plan.inverse], torch.arange(int(ends[-1])))
        assert len(flat) <= 1.25 * int(ends[-1])
        for stack in plan.stacks:  # a stack's row never leaves its conversation
            owner = torch.searchsorted(ends, stack, right=True)
            assert torch.equal(owner, owner[:, :1].expand_as(owner))


def split_at(ends: list[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in itertools.pairwise(ends) if stop > start]


def number_sequences(ends: Tensor) -> list[slice]:
    """Return the sequences that flash-linear-attention 0.5.0 computes: as many as have tokens, counted from the first.

    Its ``prepare_chunk_indices`` numbers sequences by how many have started, and those without tokens never do.
    """
    pairs = list(itertools.pairwise(ends.tolist()))
    return [slice(*pairs[number]) for number in range(sum(stop > start for start, stop in pairs))]


def install_kernels_(
    monkeypatch: pytest.MonkeyPatch, module: Any, calls: list[str], convolves_apart: bool = True
) -> None:
    """Put kernels for packed rows behind the functions of a model's code, as if its packages were installed."""
    convolve, scan = (inspect.unwrap(getattr(module, n)) for n in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"))

    def causal_conv1d_fn(
        x: Tensor, weight: Tensor, bias: Any = None, seq_idx: Any = None, activation: Any = None
    ) -> Any:
        calls.append("conv")
        assert len(x) == 1, "a batch of rows"
        if seq_idx is None:
            return convolve(x, weight, bias, activation)
        _, counts = seq_idx[0].unique_consecutive(return_counts=True)
        places = split_at([0, *counts.cumsum(0).tolist()])
        return torch.cat([convolve(x[..., place], weight, bias, activation) for place in places], -1)

    def chunk_gated_delta_rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        cu_seqlens: Any = None,
        cu_seqlens_cpu: Any = None,
        use_qk_l2norm_in_kernel: bool = False,
    ) -> Any:
        calls.append("scan")
        assert len(q) == 1, "a batch of rows"
        if cu_seqlens is None:
            return scan(q, k, v, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
        assert torch.equal(cu_seqlens, cu_seqlens_cpu)
        out = torch.zeros_like(v)
        for place in number_sequences(cu_seqlens):
            if place.stop > place.start:
                parts = (t[:, place] for t in (q, k, v, g, beta))
                out[:, place] = scan(*parts, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)[0]
        return out, None

    kernels = {"chunk_gated_delta_rule": "torch_chunk_gated_delta_rule"}
    kernels |= {"fused_recurrent_gated_delta_rule": "torch_recurrent_gated_delta_rule"}
    kernels |= {"causal_conv1d_fn": "causal_conv1d_fn"} if convolves_apart else {}
    package: Any = types.ModuleType("kernels_for_packed_rows")
    package.causal_conv1d_fn, package.chunk_gated_delta_rule = causal_conv1d_fn, chunk_gated_delta_rule
    package.fused_recurrent_gated_delta_rule = chunk_gated_delta_rule
    monkeypatch.setitem(sys.modules, package.__name__, package)
    for kernel, name in kernels.items():
        own = inspect.unwrap(getattr(module, name))
        monkeypatch.setattr(module, name, use_kernel_func_from_hub_with_fallback(kernel, package.__name__)(own))
    monkeypatch.setattr(state_layers, "_has_kernels", lambda device: device.type == "cpu")


@pytest.fixture
def fresh() -> Iterator[None]:
    """Forget which layers have kernels, before and after a test."""
    state_layers.find_kernels.cache_clear()
    yield
    state_layers.find_kernels.cache_clear()


def test_installed_kernels_get_the_bounds_of_all_rows_in_one(
    bases: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    adapter = AdapterConfig(rank=2, alpha=4.0, dropout=0.5, modules="all-linear")
    tokens, positions = draw()
    row_keys = torch.tensor([7, 8])
    calls: list[str] = []

    def run() -> tuple[str, Tensor]:
        model = load(bases / "qwen3_5_text", adapter, torch.float32).train()
        return model.state_layers, model(tokens, positions, model.make_bounds(LENGTHS), row_keys=row_keys)

    described, expected = run()
    assert described == "1 Qwen3_5GatedDeltaNet, each conversation apart, those of similar length together"
    install_kernels_(monkeypatch, modeling_qwen3_5, calls)
    state_layers.find_kernels.cache_clear()
    described, found = run()
    assert described == "1 Qwen3_5GatedDeltaNet, by kernels for packed rows on CUDA"
    assert calls == ["conv", "scan"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_kernels_of_a_version_that_skips_conversations_are_refused(
    bases: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    install_kernels_(monkeypatch, modeling_qwen3_5, [])
    rule = inspect.getclosurevars(modeling_qwen3_5.torch_chunk_gated_delta_rule).nonlocals["implementation"]
    rule.__module__ = "fla.ops.gated_delta_rule.chunk"
    package: Any = types.ModuleType("fla")
    monkeypatch.setitem(sys.modules, "fla", package)
    package.__version__ = "0.5.0"
    with pytest.raises(ConfigError, match=r"flash-linear-attention 0\.5\.0: .* skip conversations .* 0\.5\.1 or later"):
        load(bases / "qwen3_5_text")
    package.__version__ = "0.5.1"
    assert "by kernels" in load(bases / "qwen3_5_text").state_layers


def test_the_proof_catches_a_kernel_that_leaves_out_a_row(
    bases: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    install_kernels_(monkeypatch, modeling_qwen3_5, [])
    model = load(bases / "qwen3_5_text", dtype=torch.float32)
    prove_packing(model, torch.device("cpu"), 128)
    plan = state_layers._sequence_plan

    def keep_empty(bounds: DocumentBounds) -> state_layers._SequencePlan:
        ends = torch.tensor(bounds.host_ends, dtype=torch.int32)
        return replace(plan(bounds), ends=ends, host_ends=ends)

    monkeypatch.setattr(state_layers, "_sequence_plan", keep_empty)
    with pytest.raises(ConfigError, match=r"different logits from those that it has alone.*Set data.packed=false"):
        prove_packing(model, torch.device("cpu"), 128)


def test_without_a_gpu_installed_kernels_are_not_called(
    bases: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    tokens, positions = draw()
    expected = load(bases / "qwen3_5_text")(tokens, positions, make_bounds(LENGTHS, "per_document"))
    calls: list[str] = []
    install_kernels_(monkeypatch, modeling_qwen3_5, calls)
    monkeypatch.setattr(state_layers, "_has_kernels", lambda device: False)
    state_layers.find_kernels.cache_clear()
    model = load(bases / "qwen3_5_text")
    assert torch.equal(model(tokens, positions, model.make_bounds(LENGTHS)), expected)
    assert not calls


def test_a_layer_of_which_only_one_kernel_is_installed_takes_no_bounds(
    bases: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    calls: list[str] = []
    install_kernels_(monkeypatch, modeling_qwen3_5, calls, convolves_apart=False)
    model = load(bases / "qwen3_5_text")
    assert "each conversation apart" in model.state_layers


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_no_layer_takes_bounds_without_kernels(bases: Path, model_type: str, fresh: None) -> None:
    """Some of transformers' own code ignores them silently, such as LFM3's convolution."""
    assert "each conversation apart" in load(bases / model_type).state_layers
