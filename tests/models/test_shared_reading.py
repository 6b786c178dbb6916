"""The base is read once a node: ranks that hold the same weights read a part each and exchange the parts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fctune.base import distributed
from fctune.base.distributed import World
from fctune.config.sections.adapter import AdapterConfig
from fctune.config.sections.parallel import ParallelConfig
from fctune.data.chat_template import ChatTemplate
from fctune.models import base_weights
from fctune.models.base_weights import load_base_
from fctune.models.causal_lm import CausalLM, materialize_
from fctune.models.frozen_experts import iter_frozen_experts
from fctune.models.frozen_linear import rows_of_shard
from fctune.models.lora import apply_lora_, is_adapter
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model, read_architecture
from fctune.parallel.layout import Hardware, choose_parallel_layout
from fctune.parallel.sharding import shard_
from fctune.training.distillation import LocalTeacher
from tests.conftest import TINY_BASE
from tests.models.expert_samples import quantize_to_mxfp4, save_base
from tests.ranks import run_ranks


class CountingOpener:
    """Opens safetensors files, and counts the bytes that are read of each tensor."""

    def __init__(self) -> None:
        self.read: Counter[str] = Counter()

    @contextmanager
    def __call__(self, path: Path, framework: str) -> Iterator[Any]:
        with safe_open(path, framework) as self._file:
            yield self

    def get_slice(self, name: str) -> Any:
        return _CountingSlice(self, name, self._file.get_slice(name))

    def get_tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        self.read[name] += tensor.nbytes
        return tensor


class _CountingSlice:
    def __init__(self, opener: CountingOpener, name: str, stored: Any):
        self._opener, self._name, self._stored = opener, name, stored

    def __getitem__(self, region: Any) -> Tensor:
        part: Tensor = self._stored[region]
        self._opener.read[self._name] += part.nbytes
        return part


def build_on_rank(world: World, path: Path, parallel: dict[str, Any], base: str | None) -> CausalLM:
    model = build_model(read_architecture(path), 128, PrecisionPolicy.uniform(torch.bfloat16))
    if base is not None:
        has_experts = any(block.experts for block in model.architecture.blocks)
        modules = ["q_proj"] if has_experts or parallel["mode"] != "ddp" else ["q_proj", "v_proj", "down_proj"]
        apply_lora_(model, AdapterConfig(rank=2, base=base, modules=modules))  # type: ignore[arg-type]
    config = ParallelConfig(**parallel)
    hardware = Hardware("cpu", world.world_size, world.ranks_per_node)
    layout = choose_parallel_layout(config, hardware, False, lambda _: None)  # type: ignore[arg-type, return-value]
    shard_(model, layout, config, hardware)
    materialize_(model, world.device)
    return model


def collect_bytes(model: CausalLM) -> dict[str, bytes]:
    """Return the stored bytes of this rank's part of every weight of the base, scales included."""
    found = {}
    for name, parameter in model.named_parameters():
        local: Any = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if not is_adapter(name):
            parts = [local.quantized_data, local.quantized_scalers] if hasattr(local, "quantized_data") else [local]
            found[name] = b"".join(part.detach().contiguous().view(torch.uint8).numpy().tobytes() for part in parts)
    return found


def load_twice(world: World, path: Path, parallel: dict[str, Any], base: str | None, num_nodes: int) -> dict[str, int]:
    """Load once by oneself and once with the others of the node; returns the bytes that the latter read by tensor."""
    base_weights._MIN_PART_BYTES = 256  # so that small tensors are split
    world = replace(world, ranks_per_node=world.world_size // num_nodes)
    alone, shared, again = (build_on_rank(world, path, parallel, base) for _ in range(3))
    load_base_(alone, path)
    opener = CountingOpener()
    load_base_(shared, path, opener, world)
    load_base_(again, path, world=world)  # by groups of the same ranks
    assert collect_bytes(shared) == collect_bytes(alone) == collect_bytes(again)
    return dict(opener.read)


def write_base(folder: Path, family: str) -> Path:
    """Write a base whose tensors have odd numbers of rows, too."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"vocab_size": 151, "head_dim": 32, "max_position_embeddings": 256, "intermediate_size": 256}
    experts = {"moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 2}
    made = {"llama": lambda: LlamaConfig(**sizes), "qwen3_moe": lambda: Qwen3MoeConfig(**sizes, **experts)}
    torch.manual_seed(0)
    config = made[family]()
    config.tie_word_embeddings = False
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / family)
    return folder / family


@pytest.fixture(scope="module")
def make_base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}
    folder = tmp_path_factory.mktemp("bases")

    def make(family: str) -> Path:
        if family not in made:
            made[family] = write_base(folder, family)
        return made[family]

    return make


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "parallel", "base", "world_size", "num_nodes"),
    [
        ("llama", {"mode": "ddp"}, None, 2, 1),
        ("llama", {"mode": "ddp"}, "float8", 2, 1),
        ("llama", {"mode": "ddp"}, "nf4", 4, 2),
        ("qwen3_moe", {"mode": "ddp"}, None, 4, 1),
        ("qwen3_moe", {"mode": "hsdp", "replicate": 2}, None, 4, 1),
        ("llama", {"mode": "hsdp", "replicate": 2}, "float8", 4, 2),
        ("llama", {"mode": "fsdp"}, None, 4, 2),
    ],
    ids=str,
)
def test_a_node_reads_each_tensor_once_and_loads_the_same_bytes(
    family: str,
    parallel: dict[str, Any],
    base: str | None,
    world_size: int,
    num_nodes: int,
    make_base: Callable[[str], Path],
) -> None:
    path = make_base(family)
    stored = load_file(path / "model.safetensors")
    ranks = run_ranks(load_twice, world_size, path, parallel, base, num_nodes)
    is_split = parallel["mode"] == "fsdp" or (parallel["mode"] == "hsdp" and num_nodes > 1)
    for name, tensor in stored.items():
        total = sum(rank.get(name, 0) for rank in ranks)
        # Shards that cut a head read all of it, since rows of queries and keys are reordered.
        slack = 2 * 32 * 128 * 2 * world_size if family == "llama" and ("q_proj" in name or "k_proj" in name) else 0
        copies = {"ddp": num_nodes, "hsdp": num_nodes, "fsdp": 1}[parallel["mode"]]
        if parallel["mode"] == "hsdp" and num_nodes > 1:
            copies = 2  # a copy of the model on each node
        assert copies * tensor.nbytes <= total <= copies * tensor.nbytes + (slack if is_split else 0), name
    per_rank = [sum(rank.values()) for rank in ranks]
    assert max(per_rank) <= 1.5 * sum(per_rank) / world_size  # all take part


# How the base stores its experts, and what they are kept in.
FROZEN_EXPERTS = [("qwen3_moe", "nf4"), ("qwen3_moe", "float8"), ("gpt_oss", "nf4"), ("gpt_oss", "float8")]
FROZEN_EXPERTS += [("mxfp4", "mxfp4"), ("mxfp4", "nf4")]


def load_experts(world: World, bases: dict[str, Path], parallel: dict[str, Any], num_nodes: int) -> list[Counter[str]]:
    """Return the bytes that this rank reads by tensor, of each kind; experts must be those that one process loads."""
    base_weights._MIN_PART_BYTES = 256  # so that few experts are split
    world = replace(world, ranks_per_node=world.world_size // num_nodes)
    found = []
    for stored, base in FROZEN_EXPERTS:
        path = bases[stored]
        model, complete = build_on_rank(world, path, parallel, base), build_on_rank(world, path, {"mode": "ddp"}, base)
        opener = CountingOpener()
        load_base_(model, path, opener, world)
        load_base_(complete, path)
        expected = dict(iter_frozen_experts(complete))
        for name, experts in iter_frozen_experts(model):
            parts = zip(experts.parts, experts.local_parts, expected[name].parts, strict=True)
            for part, local, full in parts:
                own = full[rows_of_shard(part)]
                assert torch.equal(local.view(torch.uint8), own.view(torch.uint8)), (stored, base, name)
        found.append(opener.read)
    return found


@pytest.fixture(scope="module")
def expert_bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bases with a tensor for each expert, for all experts, and for all in MXFP4; linears fit the blocks of NF4."""
    folder = tmp_path_factory.mktemp("experts")
    sizes = {"hidden_size": 256, "head_dim": 64, "num_key_value_heads": 4, "moe_intermediate_size": 96}
    made = {family: save_base(family, folder / family, num_experts=6, **sizes) for family in ("qwen3_moe", "gpt_oss")}
    return made | {"mxfp4": quantize_to_mxfp4(made["gpt_oss"], folder / "mxfp4")}


@pytest.mark.parametrize(
    ("parallel", "world_size", "num_nodes"),
    [
        pytest.param({"mode": "ddp"}, 2, 1, marks=pytest.mark.thorough),
        pytest.param({"mode": "fsdp"}, 2, 1, marks=pytest.mark.thorough),
        ({"mode": "fsdp", "expert": 2}, 2, 1),
        pytest.param({"mode": "hsdp", "replicate": 2}, 4, 1, marks=pytest.mark.slow),
        pytest.param({"mode": "fsdp", "expert": 2}, 4, 1, marks=pytest.mark.slow),
        pytest.param({"mode": "fsdp", "expert": 2}, 4, 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_node_reads_quantized_experts_once_and_they_are_those_of_one_process(
    parallel: dict[str, Any], world_size: int, num_nodes: int, expert_bases: dict[str, Path]
) -> None:
    ranks = run_ranks(load_experts, world_size, expert_bases, parallel, num_nodes)
    for (stored, base), *read in zip(FROZEN_EXPERTS, *ranks, strict=True):
        tensors = load_file(expert_bases[stored] / "model.safetensors")
        experts = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
        assert experts
        for name, tensor in experts.items():
            assert sum(rank[name] for rank in read) == num_nodes * tensor.nbytes, (stored, base, name)
        per_rank = [sum(rank[name] for name in experts) for rank in read]
        assert max(per_rank) <= 1.5 * sum(per_rank) / world_size, (stored, base)  # all take part


def count_nf4_shards(world: World, path: Path) -> int:
    model = build_on_rank(world, path, {"mode": "fsdp"}, "nf4")
    alone = build_on_rank(world, path, {"mode": "fsdp"}, "nf4")
    opener = CountingOpener()
    load_base_(model, path, opener, world)
    load_base_(alone, path)
    assert collect_bytes(model) == collect_bytes(alone)
    return opener.read.total()


def test_shards_of_4_bit_weights_that_need_complete_tensors_are_read_once(
    make_model: Callable[..., Path],
) -> None:
    path = make_model("qwen2", hidden_size=256, intermediate_size=512, num_key_value_heads=4)
    num_bytes = sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
    assert sum(run_ranks(count_nf4_shards, 2, path)) == num_bytes


def test_a_step_of_a_source_is_that_of_what_it_is_read_from() -> None:
    from fctune.models.tensor_files import TensorHeader
    from fctune.models.weight_sources import Concatenation, Dequantized, Narrowed, Reindexed, Stack, Stored, Transposed

    def stored(*shape: int) -> Stored:
        return Stored(TensorHeader("x", Path(), shape, torch.bfloat16))

    blocks = Dequantized("w", (256, 64), (), lambda tensors, dtype: tensors[0], num_groups=2)
    assert stored(6, 4).step_along(0) == 1
    assert blocks.step_along(0) == 128
    assert Stack([blocks, blocks], 0).step_along(0) == 1
    assert Stack([blocks, blocks], 1).step_along(0) == 128
    assert Concatenation([blocks, blocks], 0).step_along(0) == 128
    assert Concatenation([blocks, stored(3, 64)], 0).step_along(0) == 259
    assert Narrowed(blocks, 0, 128, 128).step_along(0) == 128
    assert Narrowed(blocks, 0, 64, 128).step_along(0) == 128  # cuts inside of it would read groups twice
    assert Transposed(blocks, 0, 1).step_along(0) == 64
    assert Reindexed(stored(6, 4), lambda tensor: tensor.reshape(8, 3)).step_along(0) == 8


def fail_on_one_rank(world: World, path: Path, mode: str, base: str | None) -> str:
    base_weights._MIN_PART_BYTES = 256
    model = build_on_rank(world, path, {"mode": mode}, base)
    try:
        distributed.run_on_all_ranks(lambda: load_base_(model, path, world=world))
    except distributed.CheckpointError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("row", [0, 63], ids=["first rank's part", "last rank's part"])
def test_a_tensor_that_one_rank_finds_damaged_ends_every_rank(
    row: int, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    tensors = load_file(make_model("qwen2") / "model.safetensors")
    for file in make_model("qwen2").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors["model.layers.1.mlp.down_proj.weight"][row, 5] = math.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    messages = run_ranks(fail_on_one_rank, 4, tmp_path, "ddp", None, timeout_s=120)
    assert len(set(messages)) == 1
    assert "model.layers.1.mlp.down_proj.weight holds NaN or infinity" in messages[0]


def test_a_shard_that_one_rank_finds_damaged_ends_ranks_that_share_other_tensors(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    # Embeddings are in shards, and 4-bit weights, read after them, are shared.
    base = make_model("qwen2", hidden_size=256, intermediate_size=512, num_key_value_heads=4)
    for file in base.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(base / "model.safetensors")
    tensors["model.embed_tokens.weight"][-1, 0] = math.inf
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    messages = run_ranks(fail_on_one_rank, 2, tmp_path, "fsdp", "nf4", timeout_s=120)
    assert len(set(messages)) == 1
    assert "model.embed_tokens.weight holds NaN or infinity" in messages[0]


@pytest.mark.parametrize("mode", ["fsdp", "ddp"], ids=["experts of their own", "the same experts"])
def test_experts_that_one_rank_finds_damaged_end_ranks_that_share_other_tensors(mode: str, tmp_path: Path) -> None:
    # Ranks also share the 4-bit weights of linears, which are read after the experts.
    sizes = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 96, "num_experts": 4}
    path = save_base("qwen3_moe", tmp_path, **sizes)
    tensors = load_file(path / "model.safetensors")
    damaged = "model.layers.0.mlp.experts.3.down_proj.weight"
    tensors[damaged][0, 0] = math.nan
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    messages = run_ranks(fail_on_one_rank, 2, path, mode, "nf4", timeout_s=120)
    assert len(set(messages)) == 1
    assert f"{damaged} holds NaN or infinity" in messages[0]


def fail_without_file(world: World, path: Path, elsewhere: Path) -> str:
    """Load as ranks of which the last does not see the base."""
    model = build_on_rank(world, path, {"mode": "ddp"}, None)
    seen = elsewhere if world.rank == world.world_size - 1 else path
    try:
        distributed.run_on_all_ranks(lambda: load_base_(model, seen, world=world))
    except distributed.CheckpointError as error:
        return str(error)
    return "loaded"


def test_a_rank_that_does_not_see_the_base_ends_every_rank(make_model: Callable[..., Path], tmp_path: Path) -> None:
    messages = run_ranks(fail_without_file, 2, make_model("qwen2"), tmp_path, timeout_s=120)
    assert len(set(messages)) == 1
    assert "no such file" in messages[0]


def load_teacher(world: World) -> tuple[Counter[str], bool]:
    """Return the bytes that this rank reads of a teacher by tensor, and whether it has the teacher's weights."""
    teacher = LocalTeacher(str(TINY_BASE), ChatTemplate(TINY_BASE), 64)
    student = build_model(read_architecture(TINY_BASE), 64, PrecisionPolicy.uniform(torch.float32))
    opener = CountingOpener()
    with patch("fctune.training.distillation.load_base_", partial(load_base_, open_file=opener)):
        loaded = teacher.load(student, world)
    materialize_(student, torch.device("cpu"))
    load_base_(student, TINY_BASE)
    pairs = zip(loaded.parameters(), student.parameters(), strict=True)
    return opener.read, all(torch.equal(*pair) and not pair[0].requires_grad for pair in pairs)


def test_a_node_reads_a_teacher_once_and_every_rank_has_all_of_it() -> None:
    ranks = run_ranks(load_teacher, 2)
    assert [is_whole for _, is_whole in ranks] == [True, True]
    stored = load_file(TINY_BASE / "model.safetensors")
    assert sum((read for read, _ in ranks), Counter()) == {name: t.nbytes for name, t in stored.items()}
    assert all(read for read, _ in ranks)
