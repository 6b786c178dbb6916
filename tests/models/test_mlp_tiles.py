"""MLPs in tiles compute what they compute without: losses and gradients in float64, with dropout, compiled or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fctune.config.sections.adapter import AdapterConfig
from fctune.config.sections.parallel import ActivationCheckpointingConfig
from fctune.models.causal_lm import CausalLM
from fctune.models.lora import LoRALinear
from fctune.models.mlp_tiles import find_mlps, is_mlp, tile_mlps_
from fctune.models.transformers.state_layers import find_state_layers
from fctune.parallel.activations import apply_activation_checkpointing_, compile_blocks_
from tests.models.dense_samples import FAMILIES, adapt_, make_model, run_packed
from tests.models.hybrid_samples import HYBRIDS, save_hybrid
from tests.models.model_samples import load_model
from tests.models.tiny_models import TEXT_MODELS, save_tiny_model

DROPPED = AdapterConfig(rank=4, alpha=8, dropout=0.2, modules="all-linear")
LENGTHS = [[17, 20, 3], [25, 15]]  # rows of 40 tokens


def compare(model: CausalLM, tiled: CausalLM) -> None:
    ours, theirs = run_packed(tiled, LENGTHS), run_packed(model, LENGTHS)
    assert ours.keys() == theirs.keys()
    scale = max(float(one.abs().max()) for one in theirs.values())
    for name, expected in theirs.items():
        assert float((ours[name] - expected).abs().max()) <= 1e-11 * scale, name


def make_dense(model_type: str, adapter: AdapterConfig | None) -> CausalLM:
    model = make_model(model_type)
    return model if adapter is None else adapt_(model, adapter)


QUICK = ("gemma3_text", "cohere2")  # whose attention and MLP read the same tensor


@pytest.mark.parametrize("num_tiles", [8, 3])  # the latter does not divide the rows
@pytest.mark.parametrize("adapter", [None, DROPPED], ids=["full", "lora"])
@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_tiles_change_no_loss_or_gradient(model_type: str, adapter: AdapterConfig | None, num_tiles: int) -> None:
    plain, tiled = (make_dense(model_type, adapter) for _ in range(2))
    config = ActivationCheckpointingConfig(fraction=0.5, mlp_tiles=num_tiles)
    apply_activation_checkpointing_(tiled, config, "cpu")
    compare(plain, tiled)
    adapters = [module for module in tiled.modules() if isinstance(module, LoRALinear)]
    assert not any(module._input._parts for module in adapters)  # a product that nobody reads would stay in memory


@pytest.mark.parametrize("adapter", [None, DROPPED], ids=["full", "lora"])
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_tiles_of_torchtunes_blocks_change_nothing(
    fraction: float, adapter: AdapterConfig | None, make_model: Callable[..., Path]
) -> None:
    path = make_model("llama")
    plain, tiled = (load_model(path, adapter, torch.float64) for _ in range(2))
    apply_activation_checkpointing_(tiled, ActivationCheckpointingConfig(fraction=fraction, mlp_tiles=8), "cpu")
    assert len(list(find_mlps(tiled))) == 2
    compare(plain, tiled)


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[] if name == "lfm2" else pytest.mark.slow) for name in HYBRIDS]
)
def test_tiles_of_hybrids_change_nothing(model_type: str, tmp_path: Path) -> None:
    path = save_hybrid(model_type, tmp_path)
    plain, tiled = (load_model(path, DROPPED, torch.float64) for _ in range(2))
    apply_activation_checkpointing_(tiled, ActivationCheckpointingConfig(fraction=0.5, mlp_tiles=8), "cpu")
    compare(plain, tiled)


@pytest.mark.parametrize(
    ("backend", "kind", "fraction"),
    [
        pytest.param("aot_eager", "llama", 0.5, marks=pytest.mark.thorough),
        pytest.param("aot_eager", "gemma3_text", 0.5, marks=pytest.mark.slow),
        pytest.param("inductor", "llama", 0.5, marks=pytest.mark.slow),
        pytest.param("inductor", "qwen3", 1.0, marks=pytest.mark.slow),
    ],
)
def test_compiled_tiles_change_nothing(
    backend: str,
    kind: str,
    fraction: float,
    make_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = make_model(kind) if kind == "llama" else save_tiny_model(kind, tmp_path)
    plain, tiled = (load_model(path, DROPPED, torch.float64) for _ in range(2))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", backend)
    apply_activation_checkpointing_(tiled, ActivationCheckpointingConfig(fraction=fraction, mlp_tiles=8), "cpu")
    compile_blocks_(tiled)
    compare(plain, tiled)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # the first block's input needs no gradient


class Block(nn.Module):
    """A norm and an MLP much wider than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.mlp: nn.Module = SwiGLU(64, 2048)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class SwiGLU(nn.Module):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(dim, inner), nn.Linear(dim, inner), nn.Linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return y


def measure_peak(run: Callable[[], object], device_type: str) -> int:
    """Return the bytes that torch's allocator hands out at most while this runs, once it has been compiled."""
    run()
    if device_type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results = profiler.profiler
    assert results is not None
    events = sorted((e for e in results.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    held = peak = 0
    for event in events:
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize(
    ("device_type", "is_compiled"),
    [
        ("cpu", False),
        pytest.param("cpu", True, marks=pytest.mark.slow),
        *(pytest.param("cuda", is_compiled, marks=pytest.mark.gpu) for is_compiled in (False, True)),
    ],
)
def test_activations_of_one_tile_exist_at_a_time(device_type: str, is_compiled: bool) -> None:
    x = torch.randn(1, 1024, 64, device=device_type, requires_grad=True)
    activation = 1024 * 2048 * 4  # bytes of one of the MLP's inner tensors
    peaks = []
    for num_tiles in (1, 8):
        block = Block().to(device_type).requires_grad_(False)
        if num_tiles > 1:
            tile_mlps_(Holder(block), num_tiles)  # type: ignore[arg-type]
        forward = torch.compile(block) if is_compiled else block
        peaks.append(measure_peak(lambda forward=forward: forward(x).sum().backward(), device_type))  # type: ignore[misc]
    assert peaks[0] > 3 * activation
    assert peaks[1] < peaks[0] / 4


class Holder:
    """As much of a model as tiles need."""

    def __init__(self, block: nn.Module) -> None:
        self.blocks, self.token_keys = [block], make_dense("llama", None).token_keys


@pytest.mark.parametrize("model_type", [*TEXT_MODELS, *HYBRIDS])
def test_only_mlps_are_computed_in_tiles(model_type: str, tmp_path: Path) -> None:
    """Experts, their shared ones included, attention and layers with state are left alone."""
    save = save_hybrid if model_type in HYBRIDS else save_tiny_model
    model = load_model(save(model_type, tmp_path), source="transformers")
    chosen = set(find_mlps(model))
    assert all(type(mlp).__name__.endswith("MLP") for mlp in chosen)
    for block in model.blocks:
        assert chosen.isdisjoint(find_state_layers(block))
        for child in block.children():
            name = type(child).__name__
            if name.endswith("MLP") and not any(p.dim() == 3 for p in child.parameters()):
                assert child in chosen, name
            elif any(word in name for word in ("Attention", "Experts", "Moe", "MoE", "Mixer")):
                assert not is_mlp(child), name
