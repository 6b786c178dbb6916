"""Every config of a large model builds, is sharded over the ranks it names, and fits; on the meta device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fctune.config.components import resolve_component
from fctune.config.loading import load_config
from fctune.config.schema import RunConfig
from fctune.models.causal_lm import CausalLM
from fctune.models.lora import apply_lora_, count_parameters
from fctune.models.precision import choose_precision
from fctune.models.sources import build_model, read_architecture
from fctune.parallel.activations import apply_activation_checkpointing_
from fctune.parallel.footprint import GIB
from fctune.parallel.layout import Hardware, ParallelLayout, check_memory, choose_parallel_layout
from fctune.parallel.memory import MemoryModel
from fctune.parallel.sharding import shard_
from tests.configs.cluster_cases import CASES
from tests.conftest import ROOT

# One of each kind of model, layout and training.
QUICK = ("gpt_oss_20b_lora", "llama3_1_8b_lora", "qwen2_5_72b_full", "qwen3_30b_a3b_qlora", "lfm2_5_350m_lora")


@pytest.fixture
def world() -> Iterator[Any]:
    """Starts a process group of any size that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(world_size: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=world_size - 1, world_size=world_size)

    yield start
    dist.destroy_process_group()


def shape(config: RunConfig, model: dict[str, Any], folder: Path) -> CausalLM:
    """The model as the recipes shape it for CUDA, on the meta device."""
    (folder / "config.json").write_text(json.dumps(model))
    precision = choose_precision(config.precision, config.adapter is not None, "cuda")
    shaped = build_model(read_architecture(folder), config.data.seq_len, precision)
    if config.adapter is not None:
        apply_lora_(shaped, config.adapter)
    apply_activation_checkpointing_(shaped, config.activation_checkpointing, "cuda")
    return shaped


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.thorough) for name in CASES]
)
def test_a_cluster_config_holds_and_its_model_fits(name: str, tmp_path: Path, world: Any) -> None:
    case = CASES[name]
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    model = shape(config, case.model, tmp_path)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(count_parameters(model).values())
    stored = sum(p.numel() for p in model.parameters())  # which is less of experts in 4 bits
    assert trained == case.num_trained
    assert total - (trained if config.adapter is not None else 0) == case.num_parameters

    num_ranks = case.nodes * case.ranks_per_node
    assert config.global_batch_size % (config.micro_batch_size * num_ranks) == 0, "ranks that idle in every step"
    hardware = Hardware("cuda", num_ranks, case.ranks_per_node, 80 * GIB)
    need = partial(MemoryModel(model, config, 80 * GIB).required, num_ranks)
    layout = choose_parallel_layout(config.parallel, hardware, config.adapter is not None, need)
    assert (layout.mode, layout.replicate, layout.shard) == case.layout
    check_memory(hardware, layout, None, need, config.model.path)

    world(num_ranks)
    mesh_hardware = Hardware("cpu", num_ranks, case.ranks_per_node, 80 * GIB)
    shard_(model, layout, config.parallel, mesh_hardware)
    held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
    assert held == pytest.approx(stored / layout.shard, rel=1e-3)
    component, arguments = resolve_component(config.optimizer)
    component([p for p in model.parameters() if p.requires_grad], **arguments)


def test_every_config_is_one_of_the_tested_or_a_tiny_one() -> None:
    names = {path.stem for path in (ROOT / "configs").glob("*.yaml") if not path.stem.startswith("acceptance_")}
    assert names == CASES.keys() | {"tiny_lora", "tiny_full", "tiny_dpo", "tiny_grpo"}


def test_the_table_of_configs_names_each_of_them() -> None:
    table = (ROOT / "configs" / "README.md").read_text()
    for path in (ROOT / "configs").glob("*.yaml"):
        assert f"`{path.name}`" in table, path.name


def test_a_model_that_one_rank_cannot_hold_is_laid_out_over_more(tmp_path: Path) -> None:
    config = load_config(ROOT / "configs" / "llama3_3_70b_lora.yaml")
    model = shape(config, CASES["llama3_3_70b_lora"].model, tmp_path)
    layouts: list[ParallelLayout] = []
    for world_size, memory in ((16, 80), (16, 192), (8, 80)):
        hardware = Hardware("cuda", world_size, 8, memory * GIB)
        need = partial(MemoryModel(model, config, memory * GIB).required, world_size)
        layouts.append(choose_parallel_layout(config.parallel, hardware, True, need))
    assert [layout.mode for layout in layouts] == ["hsdp", "ddp", "fsdp"]
    assert [layout.shard for layout in layouts] == [8, 1, 8]
