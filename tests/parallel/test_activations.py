"""Recomputed, compiled and float8 blocks give the same numbers as plain ones."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from fctune.base.errors import ConfigError
from fctune.config.sections.adapter import AdapterConfig
from fctune.config.sections.parallel import ActivationCheckpointingConfig
from fctune.models.causal_lm import CausalLM
from fctune.models.frozen_linear import is_nf4
from fctune.parallel.activations import (
    apply_activation_checkpointing_,
    compile_blocks_,
    is_checkpointed,
    use_float8_matmuls_,
)
from tests.models.dense_samples import run_packed
from tests.models.hybrid_samples import save_hybrid
from tests.models.model_samples import ALL_MODULES, load_model
from tests.models.tiny_models import save_tiny_model

LORA = AdapterConfig(rank=4, alpha=8, dropout=0.2, modules=ALL_MODULES)
LENGTHS = [[17, 40, 23], [60, 20]]


def run(model: CausalLM) -> dict[str, torch.Tensor]:
    return run_packed(model, LENGTHS)


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], rtol: float, atol: float) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=rtol, atol=atol)


CHECKPOINTING = [
    ActivationCheckpointingConfig(fraction=1.0),
    ActivationCheckpointingConfig(fraction=0.5),
    ActivationCheckpointingConfig(fraction=1.0, policy="op"),
]


@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("config", CHECKPOINTING, ids=lambda c: f"{c.policy} {c.fraction}")
def test_checkpointed_blocks_give_the_same_loss_and_gradients(
    config: ActivationCheckpointingConfig, adapter: AdapterConfig | None, make_model: Callable[..., Path]
) -> None:
    path = make_model("llama", num_hidden_layers=4)
    plain, checkpointed = (load_model(path, adapter, torch.float64) for _ in range(2))
    apply_activation_checkpointing_(checkpointed, config, "cpu")
    assert_same(run(checkpointed), run(plain), rtol=1e-9, atol=1e-12)


class CountedOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(function)] += 1
        return function(*args, **(kwargs or {}))


def test_each_policy_recomputes_the_operators_it_documents(make_model: Callable[..., Path]) -> None:
    path = make_model("llama", num_hidden_layers=4)

    def count(config: ActivationCheckpointingConfig | None) -> tuple[int, int]:
        model = load_model(path)
        if config is not None:
            apply_activation_checkpointing_(model, config, "cpu")
        with CountedOperators() as counted:
            run(model)
        return counted.calls["aten.mm.default"], counted.calls["fctune.attend_per_document.default"]

    products, attentions = count(None)
    again = 4 * 7  # products of the forward of four blocks
    assert attentions == 4
    # A block's recomputation stops before its last product, whose result backward does not read.
    assert count(CHECKPOINTING[0]) == (products + again - 4, attentions + 4)
    assert count(CHECKPOINTING[1]) == (products + again // 2 - 2, attentions + 2)
    some, same = count(CHECKPOINTING[2])
    assert products < some < products + again * 0.75
    assert same == attentions


@pytest.mark.parametrize(
    ("num", "fraction", "chosen"), [(8, 0.25, [3, 7]), (4, 1.0, [0, 1, 2, 3]), (10, 0.3, [3, 6, 9])]
)
def test_checkpointed_blocks_are_evenly_spread(num: int, fraction: float, chosen: list[int]) -> None:
    assert [i for i in range(num) if is_checkpointed(i, fraction)] == chosen


def test_offloading_on_cpu_is_rejected(make_model: Callable[..., Path]) -> None:
    config = ActivationCheckpointingConfig(fraction=1.0, offload=True)
    with pytest.raises(ConfigError, match=r"activation_checkpointing\.offload: .* this run is on CPU"):
        apply_activation_checkpointing_(load_model(make_model("llama")), config, "cpu")


class RecordedOffloading(saved_tensors_hooks):
    """Stands in for torchtune's offloading, which needs a CUDA device: keeps what it would move to the host."""

    moved: ClassVar[list[torch.Tensor]] = []

    def __init__(self) -> None:
        def pack(tensor: torch.Tensor) -> int:
            self.moved.append(tensor)
            return len(self.moved) - 1

        super().__init__(pack, self.moved.__getitem__)


def save_base(kind: str, path: Path, make_model: Callable[..., Path]) -> Path:
    """Save a model of four blocks of 64 channels, for torchtune (``llama``) or for transformers."""
    if kind == "llama":
        return make_model(kind, num_hidden_layers=4)
    sizes = {"hidden_size": 64, "num_hidden_layers": 4}
    if kind == "lfm2":
        return save_hybrid(kind, path, **sizes, layer_types=["conv", "full_attention"] * 2)
    return save_tiny_model(kind, path, **sizes)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "fraction", "is_compiled", "mlp_tiles"),
    [
        *(("llama", *how, 1) for how in ((0.5, False), (0.5, True), (1.0, False))),
        pytest.param("llama", 1.0, True, 1, marks=pytest.mark.slow),  # half of the blocks of 0.5 are like this
        *((kind, fraction, False, 1) for kind, fraction in (("qwen3", 0.5), ("lfm2", 1.0), ("qwen3_moe", 1.0))),
        ("llama", 0.5, False, 8),
        pytest.param("llama", 0.5, True, 8, marks=pytest.mark.slow),
    ],
)
def test_offloading_moves_the_inputs_of_checkpointed_blocks_and_no_weights(
    kind: str,
    fraction: float,
    is_compiled: bool,
    mlp_tiles: int,
    make_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = save_base(kind, tmp_path, make_model)
    adapter = LORA if kind == "llama" else replace(LORA, modules="all-linear")
    plain, offloaded = (load_model(path, adapter, torch.float64) for _ in range(2))
    stand_in = SimpleNamespace(OffloadActivations=RecordedOffloading)
    monkeypatch.setitem(sys.modules, "fctune.models.torchtune.offloading", stand_in)
    RecordedOffloading.moved.clear()
    config = ActivationCheckpointingConfig(fraction=fraction, offload=True, mlp_tiles=mlp_tiles)
    apply_activation_checkpointing_(offloaded, config, "cuda")
    if is_compiled:
        torch._dynamo.reset()
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
        compile_blocks_(offloaded)
    assert_same(run(offloaded), run(plain), rtol=1e-9, atol=1e-12)
    weights = {p.untyped_storage().data_ptr() for p in offloaded.parameters()}
    assert not [t.shape for t in RecordedOffloading.moved if t.untyped_storage().data_ptr() in weights]
    inputs = [t for t in RecordedOffloading.moved if t.shape == (2, 80, 64)]
    assert len(inputs) == 4 * fraction
    # Positions and dropout keys are 16 bytes a token, of the 512 bytes of an input in float64.
    num_bytes = sum(t.numel() * t.element_size() for t in RecordedOffloading.moved)
    assert num_bytes <= 1.05 * 4 * fraction * 2 * 80 * 64 * 8


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("config", [None, *CHECKPOINTING], ids=lambda c: f"{c.policy} {c.fraction}" if c else "plain")
def test_compiled_blocks_give_the_same_loss_and_gradients(
    config: ActivationCheckpointingConfig | None, adapter: AdapterConfig | None, make_model: Callable[..., Path]
) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    path = make_model("llama", num_hidden_layers=4)
    plain, compiled = (load_model(path, adapter, torch.float64) for _ in range(2))
    if config is not None:
        apply_activation_checkpointing_(compiled, config, "cpu")
    compile_blocks_(compiled)
    assert_same(run(compiled), run(plain), rtol=1e-9, atol=1e-12)
    assert not torch._dynamo.utils.counters["graph_break"]
    # Equal blocks share a compilation; the first block differs if its input needs no gradient, and checkpointed blocks
    # differ from the others.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "float8", "dora", "float8 products"])
def test_quantised_blocks_compile_without_graph_breaks(kind: str, make_model: Callable[..., Path]) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    path = make_model("llama", hidden_size=256, intermediate_size=512, num_key_value_heads=4)
    base = {"base": kind} if kind in ("nf4", "float8") else {}
    adapter = AdapterConfig(rank=4, alpha=8, dropout=0.1, dora=kind == "dora", **base)  # type: ignore[arg-type]
    eager, compiled = (
        load_model(path, None if kind == "float8 products" else adapter, torch.bfloat16) for _ in range(2)
    )
    for model in (eager, compiled):
        if kind == "float8 products":
            use_float8_matmuls_(model)
    compile_blocks_(compiled)
    ours, theirs = run(compiled), run(eager)
    torch.testing.assert_close(ours["loss"], theirs["loss"], rtol=2e-3, atol=0)
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize(
    "config",
    [
        *(pytest.param(each, marks=pytest.mark.thorough) for each in (None, CHECKPOINTING[0])),
        pytest.param(CHECKPOINTING[2], marks=pytest.mark.thorough),
        pytest.param(CHECKPOINTING[1], marks=pytest.mark.slow),  # its blocks are like those of None and of 1.0
    ],
    ids=lambda c: f"{c.policy} {c.fraction}" if c else "plain",
)
def test_compiled_blocks_keep_no_dequantised_weight(
    config: ActivationCheckpointingConfig | None, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    path = make_model("llama", hidden_size=256, intermediate_size=512, num_key_value_heads=4, vocab_size=300)
    adapter = AdapterConfig(rank=4, alpha=8, dropout=0.1, base="nf4")
    eager, compiled = (load_model(path, adapter, torch.bfloat16) for _ in range(2))
    quantised = [p for p in compiled.parameters() if is_nf4(p)]
    sizes = {p.numel() for p in quantised}
    if config is not None:
        apply_activation_checkpointing_(compiled, config, "cpu")
    # The backend splits forward from backward as Inductor does, and compiles nothing.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager_decomp_partition"))
    compile_blocks_(compiled)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        ours = run(compiled)
    theirs = run(eager)
    torch.testing.assert_close(ours["loss"], theirs["loss"], rtol=2e-3, atol=0)
    assert ours.keys() == theirs.keys()
    assert not [(t.dtype, t.shape) for t in kept if t.is_floating_point() and t.numel() in sizes]
    if config is None:  # the first block's q, k and v have an input without gradient
        assert sum(t.dtype is torch.uint8 for t in kept) == len(quantised) - 3


def test_float8_products_approximate_bfloat16(make_model: Callable[..., Path]) -> None:
    path = make_model("llama", hidden_size=128, intermediate_size=256)
    plain, rounded = (load_model(path, dtype=torch.bfloat16) for _ in range(2))
    use_float8_matmuls_(rounded)
    kinds = {type(module).__name__ for module in rounded.modules() if isinstance(module, torch.nn.Linear)}
    assert kinds == {"Float8Linear", "Linear"}
    assert type(rounded.decoder.output) is torch.nn.Linear
    assert {name for name, _ in rounded.named_parameters()} == {name for name, _ in plain.named_parameters()}
    ours, theirs = run(rounded), run(plain)
    assert ours["loss"] != theirs["loss"]
    torch.testing.assert_close(ours["loss"], theirs["loss"], rtol=0.01, atol=0)
    for name in theirs:
        assert (ours[name] - theirs[name]).norm() < 0.35 * theirs[name].norm(), name
