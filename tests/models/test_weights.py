"""Loading of weights: each rank reads its shard, and invalid directories are reported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fctune.base.distributed import World
from fctune.base.errors import CheckpointError
from fctune.config.sections.parallel import ParallelConfig
from fctune.models.base_weights import load_base_
from fctune.models.causal_lm import materialize_
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model, read_architecture
from fctune.parallel.layout import Hardware, choose_parallel_layout
from fctune.parallel.sharding import shard_
from tests.models.model_samples import load_model
from tests.ranks import run_ranks


def load_and_count(world: World, path: Path, parallel: dict[str, Any]) -> dict[str, Any]:
    """Load over the ranks; returns the full weights in Hugging Face's layout and the elements that this rank read."""
    read: dict[str, int] = {}

    class CountingSlice:
        def __init__(self, name: str, stored: Any):
            self.name, self.stored = name, stored

        def get_shape(self) -> list[int]:
            shape: list[int] = self.stored.get_shape()
            return shape

        def __getitem__(self, rows: slice) -> torch.Tensor:
            part: torch.Tensor = self.stored[rows]
            read[self.name] = read.get(self.name, 0) + part.numel()
            return part

    class CountingFile:
        def __init__(self, *arguments: Any, **options: Any):
            self.file = safe_open(*arguments, **options)

        def __enter__(self) -> Any:
            self.tensors = self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> Any:
            return self.file.__exit__(*error)

        def keys(self) -> Any:
            return self.tensors.keys()

        def get_slice(self, name: str) -> CountingSlice:
            return CountingSlice(name, self.tensors.get_slice(name))

    model = build_model(read_architecture(path), 128, PrecisionPolicy.uniform(torch.float32))
    hardware = Hardware("cpu", world.world_size, world.world_size)
    config = ParallelConfig(**parallel)
    layout = choose_parallel_layout(config, hardware, False, lambda _: None)  # type: ignore[arg-type, return-value]
    shard_(model, layout, config, hardware)
    materialize_(model, world.device)
    load_base_(model, path, CountingFile)
    shards = {name: p.to_local() if hasattr(p, "to_local") else p for name, p in model.named_parameters()}
    held = {model.architecture.to_hf_name(name): shard.numel() for name, shard in shards.items()}
    full = {}
    for name, parameter in model.named_parameters():
        gathered: Any = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # type: ignore[operator]
        full[model.architecture.to_hf_name(name)] = (
            model.architecture.to_hf_layout(name, gathered.detach()).clone().numpy()
        )
    return {"read": read, "held": held, "weights": full}


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [(3, {"mode": "fsdp"}), (4, {"mode": "fsdp"}), (4, {"mode": "hsdp", "replicate": 2}), (2, {"mode": "ddp"})],
    ids=str,
)
def test_each_rank_reads_only_its_shard_and_the_heads_it_intersects(
    world_size: int, parallel: dict[str, Any], family: str, make_model: Callable[..., Path]
) -> None:
    # 3 key-value heads of 16 rows over 4 ranks: shard boundaries are within heads.
    path = make_model(family, num_attention_heads=6, num_key_value_heads=3, hidden_size=96)
    stored = load_file(path / "model.safetensors")
    ranks = run_ranks(load_and_count, world_size, path, parallel)
    copies = {"fsdp": 1, "hsdp": 2, "ddp": world_size}[parallel["mode"]]
    for name, tensor in stored.items():
        slack = 0
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            slack = 2 * 16 * tensor.shape[1]  # the rest of the heads at both ends
        for rank in ranks:
            assert torch.equal(torch.from_numpy(rank["weights"][name]), tensor), name
            assert rank["held"][name] <= rank["read"].get(name, 0) <= rank["held"][name] + slack, name
        if not slack:
            assert sum(rank["read"].get(name, 0) for rank in ranks) == copies * tensor.numel(), name


def broken(path: Path, out: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(path, out)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(3)


def spoil(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 3] = float("nan")


def overflow(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"][-1, -1] = float("inf")


def cut(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop, r"1 missing: model\.layers\.1\.mlp\.up_proj\.weight"),
        (add, r"1 extra: model\.layers\.0\.self_attn\.q_proj\.bias"),
        (spoil, r"model\.layers\.1\.self_attn\.k_proj\.weight holds NaN or infinity"),
        (overflow, r"lm_head\.weight holds NaN or infinity"),
        (cut, r"model\.norm\.weight has the shape \[63\], config\.json implies \[64\]"),
    ],
)
def test_weights_that_do_not_match_the_model_are_named(
    change: Callable[[dict[str, torch.Tensor]], None], words: str, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_model(broken(make_model("llama"), tmp_path / "broken", change))


def test_a_stored_head_is_ignored_if_tied(make_model: Callable[..., Path], tmp_path: Path) -> None:
    def repeat(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    path = make_model("llama", tie_word_embeddings=True)
    assert json.loads((path / "config.json").read_text())["tie_word_embeddings"]
    repeated = load_model(broken(path, tmp_path / "repeated", repeat))
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(repeated(tokens), load_model(path)(tokens))
