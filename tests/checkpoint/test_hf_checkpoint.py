"""Checkpoints in Hugging Face's form are readable by other tools, whatever ranks wrote them."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fctune.base import distributed
from fctune.base.distributed import World
from fctune.checkpoint.files import FileRecord, write_tensors
from fctune.checkpoint.hf_checkpoint import locate_tensors, plan_files, write_files
from fctune.checkpoint.sharded import list_tensors, read_shards_, write_shards
from tests.ranks import run_ranks

NAMES = ("wide", "odd", "small", "scalar")


def make_tensors(mesh_shape: tuple[int, ...], fill: float | None = None) -> dict[str, Any]:
    """Return tensors of uneven sizes, sharded along the last axis of a mesh and replicated along the first."""
    mesh = init_device_mesh("cpu", mesh_shape)
    placements = [Replicate()] * (len(mesh_shape) - 1) + [Shard(0)]
    generator = torch.Generator().manual_seed(0)
    plain = {
        "wide": torch.randn(8, 6, generator=generator),
        "odd": torch.randn(7, 3, generator=generator).bfloat16(),
        "small": torch.randn(1, 5, generator=generator),
    }
    if fill is not None:
        plain = {name: torch.full_like(tensor, fill) for name, tensor in plain.items()}
    sharded: dict[str, Any] = {
        name: distribute_tensor(tensor, mesh, placements, src_data_rank=None) for name, tensor in plain.items()
    }
    return sharded | {"scalar": torch.tensor(3.0 if fill is None else fill)}


def gather(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}


def write_elastic(world: World, folder: Path, mesh_shape: tuple[int, ...], max_bytes: int) -> dict[str, torch.Tensor]:
    group = distributed.new_cpu_group()
    tensors = make_tensors(mesh_shape)
    write_files(folder, "model", tensors, group, max_bytes=max_bytes)
    return gather(tensors)


@pytest.mark.parametrize(("world_size", "mesh_shape"), [(1, (1,)), (3, (3,)), (4, (2, 2))])
@pytest.mark.parametrize("max_bytes", [10**9, 100])
def test_files_contain_the_unsharded_tensors(
    world_size: int, mesh_shape: tuple[int, ...], max_bytes: int, tmp_path: Path
) -> None:
    expected = run_ranks(write_elastic, world_size, tmp_path, mesh_shape, max_bytes)[0]
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (max_bytes == 100)
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found |= load_file(file)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    if len(files) > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert {n: tmp_path / f for n, f in index["weight_map"].items()} == locate_tensors(tmp_path, "model")


def fail_on_one(world: World, folder: Path) -> str:
    group = distributed.new_cpu_group()

    def write(path: Path, *rest: Any) -> FileRecord:
        if world.rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_tensors(path, *rest)

    try:
        write_files(folder, "model", make_tensors((2,)), group, max_bytes=100, write=write)
    except OSError as error:
        return str(error.strerror)
    return "written"


def test_a_full_disk_on_one_rank_leaves_no_other_rank_waiting(tmp_path: Path) -> None:
    assert run_ranks(fail_on_one, 2, tmp_path, timeout_s=60) == ["written", "No space left on device"]


def write_sharded(world: World, folder: Path, mesh_shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    tensors = make_tensors(mesh_shape)
    write_shards(folder, tensors, None)
    return gather(tensors)


def read_sharded(world: World, folder: Path, mesh_shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    tensors = make_tensors(mesh_shape, fill=-1.0)
    read_shards_(folder, tensors)
    return gather(tensors)


@pytest.mark.parametrize(("written_on", "read_on"), [((4,), (1,)), ((1,), (3,)), ((3,), (2, 2)), ((2, 2), (2,))])
def test_shards_are_read_on_another_mesh(written_on: tuple[int, ...], read_on: tuple[int, ...], tmp_path: Path) -> None:
    def size(shape: tuple[int, ...]) -> int:
        return int(torch.tensor(shape).prod())

    expected = run_ranks(write_sharded, size(written_on), tmp_path, written_on)[0]
    assert list_tensors(tmp_path) == set(NAMES)
    for found in run_ranks(read_sharded, size(read_on), tmp_path, read_on):
        assert all(torch.equal(found[name], expected[name]) for name in NAMES)


def test_only_a_single_large_tensor_exceeds_the_file_limit() -> None:
    plan = plan_files("m", {"a": 4, "b": 4, "c": 9, "d": 1, "e": 2}, max_bytes=8)
    assert list(plan.values()) == [["a", "b"], ["c"], ["d", "e"]]
    assert list(plan) == [f"m-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def test_the_final_checkpoint_of_a_run_is_an_adapter_that_peft_loads(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tests.faults.harness import arguments_for, run_group

    model = make_model("qwen2")
    rows = tmp_path / "rows.jsonl"
    from fctune.data.synthetic import iter_conversations

    rows.write_text("".join(json.dumps(c.to_openai()) + "\n" for c in iter_conversations("train", 30, 1)))
    assert run_group(arguments_for(tmp_path / "run", model, rows, "max_steps=3"), 2).codes == (0, 0)
    final = tmp_path / "run" / "checkpoints" / "final"
    tokens = torch.arange(2, 40)[None]
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    adapted = PeftModel.from_pretrained(base, str(final), autocast_adapter_dtype=False).eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export" / "merged", dtype=torch.float64).eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted(tokens).logits, merged(tokens).logits)
