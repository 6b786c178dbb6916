"""Weights of transformers' models: loaded as transformers loads them, each rank its part, and exported as they came."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fctune.checkpoint.hf_checkpoint import HFModelWeights
from fctune.checkpoint.tensors import named_trainable
from fctune.config.schema import AdapterConfig, ParallelConfig
from fctune.distributed import World
from fctune.errors import CheckpointError, ConfigError
from fctune.models.base_weights import find_targets, load_base_, plan_base
from fctune.models.causal_lm import CausalLM, materialize_
from fctune.models.export import export_adapter, export_merged, iter_merged
from fctune.models.lora import apply_lora_, init_adapters_
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import read_architecture
from fctune.models.transformers.weights import find_text_model
from fctune.parallel.layout import Hardware, choose_parallel_layout
from fctune.parallel.sharding import shard_
from tests.models.tiny_models import TEXT_MODELS, VISION_MODELS, load_hf, save_tiny_model
from tests.ranks import run_ranks

FAMILIES = [*TEXT_MODELS, *VISION_MODELS]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a tiny model of each family, named by its model_type."""
    folder = tmp_path_factory.mktemp("bases")
    for family in FAMILIES:
        save_tiny_model(family, folder / family)
    return folder


def load(path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    model = read_architecture(path, "transformers").build_model(64, PrecisionPolicy.uniform(dtype))
    materialize_(model, torch.device("cpu"))
    load_base_(model, path)
    return model


def read_text_weights(model: CausalLM, path: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the weights that transformers loads for the text model of a directory, by our names."""
    architecture: Any = model.architecture
    weights = load_hf(path, dtype).state_dict()
    names = find_text_model(architecture).names
    return {target.name: weights[names[target.hf_name]] for target in find_targets(model)}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_equal_those_that_transformers_loads(family: str, bases: Path) -> None:
    model = load(bases / family)
    expected = read_text_weights(model, bases / family)
    loaded = {target.name: target.tensor for target in find_targets(model)}
    assert set(loaded) >= {name for name, _ in model.named_parameters()}
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


def test_the_bias_of_a_router_is_loaded_though_it_is_no_parameter(bases: Path) -> None:
    targets = {target.name for target in find_targets(load(bases / "deepseek_v3"))}
    assert "decoder.model.layers.1.mlp.gate.e_score_correction_bias" in targets


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_exports_have_the_tensors_of_the_base_and_load_as_the_trained_model(
    family: str, bases: Path, tmp_path: Path
) -> None:
    base, out = bases / family, tmp_path / "out"
    model = load(base)
    for target in find_targets(model):
        target.tensor.mul_(2)
    export_merged(model, base, out, is_writer=True)
    before, after = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    assert {name: t.shape for name, t in after.items()} == {name: t.shape for name, t in before.items()}
    text = plan_base(model.architecture, base)
    copied = {leaf.name for leaf in text.copied}
    assert bool(copied) == (family in VISION_MODELS)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor if name in copied else 2 * tensor), name
    trained = read_text_weights(model, out)
    for name, tensor in ((target.name, target.tensor) for target in find_targets(model)):
        assert torch.equal(trained[name], tensor), name


class Counter:
    """Counts the elements read of each stored tensor, in place of ``safe_open``."""

    def __init__(self) -> None:
        self.read: dict[str, int] = {}

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        counter = self

        class Slice:
            def __init__(self, name: str, stored: Any):
                self.name, self.stored = name, stored

            def __getitem__(self, region: Any) -> Tensor:
                part: Tensor = self.stored[region]
                counter.read[self.name] = counter.read.get(self.name, 0) + part.numel()
                return part

        class File:
            def __enter__(self) -> Any:
                self.tensors = safe_open(*arguments, **options).__enter__()
                return self

            def __exit__(self, *error: Any) -> None:
                return None

            def get_slice(self, name: str) -> Slice:
                return Slice(name, self.tensors.get_slice(name))

        return File()


def build_sharded(world: World, path: Path, counter: Counter, dtype: torch.dtype = torch.float32) -> CausalLM:
    model = read_architecture(path, "transformers").build_model(64, PrecisionPolicy.uniform(dtype))
    hardware = Hardware("cpu", world.world_size, world.world_size)
    config = ParallelConfig(mode="fsdp")
    layout = choose_parallel_layout(config, hardware, False, lambda _: None)  # type: ignore[arg-type, return-value]
    shard_(model, layout, config, hardware)
    materialize_(model, world.device)
    load_base_(model, path, counter)
    return model


def load_on_rank(world: World, folder: Path, families: list[str]) -> dict[str, Any]:
    """Load models over the ranks; compare them with transformers', and count what this rank held and read."""
    counts: dict[str, Any] = {}
    for family in families:
        counter = Counter()
        model = build_sharded(world, folder / family, counter)
        expected = read_text_weights(model, folder / family)
        held = 0
        for name, tensor in ((target.name, target.tensor) for target in find_targets(model)):
            local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            full: Any = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]
            held += local.numel()
            assert torch.equal(full, expected[name]), (family, name)
        counts[family] = {"held": held, "read": sum(counter.read.values()), "most": max(counter.read.values())}
    return counts


def test_each_of_two_ranks_reads_its_own_part_alone(bases: Path) -> None:
    ranks = run_ranks(load_on_rank, 2, bases, FAMILIES)
    for family in FAMILIES:
        total = sum(tensor.numel() for tensor in load_file(bases / family / "model.safetensors").values())
        for rank in ranks:
            assert rank[family]["read"] == rank[family]["held"], family
            assert rank[family]["held"] < 0.6 * total, family
