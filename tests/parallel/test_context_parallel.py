"""Rows that are split over ranks have the losses and gradients of whole rows, in each family of attention."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.model_zoo import find_entry, save_config
from benchmarks.training import RESULTS
from fctune.base.distributed import World
from fctune.base.errors import ConfigError
from fctune.config.schema import RunConfig
from fctune.data.loader import IGNORE, Batch
from fctune.models.context_exchange import ContextGroup, count_repeats
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_shapes, read_architecture
from fctune.models.transformers.state_layers import find_state_layers
from fctune.parallel.context_parallel import can_share_rows, check_context_parallelism
from fctune.parallel.memory import MemoryModel, Setting
from fctune.parallel.speed import count_exchange
from fctune.training.prefetch import make_inputs
from tests.models.dense_samples import FAMILIES
from tests.models.dense_samples import make_model as make_dense
from tests.parallel.split_rows import BATCHES, CPU, LORA, make_batch, measure_split
from tests.ranks import run_ranks
from tests.training.training_runs import build_trainable, make_config


def compare_split(world: World, model_types: list[str], batches: list[Batch], **options: Any) -> list[str]:
    """Return the families whose loss or gradients change as ranks share rows, with the largest difference."""
    worst = {model_type: measure_split(world, model_type, batches, **options) for model_type in model_types}
    return [f"{model_type}: {difference:.1e}" for model_type, difference in worst.items() if not difference <= 1e-11]


def run_split(num_ranks: int, model_types: list[str], batches: list[Batch], **options: Any) -> None:
    found = run_ranks(functools.partial(compare_split, **options), num_ranks, model_types, batches)
    assert found == [[]] * num_ranks


SLOW = pytest.mark.slow
QUICK = ["llama", "phi3", "gpt_oss", "deepseek_v3"]


@pytest.mark.parametrize(
    ("num_ranks", "model_types"),
    [
        (2, QUICK),
        pytest.param(4, QUICK[::2], marks=pytest.mark.thorough),  # whose two key heads are repeated
        pytest.param(2, list(FAMILIES), marks=SLOW),
        pytest.param(4, list(FAMILIES), marks=SLOW),
    ],
)
def test_losses_and_gradients_are_those_of_whole_rows(num_ranks: int, model_types: list[str]) -> None:
    run_split(num_ranks, model_types, BATCHES)


@pytest.mark.parametrize(
    ("num_ranks", "model_types"),
    [
        pytest.param(2, ["gpt_oss", "gemma3_text"], marks=pytest.mark.thorough),
        pytest.param(2, list(FAMILIES), marks=SLOW),
        pytest.param(4, list(FAMILIES), marks=SLOW),
    ],
)
def test_adapters_drop_the_same_inputs_of_parts_of_rows(num_ranks: int, model_types: list[str]) -> None:
    run_split(num_ranks, model_types, BATCHES, adapter=LORA)


@pytest.mark.thorough
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=SLOW)])
def test_parts_of_rows_are_computed_in_tiles(num_ranks: int) -> None:
    run_split(num_ranks, ["llama", "gemma3_text"], BATCHES, mlp_tiles=8)
    run_split(num_ranks, ["llama", "gemma3_text"], BATCHES[:1], mlp_tiles=8, adapter=LORA)


@pytest.mark.parametrize(
    ("backend", "model_types"),
    [
        pytest.param("aot_eager", ["llama"], marks=pytest.mark.thorough),
        pytest.param("aot_eager", ["gpt_oss", "deepseek_v3", "gemma2"], marks=SLOW),
        pytest.param("inductor", ["llama", "qwen3"], marks=SLOW),
    ],
)
def test_compiled_blocks_exchange_heads(backend: str, model_types: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", backend)
    run_split(2, model_types, BATCHES[::4], is_compiled=True)


class CountedExchanges(TorchDispatchMode):
    """Counts the bytes that this rank sends to the others of its group."""

    def __init__(self, num_ranks: int):
        super().__init__()
        self.num_ranks, self.num_bytes = num_ranks, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            self.num_bytes += args[0].nbytes * (self.num_ranks - 1) // self.num_ranks
        return func(*args, **(kwargs or {}))


def count_bytes(world: World, config: RunConfig, batch: Batch) -> tuple[int, float]:
    """Return the bytes that a rank sends for a batch, and those that the planner counts."""
    model, _ = build_trainable(config, world)
    model.train()
    inputs = make_inputs(batch, model.make_bounds, group=model.context_group)
    with CountedExchanges(world.world_size) as counted:
        model(**inputs.arguments(CPU)).backward()
    fraction = config.activation_checkpointing.fraction
    assert fraction is not None
    setting = Setting("fsdp", 1, world.world_size, fraction, 1, context=world.world_size)
    return counted.num_bytes, count_exchange(MemoryModel(model, config, None), setting, inputs.tokens.numel())


@pytest.mark.sample(1)
@pytest.mark.parametrize(("num_ranks", "fraction"), [(2, 0.0), (2, 1.0), (4, 0.0)])
def test_ranks_send_as_many_bytes_as_planned(
    num_ranks: int, fraction: float, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    config = make_config(
        make_model("llama"),
        tmp_path,
        adapter=None,  # the first block's keys have no gradient if neither they nor the embedding train
        parallel={"mode": "fsdp", "context": num_ranks},
        activation_checkpointing={"fraction": fraction},
    )
    for counted, planned in run_ranks(count_bytes, num_ranks, config, make_batch(100, 28)):
        assert counted == planned > 0


@pytest.mark.parametrize(
    ("heads", "kv", "ranks", "repeats"),
    [(32, 8, 8, 1), (32, 8, 2, 1), (32, 8, 16, 2), (4, 2, 4, 2), (12, 4, 6, 3), (6, 6, 4, None), (6, 2, 4, None)],
)
def test_key_heads_are_repeated_as_seldom_as_ranks_need(heads: int, kv: int, ranks: int, repeats: int | None) -> None:
    assert count_repeats(heads, kv, ranks) == repeats
    if repeats is None:
        return
    # The key heads of a rank's part are those that its query heads attend to.
    own = torch.arange(heads) // (heads // kv)
    repeated = torch.arange(kv).repeat_interleave(repeats).chunk(ranks)
    for queries, keys in zip(own.chunk(ranks), repeated, strict=True):
        assert torch.equal(queries, keys.repeat_interleave(len(queries) // len(keys)))


def test_parts_of_a_batch_are_its_tokens_in_order() -> None:
    batch, make_bounds = make_batch(37), make_dense("llama").make_bounds
    whole = make_inputs(batch, make_bounds)
    parts = [make_inputs(batch, make_bounds, group=ContextGroup(rank, 2)) for rank in range(2)]
    assert [part.start for part in parts] == [0, 32]  # each a multiple of 16
    assert [part.row_lengths.tolist() for part in parts] == [[32], [5]]
    for name, filler in (("tokens", 0), ("labels", IGNORE), ("loss_weights", 0)):
        joined = torch.cat([getattr(part, name) for part in parts], 1)
        assert torch.equal(joined[:, :37], getattr(whole, name))
        assert bool((joined[:, 37:] == filler).all())
    supervised = [part.supervised + part.start for part in parts]
    assert torch.equal(torch.cat(supervised), whole.supervised)
    assert all(part.bounds is not None and part.bounds.host_ends == (0, 37, 64) for part in parts)


def test_what_cannot_be_split_is_refused() -> None:
    model = make_dense("llama")
    with pytest.raises(ConfigError, match=r"parallel.context=4: does not divide the 6 ranks"):
        check_context_parallelism(model, 4, 6)
    with pytest.raises(ConfigError, match=r"parallel.context=3: .* 4 heads with 2 of keys; use 1 or 2\."):
        check_context_parallelism(model, 3, 6)
    model.state_layers = "2 Mamba2Mixer, kernels"
    with pytest.raises(ConfigError, match=r"parallel.context=2: .* carry state along it .2 Mamba2Mixer, kernels."):
        check_context_parallelism(model, 2, 4)
    check_context_parallelism(model, 1, 4)


HYBRID_TYPES = [
    row["model_type"]
    for row in json.loads((RESULTS / "models.json").read_text(encoding="utf-8"))["rows"]
    if "hybrid" in row.get("kind", "")  # which models that are refused lack
]


@pytest.mark.parametrize("model_type", HYBRID_TYPES)
def test_every_hybrid_of_the_table_of_models_is_refused_by_name(model_type: str, tmp_path: Path) -> None:
    save_config(find_entry(model_type), tmp_path / "base")
    model = build_shapes(read_architecture(tmp_path / "base"), 64, PrecisionPolicy.uniform(torch.float32))
    layers = {type(layer).__name__ for block in model.blocks for layer in find_state_layers(block)}
    name = model_type if model_type.endswith("_text") or "_5" not in model_type else f"{model_type}_text"
    with pytest.raises(ConfigError) as caught:
        check_context_parallelism(model, 2, 4)
    report = str(caught.value)
    assert report.startswith(f"parallel.context=2: a row of model_type={name!r} cannot be split over ranks")
    assert report.endswith("leave it out, and use activation_checkpointing for long rows.")
    assert all(layer in report for layer in layers)
    assert [ranks for ranks in (1, 2, 4) if can_share_rows(model, ranks, 4)] == [1]
